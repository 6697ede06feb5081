"""``ortserve bench``."""

__all__ = ["generator", "generators", "outcomes", "prepare", "target"]
