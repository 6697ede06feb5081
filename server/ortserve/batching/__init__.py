"""Who waits, who rides together, and when a batch leaves.

Runs on the event loop; knows callers only as promises and models only as a ``Runner``.
"""
