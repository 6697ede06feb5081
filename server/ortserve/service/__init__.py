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
    "labels",
    "load",
    "management",
    "models",
    "profiling",
    "recorder",
    "repository",
    "rollout",
    "shared_memory",
    "trace_settings",
]
