"""The command with virtual measurements: the file that it writes, and the arguments that it rejects."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models import builders
from ortserve.cli.main import run_tool
from ortserve.core.dtypes import DataType
from ortserve.tools.subject import find_model
from ortserve.tools.tune import arguments as tune_arguments
from ortserve.tools.tune import command
from ortserve.tools.tune.lab import Requests
from ortserve.tools.tune.loads import Offer, Reading
from ortserve.tools.tune.space import Changes
from ortserve.tools.tune.writing import edit_text
from pages import DOCS, commands
from virtual_lab import VirtualContender, VirtualLab

DIGITS = Path(command.__file__).parents[2] / "example" / "repository" / "digits"
REQUESTS = Requests(
    ((np.zeros((1, 64), np.float32),),), ({"y": np.zeros(1)},), {"y": DataType.FP32}, "made", True, False, False, 1
)
GOAL = ["--slo", "20ms", "--max-minutes", "5", "--max-trials", "6", "--json"]


def spinning_helps(changes: Changes) -> float:
    return 1.5 if changes.get("session.spinning") else 1.0


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command, "call_in_child", lambda *arguments: REQUESTS)
    monkeypatch.setattr(command, "cpu_budget", lambda: 2)  # it decides which changes are tried first
    use(monkeypatch, spinning_helps)
    return Path(shutil.copytree(DIGITS, tmp_path / "digits"))


def use(monkeypatch: pytest.MonkeyPatch, truth: Callable[[Changes], float], lab: VirtualLab | None = None) -> None:
    monkeypatch.setattr(command, "ProcessLab", lambda *arguments: lab or VirtualLab(truth, spread=0.02))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = run_tool("tune", arguments)
    printed = capsys.readouterr()
    return status, json.loads(printed.out) if printed.out.startswith("{") else printed.out + printed.err


def test_writes_the_key_that_helps_with_its_gain(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "model.yaml").write_text("# ours\nmax_rows: 16\n")
    page = model.parent / "page.html"
    status, result = run(capsys, str(model), *GOAL, "--page", str(page))
    assert (status, result["has_gain"], result["written"]) == (0, True, str(model / "model.yaml"))
    text = (model / "model.yaml").read_text()
    assert text.startswith("# ours\nmax_rows: 16\nsession:\n  spinning: true")
    assert "ortserve tune: requests per second 1." in text
    assert not (model / tune_arguments.JOURNAL).exists()
    assert "<svg" in page.read_text()
    for table in re.findall(r"<table.*?</table>", page.read_text(), re.DOTALL):
        assert len({len(re.findall("<t[hd]", row)) for row in table.split("<tr")[1:]}) == 1, "a row has other columns"
    assert any(trial["is_on_front"] for trial in result["trials"])


def test_writes_nothing_where_nothing_helps(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, lambda changes: 0.8 if changes else 1.0)
    status, result = run(capsys, str(model), *GOAL)
    assert (status, result["has_gain"], result["written"], result["yaml"]) == (0, False, "", "")
    assert "No trial was better" in result["conclusion"]
    assert sorted(path.name for path in model.iterdir()) == ["1", "README.md"]


def test_a_dry_run_writes_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = run(capsys, str(model), *GOAL, "--dry-run")
    assert (status, result["written"]) == (0, "")
    assert "spinning: true" in result["yaml"]
    assert sorted(path.name for path in model.iterdir()) == ["1", "README.md"]


def test_a_config_pbtxt_stays_and_the_keys_are_printed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "config.pbtxt").write_text("max_batch_size: 8\n")
    status, result = run(capsys, str(model), *GOAL)
    assert (status, result["written"]) == (0, "")
    assert "config.pbtxt" in result["why_not_written"]
    assert "spinning: true" in result["yaml"]
    assert (model / "config.pbtxt").read_text() == "max_batch_size: 8\n"
    assert not (model / "model.yaml").exists()


def test_a_version_that_is_not_served_can_be_tuned(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(model / "1", model / "2")
    status, result = run(capsys, str(model / "1"), *GOAL)
    assert (status, result["written"]) == (0, str(model / "model.yaml"))
    assert "version_policy" not in (model / "model.yaml").read_text()


def test_result_is_printed_if_it_cannot_be_written(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = VirtualLab(spinning_helps, spread=0.02)

    def unmount(changes: Changes) -> None:
        (model / "model.yaml").unlink(missing_ok=True)
        (model / "model.yaml").symlink_to("/nowhere/model.yaml")

    lab.on_open = unmount
    use(monkeypatch, spinning_helps, lab)
    assert run_tool("tune", [str(model), *GOAL, "--json"]) == 1
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["written"], "spinning: true" in result["yaml"]) == ("", True)
    assert result["why_not_written"] == "not written: No such file or directory; the file would get"
    assert printed.err == f"ortserve tune: {model}/model.yaml: No such file or directory\n"


def test_options_that_were_changed_meanwhile_stay_and_the_keys_are_printed(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = VirtualLab(spinning_helps, spread=0.02)

    def edit(changes: Changes) -> None:
        (model / "model.yaml").write_text("instances: 3\n")

    lab.on_open = edit
    use(monkeypatch, spinning_helps, lab)
    status, result = run(capsys, str(model), *GOAL)
    assert (status, result["written"]) == (0, "")
    assert "changed during the search" in result["why_not_written"]
    assert "spinning: true" in result["yaml"]
    assert (model / "model.yaml").read_text() == "instances: 3\n"


@pytest.mark.parametrize("count", [1, 28])
def test_other_versions_are_measured_within_the_time(
    count: int, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2, 2 + count):
        shutil.copytree(model / "1", model / str(number))
    lab = VirtualLab(spinning_helps, spread=0.02)
    use(monkeypatch, spinning_helps, lab)
    monkeypatch.setattr(
        command,
        "read_provenance",
        lambda file: SimpleNamespace(source=SimpleNamespace(name="", version=1), commands=()),
    )

    def monotonic() -> float:
        lab.now_s += 1e-6
        return lab.now_s

    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=monotonic))
    status, result = run(capsys, str(model), "--slo", "20ms", "--max-minutes", "2", "--variants", "--json")
    assert (status, len(result["variants"])) == (0, count)
    assert result["variants"][0]["ratio"]
    assert count == 1 or "no time" in result["variants"][-1]["why"]
    assert lab.now_s < 2 * 60 * 1.1


def test_a_journal_is_of_the_weights_too(tmp_path: Path) -> None:
    file = builders.external_weights(tmp_path / "m.onnx", "weights.bin")
    given = tune_arguments.build_parser().read([str(file), "--slo", "20ms"])
    keys = []
    for last in (b"x", b"y"):
        (tmp_path / "weights.bin").write_bytes(bytes(15) + last)
        keys.append(command.search_key(given, find_model(str(file)), REQUESTS))
    assert keys[0] != keys[1]


def test_an_interrupted_search_keeps_its_journal_and_goes_on(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = VirtualLab(spinning_helps, spread=0.02)

    def interrupt(changes: Changes) -> None:
        if len(lab.opened) == 5:
            raise KeyboardInterrupt

    lab.on_open = interrupt
    use(monkeypatch, spinning_helps, lab)
    status, said = run(capsys, str(model), *GOAL)
    assert (status, said) == (130, "ortserve tune: interrupted\n")
    assert sorted(path.name for path in model.iterdir()) == [tune_arguments.JOURNAL, "1", "README.md"]
    use(monkeypatch, spinning_helps)
    status, result = run(capsys, str(model), *GOAL, "--resume")
    assert (status, result["has_gain"]) == (0, True)
    assert not (model / tune_arguments.JOURNAL).exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "expected --slo"),
        (["--slo", "fast"], "expected a time such as 20ms"),
        (["--slo", "20ms", "--resume"], "found no such file"),
        (["--slo", "20ms", "--resume", "--dry-run"], "expected --journal"),
        (["--slo", "20ms", "--resume", "--fresh"], "not allowed with"),
        (["--slo", "20ms", "--journal", "none/journal"], "--journal: expected a file in an existing folder"),
        (["--slo", "20ms", "--max-error", "much"], "expected a number"),
        (["--slo", "20ms", "--max-error", "accuracy=0.1"], "with one of max, relative, cosine, top1"),
        (["--slo", "20ms", "--percentile", "20"], "from 50 to"),
    ],
)
def test_wrong_arguments_are_named(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    try:
        status = run_tool("tune", [str(model), *arguments])
    except SystemExit as left:
        status = int(left.code or 0)
    assert status == 2
    assert expected in capsys.readouterr().err


def test_models_that_are_not_there_and_files_without_a_folder(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool("tune", [str(model / "none"), "--slo", "20ms"]) == 2
    file = str(model / "1" / "model.onnx")
    assert run_tool("tune", [file, "--slo", "20ms", "--variants"]) == 2
    status, result = run(capsys, file, *GOAL) if capsys.readouterr() else (1, None)
    assert (status, result["has_gain"], result["written"]) == (0, True, "")
    assert "single file" in result["why_not_written"]


def test_the_load_that_finds_the_rate_is_no_round(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = VirtualContender.measure

    def measure(self: VirtualContender, offer: Offer, seed: int) -> Reading:
        return replace(usual(self, offer, seed), error=float(offer.high > offer.low))

    monkeypatch.setattr(VirtualContender, "measure", measure)
    _, result = run(capsys, str(model), "--objective", "memory", *GOAL)
    assert result["rate_per_s"] is not None
    assert result["trials"][0]["figures"]["error"] == 0


def test_objectives_are_parsed_with_and_without_units() -> None:
    given = [tune_arguments.build_parser().read(["m", "--slo", text]).slo for text in ("20ms", "0.5s", "20")]
    assert given == [0.02, 0.5, 0.02]


def test_the_commands_of_the_page_run(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (model.parent / "models").mkdir()
    model.rename(model.parent / "models" / "digits")
    monkeypatch.chdir(model.parent)
    shown = [one for one in commands(DOCS / "tools" / "tune.md") if one.words[:2] == ["ortserve", "tune"]]
    assert len(shown) == 4
    for one in shown:
        assert run_tool("tune", [*one.words[2:], "--max-trials", "2"]) == 0
        printed = capsys.readouterr().out
        titles = [line for line in one.output.splitlines() if line in ("Search", "Findings")]
        assert all(f"{title}" in printed for title in titles)
    example = re.search(r"```yaml\n(max_rows.*\n)", (DOCS / "tools" / "tune.md").read_text())
    assert example
    assert (
        edit_text("max_rows: 1\n", {"max_rows": 32}, {"max_rows": example[1].partition("# ")[2].strip()}) == example[1]
    )


def test_models_whose_requests_belong_together_are_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "model.yaml").write_text("sequences: {controls: {START: {kind: start}}}\n")
    status, said = run(capsys, str(model), *GOAL)
    assert (status, "expected a model that answers requests alone, it has sequences" in said) == (2, True), said
