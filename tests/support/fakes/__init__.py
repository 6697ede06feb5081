"""Fakes: they behave like the real object towards a caller, without the resources behind it."""
