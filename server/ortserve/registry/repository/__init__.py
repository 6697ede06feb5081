"""The sources of models: files in repositories or from clients, their fingerprints and their configuration."""

__all__ = [
    "client_model",
    "configuration",
    "fingerprints",
    "model_files",
    "provenance",
    "source",
    "triton_fields",
    "triton_ragged",
    "triton_sequences",
]
