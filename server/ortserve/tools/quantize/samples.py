"""The samples of calibration and those of the comparison with the source, which should not be the same."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.tensor import is_absent
from ortserve.tools.compare.measure import SYNTHETIC_NOTE, SYNTHETIC_SAMPLES, read_labels
from ortserve.tools.inputs import choose_inputs, read_inputs, spread
from ortserve.tools.opening import OpenModel
from ortserve.tools.speed import Feeds

_LEAST_TO_DIVIDE: Final = 16
"""Fewer calibration samples than this are not divided."""
_HELD_OUT: Final = 4
"""Every fourth sample is held out of calibration."""


@dataclass(frozen=True, slots=True)
class Files:
    """What the user gave.

    Attributes:
        calibration: Samples for calibration, a file or a folder.
        inputs: Samples for the comparison.
        labels: Of ``inputs``, or without them of ``calibration``.
        most: Samples that are used of each.
    """

    calibration: Path | None
    inputs: Path | None
    labels: Path | None
    most: int


@dataclass(frozen=True, slots=True)
class Samples:
    """Some samples, as ``Inputs`` that have one sample each.

    A run has one row, because rows of a batch meet in a dynamically quantized model.

    Attributes:
        origin: Where they come from.
        arrays: Of each sample.
        labels: Of the samples; None without.
        notes: What they cannot show.
    """

    origin: str
    arrays: Sequence[Arrays]
    labels: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Their number."""
        return len(self.arrays)

    def take(self, rows: int, number: int) -> Arrays:
        """As ``Inputs.take``, but always one row."""
        del rows
        return self.arrays[number % len(self.arrays)]

    def feeds(self, model: OpenModel) -> Iterator[Feeds]:
        """The samples by the names of inputs, with their rows where the model has them."""
        names = [spec.name for spec in model.signature.inputs]
        for arrays in self.arrays:
            yield {
                name: array for name, array in zip(names, model.for_model(arrays), strict=True) if not is_absent(array)
            }

    def part(self, belongs: np.ndarray, most: int, use: str) -> "Samples":
        """At most so many of those for which ``belongs`` is true, for one use."""
        numbers = np.flatnonzero(belongs)
        numbers = numbers[spread(len(numbers), most)]
        labels = None if self.labels is None else self.labels[numbers]
        return Samples(f"{self.origin}: {len(numbers)} {use}", [self.arrays[int(one)] for one in numbers], labels)


def read_samples(model: OpenModel, files: Files) -> tuple[Samples | None, Samples]:
    """The samples for calibration, None without a file for it, and those for the comparison with the source.

    Raises:
        ServeError: invalid_input: a file does not fit the model or the labels, or the model rejects synthetic inputs.
    """
    calibration, most = files.calibration, files.most
    if calibration is None or files.inputs is not None:
        evaluation = _read(model, files.inputs, "--inputs", most, files.labels) if files.inputs else None
        chosen = _read(model, calibration, "--calibration", most) if calibration else None
        return chosen, evaluation or _synthetic(model, most)
    every = _read(model, calibration, "--calibration", 2 * most, files.labels)
    if every.samples < _LEAST_TO_DIVIDE:
        note = f"calibrated and compared with the same {every.samples} samples, which judges too well"
        return every, replace(every, notes=(f"{note}: give {_LEAST_TO_DIVIDE} or more, or others by --inputs",))
    is_held_out = np.arange(every.samples) % _HELD_OUT == _HELD_OUT - 1
    return every.part(~is_held_out, most, "for calibration"), every.part(is_held_out, most, "held out")


def _synthetic(model: OpenModel, most: int) -> Samples:
    inputs, count = choose_inputs(model), min(most, SYNTHETIC_SAMPLES)
    arrays = [inputs.take(1, number) for number in range(count)]
    return Samples(f"{inputs.origin}: {count} samples", arrays, notes=(SYNTHETIC_NOTE,))


def _read(model: OpenModel, path: Path, option: str, most: int, labels: Path | None = None) -> Samples:
    """At most so many samples, in the order of the files, which is that of the labels."""
    inputs = read_inputs(path, model.signature, option=option)
    found = dict(sorted(inputs.some(most).items()))
    known = None if labels is None else read_labels(labels, inputs)[list(found)]
    part = f", {len(found)} of them" if len(found) < inputs.samples else ""
    return Samples(f"{inputs.origin}{part}", list(found.values()), known)
