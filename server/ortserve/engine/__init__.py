"""Running models: execution providers, sessions, instances. The only room of the server that imports onnxruntime."""

__all__ = [
    "bounded_time",
    "cpu_budget",
    "declared_shapes",
    "device",
    "gpus",
    "instance",
    "memory_limit",
    "model_signature",
    "placement",
    "provider_options",
    "providers",
    "run_options",
    "runtime",
    "session",
    "tensorrt_profiles",
    "throttling",
    "zip_maps",
]
