"""Keys that users of Triton may write into a ``model.yaml``."""

from typing import Final

_NAMES_OF_TRITON: Final = {
    "default_model_filename": "model_file",
    "ensemble_scheduling": "ensemble",
    "instance_group": "instances",
    "max_batch_size": "max_rows",
    "model_warmup": "warmup_samples",
    "sequence_batching": "sequences",
}
"""Fields of a ``config.pbtxt``, and the keys of a ``model.yaml`` in their place."""


def hint_for(key: str) -> str:
    """The problem with a key that only Triton knows; empty for other keys."""
    known = _NAMES_OF_TRITON.get(key)
    return f"unknown key; this field of a config.pbtxt is '{known}' here" if known else ""
