"""Model repositories, their configuration, loading models, and the versions that serve."""

__all__ = [
    "catalog",
    "effective_config",
    "load",
    "recording",
    "registry",
    "repository",
    "request_shapes",
    "served",
    "serving",
    "stores",
]
