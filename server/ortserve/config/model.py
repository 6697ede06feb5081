"""Options of one model: the schema of ``model.yaml``, and the options that the server sets for every model.

``LoadOptions`` is declared once and inherited twice: by ``ModelOptions`` as keys of ``model.yaml``, and by
``ServerOptions`` as the defaults of every model.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, Field, StringConstraints

from ortserve.config.declaration import DECLARATION, InvalidValuesError, validate
from ortserve.config.ensemble import EnsembleOptions
from ortserve.config.rollout import RolloutOptions
from ortserve.config.sequences import SequenceOptions
from ortserve.config.session import ProviderWish, SessionSettings
from ortserve.config.tensors import BatchInputOptions, FileName, InputOptions, OutputOptions, PadAxis, WarmupSample
from ortserve.config.triton_names import hint_for
from ortserve.config.versions import MAX_LABELS, Label, LatestVersions, Version, VersionPolicy
from ortserve.config.yaml_file import read_yaml
from ortserve.errors import invalid_input
from ortserve.paths import read_file

MAX_INSTANCES: Final = 64
"""Maximum number of instances of one version."""


class QueuePolicy(BaseModel):
    """Queue limits of one priority level, or of all levels without a policy of their own."""

    model_config = DECLARATION

    timeout_s: float | None = Field(default=None, gt=0, le=86400)
    """Time limit in the queue. Unset: the ``timeout`` of the request."""
    timeout_override: bool = True
    """Apply the ``timeout`` of a request if it is shorter. Off: ignore it."""
    timeout_action: Literal["reject", "delay"] = "reject"
    """What happens at the time limit. ``reject``: the request fails. ``delay``: it moves behind all requests of its
    level that are within their limit."""
    max_requests: int | None = Field(default=None, ge=1, le=2**32 - 1)
    """Maximum number of requests in the queue; further ones are rejected as ``overloaded``. Unset: only
    ``max_queue_rows`` and ``max_queue_bytes`` apply."""


class RecordOptions(BaseModel):
    """Requests that are recorded."""

    model_config = DECLARATION

    share: float = Field(default=0.0, ge=0, le=1)
    """Share of the answered requests that is recorded, chosen at random. 0: none."""
    max_bytes: int = Field(default=256 * 1024 * 1024, ge=4096, le=2**44)
    """Maximum size of the files of a version, those of earlier runs included, in blocks of 4096 bytes. The first
    request that does not fit ends the recording until the version is loaded again."""


_REQUIRED: Final = re.compile(r"^required *: *true\b", re.MULTILINE)


class LoadOptions(BaseModel):
    """Loading, warm-up and queueing of a model version."""

    model_config = DECLARATION

    execution_providers: tuple[ProviderWish, ...] = Field(
        default=("cpu",),
        min_length=1,
        json_schema_extra={"expects": "list of names, at least one"},
    )
    """Execution providers in order of preference, by short name (``cpu``, ``cuda``, ``tensorrt``) or by ONNX Runtime's
    name (``CUDAExecutionProvider``); in a file a provider may have options: ``[{cuda: {device_id: 1}}, cpu]``.
    Unavailable providers are skipped with a warning. The first available one must work and run a part of the model; the
    following ones run the nodes that it does not support. The CPU comes last, listed or not: a warning names the nodes
    that it runs, and the session entry ``session.disable_cpu_ep_fallback`` forbids it. All GPU providers use the GPU of
    the first one. Plug-in providers are found by their packages (``onnxruntime-ep-...``, for example ``openvino``)."""
    allow_fallback: bool = False
    """Try the next execution provider if the first available one cannot open the model, has too little memory for one
    row, or fails all synthetic warm-up inputs that the CPU accepts. Off: the load fails, so that a model meant for a
    GPU never runs on the CPU unnoticed."""
    device_buffers: bool = True
    """On CUDA and TensorRT, keep inputs and outputs of batches in device buffers, so that one batch is copied while
    another one is computed. Requires cupy, and shapes that the number of rows determines. Batches are padded to powers
    of two up to the largest size, unless ``buckets`` is set. The model's metadata reports whether buffers are used."""
    graph_replay: bool = False
    """On CUDA and TensorRT, capture a CUDA graph for each batch size that has device buffers (``device_buffers``)
    during loading, and replay it afterwards, which saves small models most of their time. Captures are first tried in a
    separate process; sizes that cannot be captured run without replay, and the model's metadata gives the reason. On
    TensorRT each graph needs its own session and an engine cache. Off by default, because it was tested on few GPUs."""
    intra_op_threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads of one run inside an operator. Unset: one for each physical core within the CPU quota and affinity of the
    process, or 1 for a model whose run of one row takes less than 1 ms."""
    warmup_s: float = Field(default=5.0, ge=0, le=3600)
    """Time limit of warm-up, which measures batch sizes before a version serves; only the first run and configured
    samples may exceed it. Without ``max_rows``, sizes over one row are measured on the CPU for at most the longest
    of three times: that of opening the model, 30 ms, and five runs of one row; the gain of other sizes is computed. 0:
    no warm-up. The execution provider is then untested, and requests run one at a time unless the model's graph proves
    that rows are independent or ``batched`` is ``true``."""
    max_rows: int | None = Field(default=None, ge=1, le=65536)
    """Maximum number of rows of a batch and of a request; larger requests are rejected. Unset: learned in warm-up, and
    larger requests run in pieces. On a GPU, warm-up also limits batches to the sizes that fit in memory, with a
    warning."""
    queue_delay_s: float = Field(default=0.0, ge=0, le=60)
    """Time for which the oldest row may wait for a larger batch although an instance is free. 0: no delay."""
    closed_loop_wait: bool = True
    """Let a batch wait for callers that usually send their next request right after an answer, for at most half the
    time of a single row, if more requests per second are answered that way. Requests that gain nothing do not wait."""
    slo_s: float | None = Field(default=None, gt=0, le=3600)
    """Deadline of requests without one of their own; a request that cannot meet it is rejected at once. Unset: no
    deadline."""
    run_timeout_s: float | None = Field(default=None, gt=0, le=86400)
    """Time limit of one run on a worker: its requests then fail, and the run is terminated. Unset: 20 times the learned
    time, at least 60 seconds; 600 seconds before a time is learned. In any case, a run over 1 second is terminated once
    the deadlines of all its requests have passed, or all of them were cancelled."""
    run_grace_s: float = Field(default=5.0, gt=0, le=3600)
    """Time for a terminated run to end; it cannot end inside an operator. Then its instance is abandoned and the
    version is reloaded. The version is not ready while it has no instance."""
    warmup_run_timeout_s: float = Field(default=600.0, gt=0, le=86400)
    """Time limit of one run in warm-up; then the load fails. Such a run may include the build of TensorRT engines."""
    trial_load: bool = False
    """Load each version in another process first, with all its checks, and into the server only if that succeeds. A
    version that crashes ONNX Runtime or hangs there does not load, and the server goes on. A load then takes more than
    twice its time; the other process has ended, and its memory is free, before the server loads the version. A version
    that has passed is tried again when its files or options change. No effect on ensembles."""
    load_policy: Literal["start", "on_demand", "pinned"] = "start"
    """When a model is in memory. ``start``: from the start on; under ``memory_budget_bytes`` it may be evicted for
    another model, and the next request loads it again. ``on_demand``: from the first request for it on; it may be
    evicted. ``pinned``: from the start on, and never evicted. A model with ``required: true`` is pinned."""
    max_queue_rows: int = Field(default=4096, ge=1, le=1_048_576)
    """Maximum number of rows in the queue of one model; further requests are rejected as ``overloaded``."""
    max_queue_bytes: int = Field(default=1024**3, ge=1, le=2**40)
    """Maximum size of the tensors in the queue of one model; further requests are rejected as ``overloaded``."""


TagName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_]{0,62}$")]
"""A name that is valid in Prometheus after an underscore. It begins with no underscore, because two are reserved."""
TagValue: TypeAlias = Annotated[str, StringConstraints(max_length=128)]


class ModelOptions(LoadOptions):
    """Options of one model: the keys of ``model.yaml``."""

    instances: int = Field(default=1, ge=1, le=MAX_INSTANCES)
    """Number of sessions that run in parallel, each with its own worker thread."""
    gpus: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = Field(
        default=(), json_schema_extra={"expects": "list of integers, 0 to 1023"}
    )
    """Numbers of the GPUs for the instances, in rotation: ``[0, 1]`` with ``instances: 4`` places two on each. Unset:
    all on the execution provider's ``device_id``. No effect on the CPU."""
    preferred_rows: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] = Field(
        default=(), json_schema_extra={"expects": "list of integers, 1 to 65536"}
    )
    """Batch sizes that run without waiting for the rest of ``queue_delay_s``. Unset: only a full batch."""
    buckets: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] = Field(
        default=(), json_schema_extra={"expects": "list of integers, 1 to 65536"}
    )
    """Sizes to which batches are padded; the largest one is the maximum number of rows. Sizes that do not fit in the
    memory of a GPU are not used; the load fails if none fits. Unset: no padding."""
    pad: Mapping[str, PadAxis] = Field(
        default_factory=dict, json_schema_extra={"expects": "{input: {axis: n, multiple: n, value: v}, ...}"}
    )
    """Inputs with an axis that is padded to the next ``multiple`` with ``value``, so that requests of different lengths
    run in one batch. Axis 0 is the batch axis and cannot be padded. Outputs with a dimension of the same name are cut
    back. The model must ignore the value, by itself or by a mask."""
    priority_levels: int = Field(default=0, ge=0, le=64)
    """Number of levels for the request parameter ``priority``; 1 is the most urgent. 0: no priorities."""
    default_priority_level: int = Field(default=1, ge=1, le=64)
    """Level of requests without a level or with an unknown one."""
    queue_policy: QueuePolicy = Field(default_factory=QueuePolicy)
    """Limits of the queue."""
    priority_queue_policies: Mapping[int, QueuePolicy] = Field(default_factory=dict)
    """Limits of the queue for one priority level, instead of ``queue_policy``."""
    model_file: FileName = Field(
        default="model.onnx", json_schema_extra={"expects": "name of a file, without a folder"}
    )
    """Name of the model file in each version's folder."""
    batched: bool | None = None
    """Whether rows of several requests may run in one batch. Unset: if the model's graph proves that rows are
    independent, along any axes, or, if the graph is inconclusive, if a trial finds no dependence. ``true``: axis 0 is
    the batch axis of all inputs and outputs; if graph or trial contradict, a warning is logged. The load fails if axis
    0 is fixed and the graph proves no other axis. ``false``: each request runs alone."""
    row_checks: bool | None = None
    """Whether some requests of shared batches run again alone to compare both answers: at most one in 100 batches,
    about 1 % of the model's run time, and only while the queue is empty. If two runs alone agree with each other but
    not with the batch, each request runs alone until the version is reloaded. Unset: only if the model's graph does not
    prove that rows are independent."""
    response_cache: bool = False
    """Whether a request is answered, without a run, with the outputs of an earlier request that had equal inputs. Equal
    requests that arrive during a run wait for its outputs. Only for models whose outputs depend on their inputs alone.
    The entries of a version are dropped when it is unloaded or reloaded; the server's ``cache_bytes`` limits the memory
    of all entries."""
    inputs: Mapping[str, InputOptions] = Field(default_factory=dict)
    """How clients see an input, by its name. The metadata lists these inputs first, in this order."""
    outputs: Mapping[str, OutputOptions] = Field(default_factory=dict)
    """How clients see an output, by its name, and the labels of its elements."""
    served_outputs: tuple[str, ...] = Field(default=(), json_schema_extra={"expects": "list of names"})
    """Outputs that clients can request, in this order. Unset: all outputs of the model."""
    batch_inputs: Mapping[str, BatchInputOptions] = Field(default_factory=dict)
    """Inputs that describe the requests of a batch, by name. Clients neither see nor send them."""
    batch_outputs: Mapping[str, str] = Field(
        default_factory=dict, json_schema_extra={"expects": "{output: input, ...}"}
    )
    """Outputs with one axis and one element for each element of an input in the batch: maps each such output to that
    input. Each request receives its elements in the shape of its input."""
    session: SessionSettings = Field(default_factory=SessionSettings)
    """Settings of ONNX Runtime's sessions."""
    warmup_samples: tuple[WarmupSample, ...] = ()
    """Requests that run after batch sizes were measured and before the version is ready."""
    record: RecordOptions = Field(default_factory=RecordOptions)
    """Which requests are recorded as calibration data: ``{share: 0.01}`` records the inputs of one answered request in
    a hundred, as files for ``--inputs`` and ``--calibration``. Needs the server's ``record_dir``; without it a warning
    is logged. Only a ``model.yaml`` can set it. The metadata's property ``recording`` reports the counts."""
    golden_required: bool = False
    """Whether a version without golden samples fails to load. Samples in the folder ``golden`` of a version are always
    checked before it serves."""
    max_slowdown: float | None = Field(default=None, ge=1, le=1000)
    """Maximum time of a batch, as a multiple of the time that the serving version takes for it: the previous load of
    the same version, or the one that answers requests without a version. Both versions run in turn, at the batch sizes
    that warm-up measured for both. A slower version fails to load, and the serving version keeps serving. Differences
    below 0.1 ms do not count. No effect while no version serves, and for ensembles and models with sequences. Unset: no
    comparison."""
    sequences: SequenceOptions | None = None
    """Sequences of requests: the requests of a sequence run one after the other, and the server keeps the model's state
    from one request to the next. Such a model accepts only requests with a ``sequence_id``. Unset: each request stands
    alone."""
    ensemble: EnsembleOptions | None = None
    """Makes the model an ensemble of other models: ``{steps: [{model: m, inputs: {a: x}, outputs: {b: y}}, ...]}``. Its
    version folders need no model file; ``inputs`` and ``outputs`` name its own tensors in their order. Of the other
    keys only ``batched``, ``golden_required``, ``max_rows``, ``metric_tags``, ``response_cache``, ``slo_s``,
    ``required`` and ``version_policy`` apply. Unset: the model is a file."""
    thread_nice: int | None = Field(default=None, ge=0, le=19)
    """Nice level of the threads that run the model, on Linux: 19 gives way to all other work on the processors. A level
    below that of the server needs ``CAP_SYS_NICE``; a warning is logged where it has no effect. Models with another
    level than the server's never run on the event loop. Unset: the level of the server."""
    metric_tags: Mapping[TagName, TagValue] = Field(
        default_factory=dict,
        max_length=16,
        json_schema_extra={
            "expects": "{name: text, ...}, at most 16, with names of at most 63 letters, digits and '_' that do not "
            "begin with '_', and texts of at most 128 characters"
        },
    )
    """Labels that are added to all metrics of the model, with an underscore before the name as in Triton: ``{team:
    vision}`` becomes ``_team="vision"``. The tags of the latest load apply to all versions."""
    required: bool = False
    """Whether the server reports not ready while this model has no ready version. ``strict_readiness`` requires every
    model."""
    version_policy: VersionPolicy = Field(
        default=LatestVersions(latest=1),
        json_schema_extra={"expects": "{latest: n}, {all: true} or {specific: [n, ...]}, at most 1024 versions"},
    )
    """Served versions: the ``n`` highest, all, or the listed ones. Versions that labels name are served in addition."""
    labels: Mapping[Label, Version] = Field(
        default_factory=dict, max_length=MAX_LABELS, json_schema_extra={"expects": "{name: version, ...}, at most 64"}
    )
    """Names of versions, such as ``{stable: 3, canary: 4}``, that requests may use instead of the number. Requests
    without a version go to the version that is labelled ``stable``, if there is one. Only a ``model.yaml`` can set it;
    calls can change labels while the server runs."""
    rollout: RolloutOptions | None = None
    """Tries another version with requests for the one that is labelled ``stable``: ``{candidate: 4, mode: canary}``.
    Only a ``model.yaml`` can set it; calls can start and end rollouts while the server runs."""

    @property
    def is_pinned(self) -> bool:
        """Whether the model is loaded at the start and never evicted."""
        return self.required or self.load_policy == "pinned"

    @property
    def is_on_demand(self) -> bool:
        """Whether the model is loaded by the first request for it."""
        return self.load_policy == "on_demand" and not self.required

    @property
    def is_set_to_batch(self) -> bool:
        """Whether the options explicitly let rows of several requests run in one batch."""
        tensors = (*self.inputs.values(), *self.outputs.values())
        return self.batched is not False and (self.batched or any(each.batch_axis is not None for each in tensors))

    @property
    def metric_labels(self) -> tuple[tuple[str, str], ...]:
        """The names and values of the labels that ``metric_tags`` adds, sorted by name."""
        return tuple((f"_{name}", value) for name, value in sorted(self.metric_tags.items()))

    @property
    def is_ragged(self) -> bool:
        """Whether the model receives the requests of a batch in another form than rows of one shape."""
        return bool(self.batch_inputs or self.batch_outputs) or any(each.ragged for each in self.inputs.values())


