"""The sources of models: files in repositories or sent by clients, fingerprints, and their configuration."""

__all__ = [
    "client_model",
    "configuration",
    "model_files",
    "provenance",
    "source",
    "triton_ragged",
    "triton_sequences",
]
