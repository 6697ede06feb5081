"""JSON with the tokens that JSON has not."""

import json
import math

import numpy as np
import pytest

from ortserve.codecs.json_text import parse_json, python_number, write_json
from ortserve.core.dtypes import DataType
from ortserve.core.tensor import Tensor
from ortserve.errors import ErrorKind, ServeError


def test_tokens_are_read_beside_everything_else() -> None:
    values = parse_json(memoryview(b'{"a": [NaN, Infinity, -Infinity, -0.0, 1.5], "b": "NaN"}'))
    assert math.isnan(values["a"][0])
    assert values["a"][1:3] == [math.inf, -math.inf]
    assert math.copysign(1, values["a"][3]) == -1
    assert values["b"] == "NaN"


@pytest.mark.parametrize("text", [b"", b"{", b"[NaN", b"nan", b"[1e400, NaN]", b"\xff", b"[" * 100_000 + b"NaN"])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(ServeError, match="failed to parse the request JSON buffer") as caught:
        parse_json(text)
    assert caught.value.kind is ErrorKind.INVALID_INPUT


def test_tokens_are_written_and_negative_zero_keeps_its_sign() -> None:
    array = np.array([np.nan, np.inf, -np.inf, -0.0, 0.1], np.float32)
    tensor = Tensor("y", DataType.FP32, array)
    assert write_json({"data": array}, [tensor]) == b'{"data":[NaN,Infinity,-Infinity,-0.0,0.1]}'
    assert write_json({"y": python_number(array[0]), "z": python_number(array[4])}, [tensor]) == b'{"y":NaN,"z":0.1}'
    finite = array[3:]
    assert write_json({"data": finite}, [Tensor("y", DataType.FP32, finite)]) == b'{"data":[-0.0,0.1]}'


def test_text_is_written_alike_with_and_without_tokens() -> None:
    text = '\u2028 "ñ" \\ \n 😀'
    plain = write_json({"t": [text, None]}, [])
    array = np.array([np.nan])
    with_token = write_json({"t": [text, None], "d": array}, [Tensor("y", DataType.FP64, array)])
    assert json.loads(plain)["t"] == json.loads(with_token)["t"] == [text, None]


def test_half_a_surrogate_pair_is_refused_beside_the_bare_tokens_too() -> None:
    with pytest.raises(ServeError, match="failed to parse the request JSON buffer"):
        parse_json(b'{"id": "\\ud800", "data": [NaN]}')
    assert parse_json(b'{"id": "\\ud83d\\ude00", "data": [Infinity]}') == {"id": "😀", "data": [math.inf]}
