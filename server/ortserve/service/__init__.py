"""The use cases, independent of the protocol: inference, management, health and metadata."""

__all__ = [
    "access",
    "busy_polling",
    "call",
    "codec_threads",
    "followed_files",
    "gate",
    "inference",
    "key_files",
    "load",
    "management",
    "model_details",
    "models",
    "observation",
    "profiling",
    "recorder",
    "repository",
    "server_details",
    "shared_memory",
    "trace_settings",
]
