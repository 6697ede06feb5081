"""REST: inference past FastAPI's routing and validation, everything else through FastAPI."""

__all__ = ["answers", "control", "exchange", "generate_route", "health", "infer_route", "lane", "limits", "server"]
