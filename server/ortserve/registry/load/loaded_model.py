"""The result of a load: warm instances with their measured properties, the model's metadata, and warnings."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ortserve.batching.row_checks import Difference
from ortserve.config.model import ModelOptions
from ortserve.config.sequences import SequenceOptions
from ortserve.core.batch import deep_bytes
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import format_shape
from ortserve.device.instance import DeviceInstance
from ortserve.engine.instance import Instance
from ortserve.engine.placement import (
    Placement,
    describe_elsewhere,
    describe_operators,
    describe_placement,
    left_to_cpu,
    total_nodes,
)
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.thread_priority import call_with_nice, set_nice
from ortserve.engine.zip_maps import Classes
from ortserve.registry.load.device_batches import DeviceBatches
from ortserve.registry.load.interface import Interface
from ortserve.registry.load.row_axes import Grounds, RowAxes
from ortserve.registry.load.warmup import WarmUpResult
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_BATCH_OPTIONS: Final = ("max_rows", "buckets", "preferred_rows", "queue_delay_s")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The result of a load.

    Attributes:
        instances: Warm instances.
        interface: The inputs and outputs of the instances and of requests.
        rows: The axes along which rows run together, and the grounds for it.
        warm_up: The results of warm-up.
        providers: The execution provider, and why others were passed over.
        operators: Number of nodes of the graph, by execution provider and by operator.
        intra_op_threads: Threads of a run inside an operator.
        run_threads: Threads that a run may keep busy in total.
        padding: Padding of batches; None if they are not padded.
        output_labels: Names of the elements of an output, by its name; its classes if no labels are configured.
        on_device: Batch sizes that run on buffers of a device.
        device_ids: Device number of each instance, counted among the devices of its kind.
        unbounded_because: Why runs must not happen on the event loop; empty if they may.
        classes: Classes of each output that is a sequence of maps in the file, by the name of the output.
        provenance: Origin of the version; empty if unknown.
        golden: How well golden samples agree; empty without samples.
        empty_axes: Axes along which each input may be empty; None if all inputs may be empty along all axes.
    """

    instances: tuple[Instance | DeviceInstance, ...]
    interface: Interface
    rows: RowAxes
    warm_up: WarmUpResult
    providers: ProviderChoice
    operators: Placement
    intra_op_threads: int
    run_threads: int
    padding: Padding | None = None
    output_labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    on_device: DeviceBatches = field(default_factory=DeviceBatches)
    device_ids: tuple[int, ...] = ()
    unbounded_because: str = ""
    classes: Mapping[str, Classes] = field(default_factory=dict)
    provenance: str = ""
    golden: str = ""
    empty_axes: Mapping[str, frozenset[int]] | None = None

    @property
    def nodes(self) -> Mapping[str, int]:
        """The number of nodes by execution provider."""
        return total_nodes(self.operators)

    @property
    def signature(self) -> ModelSignature:
        """The inputs and outputs of the instances."""
        return self.interface.model

    @property
    def execution_provider(self) -> str:
        """The full name of the chosen execution provider."""
        return self.providers.name

    def close(self) -> None:
        """Close the instances, which blocks. Otherwise their sessions would live as long as the process."""
        for instance in self.instances:
            instance.close()


def describe_properties(loaded: LoadedModel, max_rows: int, sequences: SequenceOptions | None = None) -> dict[str, str]:
    """The properties for the model's metadata, long ones last. Batches have at most ``max_rows`` rows."""
    found = loaded.warm_up
    warm_up = "not warmed up"
    if found.rejection:
        warm_up = f"not warmed up: the model rejects synthetic inputs: {found.rejection}"
    elif found.latencies:
        warm_up = ", ".join(f"{size.rows}: {size.run_ns / 1e6:.3f} ms" for size in found.latencies)
    properties = {
        "execution_provider": loaded.execution_provider,
        "batching": describe_batching(loaded, max_rows),
        "intra_op_threads": str(loaded.intra_op_threads),
        "warm_up": warm_up,
        "event_loop": _describe_event_loop(loaded),
        "nodes": describe_placement(loaded.nodes),
    }
    if sequences is not None:
        properties["sequence_batching"] = _describe_sequences(loaded, sequences, max_rows)
    if loaded.providers.passed_over:
        properties["execution_providers_passed_over"] = "; ".join(loaded.providers.passed_over)
    served = loaded.signature.output_index
    if classes := {output: names for output, names in loaded.classes.items() if output in served}:
        properties["classes"] = json.dumps(classes, ensure_ascii=False)
    properties |= loaded.on_device.properties() | _describe_tensors(loaded.signature)
    properties["operators"] = "; ".join(
        f"{name}: {describe_operators(kinds)}" for name, kinds in loaded.operators.items()
    )
    if elsewhere := describe_elsewhere(loaded.execution_provider, loaded.operators):
        properties["nodes_elsewhere"] = elsewhere
    if loaded.golden:
        properties["golden"] = loaded.golden
    if loaded.provenance:
        properties["provenance"] = loaded.provenance
    return properties


