"""JSON with the tokens that JSON has not."""

import json
import math

import numpy as np
import pytest

from ortserve.codecs.json_text import parse_json, write_array, write_json
from ortserve.core.dtypes import DataType
from ortserve.core.large_memory import LargeMemory
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


def spell(array: np.ndarray, datatype: DataType, text: str = "") -> bytes:
    return bytes(write_json({"data": array, "text": text}, [Tensor("y", datatype, array)]))


def test_tokens_are_written_and_negative_zero_keeps_its_sign() -> None:
    array = np.array([np.nan, np.inf, -np.inf, -0.0, 0.1], np.float32)
    tensor = Tensor("y", DataType.FP32, array)
    assert write_json({"data": array}, [tensor]) == b'{"data":[NaN,Infinity,-Infinity,-0.0,0.1]}'
    assert write_json({"y": array[0], "z": array[4]}, [tensor]) == b'{"y":NaN,"z":0.1}'
    finite = array[3:]
    assert write_json({"data": finite}, [Tensor("y", DataType.FP32, finite)]) == b'{"data":[-0.0,0.1]}'


@pytest.mark.parametrize("datatype", [DataType.FP16, DataType.FP32, DataType.FP64])
@pytest.mark.parametrize("odd", [[np.nan], [-np.inf], [np.nan, np.inf, np.nan, -np.inf]])
@pytest.mark.parametrize("stride", [1, 3, 499, 10_000])
def test_numbers_beside_tokens_are_spelled_as_without(datatype: DataType, odd: list[float], stride: int) -> None:
    bits = np.random.default_rng(0).integers(0, 256, 1000 * datatype.itemsize, np.uint8)
    array = bits.view(datatype.numpy).copy()
    array[~np.isfinite(array)] = 0
    array[::stride] = 123.5
    plain = spell(array, datatype).decode()
    tokens = [{"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(number)] for number in odd]
    places = range(0, array.size, stride)
    for count, place in enumerate(places):
        array[place] = odd[count % len(odd)]
        plain = plain.replace("123.5", tokens[count % len(odd)], 1)
    assert spell(array, datatype).decode() == plain


def test_each_array_has_its_own_tokens_and_those_without_stay() -> None:
    with_tokens, whole, numbers = np.array([np.nan, 0.5]), np.array([1.5], np.float32), np.array([7], np.uint64)
    outputs = [
        Tensor("a", DataType.FP64, with_tokens),
        Tensor("b", DataType.FP32, whole),
        Tensor("c", DataType.UINT64, numbers),
    ]
    document = {"a": with_tokens, "b": [{"data": whole}, {"data": numbers}], "d": numbers[0], "e": whole[:0]}
    assert write_json(document, outputs) == b'{"a":[NaN,0.5],"b":[{"data":[1.5]},{"data":[7]}],"d":7,"e":[]}'


def test_text_is_written_alike_with_and_without_tokens() -> None:
    text = '\u2028 "ñ" \\ \n 😀 null NaN'
    one = np.array([1.0])
    assert spell(one, DataType.FP64, text).replace(b"1.0", b"NaN") == spell(one * np.nan, DataType.FP64, text)
    assert json.loads(spell(one, DataType.FP64, text))["text"] == text


def test_half_a_surrogate_pair_is_refused_beside_the_bare_tokens_too() -> None:
    with pytest.raises(ServeError, match="failed to parse the request JSON buffer"):
        parse_json(b'{"id": "\\ud800", "data": [NaN]}')
    assert parse_json(b'{"id": "\\ud83d\\ude00", "data": [Infinity]}') == {"id": "😀", "data": [math.inf]}


def test_long_arrays_are_put_together_in_lent_memory() -> None:
    array = np.arange(100_000, dtype=np.float32)
    array[7] = np.nan
    tensor, memory = Tensor("y", DataType.FP32, array), LargeMemory()
    text = write_json({"data": write_array(array), "more": write_array(array[:5000])}, [tensor], memory)
    assert isinstance(text, memoryview)
    assert memory.kept_bytes >= len(text)
    assert bytes(text) == write_json({"data": write_array(array), "more": write_array(array[:5000])}, [tensor])
