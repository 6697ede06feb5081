"""JSON documents as Triton and its clients write them: with the bare tokens ``NaN``, ``Infinity`` and ``-Infinity``.

orjson reads and writes everything else, many times faster than the json module, which only reads documents with tokens.
"""

import json
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import orjson

from ortserve.core.dtypes import DataType
from ortserve.core.large_memory import LargeMemory
from ortserve.core.tensor import Tensor
from ortserve.errors import invalid_input

_TOKENS: Final = np.array([b"NaN", b"Infinity", b"-Infinity"], object)
"""By the sign of what they stand for."""

_PLACE: Final = b"\1"
_STEP: Final = 4096
"""Elements that are written at a time, in about 0.2 ms."""


def parse_json(text: bytes | memoryview) -> Any:
    """Read a document.

    Raises:
        ServeError: invalid_input, with the reason and the place.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        reason = f"{error.msg} at {error.pos}"
    raw = bytes(text)
    if b"NaN" in raw or b"Infinity" in raw:
        try:
            document = json.loads(raw, parse_float=_finite)
            if b"\\u" in raw:  # it takes half a surrogate pair for a character, which nothing can be made of any more
                json.dumps(document, ensure_ascii=False).encode()
            return document
        except (ValueError, RecursionError):
            pass
    raise invalid_input(f"failed to parse the request JSON buffer: {reason}")


class LongArray:
    """An array that is written already, in pieces. No dataclass: orjson would write its fields."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces: Final = pieces


def write_json(
    document: dict[str, Any], outputs: Sequence[Tensor], memory: LargeMemory | None = None
) -> bytes | memoryview:
    """Write a document whose numpy arrays and numbers, wherever they are in it, come from ``outputs``.

    Long arrays are put together in ``memory``, where there is some.
    """
    long: list[LongArray] = []
    text = orjson.dumps(document, default=partial(_stand_in, long), option=orjson.OPT_SERIALIZE_NUMPY)
    # orjson writes NaN and the infinities as null. Looking for it in the text costs next to nothing; only a hit makes
    # the arrays worth a look.
    if b"null" in text and any(_has_non_finite(tensor) for tensor in outputs):
        long = []
        text = orjson.dumps(
            document, default=partial(_stand_in, long)
        )  # not told of numpy, it asks for what is numpy's
    return text if not long else _with_long_arrays(text, long, memory)


def write_array(elements: np.ndarray | list[str]) -> LongArray:
    """Write a long array of numbers, or of texts, step by step: a thread that does so gives way to others."""
    pieces: list[bytes] = []
    for begin in range(0, len(elements), _STEP):
        step = elements[begin : begin + _STEP]
        text = orjson.dumps(step, option=orjson.OPT_SERIALIZE_NUMPY)
        if isinstance(step, np.ndarray) and b"null" in text:
            text = _spell_with_tokens(step, text)
        pieces += text[1:-1], b","
        time.sleep(0)
    pieces[-1] = b"]"
    return LongArray([b"[", *pieces])


def _stand_in(long: list[LongArray], value: object) -> orjson.Fragment:
    """What orjson writes for what it does not know. For a long array that is a byte which is nowhere else in JSON."""
    if isinstance(value, LongArray):
        long.append(value)
        return orjson.Fragment(_PLACE)
    if isinstance(value, np.ndarray | np.generic):
        return _with_tokens(value)
    raise TypeError(type(value).__name__)


def _with_long_arrays(text: bytes, long: list[LongArray], memory: LargeMemory | None) -> bytes | memoryview:
    """Put the arrays into their places. Joining releases the interpreter lock, which orjson keeps while it copies."""
    around = text.split(_PLACE)
    pieces: list[bytes | memoryview] = [around[0]]
    for array, after in zip(long, around[1:], strict=True):
        pieces += array.pieces
        array.pieces.clear()
        pieces.append(after)
    return b"".join(pieces) if memory is None else memory.join(pieces)


def _finite(literal: str) -> float:
    number = float(literal)
    if math.isinf(number):  # 1e400: not the token, and orjson refuses it, too
        raise invalid_input(f"failed to parse the request JSON buffer: a number is beyond the range of FP64: {literal}")
    return number


def _has_non_finite(tensor: Tensor) -> bool:
    if tensor.datatype is DataType.BF16:
        return bool(((tensor.array & 0x7F80) == 0x7F80).any())
    return tensor.array.dtype.kind == "f" and not np.isfinite(tensor.array).all()


def _with_tokens(numbers: np.ndarray | np.generic) -> orjson.Fragment:
    return orjson.Fragment(_spell_with_tokens(numbers, orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)))


def _spell_with_tokens(numbers: np.ndarray | np.generic, text: bytes) -> bytes:
    """``text``, as orjson spells ``numbers``, with a token for each null, of which there is one for each non-finite."""
    if numbers.dtype.kind != "f":
        return text
    flat = numbers.reshape(-1)
    odd = flat[~np.isfinite(flat)]
    signs = np.where(np.isnan(odd), 0, np.sign(odd)).astype(np.intp)
    if odd.size and (signs == signs[0]).all():  # a mask, or a model that went wrong: no need to split
        return text.replace(b"null", _TOKENS[signs[0]])
    pieces = [b""] * (2 * odd.size + 1)
    pieces[::2] = text.split(b"null")
    pieces[1::2] = _TOKENS[signs].tolist()
    return b"".join(pieces)
