"""Runs models with ONNX Runtime: execution providers, sessions, instances, and the analysis of run times."""

__all__ = [
    "bounded_time",
    "child_process",
    "distributions",
    "encoded_images",
    "instance",
    "model_signature",
    "ort_errors",
    "output_buffers",
    "placement",
    "process_limits",
    "process_memory",
    "profiler_cost",
    "provider_options",
    "providers",
    "runs",
    "runtime",
    "session",
    "staging",
    "thread_priority",
    "zip_maps",
]
