"""Decodes wire bytes to requests, and encodes responses to wire bytes. One module for each format."""

__all__ = [
    "binary_tensor",
    "bounds",
    "compression",
    "embeddings",
    "generate",
    "grpc_answer",
    "grpc_infer",
    "grpc_load",
    "json_process",
    "json_text",
    "load_report",
    "model_config",
    "rest",
]
