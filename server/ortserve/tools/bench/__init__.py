"""``ortserve bench``."""

__all__ = ["encoding", "statistics"]
