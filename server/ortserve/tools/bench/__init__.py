"""``ortserve bench``."""

__all__ = ["encoding", "generator", "generators", "prepare", "samples", "statistics", "target"]
