"""Writes what ``version``, ``health`` and ``help`` print. They do not import the tools, which have their own output."""

import os
import sys


def write_output(command: str, text: str) -> int:
    """Write a text to standard output. Returns the exit status.

    A reader that has closed the pipe does not change the status of a command: 0. If the text cannot be written, for
    example on a full disk, a line on standard error says so, and the status is 1.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Otherwise the rest of the buffer is written again when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"ortserve {command}: output: {error.strerror}\n")
            return 1
    return 0
