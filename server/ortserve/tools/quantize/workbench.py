"""Makes quantized models and compares them with their source, in a child process (``ObjectInChild``)."""

import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ortserve.core.agreement import Agreement
from ortserve.engine.ort_errors import ORT_ERRORS, without_paths
from ortserve.errors import invalid_input
from ortserve.model_file.reading import read_model
from ortserve.tools.compare.measure import measure_agreement
from ortserve.tools.opening import OpenModel, open_model
from ortserve.tools.quantize.making import PreparedModel, calibrate, make, prepare
from ortserve.tools.quantize.plan import Candidates, find_candidates
from ortserve.tools.quantize.result import Settings
from ortserve.tools.quantize.samples import read_samples
from ortserve.tools.quantize.search import Tried
from ortserve.tools.speed import Feeds
from ortserve.tools.subject import Subject

_MAX_FEEDS: Final = 4


@dataclass(frozen=True, slots=True)
class Ready:
    """The result of ``Workbench.prepare``.

    Attributes:
        candidates: The nodes to quantize.
        calibration: Origin of the calibration samples; empty without them.
        inputs: Origin of the samples of the comparison.
        feeds: Inputs for measurements of speed.
        notes: The limits of the samples, and the changes that prepared the source.
    """

    candidates: Candidates
    calibration: str
    inputs: str
    feeds: list[Feeds]
    notes: tuple[str, ...]


class Workbench:
    """The source, its samples, and a folder for files. Call ``prepare`` first, then ``calibrate`` if needed."""

    def __init__(self, source: Subject, given: Namespace, settings: Settings) -> None:
        """Open the source, read the samples, and run it with them.

        Raises:
            ServeError: The model cannot be opened or run, or a file does not fit it.
        """
        self._settings: Final = settings
        self._source: Final = open_model(source, provider="cpu")
        self._calibration, self._evaluation = read_samples(self._source, given)
        self._compare(self._source)  # errors here are not those of a quantized model

    def prepare(self, folder: Path, nbytes: int, exclude: list[str]) -> Ready:
        """Prepare the source for quantization in an empty folder.

        Raises:
            ServeError: As ``making.prepare`` and ``plan.find_candidates``.
        """
        tempfile.tempdir = str(folder)  # the library writes whole models there; they are removed with the folder
        path, settings = self._source.subject.path, self._settings
        self._prepared: PreparedModel = prepare(path, folder, settings, nbytes)
        model = read_model(self._prepared.path)
        self._candidates: Candidates = find_candidates(model, settings, self._prepared.dtypes, exclude, str(path))
        calibration, evaluation = self._calibration, self._evaluation
        names = [spec.name for spec in self._source.signature.inputs]
        return Ready(
            candidates=self._candidates,
            calibration="" if calibration is None else calibration.origin,
            inputs=evaluation.origin,
            feeds=[dict(zip(names, arrays, strict=True)) for arrays in evaluation.arrays[:_MAX_FEEDS]],
            notes=(*evaluation.notes, *self._prepared.notes),
        )

    def calibrate(self, limit_s: float) -> int:
        """Find the ranges of activations, from as many samples as the time allows, at least one.

        Returns:
            The number of samples for which there was no time.

        Raises:
            ServeError: invalid_input: the model cannot be calibrated with the samples.
        """
        assert self._calibration is not None
        left = self._calibration.samples
        deadline = time.monotonic() + limit_s

        def in_time() -> Iterator[Feeds]:
            nonlocal left
            for feeds in self._calibration.feeds(self._source) if self._calibration else ():
                yield feeds
                left -= 1
                if time.monotonic() > deadline:
                    return

        try:
            calibrate(self._prepared, self._settings, in_time())
        except ORT_ERRORS as error:
            raise invalid_input(f"calibration failed: {without_paths(str(error))}") from None
        return left

    def attempt(self, names: tuple[str, ...], target: Path) -> Tried:
        """Quantize these nodes, and compare the model with the source. A model that cannot run is a valid result.

        Raises:
            OSError: The model cannot be written.
        """
        target.parent.mkdir()
        nodes = {name: self._candidates.nodes[name] for name in names}
        try:
            make(self._prepared, target, self._settings, nodes, self._candidates.passing)
            return Tried(names, self._compare(self._open(target)))
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - the library raises errors of any class
            return Tried(names, None, without_paths(str(error)) or type(error).__name__)

    def batching_lost(self, target: Path) -> str:
        """Why the server does not batch requests for this model; empty if it does, or batches none for the source."""
        return "" if _alone_because(self._source) else _alone_because(self._open(target))

    def _compare(self, model: OpenModel) -> Agreement:
        samples = self._evaluation
        return measure_agreement(self._source, model, samples, samples.samples, samples.labels, rows=1)

    def _open(self, path: Path) -> OpenModel:
        return open_model(replace(self._source.subject, path=path), provider="cpu")


def _alone_because(model: OpenModel) -> str:
    return model.signature.unbatched_because or model.rows.known_dependence or ""
