"""The documents name only existing things: links, options, variables, metrics, paths, tests, programs, log lines.

The pages of the rooms list every module, and name only members that exist.
"""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from itertools import product
from pathlib import Path
from typing import Final, Literal

import pytest
import yaml

from archives import file_site
from browser import NEEDS_CHROMIUM, chromium, open_page, violations
from manifests import ROOT
from ortserve.cli.serve import build_parser
from ortserve.config.model import ModelOptions
from ortserve.config.options import ServerOptions, flag_name, read_options, variable_name
from ortserve.frontends.status import STATUSES
from ortserve.telemetry.declarations import DECLARATIONS
from pages import DOCS, PAGES, Command, anchor_of, blocks, commands, flags_of_tool, spans

PROGRAMS: Final = {
    ".venv/bin/python",
    "apt-get",
    "curl",
    "docker",
    "kubectl",
    "make",
    "openssl",
    "ortserve",
    "pip",
    "python3",
}
"""Programs whose commands have a test here, in ``tests/deploy`` or in ``tests/integration/test_documents.py``; except
``apt-get``, which needs root.
"""

SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")
FLAGS_OF_OTHERS: Final = {"--config", "--foreground", "--gpus", "--init", "--live", "--pid", "--strict", "--ulimit"}
"""Flags of ``ortserve health``, Docker, ``timeout`` and mypy; ``--config`` is not an option of the server."""
VARIABLES_OF_BUILDS: Final = {"ORTSERVE_COMPILE"}
TESTS: Final = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


of_each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    return set(map(anchor_of, re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)))


