"""Models that cannot be opened: all commands that open models describe them in the same words, with their path."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from models import builders
from ortserve.cli.main import run_tool
from ortserve.errors import ServeError
from ortserve.example import repository_path
from ortserve.tools.opening import open_model
from ortserve.tools.subject import find_model

pytestmark = pytest.mark.usefixtures("preloaded_commands")

COMMANDS = {
    "inspect": ["--no-run"],
    "profile": [],
    "bench": [],
    "compare": [str(repository_path() / "digits")],
    "optimize": ["-o", "OUT"],
    "quantize": ["--mode", "dynamic", "-o", "OUT"],
    "tune": ["--slo", "10ms"],
    "publish": ["REPOSITORY/new"],
    "check": [],
}


def truncated(path: Path) -> Path:
    content = builders.mlp(path).read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def pointer(path: Path) -> Path:
    path.write_text(builders.GIT_LFS_POINTER)
    return path


def pointer_to_weights(path: Path) -> Path:
    pointer(path.with_name("weights.bin"))
    return builders.external_weights(path, "weights.bin")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (builders.not_onnx, "expected an ONNX model, it is not one or is truncated"),
        (truncated, "expected an ONNX model, it is not one or is truncated"),
        (pointer, "model.onnx is a Git LFS pointer, not a model: run 'git lfs pull'"),
        (pointer_to_weights, "weights.bin is a Git LFS pointer, not weights: run 'git lfs pull'"),
    ],
)
def test_all_commands_name_the_damage_in_the_same_words(
    command: str, damaged: Callable[[Path], Path], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "models"
    (repository / "m" / "1").mkdir(parents=True)
    model = damaged(repository / "m" / "1" / "model.onnx")
    places = {"OUT": str(tmp_path / "out.onnx"), "REPOSITORY/new": str(repository / "new")}
    flags = [places.get(flag, flag) for flag in COMMANDS[command]]

    status = run_tool(command, [str(repository if command == "check" else model), *flags])

    printed = capsys.readouterr()
    assert status == (1 if command == "check" else 2), printed
    assert words in " ".join((printed.out + printed.err).split())


def test_model_whose_inputs_cannot_be_served_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    graph = "m (seq(float[n]) s, int64 i) => (float[n] y) { y = SequenceAt(s, i) }"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}'), path)

    with pytest.raises(ServeError) as caught:
        open_model(find_model(str(path)))

    assert caught.value.message.startswith(f"{path}: input 's' has type seq(tensor(float))")