def load_model_options(path: Path | None, defaults: LoadOptions) -> ModelOptions:
    """Read a ``model.yaml``; missing keys are taken from ``defaults``. Blocks on the file.

    Args:
        path: The file; None for a model without a file.
        defaults: The server's options, or any other ``LoadOptions``.

    Raises:
        ServeError: invalid_input; the message has the file's name (never its folder) and, for every invalid key, the
            expected and the actual value.
    """
    if path is None:
        return make_model_options({}, defaults, "the server's options")
    try:
        given = read_yaml(path)
    except ValueError as error:
        raise invalid_input(f"{path.name}: {error}") from None
    return make_model_options(given, defaults, path.name)


def says_required(path: Path) -> bool:
    """Whether a ``model.yaml`` contains ``required: true``, even if it is invalid otherwise. Blocks on the file."""
    try:
        return read_yaml(path).get("required") is True
    except ValueError:
        pass
    try:
        return _REQUIRED.search(read_file(path).decode(errors="replace")) is not None
    except OSError:
        return False


def make_model_options(given: Mapping[str, object], defaults: LoadOptions, source: str) -> ModelOptions:
    """Validate the values of a file; missing keys are taken from ``defaults``.

    Returns:
        The options, whose ``model_fields_set`` holds the keys of ``given``.

    Raises:
        ServeError: invalid_input; the message has ``source`` and every invalid key.
    """
    inherited = {name: getattr(defaults, name) for name in LoadOptions.model_fields}
    try:
        options = validate(ModelOptions, given, inherited)
    except InvalidValuesError as error:
        found = {key: hint_for(key) or problem for key, problem in error.problems.items()}
        raise invalid_input(f"{source}: {InvalidValuesError(found)}") from None
    if problem := "; ".join([*_priority_problems(options), *_sequence_problems(options), *_ragged_problems(options)]):
        raise invalid_input(f"{source}: {problem}")
    return ModelOptions.model_construct(set(given), **dict(options))


