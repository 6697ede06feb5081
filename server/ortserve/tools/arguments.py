"""Readers of arguments that are numbers. They raise argparse.ArgumentTypeError, which says what was expected."""

import argparse
from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")
_Number = TypeVar("_Number", int, float)


def number(kind: type[_Number], least: float, most: float = 999_999) -> Callable[[str], _Number]:
    """Reads a number from ``least`` to ``most``. ``kind`` is int or float."""
    expected = f"expected {'an integer' if kind is int else 'a number'} from {least:,} to {most:,}"

    def read(text: str) -> _Number:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least) - 1
        if not least <= value <= most:  # nor NaN
            raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
        return value

    return read


def several(read: Callable[[str], _Value]) -> Callable[[str], list[_Value]]:
    """Reads values that are separated by commas."""
    return lambda text: [read(part) for part in text.split(",")]
