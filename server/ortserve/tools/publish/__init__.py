"""``ortserve publish``: a model becomes a version of a repository, as a whole or not at all."""

__all__ = ["folder", "place"]
