"""``ortserve doctor``."""

__all__ = ["loading", "machine"]
