"""Errors of the outputs of a model against those of a reference model, and bounds of these errors. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ortserve.errors import invalid_input

WITHOUT_LABELS: Final = ("max", "relative", "cosine", "top1")
MEASURES: Final = (*WITHOUT_LABELS, "accuracy")
"""The measures that can be bounded. All are 0 for equal outputs; larger is worse."""


@dataclass(frozen=True, slots=True)
class OutputError:
    """Errors of one output against the reference, over all samples.

    If shapes or non-finite elements differ, ``top1`` is 1 and the other errors are infinite.

    Attributes:
        name: Name of the output.
        max: Largest absolute difference of two elements; for texts and booleans, 1 if any differ.
        relative: ``max`` divided by the largest absolute element of the reference.
        cosine: 1 minus the cosine between a sample's output and the reference, for the worst sample.
        top1: Share of positions whose largest element along the last axis has another index. For integers, texts and
            booleans, both ``cosine`` and ``top1`` are the share of elements that differ.
    """

    name: str
    max: float
    relative: float
    cosine: float
    top1: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of a model with its reference.

    Attributes:
        samples: The number of samples that were compared.
        outputs: The errors of each output.
        accuracy: Share of the labels that the model predicts; None without labels.
        reference_accuracy: Share of the labels that the reference predicts; None without labels.
    """

    samples: int
    outputs: tuple[OutputError, ...]
    accuracy: float | None = None
    reference_accuracy: float | None = None

    def error(self, measure: str) -> float:
        """The worst error of any output; for ``accuracy``, the loss of the model against the reference.

        Raises:
            ServeError: invalid_input: ``accuracy`` without labels.
        """
        if measure != "accuracy":
            return max((float(getattr(output, measure)) for output in self.outputs), default=0.0)
        if self.accuracy is None or self.reference_accuracy is None:
            raise invalid_input("--max-error accuracy: expected --labels to be given, too")
        return max(0.0, self.reference_accuracy - self.accuracy)


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """The maximum accepted error.

    Attributes:
        measure: One of ``MEASURES``.
        most: The bound.
    """

    measure: str
    most: float

    def __str__(self) -> str:
        return f"{self.measure}={self.most:g}"

    def excess(self, agreement: Agreement) -> str:
        """Describes how the bound is exceeded; empty if it is not."""
        error = agreement.error(self.measure)
        return "" if error <= self.most else f"{self.measure} error {error:.3g} exceeds {self.most:g}"


def parse_bound(text: str, option: str = "--max-error", measures: Sequence[str] = MEASURES) -> ErrorBound:
    """Read a bound: ``0.001`` bounds the largest difference, ``cosine=0.01`` another measure.

    Args:
        text: The value of the option.
        option: Name of the option, for the error.
        measures: The measures that the command knows; ``WITHOUT_LABELS`` if it takes none.

    Raises:
        ServeError: invalid_input, for any other text.
    """
    measure, equals, number = text.rpartition("=")
    try:
        most = float(number)
    except ValueError:
        most = math.nan
    if (measure or "max") not in measures or bool(measure) != bool(equals) or not 0 <= most < math.inf:
        expected = f"a number from 0, or MEASURE=NUMBER with one of {', '.join(measures)}"
        raise invalid_input(f"{option}: expected {expected}, got '{text}'")
    return ErrorBound(measure or "max", most)


class AgreementMeter:
    """Collects errors batch by batch."""

    def __init__(self, names: Sequence[str]) -> None:
        """``names`` are those of the outputs, in order."""
        self._outputs: Final = [_OutputMeter(name) for name in names]
        self._samples = 0
        self._labels = self._hits = self._reference_hits = 0

    def add(
        self,
        reference: Sequence[np.ndarray],
        candidate: Sequence[np.ndarray],
        samples: int,
        labels: np.ndarray | None = None,
    ) -> None:
        """Compare the outputs of a run.

        Args:
            reference: Outputs of the reference, rows on axis 0.
            candidate: Outputs of the model for the same inputs.
            samples: Rows of the run.
            labels: Labels of these rows; None without labels.

        Raises:
            ServeError: invalid_input: no output has a class or scores for each label.
        """
        for meter, expected, found in zip(self._outputs, reference, candidate, strict=True):
            meter.add(expected, found, samples)
        self._samples += samples
        if labels is not None:
            self._reference_hits += predicted_hits(reference, labels)
            self._hits += predicted_hits(candidate, labels)
            self._labels += len(labels)

    def result(self) -> Agreement:
        """All errors so far."""
        outputs = tuple(meter.result() for meter in self._outputs)
        if not self._labels:
            return Agreement(self._samples, outputs)
        return Agreement(self._samples, outputs, self._hits / self._labels, self._reference_hits / self._labels)


