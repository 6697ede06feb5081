"""``ortserve quantize``."""
