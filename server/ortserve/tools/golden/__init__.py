"""``ortserve golden``: inputs and expected outputs beside a version. The version must agree with them to be served."""

__all__ = ["recording"]
