"""JSON documents as Triton and its clients write them: with the bare tokens ``NaN``, ``Infinity`` and ``-Infinity``.

orjson reads and writes everything else, many times faster than the json module, which is asked only where a token is.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from ortserve.core.dtypes import DataType
from ortserve.core.tensor import Tensor
from ortserve.errors import invalid_input


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
    """Write a document whose numpy arrays, wherever they are in it, come from ``outputs``."""
    text = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    # orjson writes NaN and the infinities as null. Looking for it in the text costs next to nothing; only a hit makes
    # the arrays worth a look.
    if b"null" in text and any(_has_non_finite(tensor) for tensor in outputs):
        text = json.dumps(document, default=_python_numbers, separators=(",", ":"), ensure_ascii=False).encode()
    return text


def python_number(value: np.generic) -> Any:
    """The number that prints as the element's own type would: ``float32`` 0.1 as 0.1, not 0.10000000149."""
    return float(str(value)) if isinstance(value, np.float16 | np.float32) else value.item()


def _finite(literal: str) -> float:
    number = float(literal)
    if math.isinf(number):  # 1e400: not the token, and orjson refuses it, too
        raise invalid_input(f"failed to parse the request JSON buffer: a number is beyond the range of FP64: {literal}")
    return number


def _has_non_finite(tensor: Tensor) -> bool:
    if tensor.datatype is DataType.BF16:
        return bool(((tensor.array & 0x7F80) == 0x7F80).any())
    return tensor.array.dtype.kind == "f" and not np.isfinite(tensor.array).all()


def _python_numbers(array: np.ndarray) -> list[Any]:
    if array.dtype.kind == "f" and array.dtype.itemsize < 8:
        return [python_number(number) for number in array]
    numbers: list[Any] = array.tolist()
    return numbers
