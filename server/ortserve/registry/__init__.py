"""Model repositories, their configuration, loading models, and the versions that serve."""

__all__ = [
    "catalog",
    "dependents",
    "effective_config",
    "load",
    "recording",
    "registry",
    "repository",
    "request_shapes",
    "rollout",
    "sample_files",
    "served",
    "serving",
    "state_file",
    "stores",
    "versions",
]
