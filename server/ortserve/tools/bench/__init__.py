"""``ortserve bench``."""

__all__ = ["statistics"]
