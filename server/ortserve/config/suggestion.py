"""Guessing what was meant by a name that nobody knows."""

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of a message: ``; did you mean 'x'?``, or nothing where no known name is close."""
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=0.65)
    return f"; did you mean '{close[0]}'?" if close else ""