def _priority_problems(options: ModelOptions) -> Iterator[str]:
    """Yield one line per option that names a level beyond ``priority_levels``."""
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


def _sequence_problems(options: ModelOptions) -> Iterator[str]:
    """Yield one line per option that contradicts ``sequences``."""
    if options.sequences is None:
        return
    yield from options.sequences.problems()
    if options.response_cache:
        yield "response_cache: expected false with sequences, whose answers depend on earlier requests"
    if options.pad:
        yield "pad: expected no padded inputs with sequences"
    if options.priority_levels or options.priority_queue_policies or options.queue_policy != QueuePolicy():
        yield "priority_levels, queue_policy: expected none with sequences, whose requests run in their order"


def _ragged_problems(options: ModelOptions) -> Iterator[str]:
    """Yield one line per option that contradicts ragged batches."""
    if not options.is_ragged:
        return
    named = {**options.inputs, **options.outputs}
    key = next((f"inputs.{name}.ragged" for name, each in options.inputs.items() if each.ragged), "")
    key = key or ("batch_inputs" if options.batch_inputs else "batch_outputs")
    if options.ensemble is not None:
        yield f"{key}: expected none for an ensemble, whose members form the batches"
        return
    if options.batched is not True or options.max_rows is None:
        yield f"{key}: expected batched: true and max_rows to be set, too, because it describes batches"
    if options.pad or options.buckets:
        yield f"pad, buckets: expected none with {key}: padding rows would count as requests"
    if options.sequences is not None:
        yield f"sequences: expected none with {key}: a slot of a sequence is a row of one shape"
    for name, tensor in named.items():
        if tensor.batch_axis is not None or tensor.reshape is not None:
            yield f"{name}: expected no batch_axis and no reshape with {key}, as rows are joined as clients send them"
    for name, declared in options.inputs.items():
        if declared.ragged and declared.optional:
            yield f"inputs.{name}: expected ragged or optional, not both: a request without it has no elements"
    for name in options.batch_inputs:
        if name in options.inputs:
            yield f"batch_inputs: expected '{name}' in batch_inputs or in inputs, got it in both"
