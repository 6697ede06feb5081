"""What an operator sees: metrics, the port that exposes them, and log lines.

The only room that knows prometheus_client. It is told what happened and decides nothing.
"""

__all__ = [
    "families",
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
