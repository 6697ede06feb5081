"""The server's options and the keys of ``model.yaml``: declared once, read at the start, immutable afterwards.

``README.md`` lists the files. This room does not know what an option does.
"""

__all__ = [
    "declaration",
    "ensemble",
    "golden",
    "model",
    "option_groups",
    "options",
    "repository_url",
    "rollout",
    "sequences",
    "session",
    "shown_values",
    "tensors",
    "triton_names",
    "versions",
]
