"""``ortserve publish`` on real repositories: during polling, in parallel, interrupted, killed, on a full disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import onnx
import pytest

from models import builders
from ortserve.cli.main import main
from ortserve.config.model import LoadOptions
from ortserve.registry.repository.source import read_source
from ortserve.tools.provenance import make_provenance
from ortserve.tools.publish import folder as folder_module
from ortserve.tools.publish.arguments import build_parser
from ortserve.tools.publish.folder import publish_version
from ortserve.tools.subject import find_model
from pages import DOCS, commands
from scarcity import with_files_of_at_most
from servers import LONG_S, SHORT_WARMUP, add_model, serving

pytestmark = pytest.mark.usefixtures("preloaded_commands")

EXAMPLE = Path(__file__).parents[2] / "server" / "ortserve" / "example" / "repository"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    add_model(folder, "mlp", builders.mlp)
    return folder


@pytest.fixture(autouse=True)
def opened_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open models in this process, which saves a second each, except in tests with ``opened_apart``."""
    if "opened_apart" not in request.fixturenames:
        monkeypatch.setattr(folder_module, "call_in_child", lambda limit_s, function, *arguments: function(*arguments))


@pytest.fixture
def opened_apart() -> None:
    """Open models in separate processes, as the command does for users."""


@pytest.fixture
def better(tmp_path: Path) -> Path:
    return builders.mlp(tmp_path / "better.onnx", seed=1)


