"""The dense model that open-loop benchmarks serve: its repository, requests for it, and their correct answers.

Its batches take some milliseconds on one thread, so that queues form. Used by ``overload.py`` and
``fixed_windows.py``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import onnxruntime as ort

from crafted_messages import NO_HEADERS, http_request
from infer_requests import json_request, numbers_of_json
from models.builders import heavy

MAX_ROWS: Final = 16
CALLERS: Final = 64
"""Callers of the closed loop that measures the capacity; with this many, a full batch is always waiting."""

_NAME: Final = "heavy"
STEPS: Final = 30
"""Layers of the model; its full batches take about 5 ms."""
_VARIETY: Final = 16


@dataclass(frozen=True)
class DenseModel:
    """The model with ``rows``, one per request in turns, and ONNX Runtime's answer to each row in ``expected``."""

    repository: Path
    rows: np.ndarray
    expected: np.ndarray

    @property
    def path(self) -> str:
        """The path of the model in URLs."""
        return f"/v2/models/{_NAME}"

    def requests(self, headers: Mapping[str, str] = NO_HEADERS) -> list[bytes]:
        """Complete HTTP requests with these additional headers, one per row."""
        return [http_request(_NAME, json_request(row[None]), headers) for row in self.rows]

    def check(self, number: int, body: bytes) -> None:
        """Raises AssertionError if a body is not the answer to the request with that number."""
        np.testing.assert_allclose(numbers_of_json(body), self.expected[number % len(self.rows)], rtol=1e-3, atol=1e-4)


@contextmanager
def dense_model(steps: int = STEPS) -> Iterator[DenseModel]:
    """Write the model to a temporary repository: ``steps`` layers, batches of ``MAX_ROWS`` at most, one thread."""
    rows = np.random.default_rng(0).standard_normal((_VARIETY, 64)).astype(np.float32).round(4)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / _NAME
        (folder / "1").mkdir(parents=True)
        file = heavy(folder / "1" / "model.onnx", steps=steps)
        (folder / "model.yaml").write_text(f"max_rows: {MAX_ROWS}\nintra_op_threads: 1\n")
        expected = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"x": rows})[0]
        yield DenseModel(folder.parent, rows, expected)
