"""The tiny MLP that most benchmarks of servers serve, with one request for it and the right answer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort

from models.builders import mlp

NAME: Final = "mlp"


@dataclass(frozen=True)
class TinyMlp:
    """The model's file, the input ``row`` of shape [1, 64], and ONNX Runtime's answer ``expected`` of shape [10]."""

    file: Path
    row: np.ndarray
    expected: np.ndarray

    def check(self, numbers: np.ndarray) -> None:
        """Raises AssertionError if an answer is wrong."""
        np.testing.assert_allclose(numbers, self.expected, rtol=1e-4, atol=1e-6)


def write_tiny_mlp(repository: Path, name: str = NAME, *, decimals: int | None = None) -> TinyMlp:
    """Write the model into a repository. ``decimals``, if given, rounds the numbers of the row."""
    (repository / name / "1").mkdir(parents=True)
    file = mlp(repository / name / "1" / "model.onnx")
    row = np.random.default_rng(0).uniform(-1, 1, (1, 64))
    if decimals is not None:
        row = row.round(decimals)
    row = row.astype(np.float32)
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return TinyMlp(file, row, session.run(None, {"x": row})[0].ravel())
