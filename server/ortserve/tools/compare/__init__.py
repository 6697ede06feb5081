"""``ortserve compare``: two models side by side."""
