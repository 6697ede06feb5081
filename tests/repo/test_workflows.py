"""The files for GitHub and pre-commit conform to their schemas and name existing files."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from manifests import ROOT

GITHUB: Final = ROOT / ".github"
WORKFLOWS: Final = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS: Final = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
PRE_COMMIT: Final[Any] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
HOOKS: Final[list[Any]] = [hook for repo in PRE_COMMIT["repos"] for hook in repo["hooks"]]
PYPROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())


def workflow(name: str) -> Any:
    return yaml.safe_load((GITHUB / "workflows" / f"{name}.yml").read_text())


def lines_that_run() -> list[str]:
    """Each shell line in the workflows."""
    jobs = [job for path in WORKFLOWS for job in yaml.safe_load(path.read_text())["jobs"].values()]
    return [line for job in jobs for step in job["steps"] for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("custom.github-workflows-require-timeout", WORKFLOWS),
        ("vendor.dependabot", [GITHUB / "dependabot.yml"]),
        ("vendor.github-issue-forms", FORMS),
        ("vendor.github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
    ],
)
def test_files_follow_their_schema(schema: str, files: list[Path]) -> None:
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


def test_ci_runs_every_step() -> None:
    default = re.search(r"^    steps=\((.*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert default is not None
    assert workflow("ci")["jobs"]["steps"]["strategy"]["matrix"]["step"] == default[1].split()


def test_unknown_step_is_rejected() -> None:
    done = subprocess.run([ROOT / ".ci" / "run", "tset"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "tset: expected check, docs, test, compiled, audit or browser" in done.stderr


def test_workflows_run_targets_and_scripts_that_exist() -> None:
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = {target for line in lines_that_run() for target in re.findall(r"\bmake ([\w./-]+)", line)}
    assert {"fuzz", "wheel"} <= made <= targets
    scripts = {path for line in lines_that_run() for path in re.findall(r"\b(?:loadtests|tests)/\S+\.py", line)}
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)


def test_actions_are_pinned_to_commits() -> None:
    """A tag can move to other code, which would run with the secrets of a release. Dependabot updates both parts."""
    used = [line for path in WORKFLOWS for line in re.findall(r"\buses: (.*)", path.read_text())]
    assert used
    assert not [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)]


def test_images_are_stages_of_the_dockerfile() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    built = {image["target"] for image in workflow("release")["jobs"]["image"]["strategy"]["matrix"]["include"]}
    assert built == set(workflow("ci")["jobs"]["image"]["strategy"]["matrix"]["target"])
    assert built <= stages


def test_wheels_are_built_of_every_supported_version() -> None:
    settings = PYPROJECT["tool"]["cibuildwheel"]
    built = [f"3.{minor}" for minor in re.findall(r"cp3(\d+)-\*", settings["build"])]
    matrix = workflow("ci")["jobs"]["steps"]["strategy"]["matrix"]
    assert built == [*matrix["python"], *(job["python"] for job in matrix["include"])]
    assert PYPROJECT["project"]["requires-python"] == f">={built[0]}"
    assert {f"Programming Language :: Python :: {version}" for version in built} <= set(
        PYPROJECT["project"]["classifiers"]
    )
    script = re.search(r"\{project\}/(\S+)", settings["test-command"])
    assert script is not None
    assert (ROOT / script[1]).is_file()


def test_package_index_accepts_the_links_of_the_package() -> None:
    """PyPI rejects the whole upload for a path, and publishing is the last step of a release."""
    links = PYPROJECT["project"].get("urls", {})
    assert not [link for link in links.values() if not link.startswith("https://")]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_hook_runs_an_installed_program_on_files_that_exist(hook: dict[str, Any]) -> None:
    program, *arguments = hook["entry"].split()
    assert program.startswith(".venv/bin/")
    assert (Path(sys.executable).parent / Path(program).name).exists()
    assert all((ROOT / argument).exists() for argument in arguments if "/" in argument)
    if "files" in hook:
        files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
        assert any(re.search(hook["files"], file) for file in files.stdout.splitlines())
