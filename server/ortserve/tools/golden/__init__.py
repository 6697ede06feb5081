"""``ortserve golden``: inputs and expected outputs beside a version, which it must agree with to be served."""

__all__ = ["recording"]
