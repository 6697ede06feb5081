"""Batching: queued requests become batches on the instances of a model.

Runs on the event loop. It knows callers only as ``InflightRequest`` and models only as a ``Runner``.
"""

__all__ = [
    "admission",
    "batch_runs",
    "batcher",
    "cached_runs",
    "direct_sequences",
    "inline_runs",
    "kept_sequences",
    "oldest_sequences",
    "planner",
    "queue",
    "response_cache",
    "row_checks",
    "row_limit",
    "run_limits",
    "sequence_admission",
    "sequence_table",
    "sequences",
    "shared_threads",
    "statistics",
    "timers",
]
