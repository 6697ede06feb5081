"""The composition root, and the start, drain and stop of the server."""

__all__ = ["run"]
