"""``ortserve inspect``."""

__all__ = ["content", "patterns", "placement"]
