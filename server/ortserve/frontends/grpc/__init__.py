"""The Open Inference Protocol over gRPC: ``*_calls`` answer its calls, ``server`` owns the socket."""

__all__ = [
    "calls",
    "configuration_calls",
    "health_calls",
    "infer_calls",
    "infer_stream",
    "metadata_calls",
    "native",
    "reflection_calls",
    "repository_calls",
    "router",
    "server",
    "settings_calls",
    "shared_memory_calls",
    "statistics_calls",
    "streams",
]
