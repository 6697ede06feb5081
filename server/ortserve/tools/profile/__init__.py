"""``ortserve profile``."""
