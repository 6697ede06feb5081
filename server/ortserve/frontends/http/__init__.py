"""The HTTP/1.1 server: its own protocol over httptools, inference without ASGI, and FastAPI for all other calls."""

__all__ = [
    "asgi_exchange",
    "connection",
    "console_routes",
    "control_app",
    "generate_routes",
    "infer_exchange",
    "limits",
    "model_routes",
    "responses",
    "server",
]
