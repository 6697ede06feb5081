"""``cupy.cuda``."""
