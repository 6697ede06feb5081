"""The composition root, and the server's start, drain and end."""

__all__ = ["run"]
