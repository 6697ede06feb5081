"""The texts by which requests name a version of a model: its number, or a label such as ``stable``."""

import re
from typing import Final

STABLE: Final = "stable"
"""The label of the version that answers requests without a version, if the model has this label."""

MAX_VERSION: Final = 2**63 - 1
"""The highest version: Triton's messages hold no larger integers."""

LABEL_PATTERN: Final = "[A-Za-z_][A-Za-z0-9_.-]{0,62}"
"""A label is never a number, and needs no escaping in a URL."""

LABEL_FORM: Final = "at most 63 letters, digits, '_', '.' and '-' that begin with a letter or '_'"
"""The pattern in words, for errors."""

VERSION_PATTERN: Final = f"^([0-9]+|{LABEL_PATTERN})$"

_LABEL: Final = re.compile(LABEL_PATTERN)
_NUMBER: Final = re.compile("[1-9][0-9]{0,18}")


def version_of(name: str) -> int | None:
    """The version that the name of a folder denotes; None for other names.

    A number with a leading zero is another name: 01 would be version 1 a second time.
    """
    number = int(name) if _NUMBER.fullmatch(name) else 0
    return number if 1 <= number <= MAX_VERSION else None


def is_label(text: str) -> bool:
    """Whether a text can be the name of a label."""
    return _LABEL.fullmatch(text) is not None


def is_version(text: str) -> bool:
    """Whether a text can name a version: decimal digits, or a label."""
    return (text.isascii() and text.isdigit()) or is_label(text)
