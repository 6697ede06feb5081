"""Which compression a body has, and which its answer may have: decisions on the values of two headers."""

from functools import lru_cache
from typing import Final

from ortserve.codecs.compression import Encoding
from ortserve.errors import ErrorKind, ServeError

NAMES: Final = ", ".join(encoding.value for encoding in Encoding)
"""What an ``Accept-Encoding`` of ours says."""

_BY_NAME: Final = {encoding.value.encode(): encoding for encoding in Encoding} | {b"x-gzip": Encoding.GZIP}
_IDENTITY: Final = (b"identity", b"")

_MAX_BYTES: Final = 200
"""Of an Accept-Encoding that is read; longer ones are nothing that a client has a use for."""


class UnknownEncodingError(ServeError):
    """A body in an encoding that is not undone here; its answer names those that are."""

    def __init__(self, value: bytes) -> None:
        super().__init__(
            ErrorKind.UNSUPPORTED,
            f"Content-Encoding '{value.decode('latin-1')}' is not supported: expected one of identity, {NAMES}",
        )


def body_encoding(value: bytes) -> Encoding | None:
    """Read a Content-Encoding; None where the body is as it is.

    Raises:
        UnknownEncodingError: For any other encoding, and for several at once.
    """
    name = value.strip().lower()
    if name in _IDENTITY:
        return None
    encoding = _BY_NAME.get(name)
    if encoding is None:
        raise UnknownEncodingError(value)
    return encoding


def answer_encoding(value: bytes) -> Encoding | None:
    """Read an Accept-Encoding: what the caller wants most, the first of equals; None where that is no compression.

    Encodings that are unknown here, ``*`` and entries that cannot be read count for nothing. An answer without any is
    always allowed.
    """
    return _best(value) if len(value) <= _MAX_BYTES else None


@lru_cache(maxsize=64)
def _best(value: bytes) -> Encoding | None:
    best: Encoding | None = None
    best_weight = 0.0
    for entry in value.lower().split(b","):
        name, *parameters = (part.strip() for part in entry.split(b";"))
        encoding = _BY_NAME.get(name)
        if encoding is not None or name == b"identity":
            weight = _weight(parameters)
            if weight > best_weight:
                best, best_weight = encoding, weight
    return best


def _weight(parameters: list[bytes]) -> float:
    weight = 1.0
    for parameter in parameters:
        key, _, number = parameter.partition(b"=")
        if key.strip() == b"q":
            try:
                weight = float(number)
            except ValueError:
                return 0.0
    return weight if 0.0 <= weight <= 1.0 else 0.0
