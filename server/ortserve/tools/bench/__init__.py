"""``ortserve bench``."""

__all__ = ["generator", "generators", "prepare", "samples", "target"]
