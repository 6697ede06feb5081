"""``ortserve doctor``."""

__all__ = ["findings", "loading", "machine", "options", "presentation", "result"]
