"""Metrics, log lines and traces. This room records what happens and decides nothing.

Only it and ``app`` import prometheus_client, and only it imports OpenTelemetry.
"""

__all__ = [
    "families",
    "history",
    "logs",
    "machine",
    "metrics",
    "readings",
    "series",
    "standard_error",
    "statistics",
    "trace_export",
    "trace_files",
    "tracing",
]
