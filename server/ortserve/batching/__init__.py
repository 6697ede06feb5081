"""Who waits, who rides together, and when a batch leaves.

Runs on the event loop; knows callers only as promises and models only as a ``Runner``.
"""

__all__ = [
    "admission",
    "alarm",
    "batcher",
    "inline",
    "learned",
    "planner",
    "queue",
    "row_checks",
    "run_watch",
    "shared_threads",
]
