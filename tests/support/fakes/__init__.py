"""Stand-ins that behave: they run the code a caller would reach, and nothing behind it."""
