"""REST: inference past FastAPI's routing and validation, everything else through FastAPI."""
