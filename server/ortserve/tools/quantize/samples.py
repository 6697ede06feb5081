"""The samples of calibration and those of the comparison with the source, which should not be the same."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.tensor import is_absent
from ortserve.tools.compare.measure import SYNTHETIC_NOTE, SYNTHETIC_SAMPLES, read_labels
from ortserve.tools.inputs import FileInputs, Inputs, choose_inputs
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
    """

    origin: str
    arrays: Sequence[Arrays]
    labels: np.ndarray | None = None

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
            given = zip(names, arrays, model.for_model(arrays), strict=True)
            yield {name: array for name, own, array in given if not is_absent(own)}


@dataclass(frozen=True, slots=True)
class Divided:
    """The samples by their use.

    Attributes:
        calibration: None without a file for it.
        evaluation: For the comparison with the source.
        notes: What they cannot show.
    """

    calibration: Samples | None
    evaluation: Samples
    notes: tuple[str, ...]


def read_samples(model: OpenModel, files: Files) -> Divided:
    """Read and divide the samples.

    Raises:
        ServeError: invalid_input: a file does not fit the model or the labels, or the model rejects synthetic inputs.
    """
    calibration = None if files.calibration is None else choose_inputs(model, files.calibration)
    notes: list[str] = []
    if files.inputs is not None or calibration is None:
        if files.inputs is None:
            notes.append(SYNTHETIC_NOTE)
        evaluation = _chosen(choose_inputs(model, files.inputs), files.most, labels=files.labels)
        return Divided(None if calibration is None else _chosen(calibration, files.most), evaluation, tuple(notes))
    everything = _chosen(calibration, 2 * files.most, labels=files.labels)
    count = everything.samples
    if count < _LEAST_TO_DIVIDE:
        notes.append(
            f"calibrated and compared with the same {count} samples, which judges too well: give {_LEAST_TO_DIVIDE} or "
            "more, or others by --inputs"
        )
        return Divided(everything, everything, tuple(notes))
    held_out = np.arange(count) % _HELD_OUT == _HELD_OUT - 1
    return Divided(
        _part(everything, np.flatnonzero(~held_out)[: files.most], "for calibration"),
        _part(everything, np.flatnonzero(held_out)[: files.most], "held out"),
        tuple(notes),
    )


def _chosen(inputs: Inputs, most: int, labels: Path | None = None) -> Samples:
    """At most so many samples, spread evenly over all."""
    if not isinstance(inputs, FileInputs):
        count = min(most, SYNTHETIC_SAMPLES)
        return Samples(f"{inputs.origin}: {count} samples", [inputs.take(1, number) for number in range(count)])
    numbers = np.unique(np.linspace(0, inputs.samples - 1, min(most, inputs.samples)).round().astype(int))
    known = None if labels is None else read_labels(labels, inputs)[numbers]
    part = f", {len(numbers)} of them" if len(numbers) < inputs.samples else ""
    return Samples(f"{inputs.origin}{part}", [inputs.take(1, int(number)) for number in numbers], known)


def _part(samples: Samples, numbers: np.ndarray, use: str) -> Samples:
    labels = None if samples.labels is None else samples.labels[numbers]
    return Samples(f"{samples.origin}: {len(numbers)} {use}", [samples.arrays[int(one)] for one in numbers], labels)
