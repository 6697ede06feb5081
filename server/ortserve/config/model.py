"""What can be said for one model: the schema of ``model.yaml``, and the defaults that every model starts from.

``LoadOptions`` are declared once and inherited twice: by ``ModelOptions`` as keys of ``model.yaml``, and by
``ServerOptions`` as the values of models that do not say otherwise. The registry reads; nothing here touches a session.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ortserve.config.expectation import describe_problems
from ortserve.config.session import ProviderWish, SessionSettings
from ortserve.config.tensors import FileName, InputOptions, OutputOptions, WarmupSample
from ortserve.config.yaml_file import read_yaml
from ortserve.errors import invalid_input

MOST_INSTANCES: Final = 64
"""Of one version of a model."""


class QueuePolicy(BaseModel):
    """Of one priority level, or of all that have none of their own."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    timeout_s: float | None = Field(default=None, gt=0, le=86400)
    """How long a request may wait in the queue before it runs. Unset: as long as its own ``timeout`` says."""
    timeout_override: bool = True
    """Whether the ``timeout`` of a request counts, where it is shorter. Off: it does not."""
    timeout_action: Literal["reject", "delay"] = "reject"
    """What becomes of one that has waited so long: it is answered with an error, or goes behind everybody of its
    level who has not."""
    max_requests: int | None = Field(default=None, ge=1, le=2**32 - 1)
    """Most requests that may wait; those beyond are refused as ``overloaded``. Unset: bounded by ``max_queue_rows`` and
    ``max_queue_bytes`` only."""


_REQUIRED: Final = re.compile(r"^required *: *true\b", re.MULTILINE)


class LoadOptions(BaseModel):
    """How a model version is loaded, warmed and queued for."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    execution_providers: tuple[ProviderWish, ...] = Field(
        default=("cpu",),
        min_length=1,
        json_schema_extra={"expects": "list of names, at least one"},
    )
    """Execution providers in order of preference, by short name (``cpu``, ``cuda``, ``tensorrt``) or ONNX Runtime's own
    (``CUDAExecutionProvider``); in a file one may have options: ``[{cuda: {device_id: 1}}, cpu]``. Those that are not
    there are passed over, with a warning; the first that is there must work, and run some of the model, and those
    behind it get the nodes that it does not take, last of all the CPU, listed or not: a warning names what it gets,
    and the session's entry ``session.disable_cpu_ep_fallback`` forbids it. Providers of GPUs are on the GPU of the
    first of them. Plug-in providers are found by their packages (``onnxruntime-ep-…``, such as ``openvino``)."""
    allow_fallback: bool = False
    """Go on to the next execution provider where the first that is there does not work for a model: it cannot open it,
    has too little memory for a row of it, or fails at all that warm-up makes up and the CPU takes. Off: the load fails,
    because a model that was meant for a GPU is better missed than found on the CPU."""
    device_buffers: bool = True
    """On CUDA and TensorRT, keep inputs and outputs of batches in buffers on the device, so that one batch is copied
    while another is computed, where the number of rows fixes the shapes of all of them and cupy is installed. Batches
    are then padded to sizes that double up to the largest, unless ``buckets`` says otherwise. Its metadata says what
    became of it."""
    graph_replay: bool = False
    """On CUDA and TensorRT, capture the graph of each of these sizes while the model is loaded and replay it
    afterwards, which saves small models most of their time. What cannot be captured runs without, after a trial in a
    process of its own; the model's metadata says why. On TensorRT each graph takes a session more, and an engine cache
    is needed. Off, as it has not been tried on enough GPUs."""
    intra_op_threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads that one run may use inside an operator. Unset: from the CPU quota and affinity of the process, and one
    for a model whose run of one row takes less than 1 ms."""
    warmup_s: float = Field(default=5.0, ge=0, le=3600)
    """Longest time of warm-up, in which batch sizes are measured, before a version serves; only the first run, and
    configured samples, may exceed it. Without ``max_rows``, sizes over one row are measured on the CPU for no longer
    than the model took to open, or 30 ms, and what others would gain is computed. With 0 nothing is run: the execution
    provider has not been seen to run the model, and requests run one at a time unless the model's graph proves that
    rows are independent, or ``batched`` is ``true``."""
    max_rows: int | None = Field(default=None, ge=1, le=65536)
    """Most rows that run together in one batch. Unset: learned in warm-up, which also keeps batches, with a warning, to
    the sizes that find memory on a GPU."""
    queue_delay_s: float = Field(default=0.0, ge=0, le=60)
    """How long the oldest row may wait for others to ride with, although an instance is free. 0 adds no delay."""
    echo_wait: bool = True
    """Let a batch wait for callers who usually come back right after an answer, by no more than half the time of a row
    alone, where that serves more of them. It turns itself off for requests that gain nothing by it."""
    slo_s: float | None = Field(default=None, gt=0, le=3600)
    """Deadline of requests that bring none of their own: what cannot be answered within it is refused at once. Unset:
    such requests wait as long as it takes."""
    run_timeout_s: float | None = Field(default=None, gt=0, le=86400)
    """Longest time of one run on a worker: its requests are then answered with an error, and the run is asked to end.
    Unset: 60 seconds or 20 times the learned time, whichever is longer, and 600 seconds where nothing was learned yet.
    However long that is, a run over 1 second is asked to end once the deadlines of all its requests have passed."""
    run_grace_s: float = Field(default=5.0, gt=0, le=3600)
    """How long a run that was asked to end may go on, which it does while it is inside one operator. Then its instance
    is given up, and the version is loaded anew; while no instance is left, it is not ready."""
    warmup_run_timeout_s: float = Field(default=600.0, gt=0, le=86400)
    """Longest time of one run in warm-up, after which the load fails. A run may build TensorRT's engines, too."""
    max_queue_rows: int = Field(default=4096, ge=1, le=1_048_576)
    """Most rows that may wait for one model; requests beyond are refused as ``overloaded``."""
    max_queue_bytes: int = Field(default=1024**3, ge=1, le=2**40)
    """Most bytes of tensors that may wait for one model; requests beyond are refused as ``overloaded``."""