def describe_ended_sharing(difference: Difference, max_rows: int) -> str:
    """The property ``batching`` of a model whose requests stopped sharing batches after a failed row check.

    The row check found ``difference``. Up to ``max_rows`` rows of one request still run together.
    """
    return (
        "each request runs alone: an answer depended on the other requests of its batch, "
        f"{difference.reason}; up to {max_rows} rows of one request run together"
    )


def log_warnings(
    loaded: LoadedModel,
    name: str,
    options: ModelOptions,
    *,
    max_rows: int | None,
    has_global_threads: bool,
    is_on_gpu: bool,
) -> None:
    """Log warnings: nodes left to the CPU, batches limited by memory, options without effect.

    ``max_rows`` is the configured maximum of a batch; None for no limit.
    """
    found = loaded.warm_up
    if on_cpu := left_to_cpu(loaded.execution_provider, loaded.operators):
        log_event(
            logger,
            logging.WARNING,
            "nodes are left to the CPU",
            model=name,
            execution_provider=loaded.execution_provider,
            count=sum(on_cpu.values()),
            of=sum(loaded.nodes.values()),
            operators=describe_operators(on_cpu),
        )
    if found.no_memory:
        event = "too little memory for larger batches"
        log_event(logger, logging.WARNING, event, model=name, max_rows=found.max_rows, reason=found.no_memory)
    for reason in (
        *loaded.interface.without_effect,
        *batch_options_without_effect(loaded.signature, options),
        *threads_without_effect(options, has_global_threads=has_global_threads),
        *sizes_without_effect(options, max_rows),
        *nice_without_effect(options, has_global_threads=has_global_threads, is_on_gpu=is_on_gpu),
        *(() if is_on_gpu else gpus_without_effect(options, loaded.execution_provider)),
    ):
        log_event(logger, logging.WARNING, "option has no effect", model=name, reason=reason)


def batch_options_without_effect(signature: ModelSignature, options: ModelOptions) -> list[str]:
    """The model's own options for batches, which have no effect if each of its requests runs alone."""
    if signature.is_batched:
        return []
    keys = [key for key in _BATCH_OPTIONS if key in options.model_fields_set and getattr(options, key)]
    if options.max_rows == 1:  # The option has its effect.
        keys = [key for key in keys if key != "max_rows"]
    return [f"{key}: each request runs alone: {signature.unbatched_because}" for key in keys]


def sizes_without_effect(options: ModelOptions, max_rows: int | None) -> list[str]:
    """Preferred sizes that exceed the maximum size of a batch."""
    larger = [str(rows) for rows in options.preferred_rows if max_rows is not None and rows > max_rows]
    return [f"preferred_rows: {', '.join(larger)}: batches have at most {max_rows} rows"] if larger else []


def nice_without_effect(options: ModelOptions, *, has_global_threads: bool, is_on_gpu: bool) -> list[str]:
    """Why ``thread_nice`` has no effect on some threads. Tries the level on a thread of its own."""
    nice = options.thread_nice
    if nice is None:
        return []
    if is_on_gpu:
        return ["thread_nice: ONNX Runtime has no priority for the CUDA streams on which the model computes"]
    failure = call_with_nice(nice, partial(set_nice, nice))
    reasons = [f"thread_nice: {failure}"] if failure else []
    if has_global_threads:
        reasons.append("thread_nice: all models share the threads of global_threads; it holds for workers only")
    return reasons


