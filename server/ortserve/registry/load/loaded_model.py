"""What a load of a model has made."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ortserve.batching.row_checks import Difference
from ortserve.config.model import ModelOptions
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.engine.device.instance import DeviceInstance
from ortserve.engine.instance import Instance
from ortserve.engine.placement import Placement, describe_elsewhere, describe_operators, describe_placement, total_nodes
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.zip_maps import Classes
from ortserve.registry.load.interface import Interface
from ortserve.registry.load.row_axes import Grounds, RowAxes
from ortserve.registry.load.warmup import WarmUp
from ortserve.registry.on_device import OnDevice


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Warm instances, what they take and give, and what was found out about them.

    Attributes:
        rows: Along which axes they run together, and why that is believed.
        providers: The execution provider, and why others were passed over.
        operators: Nodes of the graph, by the execution provider that runs them and by operator.
        intra_op_threads: Threads of a run inside an operator.
        run_threads: Threads that a run may keep busy in all.
        labels: Names of the elements of an output, by its name; its classes where none are configured.
        classes: Of each output that is a sequence of maps in the file, by its name.
        on_device: What runs on buffers of a device.
        unbounded_because: Why the number of rows does not bound the time of a run; empty where it does.
        placed: On which device each instance was placed; empty where all are on the execution provider's.
    """

    instances: tuple[Instance | DeviceInstance, ...]
    interface: Interface
    rows: RowAxes
    warm_up: WarmUp
    providers: ProviderChoice
    operators: Placement
    intra_op_threads: int
    run_threads: int
    padding: Padding | None = None
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    on_device: OnDevice = field(default_factory=OnDevice)
    placed: tuple[int, ...] = ()
    unbounded_because: str = ""
    classes: Mapping[str, Classes] = field(default_factory=dict)

    @property
    def nodes(self) -> Mapping[str, int]:
        """Of the graph, by execution provider."""
        return total_nodes(self.operators)

    @property
    def signature(self) -> ModelSignature:
        """What the instances take and give."""
        return self.interface.model

    @property
    def execution_provider(self) -> str:
        """The one that was chosen, in full."""
        return self.providers.name

    @property
    def device_ids(self) -> tuple[int, ...]:
        """For each instance, which of the devices of its kind the execution provider uses."""
        return self.placed or (self.providers.device_id,) * len(self.instances)


def describe_properties(loaded: LoadedModel, max_rows: int) -> dict[str, str]:
    """The properties of a model's metadata, the long ones last; ``max_rows`` is the most rows of a batch."""
    found = loaded.warm_up
    warm_up = "not warmed up"
    if found.refused:
        warm_up = f"not warmed up: the model refuses made-up inputs: {found.refused}"
    elif found.latencies:
        warm_up = ", ".join(f"{size.rows}: {size.run_ns / 1e6:.3f} ms" for size in found.latencies)
    properties = {
        "execution_provider": loaded.execution_provider,
        "batching": _describe_batching(loaded, max_rows),
        "intra_op_threads": str(loaded.intra_op_threads),
        "warm_up": warm_up,
        "event_loop": _describe_loop(loaded),
        "nodes": describe_placement(loaded.nodes),
    }
    if loaded.providers.passed_over:
        properties["execution_providers_passed_over"] = "; ".join(loaded.providers.passed_over)
    served = loaded.signature.output_index
    if classes := {output: names for output, names in loaded.classes.items() if output in served}:
        properties["classes"] = json.dumps(classes, ensure_ascii=False)
    properties |= loaded.on_device.properties() | _interface(loaded.signature)
    properties["operators"] = "; ".join(
        f"{name}: {describe_operators(kinds)}" for name, kinds in loaded.operators.items()
    )
    if elsewhere := describe_elsewhere(loaded.execution_provider, loaded.operators):
        properties["nodes_elsewhere"] = elsewhere
    return properties


