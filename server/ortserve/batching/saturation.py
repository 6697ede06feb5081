"""How much of what a model's instances can do is asked of them: the signal to start more servers by."""

from ortserve.batching.latency import known_ns


def saturation(
    offered_rows_per_s: float, *, batch_rows: int, batch_ns: float | None, parallel_batches: int
) -> float | None:
    """Offered rows a second by those that can be computed a second; above 1 more come than can ever be answered.

    Args:
        offered_rows_per_s: That came lately, refused ones included.
        batch_rows: Of a full batch.
        batch_ns: What a full batch is expected to take.
        parallel_batches: That run at a time; 0 where no instance is left.

    Returns:
        None where rows come and nothing is known of how long they take, or nothing runs them any more.
    """
    if offered_rows_per_s <= 0:
        return 0.0
    full_batch_ns = known_ns(batch_ns)
    if full_batch_ns <= 0 or not parallel_batches:
        return None
    return offered_rows_per_s * full_batch_ns / 1e9 / (batch_rows * parallel_batches)