def gpus_without_effect(options: ModelOptions, provider: str) -> list[str]:
    """The model's own options for GPUs, which have no effect if it runs on no GPU."""
    keys = ["gpus"] if options.gpus else []
    if options.graph_replay and "graph_replay" in options.model_fields_set:
        keys.append("graph_replay")
    return [f"{key}: the model is on {provider}" for key in keys]


def threads_without_effect(options: ModelOptions, *, has_global_threads: bool) -> list[str]:
    """The model's own options for threads that its sessions do not use."""
    session = options.session
    if has_global_threads:
        keys = []
        if "intra_op_threads" in options.model_fields_set and options.intra_op_threads:
            keys.append("intra_op_threads")
        if "inter_op_threads" in session.model_fields_set:
            keys.append("session.inter_op_threads")
        return [f"{key}: all models share the threads of global_threads" for key in keys]
    if session.inter_op_threads > 1 and session.execution_mode == "sequential":
        return ["session.inter_op_threads: only the execution_mode parallel uses them, and it is sequential"]
    return []


def describe_batching(loaded: LoadedModel, max_rows: int) -> str:
    """The property ``batching``. The arguments are those of ``describe_properties``."""
    if not loaded.signature.is_batched:
        return f"not batched because {loaded.signature.unbatched_because}"
    rows, found = loaded.rows, loaded.warm_up
    batching = f"up to {max_rows} rows run together, "
    if rows.grounds is Grounds.PROVEN:
        return batching + f"proven: the model's graph keeps rows apart{_describe_axes(loaded.signature)}"
    tried = "not tried"
    if found.rows_depend:
        tried = f"tried: {found.rows_depend}"
    elif found.tried:
        tried = f"tried on {found.tried}: a row alone and among others differs by {found.drift:.1e} at most"
    configured = "configured; " if rows.grounds is Grounds.CONFIGURED else ""
    return f"{batching}{configured}{tried}{_describe_axes(loaded.signature)}; {rows.doubt}"


def _describe_axes(signature: ModelSignature) -> str:
    """The tensors whose rows are not on axis 0."""
    elsewhere = [
        f"on axis {spec.batch_axis} of '{spec.name}'" if spec.batch_axis else f"none in '{spec.name}'"
        for spec in (*signature.inputs, *signature.outputs)
        if spec.batch_axis != 0
    ]
    return f" (rows: {', '.join(elsewhere)})" if elsewhere else ""


def _describe_sequences(loaded: LoadedModel, options: SequenceOptions, max_rows: int) -> str:
    tensors = loaded.interface.sequences
    assert tensors is not None
    slots = options.max_candidates if options.strategy == "oldest" else max_rows if loaded.signature.is_batched else 1
    text = f"{options.strategy}: {slots} sequences per instance at a time, idle for {options.max_idle_s:g} s at most"
    if not tensors.initial:
        return text
    shapes = (
        f"'{state.input}' {format_shape(first.shape)}"
        for state, first in zip(options.states, tensors.initial, strict=True)
    )
    return f"{text}; states begin as {', '.join(shapes)}: {deep_bytes(tensors.initial)} bytes"


def _describe_event_loop(loaded: LoadedModel) -> str:
    """Whether runs may happen on the event loop."""
    if not all(instance.runs_on_host for instance in loaded.instances):
        return "no runs: the model computes on a device"
    return f"no runs: {loaded.unbounded_because}" if loaded.unbounded_because else "short runs"


def _describe_tensors(signature: ModelSignature) -> dict[str, str]:
    """Properties of inputs and outputs that the protocol's metadata cannot express."""
    properties = {
        "optional_inputs": ", ".join(f"'{spec.name}'" for spec in signature.inputs if spec.is_optional),
        "any_shape": ", ".join(f"'{spec.name}'" for spec in signature.inputs if spec.has_any_shape),
        "sequences": ", ".join(f"'{spec.name}'" for spec in signature.outputs if spec.is_sequence),
        "not_served": "; ".join(
            [f"input '{name}': {why}" for name, why in signature.unserved_inputs.items()]
            + [f"output '{name}': {why}" for name, why in signature.unserved_outputs.items()]
        ),
    }
    return {name: text for name, text in properties.items() if text}
