"""``ortserve inspect``."""

__all__ = ["content"]
