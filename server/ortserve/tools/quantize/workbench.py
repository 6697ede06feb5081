"""Makes quantized models and compares them with their source, in a process of its own (``apart.ObjectApart``)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ortserve.engine.ort_errors import ORT_ERRORS, without_paths
from ortserve.errors import ServeError, invalid_input
from ortserve.tools.compare.measure import measure_agreement
from ortserve.tools.opening import OpenModel, open_model
from ortserve.tools.quantize.making import Prepared, calibrate, make, prepare
from ortserve.tools.quantize.plan import Candidates
from ortserve.tools.quantize.result import Settings
from ortserve.tools.quantize.samples import Files, read_samples
from ortserve.tools.quantize.search import Tried
from ortserve.tools.speed import Feeds
from ortserve.tools.subject import Subject

_MOST_FEEDS: Final = 4
_FAILURES: Final[tuple[type[Exception], ...]] = (*ORT_ERRORS, ServeError)


@dataclass(frozen=True, slots=True)
class Opened:
    """What is known of the source and its samples.

    Attributes:
        calibration: Origin of the calibration samples; empty without them.
        inputs: Origin of the samples of the comparison.
        notes: About the samples.
        feeds: Inputs for measurements of speed.
    """

    calibration: str
    inputs: str
    notes: tuple[str, ...]
    feeds: list[Feeds]


class Workbench:
    """The source, its samples, and a folder for models."""

    def __init__(self, source: Subject, files: Files, settings: Settings) -> None:
        """Open the source and read the samples.

        Raises:
            ServeError: The model cannot be opened, or a file does not fit it.
        """
        self._settings: Final = settings
        self._source: Final = open_model(source, provider="cpu")
        self._samples: Final = read_samples(self._source, files)

    def opened(self) -> Opened:
        """Describe what was opened."""
        calibration, evaluation = self._samples.calibration, self._samples.evaluation
        names = [spec.name for spec in self._source.signature.inputs]
        feeds: list[Feeds] = [dict(zip(names, arrays, strict=True)) for arrays in evaluation.arrays[:_MOST_FEEDS]]
        origin = "" if calibration is None else calibration.origin
        return Opened(origin, evaluation.origin, self._samples.notes, feeds)

    def prepare(self, folder: Path, opset: int, nbytes: int) -> Prepared:
        """Prepare the source for quantization; see ``making.prepare``."""
        return prepare(self._source.subject.path, folder, self._settings, opset, nbytes)

    def calibrate(self, prepared: Prepared) -> None:
        """Write the ranges of activations.

        Raises:
            ServeError: invalid_input: the model cannot be calibrated with the samples.
        """
        samples = self._samples.calibration
        assert samples is not None
        try:
            calibrate(prepared, self._settings, samples.feeds(self._source), self._cache(prepared))
        except ORT_ERRORS as error:
            raise invalid_input(f"calibration failed: {without_paths(str(error))}") from None

    def attempt(self, prepared: Prepared, nodes: Mapping[str, str], candidates: Candidates, target: Path) -> Tried:
        """Quantize these nodes, and compare the model with the source. A model that cannot run is a result, too."""
        names = tuple(nodes)
        target.parent.mkdir()
        samples = self._samples.evaluation
        try:
            make(prepared, target, self._settings, nodes, candidates.passing, self._cache(prepared))
            made = self._open(target)
            # A model that is not batched any more has its rows where the source has them.
            made = replace(made, signature=self._source.signature)
            agreement = measure_agreement(self._source, made, samples, samples.samples, samples.labels, rows=1)
        except _FAILURES as error:
            return Tried(names, target, None, without_paths(str(error)))
        return Tried(names, target, agreement)

    def batching_lost(self, target: Path) -> str:
        """Why the server batches requests for the source but not for this model; empty if that is not so."""
        return "" if _alone_because(self._source) else _alone_because(self._open(target))

    def _open(self, path: Path) -> OpenModel:
        return open_model(replace(self._source.subject, path=path), provider="cpu")

    @staticmethod
    def _cache(prepared: Prepared) -> Path:
        """The file with the ranges of activations."""
        return prepared.path.with_name("ranges.json")


def _alone_because(model: OpenModel) -> str:
    return model.signature.unbatched_because or model.rows.known_dependence or ""
