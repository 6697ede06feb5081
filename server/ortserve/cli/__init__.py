"""The command line: one file a command, each with ``main(arguments) -> exit status``.

Whatever can be refused from the words alone is refused here, before the engine is imported, which takes a second.
"""

__all__ = ["main"]
