"""Tools with samples that the model rejects: one exit status and one message, whichever command takes them."""

from pathlib import Path

import numpy as np
import pytest

from models import builders
from ortserve.cli.main import main
from servers import add_model

pytestmark = pytest.mark.usefixtures("preloaded_commands")


@pytest.mark.parametrize("bad", [0, 7], ids=["first", "last"])
@pytest.mark.parametrize(
    "command",
    [
        "inspect MODEL --inputs FILE --batch 8",
        "profile MODEL --inputs FILE",
        "bench MODEL --inputs FILE --way run,batcher",
        "compare MODEL MODEL --inputs FILE",
        "optimize MODEL --inputs FILE -o OUT",
        "quantize MODEL --mode dynamic --inputs FILE -o OUT",
        "tune MODEL --slo 1s --inputs FILE",
        "golden record MODEL --inputs FILE",
    ],
)
def test_rejected_samples_are_wrong_input_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, bad: int
) -> None:
    model = add_model(tmp_path / "repository", "table", builders.poison)
    samples = np.zeros((8, 4), np.int64)
    samples[bad] = 99
    np.savez(tmp_path / "samples.npz", x=samples)
    places = {"MODEL": model, "FILE": tmp_path / "samples.npz", "OUT": tmp_path / "out.onnx"}
    status = main([str(places.get(word, word)) for word in command.split()])
    error = capsys.readouterr().err.splitlines()[-1]
    assert (status, "the model rejected the inputs: " in error, "idx=99" in error) == (2, True, True), error
    assert not places["OUT"].exists()
