"""Batching: queued requests become batches on the instances of a model.

Runs on the event loop. It knows callers only as ``InflightRequest`` and models only as a ``Runner``.
"""

__all__ = [
    "admission",
    "batch_runs",
    "batcher",
    "executor",
    "planner",
    "queue",
    "response_cache",
    "row_checks",
    "run_limits",
    "shared_threads",
    "statistics",
    "timers",
]
