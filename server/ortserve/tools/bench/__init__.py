"""``ortserve bench``."""
