"""Wire bytes to requests and responses to wire bytes: pure functions, one file a format."""

__all__ = [
    "binary_tensor",
    "bounds",
    "bytes_elements",
    "compression",
    "control_json",
    "generate",
    "grpc_infer",
    "grpc_stream",
    "json_process",
    "load_report",
    "model_config_fields",
    "model_config_json",
    "model_config_text",
    "rest",
]
