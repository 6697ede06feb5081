"""The use cases, free of any protocol: inference, and what there is to know about the server and its models."""

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
    "models",
    "recorder",
    "repository",
    "shared_memory",
    "trace_settings",
]
