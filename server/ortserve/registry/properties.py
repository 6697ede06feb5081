"""What operators may read of a loaded model: how it is run, and why."""

from ortserve.core.signature import ModelSignature
from ortserve.engine.placement import describe_elsewhere, describe_operators, describe_placement
from ortserve.registry.loaded import LoadedModel


def describe_properties(loaded: LoadedModel, max_rows: int) -> dict[str, str]:
    """The properties of a model's metadata; ``max_rows`` is the most rows of a batch."""
    found = loaded.warm_up
    batching = f"up to {max_rows} rows run together"
    if not loaded.signature.is_batched:
        batching = f"one request at a time: {loaded.signature.unbatched_because}"
    elif not found.latencies:
        batching += ", unverified"
    else:
        batching += f", verified: a row alone and among others differs by {found.drift:.1e} at most"
    warm_up = "not warmed up"
    if found.refused:
        warm_up = f"not warmed up: the model refuses made-up inputs: {found.refused}"
    elif found.latencies:
        warm_up = ", ".join(f"{size.rows}: {size.run_ns / 1e6:.3f} ms" for size in found.latencies)
    properties = {
        "execution_provider": loaded.execution_provider,
        "nodes": describe_placement(loaded.nodes),
        "operators": "; ".join(f"{name}: {describe_operators(kinds)}" for name, kinds in loaded.operators.items()),
        "intra_op_threads": str(loaded.intra_op_threads),
        "batching": batching,
        "warm_up": warm_up,
        "event_loop": _describe_loop(loaded),
    }
    if elsewhere := describe_elsewhere(loaded.execution_provider, loaded.operators):
        properties["nodes_elsewhere"] = elsewhere
    if loaded.providers.passed_over:
        properties["execution_providers_passed_over"] = "; ".join(loaded.providers.passed_over)
    return properties | loaded.on_device.properties() | _interface(loaded.signature)


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
        "not_served": "; ".join(
            [f"input '{name}': {why}" for name, why in signature.unserved_inputs.items()]
            + [f"output '{name}': {why}" for name, why in signature.unserved_outputs.items()]
        ),
    }
    return {name: told for name, told in found.items() if told}
