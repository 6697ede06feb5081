"""Opening a model in this process, as the server would open it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ortserve.config.session import SessionSettings
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import is_absent
from ortserve.engine.model_signature import read_signature
from ortserve.engine.ort_errors import ORT_ERRORS, run_error
from ortserve.engine.process_limits import core_budget, intra_op_threads
from ortserve.engine.provider_options import GPU_PROVIDERS
from ortserve.engine.providers import ProviderChoice, choose_provider
from ortserve.engine.runs import PlainRun, run_options
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.errors import ServeError, invalid_input
from ortserve.model_file.damage import find_damage, find_pointer
from ortserve.model_file.graph import Model
from ortserve.model_file.reading import read_model
from ortserve.registry.load.row_axes import RowAxes, find_row_axes
from ortserve.registry.repository.model_files import operator_libraries
from ortserve.tools.subject import Subject

_WEIGHTS: Final = "session.optimized_model_external_initializers_file_name"


@dataclass(frozen=True, slots=True)
class OpenModel:
    """An open model.

    Attributes:
        subject: The model on disk.
        graph: Its content without weights.
        rows: The row axes, and how they were determined.
        session: The session.
        signature: The inputs and outputs, with the row axes.
        choice: The execution provider.
        threads: Threads of a run.
        opening_s: Time that ONNX Runtime took to open the session.
    """

    subject: Subject
    graph: Model
    rows: RowAxes
    session: Session
    signature: ModelSignature
    choice: ProviderChoice
    threads: int
    opening_s: float

    @property
    def models(self) -> "tuple[OpenModel, ...]":
        """This model. An ensemble has several."""
        return (self,)

    def runner(self) -> PlainRun:
        """A runner of the session, for arrays from ``for_model``."""
        return PlainRun(self.session, self.signature, run_options(self.subject.options.session))

    def with_rows_of(self, reference: ModelSignature) -> "OpenModel":
        """This model with the row axes of a reference, so that both take the same arrays.

        The detected axes of two models may differ: in a quantized model rows may depend on each other, so axis 0 is
        assumed. Its rows are nevertheless on the axes of its source.
        """
        return replace(self, signature=rows_as(self.signature, reference))

    def for_model(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Convert arrays with their rows on axis 0 to contiguous arrays with the model's row axes."""
        return arrays_for(self.signature, arrays)


@contextmanager
def naming_failures(subject: object) -> Iterator[None]:
    """Raise ServeError if a run in the block fails: rejected_by_model if the model rejects the inputs.

    ``subject`` is what the message names: the path of the model, or the option with the inputs.
    """
    try:
        yield
    except ORT_ERRORS as error:
        failure = run_error(error)
        raise ServeError(failure.kind, f"{subject}: {failure.message}") from None


def rows_as(signature: ModelSignature, reference: ModelSignature) -> ModelSignature:
    """A signature with the row axes of a reference."""
    axes = {spec.name: spec.batch_axis for spec in (*reference.inputs, *reference.outputs)}
    inputs, outputs = (
        tuple(replace(spec, batch_axis=axes.get(spec.name)) for spec in specs)
        for specs in (signature.inputs, signature.outputs)
    )
    return replace(signature, inputs=inputs, outputs=outputs, unbatched_because=reference.unbatched_because)


def arrays_for(signature: ModelSignature, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Convert inputs with their rows on axis 0 to contiguous arrays with the row axes of a signature."""

    def move(spec: TensorSpec, array: np.ndarray) -> np.ndarray:
        if is_absent(array) or not spec.batch_axis:
            is_whole = signature.is_batched and spec.batch_axis is None and not is_absent(array)
            return array[0, ...] if is_whole else array  # shared by all rows, so one is enough; ``...`` keeps an array
        return np.moveaxis(array, 0, spec.batch_axis)

    moved = (move(*pair) for pair in zip(signature.inputs, arrays, strict=True))
    return [np.ascontiguousarray(array) if array.ndim else array for array in moved]


def read_graph(path: Path) -> Model:
    """Read a model file without its weights.

    Raises:
        ServeError: invalid_input, if the file is no ONNX model, or a Git LFS pointer is in place of one of its files.
    """
    graph = read_model(path)
    if not graph.is_readable or find_pointer(path, graph):
        raise invalid_input(f"{path}: {find_damage(path, graph)}")
    return graph


def open_model(
    subject: Subject,
    *,
    provider: str | None = None,
    threads: int | None = None,
    settings: Mapping[str, Any] | None = None,
    profile_prefix: Path | None = None,
) -> OpenModel:
    """Open a model. Blocks while ONNX Runtime opens it.

    Args:
        subject: The model on disk.
        provider: The only execution provider to use, such as ``cpu``; None for the configured ones.
        threads: Threads of a run; None for the configured number, or for the usual one.
        settings: Replace session settings of the configuration, by their names in ``SessionSettings``.
        profile_prefix: As in ``engine.session.SessionOptions``.

    Raises:
        ServeError: The file is no model, ONNX Runtime refuses it, or no execution provider can be used.
    """
    options = subject.options
    graph = read_graph(subject.path)
    choice = choose_provider([provider] if provider else options.execution_providers)
    session_settings = options.session.model_copy(update=settings or {})
    count = threads or options.intra_op_threads or usual_threads(choice, session_settings)
    libraries = operator_libraries(options, subject.folder)
    opening = SessionOptions(choice, count, session_settings, libraries, profile_prefix=profile_prefix)
    began = time.perf_counter()
    try:
        session = open_session(subject.path, subject.name, opening, graph)
        opening_s = time.perf_counter() - began
        signature = read_signature(session, graph)
    except ServeError as error:
        if damage := find_damage(subject.path, graph):
            raise invalid_input(f"{subject.path}: {damage}") from None
        raise ServeError(error.kind, f"{subject.path}: {error.message}") from None
    rows = find_row_axes(graph, options)
    return OpenModel(subject, graph, rows, session, rows.apply(signature), choice, count, opening_s)


def saving_graph(graph: Model, entries: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Settings for ``open_model`` that save the optimized graph, without weights of more than 1 KiB.

    Args:
        graph: The content of the model.
        entries: The entries of the session configuration.
        file: The new file. A link beside it discards the weights.
    """
    if graph.external_files:  # they stay where they are; the optimized graph refers to them
        return {"optimized_model_file": str(file.absolute())}
    weights = file.with_suffix(".weights")
    weights.symlink_to("/dev/null")
    return {"optimized_model_file": str(file.absolute()), "entries": {**entries, _WEIGHTS: weights.name}}


def usual_threads(choice: ProviderChoice, settings: SessionSettings) -> int:
    """The number of threads of a run on this machine, without a configured one."""
    branches = settings.inter_op_threads if settings.execution_mode == "parallel" else 1
    return intra_op_threads(core_budget(), on_gpu=choice.name in GPU_PROVIDERS, inter_op_threads=branches)