def describe_ended_sharing(difference: Difference, max_rows: int) -> str:
    """The property ``batching`` of a model whose batching stopped because an answer depended on its batch.

    Args:
        difference: Between the answers in the batch and alone.
        max_rows: The most rows of one request that run together.
    """
    return (
        "each request runs alone: an answer depended on the other requests of its batch, "
        f"{difference.reason}; up to {max_rows} rows of one request run together"
    )


def _describe_batching(loaded: LoadedModel, max_rows: int) -> str:
    if not loaded.signature.is_batched:
        return f"not batched because {loaded.signature.unbatched_because}"
    rows, found = loaded.rows, loaded.warm_up
    batching = f"up to {max_rows} rows run together, "
    if rows.grounds is Grounds.PROVEN:
        return batching + f"proven: the model's graph keeps rows apart{_describe_axes(loaded.signature)}"
    tried = "not tried"
    if found.rows_depend:
        tried = f"tried: {found.rows_depend}"
    elif found.latencies:
        tried = f"tried on {found.tried}: a row alone and among others differs by {found.drift:.1e} at most"
    configured = "configured; " if rows.grounds is Grounds.CONFIGURED else ""
    return f"{batching}{configured}{tried}{_describe_axes(loaded.signature)}; {rows.doubt}"


def _describe_axes(signature: ModelSignature) -> str:
    """Where rows are on other axes than 0."""
    elsewhere = [
        f"on axis {spec.batch_axis} of '{spec.name}'" if spec.batch_axis else f"none in '{spec.name}'"
        for spec in (*signature.inputs, *signature.outputs)
        if spec.batch_axis != 0
    ]
    return f" (rows: {', '.join(elsewhere)})" if elsewhere else ""


def _describe_loop(loaded: LoadedModel) -> str:
    """Whether runs may happen on the event loop, as the model was loaded."""
    if not all(instance.runs_on_host for instance in loaded.instances):
        return "no runs: the model computes on a device"
    return f"no runs: {loaded.unbounded_because}" if loaded.unbounded_because else "short runs"


def _interface(signature: ModelSignature) -> dict[str, str]:
    """What inputs and outputs alone do not tell: which may be left out, and what the model has besides."""
    found = {
        "optional_inputs": ", ".join(f"'{spec.name}'" for spec in signature.inputs if spec.is_optional),
        "any_shape": ", ".join(f"'{spec.name}'" for spec in signature.inputs if spec.has_any_shape),
        "sequences": ", ".join(f"'{spec.name}'" for spec in signature.outputs if spec.is_sequence),
        "not_served": "; ".join(
            [f"input '{name}': {why}" for name, why in signature.unserved_inputs.items()]
            + [f"output '{name}': {why}" for name, why in signature.unserved_outputs.items()]
        ),
    }
    return {name: told for name, told in found.items() if told}


def threads_in_vain(options: ModelOptions, *, has_global_threads: bool) -> tuple[str, ...]:
    """What a model's own options say of threads that none of its sessions has."""
    session = options.session
    if has_global_threads:
        said = {
            "intra_op_threads": options.intra_op_threads if "intra_op_threads" in options.model_fields_set else None,
            "session.inter_op_threads": "inter_op_threads" in session.model_fields_set,
        }
        return tuple(f"{key}: all models share the threads of global_threads" for key in said if said[key])
    if session.inter_op_threads > 1 and session.execution_mode == "sequential":
        return ("session.inter_op_threads: they are of the execution_mode parallel, and it is sequential",)
    return ()


def sizes_in_vain(options: ModelOptions, most_rows: int | None) -> tuple[str, ...]:
    """What a model's own options say of batches that are larger than any."""
    if most_rows is None:
        return ()
    larger = [str(rows) for rows in options.preferred_rows if rows > most_rows]
    return (f"preferred_rows: {', '.join(larger)}: batches have at most {most_rows} rows",) if larger else ()


def gpus_in_vain(options: ModelOptions, provider: str) -> tuple[str, ...]:
    """What a model's own options say of GPUs where it runs on none."""
    own = options.model_fields_set
    said = {"gpus": bool(options.gpus), "graph_replay": options.graph_replay and "graph_replay" in own}
    return tuple(f"{key}: the model is on {provider}" for key in said if said[key])
