"""``ortserve compare``: compares outputs, speed, size and memory of two models."""

__all__ = ["arguments", "measure", "result"]
