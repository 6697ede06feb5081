"""The samples for calibration and for the comparison with the source. They should not be the same."""

from argparse import Namespace
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

_MIN_TO_DIVIDE: Final = 16
"""Fewer calibration samples than this are not divided."""
_HELD_OUT: Final = 4
"""Every fourth sample is held out of calibration."""


@dataclass(frozen=True, slots=True)
class Samples:
    """A selection of samples. Implements ``Inputs`` for runs of one sample.

    A run has one row, because the rows of a batch affect each other in a dynamically quantized model.

    Attributes:
        origin: A description of the source of the samples.
        arrays: The inputs of each sample.
        labels: The label of each sample; None without labels.
        notes: The limits of what the samples can show.
    """

    origin: str
    arrays: Sequence[Arrays]
    labels: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self.arrays)

    def take(self, rows: int, number: int) -> Arrays:
        """As ``Inputs.take``, but always with one row."""
        del rows
        return self.arrays[number % len(self.arrays)]

    def feeds(self, model: OpenModel) -> Iterator[Feeds]:
        """The inputs of each sample by name, with the rows on the model's batch axis."""
        names = [spec.name for spec in model.signature.inputs]
        for arrays in self.arrays:
            yield {
                name: array for name, array in zip(names, model.for_model(arrays), strict=True) if not is_absent(array)
            }

    def part(self, belongs: np.ndarray, most: int, use: str) -> "Samples":
        """At most ``most`` of the samples for which ``belongs`` is true. ``use`` is added to the origin."""
        numbers = np.flatnonzero(belongs)
        numbers = numbers[spread(len(numbers), most)]
        labels = None if self.labels is None else self.labels[numbers]
        return Samples(f"{self.origin}: {len(numbers)} {use}", [self.arrays[int(one)] for one in numbers], labels)


def read_samples(model: OpenModel, given: Namespace) -> tuple[Samples | None, Samples]:
    """Read the samples for calibration (None without a file) and those for the comparison with the source.

    Raises:
        ServeError: invalid_input: a file does not fit the model or the labels, or the model rejects synthetic inputs.
    """
    calibration, most = given.calibration, given.samples
    if calibration is None or given.inputs is not None:
        evaluation = _read(model, given.inputs, "--inputs", most, given.labels) if given.inputs else None
        chosen = _read(model, calibration, "--calibration", most) if calibration else None
        return chosen, evaluation or _synthetic(model, most)
    every = _read(model, calibration, "--calibration", 2 * most, given.labels)
    if every.samples < _MIN_TO_DIVIDE:
        note = f"calibrated and compared with the same {every.samples} samples, so the errors look too small"
        return every, replace(every, notes=(f"{note}: give {_MIN_TO_DIVIDE} or more, or others by --inputs",))
    is_held_out = np.arange(every.samples) % _HELD_OUT == _HELD_OUT - 1
    return every.part(~is_held_out, most, "for calibration"), every.part(is_held_out, most, "held out")


def _synthetic(model: OpenModel, most: int) -> Samples:
    inputs, count = choose_inputs(model), min(most, SYNTHETIC_SAMPLES)
    arrays = [inputs.take(1, number) for number in range(count)]
    return Samples(f"{inputs.origin}: {count} samples", arrays, notes=(SYNTHETIC_NOTE,))


def _read(model: OpenModel, path: Path, option: str, most: int, labels: Path | None = None) -> Samples:
    """Read at most ``most`` samples. They keep the order of the files, which is also the order of the labels."""
    inputs = read_inputs(path, model.signature, option=option)
    found = dict(sorted(inputs.some(most).items()))
    known = None if labels is None else read_labels(labels, inputs)[list(found)]
    part = f", {len(found)} of them" if len(found) < inputs.samples else ""
    return Samples(f"{inputs.origin}{part}", list(found.values()), known)
