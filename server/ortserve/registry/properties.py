"""What operators may read of a loaded model: how it is run, and why."""

import json

from ortserve.batching.row_checks import Difference
from ortserve.core.signature import ModelSignature
from ortserve.engine.placement import describe_elsewhere, describe_operators, describe_placement
from ortserve.registry.loaded import LoadedModel
from ortserve.registry.row_axes import Grounds


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