def predicted_hits(outputs: Sequence[np.ndarray], labels: np.ndarray) -> int:
    """Count the labels that the outputs of a classifier predict.

    The first output with one integer or text per label decides. Without one, the first output with scores of at least
    two classes decides, for integer labels.

    Raises:
        ServeError: invalid_input: there is no such output.
    """
    count = len(labels)
    for output in outputs:
        if output.dtype.kind in "iuOSU" and output.shape in ((count,), (count, 1)):
            return int((output.reshape(count).astype(str) == labels.astype(str)).sum())
    for output in outputs:
        if output.dtype.kind == "f" and output.ndim == 2 and len(output) == count and output.shape[1] > 1:
            return int((output.argmax(axis=1).astype(str) == labels.astype(str)).sum())
    shapes = ", ".join(f"{output.dtype} {list(output.shape)}" for output in outputs)
    raise invalid_input(f"--labels: expected an output with a class or with scores for each sample, got {shapes}")


class _OutputMeter:
    """Collects the errors of one output. They are infinite once shapes or non-finite elements differ."""

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._max = self._largest = self._cosine = 0.0
        self._positions = self._elsewhere = 0
        self._is_discrete = True

    def add(self, reference: np.ndarray, candidate: np.ndarray, samples: int) -> None:
        if reference.shape != candidate.shape or (reference.dtype.kind in "OSU") != (candidate.dtype.kind in "OSU"):
            self._max = self._cosine = math.inf
        elif not reference.size:
            return
        elif reference.dtype.kind in "OSUb":
            self._add_symbols(reference, candidate)
        else:
            self._add_numbers(reference, candidate, samples)

    def _add_symbols(self, reference: np.ndarray, candidate: np.ndarray) -> None:
        differ = int((reference != candidate).sum())
        self._count(differ, reference.size)
        self._max, self._largest = max(self._max, float(differ > 0)), 1.0

    def _add_numbers(self, reference: np.ndarray, candidate: np.ndarray, samples: int) -> None:
        expected, found = reference.astype(np.float64), candidate.astype(np.float64)
        finite = np.isfinite(expected)
        if (
            not np.array_equal(expected[~finite], found[~finite], equal_nan=True)
            or not np.isfinite(found[finite]).all()
        ):
            self._max = self._cosine = math.inf
            return
        ranked = np.where(np.isnan(expected), -np.inf, expected), np.where(np.isnan(found), -np.inf, found)
        expected, found = np.where(finite, expected, 0), np.where(finite, found, 0)
        difference = np.abs(expected - found)
        if reference.dtype.kind in "iu" and candidate.dtype.kind in "iu":  # FP64 rounds integers over 2^53
            difference = np.maximum(difference, reference != candidate)
        self._max = max(self._max, float(difference.max()))
        self._largest = max(self._largest, float(np.abs(expected).max()))
        if reference.dtype.kind in "iu":
            self._count(int((difference != 0).sum()), difference.size)
            return
        self._is_discrete = False
        rows = samples if expected.ndim and len(expected) == samples else 1
        self._cosine = max(self._cosine, _cosine_error(expected.reshape(rows, -1), found.reshape(rows, -1)))
        if reference.dtype.kind == "f" and reference.ndim and reference.shape[-1] > 1:
            elsewhere = ranked[0].argmax(axis=-1) != ranked[1].argmax(axis=-1)
            self._count(int(elsewhere.sum()), elsewhere.size)

    def _count(self, elsewhere: int, positions: int) -> None:
        self._elsewhere += elsewhere
        self._positions += positions

    def result(self) -> OutputError:
        relative = 0.0
        if self._max:
            relative = self._max / self._largest if self._largest else math.inf
        top1 = 1.0 if math.isinf(self._max) else self._elsewhere / max(1, self._positions)
        cosine = max(self._cosine, top1) if self._is_discrete else self._cosine
        return OutputError(self._name, self._max, relative, cosine, top1)


def _cosine_error(expected: np.ndarray, found: np.ndarray) -> float:
    """The cosine error of the worst row. A row of zeros agrees only with zeros, and equal rows have no error at all."""
    scaled = _scaled(expected), _scaled(found)
    product = np.linalg.norm(scaled[0], axis=1) * np.linalg.norm(scaled[1], axis=1)
    cosines = (scaled[0] * scaled[1]).sum(axis=1) / np.where(product == 0, 1, product)
    return float(max(0.0, 1 - np.where((expected == found).all(axis=1), 1, cosines).min()))


def _scaled(rows: np.ndarray) -> np.ndarray:
    """Divide each row by its largest element, because squares of very large and very small ones are no FP64."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    scaled: np.ndarray = rows / np.where(largest == 0, 1, largest)
    return scaled
