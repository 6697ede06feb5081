"""What an operator sees: metrics, the port that exposes them, and log lines.

The only room that knows prometheus_client. It is told what happened and decides nothing.
"""

__all__ = [
    "access_log",
    "devices",
    "exposition",
    "logs",
    "loop",
    "machine",
    "metrics",
    "proc",
    "rejection_log",
    "statistics",
    "trace_export",
    "trace_files",
    "trace_record",
    "trace_sampling",
    "tracing",
    "triton_metrics",
]