def _equal_to_itself(value: bool | int | float | str) -> bool | int | float | str:
    if value != value:  # then the options would differ from what was loaded, and each poll load anew
        raise ValueError("value: expected a number other than NaN, true, false or a text, got nan")
    return value


class PadAxis(BaseModel):
    """How one axis of an input is padded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    axis: int
    multiple: int = Field(ge=1, le=1_048_576)
    value: Annotated[bool | int | float | str, AfterValidator(_equal_to_itself)]


class LatestVersions(BaseModel):
    """Serve the ``latest`` highest version numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    latest: int = Field(ge=1)


class AllVersions(BaseModel):
    """Serve every version in the repository."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    all: Literal[True]


class SpecificVersions(BaseModel):
    """Serve these versions and no others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    specific: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)


VersionPolicy: TypeAlias = LatestVersions | AllVersions | SpecificVersions


class ModelOptions(LoadOptions):
    """What holds for one model; the keys of ``model.yaml``."""

    instances: int = Field(default=1, ge=1, le=MOST_INSTANCES)
    """Sessions of the model that may run at the same time, each with a worker thread of its own."""
    gpus: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = Field(
        default=(), json_schema_extra={"expects": "list of integers, 0 to 1023"}
    )
    """Numbers of the GPUs that instances are placed on, in turns: ``[0, 1]`` with ``instances: 4`` has two on each.
    Unset: all on the one that the execution provider's ``device_id`` names. Without effect on the CPU."""
    preferred_rows: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), json_schema_extra={"expects": "list of integers, at least 1"}
    )
    """Batch sizes that leave without waiting for the rest of ``queue_delay_s``. Unset: only a full batch does."""
    buckets: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), json_schema_extra={"expects": "list of integers, at least 1"}
    )
    """Sizes that batches are padded to, the largest of them the most rows of a batch. Unset: batches are not padded.
    Those that warm-up finds too little memory for on a GPU are not used; the load fails where that is so of all."""
    pad: Mapping[str, PadAxis] = Field(
        default_factory=dict, json_schema_extra={"expects": "{input: {axis: n, multiple: n, value: v}, ...}"}
    )
    """One axis of each of these inputs (0 is the batch axis, which is not padded) grows to the next multiple with
    elements that hold the value, so that requests of different lengths run together. Outputs are cut back where they
    have a dimension of the same name. The value must mean nothing to the model, by itself or by a mask."""
    priority_levels: int = Field(default=0, ge=0, le=64)
    """Levels that requests may ask for by the parameter ``priority``, 1 the most urgent. 0: all requests are alike."""
    default_priority_level: int = Field(default=1, ge=1, le=64)
    """Level of requests that ask for none, or for one that is not there."""
    queue_policy: QueuePolicy = Field(default_factory=QueuePolicy)
    """How long requests may wait, and how many."""
    priority_queue_policies: Mapping[int, QueuePolicy] = Field(default_factory=dict)
    """The same for one priority level, instead of ``queue_policy``."""
    model_file: FileName = Field(
        default="model.onnx", json_schema_extra={"expects": "name of a file, without a folder"}
    )
    """Name of the file in each version's folder."""
    batched: bool | None = None
    """Whether rows of several requests may run together. Unset: where the model's graph proves that rows are
    independent, along whatever axes, and, where it does not tell, where a trial has seen that they are. ``true`` takes
    axis 0 for the batch axis of all inputs and outputs, whatever their dimensions are called, and is believed, with a
    warning, where graph or trial speak against it; it fails the load where axis 0 is fixed and the graph proves no
    other. With ``false`` each request runs alone."""
    row_checks: bool | None = None
    """Whether requests that shared a batch are run again alone at times, to compare both answers: at most one in 100
    batches, in at most about 1 % of the time of the model's runs, and only while no request waits. Where two runs alone
    agree with each other and not with the batch, each request runs alone until the version is loaded anew. Unset: where
    the model's graph does not prove that rows are independent."""
    inputs: Mapping[str, InputOptions] = Field(default_factory=dict)
    """How clients see an input, by its name. Those that are named are listed first in the metadata, in this order."""
    outputs: Mapping[str, OutputOptions] = Field(default_factory=dict)
    """How clients see an output, by its name; names of its elements."""
    served_outputs: tuple[str, ...] = Field(default=(), json_schema_extra={"expects": "list of names"})
    """Outputs that clients can have, in this order. Unset: all that the model has."""
    session: SessionSettings = Field(default_factory=SessionSettings)
    """Settings of ONNX Runtime's sessions."""
    warmup_samples: tuple[WarmupSample, ...] = ()
    """Requests that are run before the version is ready, after batch sizes were measured."""
    required: bool = False
    """Whether the server is not ready while this model has no ready version. With ``strict_readiness`` every model is
    required."""
    version_policy: VersionPolicy = Field(
        default=LatestVersions(latest=1),
        json_schema_extra={"expects": "{latest: n}, {all: true} or {specific: [n, ...]}"},
    )
    """Which of the versions in the repository are served: the ``n`` highest, all, or those listed."""

    @property
    def says_batched(self) -> bool:
        """Whether it says that rows of several requests may run together."""
        tensors = (*self.inputs.values(), *self.outputs.values())
        return self.batched is not False and (self.batched or any(each.batch_axis is not None for each in tensors))


