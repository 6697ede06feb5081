"""The command line. Each command is a function from arguments to an exit status.

Arguments and options are validated before the engine is imported, because that import takes a second.
"""

__all__ = ["main"]
