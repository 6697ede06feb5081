"""``ortserve doctor``."""
