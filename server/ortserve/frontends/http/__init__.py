"""The HTTP/1.1 server: its own protocol over httptools, inference without ASGI, and FastAPI for all other calls."""

__all__ = [
    "asgi_exchange",
    "console_routes",
    "context",
    "control_app",
    "embeddings_routes",
    "generate_routes",
    "infer_exchange",
    "model_routes",
    "responses",
    "server",
]
