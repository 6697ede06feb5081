"""What operators may read of a loaded model: how it is run, and why."""

from ortserve.registry.loader import LoadedModel


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
    return {
        "execution_provider": loaded.execution_provider,
        "intra_op_threads": str(loaded.intra_op_threads),
        "batching": batching,
        "warm_up": warm_up,
    }
