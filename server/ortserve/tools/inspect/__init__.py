"""``ortserve inspect``."""