def published(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert main(["publish", *map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 2) -> str:
    assert main(["publish", *map(str, arguments)]) == status
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.count("\n") == 1, shown.err
    return shown.err


def content(folder: Path) -> dict[str, bytes | None]:
    """All files and folders below a folder, including hidden ones."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def served_versions(repository: Path, name: str) -> list[int]:
    source = read_source(name, [repository], LoadOptions())
    assert source is not None
    assert not source.problem
    return list(source.versions)


@pytest.mark.usefixtures("opened_apart")
def test_a_polling_server_changes_to_the_published_version_without_a_failed_request(
    repository: Path, better: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"inputs": [{"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}]}
    seen: Counter[str] = Counter()
    arrived = threading.Event()
    over = threading.Event()
    flags = ("--model-control-mode", "poll", "--repository-poll-s", "0.1", *SHORT_WARMUP)
    with serving(repository, *flags) as server, ThreadPoolExecutor() as pool:

        def keep_calling() -> None:
            with httpx.Client(base_url=server.url, timeout=LONG_S) as client:
                while not over.is_set():
                    answer = client.post("/v2/models/mlp/infer", json=body)
                    seen[answer.json()["model_version"] if answer.status_code == 200 else answer.text] += 1
                    if answer.status_code != 200 or answer.json()["model_version"] == "2":
                        arrived.set()
                    if not (repository / "mlp" / "2").exists():  # leaves the processors to the command
                        over.wait(0.02)

        callers = [pool.submit(keep_calling) for _ in range(2)]
        try:
            result = published(capsys, better, repository / "mlp")
            assert arrived.wait(LONG_S)
        finally:
            over.set()
        for caller in callers:
            caller.result()
        metadata = httpx.get(f"{server.url}/v2/models/mlp", timeout=LONG_S).json()

    assert set(seen) <= {"1", "2"}, seen
    assert result["version"] == 2
    assert metadata["versions"] == ["2"]
    shown = metadata["properties"]["provenance"]
    assert shown == result["provenance"]
    assert shown.startswith(f"from better.onnx (sha256 {result['digest'][:12]}), by ortserve publish better.onnx mlp")
    assert str(repository.parent) not in shown


@pytest.mark.parametrize(("target", "numbers"), [("mlp", [2, 3, 4]), ("new", [1, 2, 3])])
def test_publishers_at_the_same_time_get_different_numbers(
    repository: Path, better: Path, target: str, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(3)
    sync_all = folder_module._sync_all

    def wait_and_sync(folder: Path) -> None:
        if threading.current_thread() not in waited:
            waited.add(threading.current_thread())
            together.wait(LONG_S)
        sync_all(folder)

    waited: set[threading.Thread] = set()
    monkeypatch.setattr(folder_module, "_sync_all", wait_and_sync)
    provenance = make_provenance(find_model(str(better)), better, arguments=("publish", str(better)))
    given = build_parser().read([str(better), str(repository / target)])
    with ThreadPoolExecutor(3) as pool:
        work = [pool.submit(publish_version, better, given.target, provenance, given) for _ in range(3)]
        assert sorted(one.result().version for one in work) == numbers
    assert served_versions(repository, target) == [numbers[-1]]
    assert not list(repository.rglob(".ortserve-*"))


def test_the_number_of_a_removed_version_is_not_used_again(
    repository: Path, better: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert published(capsys, better, repository / "mlp")["version"] == 2
    shutil.rmtree(repository / "mlp" / "2")
    assert published(capsys, better, repository / "mlp")["version"] == 3
    shutil.rmtree(repository / "mlp" / "3")
    shutil.rmtree(repository / "mlp" / "1")
    assert published(capsys, better, repository / "mlp")["version"] == 4
    assert served_versions(repository, "mlp") == [4]


def test_a_version_gets_the_external_data_and_the_other_files_of_the_version_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "repository"
    folder = add_model(repository, "external", partial(builders.external_weights, location="old.bin"))
    (folder / "1" / "labels.txt").write_text("a\nb\n")
    (folder / "1" / "extra").mkdir()
    (folder / "1" / "extra" / "table.csv").write_text("1,2\n")
    (folder / "1" / "model.onnx").rename(folder / "1" / "other.onnx")
    (folder / "model.yaml").write_text("model_file: other.onnx\n")
    (folder / "1" / "old.bin").write_bytes(bytes(16))
    new = builders.external_weights(tmp_path / "new.onnx", location="new.bin")
    (tmp_path / "new.bin").write_bytes(bytes(16))

    result = published(capsys, new, folder)

    files = {str(path.relative_to(folder / "2")) for path in (folder / "2").rglob("*") if path.is_file()}
    assert files == {"other.onnx", "new.bin", "labels.txt", "extra/table.csv", "provenance.json"}
    assert result["nbytes"] == sum((tmp_path / name).stat().st_size for name in ("new.onnx", "new.bin"))
    assert (folder / "2" / "other.onnx").stat().st_mode & 0o777 == (new.stat().st_mode & 0o777)
    (tmp_path / "new.bin").unlink()
    assert "new.bin" in refused(capsys, new, folder)


def test_what_clients_rely_on_changes_only_on_demand(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(repository)
    wider = builders.mlp(tmp_path / "wider.onnx", inputs=32)
    problem = refused(capsys, wider, repository / "mlp")
    assert "input 'x': expected FP32[-1,64], got FP32[-1,32]" in problem
    assert "--allow-changed-interface" in problem
    assert content(repository) == before

    result = published(capsys, wider, repository / "mlp", "--allow-changed-interface")
    assert result["notes"] == ["changed interface: input 'x': expected FP32[-1,64], got FP32[-1,32]"]


def broken(path: Path) -> Path:
    """A model that can be read but that no session can open."""
    model = onnx.load(builders.mlp(path))
    model.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(model, path)
    return path


def test_wrong_models_and_targets_are_refused_with_one_line(
    repository: Path, better: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builders.mlp(repository / "single.onnx")
    add_model(repository, "both", builders.mlp)
    (repository / "both" / "model.yaml").write_text("max_rows: 0\n")
    before = content(repository)
    assert "expected an ONNX model" in refused(capsys, builders.not_onnx(tmp_path / "text.onnx"), repository / "mlp")
    problem = refused(capsys, broken(tmp_path / "broken.onnx"), repository / "mlp")
    assert "NoSuchOperator" in problem
    assert ".ortserve-" not in problem
    assert "mkdir -p single/1 && mv single.onnx single/1/model.onnx" in refused(capsys, better, repository / "single")
    assert "max_rows" in refused(capsys, better, repository / "both")
    assert "existing repository" in refused(capsys, better, tmp_path / "none" / "mlp")
    assert "got a repository, a folder of models: it has both, mlp" in refused(capsys, better, repository)
    assert "without a version" in refused(capsys, better, repository / "mlp" / "2")
    assert "got '.hidden'" in refused(capsys, better, repository / ".hidden")
    assert "/: expected the name of a model after the repository, got ''" in refused(capsys, better, "/")
    (repository / "mlp" / ".highest-version").write_text("many\n")
    assert ".highest-version" in refused(capsys, better, repository / "mlp")
    (repository / "mlp" / ".highest-version").unlink()
    assert content(repository) == before


def test_options_come_with_the_version_and_a_policy_that_leaves_it_out_is_said(
    repository: Path, better: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = tmp_path / "tuned.yaml"
    options.write_text("version_policy: {specific: [1]}\nmax_rows: 4\n")
    result = published(capsys, better, repository / "mlp", "--options", options)
    assert result["notes"] == ["the version_policy of mlp does not serve version 2"]
    assert (repository / "mlp" / "model.yaml").read_text() == options.read_text()
    assert published(capsys, better, repository / "new", "--options", options)["version"] == 1
    assert served_versions(repository, "new") == [1]
    options.write_text("max_rows: 0\n")
    assert "max_rows" in refused(capsys, better, repository / "mlp", "--options", options)
    (repository / "mlp" / "model.yaml").rename(repository / "mlp" / "config.pbtxt")
    (repository / "mlp" / "config.pbtxt").write_text('platform: "onnxruntime_onnx"\nmax_batch_size: 4\n')
    assert published(capsys, better, repository / "mlp")["version"] == 3
    assert "it has config.pbtxt" in refused(capsys, better, repository / "mlp", "--options", options)


def test_the_commands_of_a_source_come_first(
    repository: Path, better: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(capsys, better, repository / "first")
    published(capsys, repository / "first", repository / "second")
    made = json.loads((repository / "second" / "1" / "provenance.json").read_text())
    assert [line.split()[1:3] for line in made["commands"]] == [["publish", "better.onnx"], ["publish", "first"]]
    # The provenance of a replaced file does not apply to the new file.
    builders.mlp(repository / "first" / "1" / "model.onnx", seed=2)
    result = published(capsys, repository / "first", repository / "second")
    assert result["notes"] == ["the provenance of model.onnx belongs to another file and was left out"]
    assert "better.onnx" not in result["provenance"]


# Stops in the middle of a copy; the first argument selects how.
HALFWAY = """\
    from ortserve.cli.main import main
    import os, shutil, signal, sys

    def copy_half(source, target):
        with open(source, "rb") as a, open(target, "wb") as b:
            b.write(a.read(os.path.getsize(source) // 2))
        print("halfway", flush=True)
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    shutil.copyfile = copy_half
    sys.exit(main(["publish", *sys.argv[2:]]))
"""


def stopped_halfway(how: str, *arguments: str | Path) -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HALFWAY), how, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "halfway\n"
    if how != "kill":
        process.send_signal(signal.Signals[how])
    _, errors = process.communicate(timeout=LONG_S)
    return process.returncode, errors


@pytest.mark.parametrize(("how", "target"), [("SIGINT", "mlp"), ("SIGTERM", "new")])
def test_an_interruption_leaves_nothing(repository: Path, better: Path, how: str, target: str) -> None:
    before = content(repository)
    assert stopped_halfway(how, better, repository / target) == (130, "ortserve publish: interrupted\n")
    assert content(repository) == before


@pytest.mark.parametrize("target", ["mlp", "new"])
def test_a_killed_process_leaves_nothing_that_is_served(
    repository: Path, better: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_source("mlp", [repository], LoadOptions())
    assert stopped_halfway("kill", better, repository / target)[0] == -signal.SIGKILL
    assert [path.name for path in repository.rglob("*.onnx")] == ["model.onnx"] * 2  # one of them is in a hidden folder
    assert read_source("mlp", [repository], LoadOptions()) == before
    assert read_source("new", [repository], LoadOptions()) is None
    assert published(capsys, better, repository / target)["version"] == (2 if target == "mlp" else 1)


def test_a_full_disk_leaves_nothing(repository: Path, tmp_path: Path) -> None:
    large = builders.mlp(tmp_path / "large.onnx", hidden=4096)
    before = content(repository)
    program = with_files_of_at_most(large.stat().st_size // 2)
    command: list[str | Path] = [sys.executable, "-c", program, "publish", large]
    done = subprocess.run([*command, repository / "mlp"], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 1
    assert done.stderr == f"ortserve publish: {repository / 'mlp'}: File too large\n"
    assert content(repository) == before


def test_options_that_cannot_be_replaced_leave_no_version(
    repository: Path, better: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new.yaml").write_text("max_rows: 8\n")
    copy = shutil.copyfile

    def copy_beside_a_folder(source: Path, target: Path) -> Path:
        (repository / "mlp" / "model.yaml").mkdir(exist_ok=True)  # while the command runs
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", copy_beside_a_folder)
    status = main(["publish", str(better), str(repository / "mlp"), "--options", str(tmp_path / "new.yaml")])
    assert (status, capsys.readouterr().err) == (1, f"ortserve publish: {repository / 'mlp'}: Is a directory\n")
    assert sorted(path.name for path in (repository / "mlp").iterdir()) == [".highest-version", "1", "model.yaml"]


def test_a_model_that_cannot_be_read_is_a_wrong_argument(
    repository: Path, better: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    better.chmod(0)
    if os.access(better, os.R_OK):
        pytest.skip("root may read everything")
    assert "expected an ONNX model, it cannot be read: Permission denied" in refused(capsys, better, repository / "mlp")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_repository_that_cannot_be_written_is_named(
    repository: Path, better: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "mlp").chmod(0o500)
    assert "mlp: Permission denied" in refused(capsys, better, repository / "mlp", status=1)


def test_the_page_shows_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(EXAMPLE / "digits", tmp_path / "models" / "digits")
    shutil.copy(EXAMPLE / "digits" / "1" / "model.onnx", tmp_path / "out.onnx")
    monkeypatch.chdir(tmp_path)
    (command,) = (one for one in commands(DOCS / "tools" / "publish.md") if one.output)
    assert main(command.words[1:]) == 0
    changing = ("digest", "size", "provenance")
    shown, documented = (
        [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(changing)]
        for text in (capsys.readouterr().out, command.output)
    )
    assert shown[: len(documented)] == documented
