"""Wire bytes to requests, and responses to wire bytes: pure functions, by format."""

__all__ = [
    "binary_tensor",
    "bounds",
    "compression",
    "generate",
    "grpc_answer",
    "grpc_infer",
    "json_process",
    "json_text",
    "load_report",
    "model_config",
    "rest",
]
