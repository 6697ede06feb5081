"""The load pipeline: turns a model file into warm instances, and these into a model that serves requests."""

__all__ = [
    "assembly",
    "batch_sizes",
    "capture_trial",
    "coordination",
    "golden_check",
    "golden_samples",
    "inputs",
    "interface",
    "loaded_model",
    "pipeline",
    "row_axes",
    "row_trial",
    "trial_load",
]
