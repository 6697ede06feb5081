"""``ortserve publish``: adds a version to a model of a repository atomically."""

__all__ = ["folder", "place"]
