"""``ortserve compare``: two models side by side."""

__all__ = ["measure", "result"]
