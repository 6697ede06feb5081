"""The Open Inference Protocol over gRPC: handlers of RPCs (``*_calls``), and two servers for them."""

__all__ = [
    "calls",
    "grpcio_server",
    "infer_calls",
    "infer_stream",
    "management_calls",
    "model_calls",
    "native",
    "router",
    "standard_calls",
    "streams",
]
