"""The load pipeline: turns a model file into warm instances, and these into a model that serves requests."""

__all__ = [
    "assembly",
    "batch_sizes",
    "capture_trial",
    "golden_check",
    "golden_samples",
    "inputs",
    "interface",
    "load_limits",
    "loaded_model",
    "pipeline",
    "progress",
    "row_axes",
    "row_trial",
    "trial_load",
]
