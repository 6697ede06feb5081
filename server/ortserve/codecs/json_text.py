"""JSON documents as Triton and its clients write them: with the bare tokens ``NaN``, ``Infinity`` and ``-Infinity``.

orjson reads and writes everything else, many times faster than the json module, which only reads documents with tokens.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import orjson

from ortserve.core.dtypes import DataType
from ortserve.core.tensor import Tensor
from ortserve.errors import invalid_input

_TOKENS: Final = np.array([b"NaN", b"Infinity", b"-Infinity"], object)
"""By the sign of what they stand for."""


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


def write_json(document: dict[str, Any], outputs: Sequence[Tensor]) -> bytes:
    """Write a document whose numpy arrays and numbers, wherever they are in it, come from ``outputs``."""
    text = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    # orjson writes NaN and the infinities as null. Looking for it in the text costs next to nothing; only a hit makes
    # the arrays worth a look.
    if b"null" in text and any(_has_non_finite(tensor) for tensor in outputs):
        text = orjson.dumps(document, default=_with_tokens)  # not told of numpy, it asks for what is numpy's
    return text


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
    """Spell ``numbers`` as orjson does, but with a token for each null, of which there is one for each that is none."""
    text = orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)
    if numbers.dtype.kind == "f":
        flat = numbers.reshape(-1)
        odd = flat[~np.isfinite(flat)]
        signs = np.where(np.isnan(odd), 0, np.sign(odd)).astype(np.intp)
        if odd.size and (signs == signs[0]).all():  # a mask, or a model that went wrong: no need to split
            text = text.replace(b"null", _TOKENS[signs[0]])
        else:
            pieces = [b""] * (2 * odd.size + 1)
            pieces[::2] = text.split(b"null")
            pieces[1::2] = _TOKENS[signs].tolist()
            text = b"".join(pieces)
    return orjson.Fragment(text)
