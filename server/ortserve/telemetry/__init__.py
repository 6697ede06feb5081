"""Metrics, log lines and traces: records what happens and decides nothing.

The only room, besides ``app``, that imports prometheus_client, and the only one that imports OpenTelemetry.
"""

__all__ = [
    "families",
    "history",
    "logs",
    "machine",
    "metrics",
    "readings",
    "series",
    "statistics",
    "trace_export",
    "trace_files",
    "tracing",
]