@of_each_page
def test_links_have_existing_targets(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@of_each_page
def test_options_and_metrics_are_declared(page: Path) -> None:
    text = page.read_text()
    if page == DOCS / "migrate.md":  # the first column of its tables has the options of other servers
        text = re.sub(r"^\| [^|]* \|", "|", text, flags=re.MULTILINE)
    flags = {
        match for span in spans(text) for match in re.findall(r"(?:^|\s)(--[a-z][a-z-]*[a-z])(?![\w-]*…)(?!\w)", span)
    }
    negated = {
        flag_name(f"no_{name}") for name, field in ServerOptions.model_fields.items() if field.annotation is bool
    }
    kubectl = {match for span in spans(text) if "kubectl" in span for match in re.findall(r"--[a-z-]+", span)}
    known = {flag_name(name) for name in ServerOptions.model_fields} | negated | FLAGS_OF_OTHERS
    if page.parent == DOCS / "tools":
        named = set(re.findall(r"`ortserve (\w+)", text)) if page.stem == "index" else {page.stem}
        known |= {flag for tool in named for flag in flags_of_tool(tool)}
    if page == DOCS / "performance.md":
        known |= flags  # test_performance_guide checks the flags of all tools
    assert flags - kubectl <= known
    variables = set(re.findall(r"ORTSERVE_[A-Z_]+[A-Z]", text)) - VARIABLES_OF_BUILDS
    assert variables <= {variable_name(name) for name in ServerOptions.model_fields}
    metrics = {re.sub(r"_count$", "", name) for name in re.findall(r"(?<!:)\bortserve_\w+[a-z](?![\w…])", text)}
    assert metrics <= {declaration.name for declaration in DECLARATIONS}


@of_each_page
def test_paths_and_tests_exist(page: Path) -> None:
    for span in spans(page.read_text()):
        if re.match(r"(\.ci|\.github|deploy|docs|loadtests|server|tests)/[^\s…]*$", span):
            assert (ROOT / span).exists(), span
        if re.fullmatch(r"test_\w+", span):
            assert span in TESTS, span


PACKAGE: Final = ROOT / "server" / "ortserve"
of_each_room = pytest.mark.parametrize("page", sorted(PACKAGE.rglob("README.md")), ids=name_of)


@of_each_room
def test_page_of_a_room_lists_every_module(page: Path) -> None:
    known = set(re.findall(r"\w+", page.read_text()))
    # The page about the tools has one row for each command, whose folder has no page.
    modules = page.parent.glob("*.py") if page.parent.name == "tools" else page.parent.rglob("*.py")
    for module in modules:
        inner = next(folder for folder in module.parents if (folder / "README.md").exists())
        assert inner != page.parent or module.stem.startswith("__") or module.stem in known, module


@pytest.mark.parametrize("page", [ROOT / "server" / "README.md", *sorted(PACKAGE.rglob("README.md"))], ids=name_of)
def test_modules_named_on_the_pages_of_the_code_exist(page: Path) -> None:
    roots = (PACKAGE, PACKAGE / "frontends", ROOT, page.parent)
    named = {span for span in spans(page.read_text()) if re.fullmatch(r"[a-z_]+(/[a-z_]+)+", span)}
    assert [name for name in named if not any(list(root.glob(f"{name}*")) for root in roots)] == []


@cache
def sources_of_classes() -> dict[str, str]:
    """The source of each class of the server, by name."""
    sources: dict[str, str] = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
                sources[node.name] = "\n".join([sources.get(node.name, ""), *lines])
    return sources


@of_each_room
def test_members_named_on_the_page_of_a_room_exist(page: Path) -> None:
    for name, member in re.findall(r"\b([A-Z]\w+)\.(_?[a-z]\w+)", page.read_text()):
        if name in sources_of_classes():
            assert re.search(rf"\b{member}\b", sources_of_classes()[name]), f"{name}.{member}"


@cache
def texts_of_the_package() -> str:
    """All strings of the server, one per line."""
    return "\n".join(
        " ".join(node.value.split())
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


@of_each_page
def test_quoted_log_lines_exist_in_the_code(page: Path) -> None:
    text = " ".join(page.read_text().split())
    for line in re.findall(r'(?:log line|line|warning|logs|says) "([^"]+)"', text):
        assert line in texts_of_the_package(), line


@pytest.mark.parametrize("command", commands(), ids=str)
def test_commands_use_existing_programs_targets_extras_and_options(command: Command, tmp_path: Path) -> None:
    program, *arguments = command.words
    assert program in PROGRAMS
    if program == "make":
        targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets)
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.findall(r"\.\[([\w,]+)\]", command.text)
        assert {extra for group in named for extra in group.split(",")} <= set(extras)
    if program == ".venv/bin/python":
        assert (ROOT / arguments[0]).is_file()
    if program == "ortserve" and arguments[0] == "serve":
        flags = vars(build_parser().parse_intermixed_args(arguments[1:]))
        read_options({name: value for name, value in flags.items() if not name.endswith("_file")}, None)
    if program == "ortserve" and command.page.parent == DOCS / "tools" and arguments[0] == command.page.stem:
        assert {word for word in arguments if word.startswith("--")} <= flags_of_tool(arguments[0])


def test_samples_of_options_are_valid(tmp_path: Path) -> None:
    of_model, of_server, of_recording = blocks("yaml", (DOCS / "models.md").read_text())
    assert ModelOptions.model_validate(yaml.safe_load(of_model)).max_rows == 64
    assert ModelOptions.model_validate(yaml.safe_load(of_recording)).record.share == 0.01
    (tmp_path / "options.yaml").write_text(of_server)
    options = read_options({}, tmp_path / "options.yaml")
    assert (options.http_port, options.log_format) == (9000, "json")
    (of_provider,) = blocks("yaml", (DOCS / "execution-providers.md").read_text())
    assert len(ModelOptions.model_validate(yaml.safe_load(of_provider)).execution_providers or ()) == 3


def test_samples_of_model_yaml_are_valid_on_all_pages() -> None:
    of_other_files = {
        "apiVersion",
        "components",
        "configMapGenerator",
        "load_balancing_policy",
        "http_port",
        "patches",
        "scrape_configs",
        "tolerances",
    }
    texts = [block for page in DOCS.rglob("*.md") for block in blocks("yaml", page.read_text())]
    samples = [sample for text in texts for sample in yaml.safe_load_all(text)]
    of_models = [sample for sample in samples if not of_other_files & set(sample)]
    assert len(of_models) >= 14
    for sample in of_models:
        ModelOptions.model_validate(sample)


def test_table_of_errors_equals_the_server_table() -> None:
    rows = re.findall(r"^\| (\w+) \| (\d+) \| ([A-Z_]+) \|", (DOCS / "protocol.md").read_text(), re.MULTILINE)
    assert {kind: (int(http), grpc) for kind, http, grpc in rows} == {
        kind.value: (status.http, status.grpc.name) for kind, status in STATUSES.items()
    }


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_every_load_test_is_listed() -> None:
    listed = set(re.findall(r"`(\w+\.py)`", (ROOT / "loadtests" / "README.md").read_text()))
    scripts = {path.name for path in (ROOT / "loadtests").glob("*.py") if "argparse" in path.read_text()}
    assert scripts <= listed
    assert all((ROOT / "loadtests" / name).exists() for name in listed)


def test_help_of_every_load_test_shows_its_question_and_usage() -> None:
    for path in (ROOT / "loadtests").glob("*.py"):
        text = path.read_text()
        if "ArgumentParser(" in text:
            assert "(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)" in text, path
            assert f"python loadtests/{path.name}" in text, path


def test_every_protection_names_a_test_or_an_option() -> None:
    page = (DOCS / "threat-model.md").read_text()
    claims = re.findall(r"^- (.*?)(?=\n- |\n\n|\Z)", page[page.index("## ") :], re.MULTILINE | re.DOTALL)
    assert len(claims) > 30
    for claim in claims:
        assert "test" in claim or "`--" in claim, claim


def build_site(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as ``make docs`` does."""
    command = re.search(r"\$\(BIN\)/mkdocs (build .*)", (ROOT / "Makefile").read_text())
    assert command is not None
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", *command[1].split(), "--site-dir", site],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build_site(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_site_loads_from_no_other_host(site: Path) -> None:
    """Links to other hosts are for readers; scripts, styles, fonts and pictures must be on the site itself."""
    built = {page.relative_to(site) for page in site.rglob("index.html")}
    assert len(built) == len([*DOCS.rglob("*.md")])
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r'<script[^>]+src="(?:https?:)?//', text), page
        assert not re.findall(r'<link[^>]+rel="(?:stylesheet|preconnect|preload)"[^>]+href="(?:https?:)?//', text), page
        assert not re.findall(r'<(?:img|iframe)[^>]+src="(?:https?:)?//', text), page


def test_each_fault_of_the_site_fails_its_build(tmp_path: Path) -> None:
    """A strict build fails on a single warning, and each fault causes one."""
    faults = {
        "[broken](nowhere.md)": "nowhere.md",
        "[broken](batching.md#nowhere)": "#nowhere",
        "A page that is in no menu.": "extra.md",
    }
    shutil.copytree(DOCS, tmp_path / "docs")
    for file in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copyfile(ROOT / file, tmp_path / file)
    for text in faults:
        page = "gpu.md" if "broken" in text else "extra.md"
        with (tmp_path / "docs" / page).open("a") as broken:
            broken.write(f"\n{text}\n")
    done = build_site(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    warnings = done.stderr.partition("WARNING")[2].split("WARNING")
    for complaint in faults.values():
        assert any(complaint in warning for warning in warnings), (complaint, done.stderr)
    assert f"Aborted with {len(faults)} warnings" in done.stdout


@NEEDS_CHROMIUM
def test_pages_of_the_site_are_legible_and_commands_are_copied_without_prompts_and_output(site: Path) -> None:
    """The button sets the attribute, and reads the text that is still displayed."""
    copy = """() => [...document.querySelectorAll("pre > code:has(.gp)")].map((code) => {
        code.setAttribute("data-md-copying", "");
        return code.innerText.trim();
    })"""
    with file_site(site) as url, chromium() as browser:
        for path, scheme in product(("", "quickstart/", "migrate/", "tools/golden/"), SCHEMES):
            with open_page(browser, f"{url}/{path}", scheme=scheme) as page:
                assert violations(page, "color-contrast", "link-in-text-block") == []
                prompted = re.findall(r"^\$ (.*)", (DOCS / f"{path[:-1] or 'index'}.md").read_text(), re.MULTILINE)
                assert page.evaluate(copy) == prompted
