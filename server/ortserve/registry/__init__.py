"""Model repositories, their configuration, loading models, and the versions that serve."""

__all__ = [
    "catalog",
    "draining",
    "effective_config",
    "ensemble",
    "ensemble_sources",
    "load",
    "recording",
    "registry",
    "repository",
    "request_shapes",
    "residency",
    "rollout",
    "sample_files",
    "served_model",
    "served_version",
    "state_file",
    "stores",
    "version_loader",
    "versions",
]
