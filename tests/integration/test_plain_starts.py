"""Exits of commands from the interpreter itself: processes forked by ``preloaded`` do not end native libraries."""

import subprocess
import sys

import pytest

from ortserve.example import repository_path
from servers import LONG_S

DIGITS = repository_path() / "digits" / "1" / "model.onnx"


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect",),
        ("profile", "--runs", "1"),
        ("bench", "--rate", "20", "--seconds", "0.3", "--warmup", "0"),
        ("compare", str(DIGITS), "--seconds", "0"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_command_that_has_opened_a_session_exits_with_0(arguments: tuple[str, ...]) -> None:
    """The first three open it themselves; ``compare`` and all others do so in a process like that of ``compare``."""
    command = [sys.executable, "-m", "ortserve", arguments[0], str(DIGITS), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