def load_model_options(path: Path | None, defaults: LoadOptions) -> ModelOptions:
    """Read a ``model.yaml``; keys that it does not have are taken from ``defaults``. Blocks on the file.

    Args:
        path: The file, or ``None`` for a model without one.
        defaults: The server's options, or any other ``LoadOptions``.

    Raises:
        ServeError: ``INVALID_INPUT``, with the file's name (never its folder), every bad key, what was expected there
            and what came.
    """
    if path is None:
        return make_model_options({}, defaults, "the server's options")
    try:
        given = read_yaml(path)
    except ValueError as error:
        raise invalid_input(f"{path.name}: {error}") from None
    return make_model_options(given, defaults, path.name)


def says_required(path: Path) -> bool:
    """Whether a ``model.yaml`` says that its model is required, however wrong it may be in all else. Blocks on it."""
    try:
        return read_yaml(path).get("required") is True
    except ValueError:
        pass
    try:
        return _REQUIRED.search(path.read_text(errors="replace")) is not None
    except OSError:
        return False


def make_model_options(given: Mapping[str, object], defaults: LoadOptions, source: str) -> ModelOptions:
    """Check values as they stand in a file; keys that are not given are taken from ``defaults``.

    Returns:
        The options; ``model_fields_set`` is what was given.

    Raises:
        ServeError: ``INVALID_INPUT``, beginning with ``source``, with every bad key.
    """
    inherited = {name: getattr(defaults, name) for name in LoadOptions.model_fields}
    try:
        # Through JSON, because strict validation takes a list for a tuple there, but no text or boolean for a number.
        options = ModelOptions.model_validate_json(json.dumps(inherited | dict(given), default=str), strict=True)
    except ValidationError as error:
        problems = describe_problems(error, ModelOptions.model_fields, given)
        told = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise invalid_input(f"{source}: {told}") from None
    if problem := "; ".join(_priority_problems(options)):
        raise invalid_input(f"{source}: {problem}")
    return ModelOptions.model_construct(set(given), **dict(options))


def _priority_problems(options: ModelOptions) -> Iterator[str]:
    """Say which options name levels that the model has not."""
    levels = max(1, options.priority_levels)
    if options.default_priority_level > levels:
        yield (
            f"default_priority_level: expected 1 to {levels}, as priority_levels is {options.priority_levels}, "
            f"got {options.default_priority_level}"
        )
    for level in options.priority_queue_policies:
        if not 1 <= level <= levels:
            yield (
                f"priority_queue_policies: expected levels from 1 to {levels}, as priority_levels is "
                f"{options.priority_levels}, got {level}"
            )
