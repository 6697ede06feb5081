"""JSON documents with bare tokens, and the ``data`` arrays of tensors, in both directions."""

import json
import math
import time
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ortserve.codecs.bounds import INLINE_CHARACTERS
from ortserve.codecs.json_text import (
    LongJson,
    decode_json_data,
    encode_json_data,
    encode_json_text,
    parse_json,
    write_array,
    write_json,
)
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


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[NaN", b"nan", b"[1e400, NaN]", b"[%d, NaN]" % 10**400, b"\xff", b"[" * 100_000 + b"NaN"]
)
def test_invalid_json_is_rejected(text: bytes) -> None:
    with pytest.raises(ServeError, match="failed to parse the request JSON buffer") as caught:
        parse_json(text)
    assert caught.value.kind is ErrorKind.INVALID_INPUT


def test_error_beside_tokens_has_the_position_of_the_fault() -> None:
    with pytest.raises(ServeError, match=r"JSON buffer: Expecting value at 25$"):
        parse_json(b'{"data": [NaN, Infinity, -NaN]}')


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
def test_numbers_beside_tokens_are_encoded_as_without(datatype: DataType, odd: list[float], stride: int) -> None:
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


def test_each_array_has_its_own_tokens() -> None:
    with_tokens, whole, numbers = np.array([np.nan, 0.5]), np.array([1.5], np.float32), np.array([7], np.uint64)
    outputs = [
        Tensor("a", DataType.FP64, with_tokens),
        Tensor("b", DataType.FP32, whole),
        Tensor("c", DataType.UINT64, numbers),
    ]
    document = {"a": with_tokens, "b": [{"data": whole}, {"data": numbers}], "d": numbers[0], "e": whole[:0]}
    assert write_json(document, outputs) == b'{"a":[NaN,0.5],"b":[{"data":[1.5]},{"data":[7]}],"d":7,"e":[]}'


def test_text_is_encoded_equally_with_and_without_tokens() -> None:
    text = '\u2028 "ñ" \\ \n 😀 null NaN'
    one = np.array([1.0])
    assert spell(one, DataType.FP64, text).replace(b"1.0", b"NaN") == spell(one * np.nan, DataType.FP64, text)
    assert json.loads(spell(one, DataType.FP64, text))["text"] == text


@pytest.mark.parametrize(
    "document",
    [
        b'{"id": "\\ud800", "data": [NaN]}',
        b'{"id": "\xed\xa0\x80", "data": [NaN]}',
        b'\xef\xbb\xbf{"data": [NaN]}',
        '{"id": "\u614eN", "data": [NaN]}'.encode("utf-16-le"),
    ],
    ids=["escaped surrogate", "surrogate in three bytes", "byte order mark", "UTF-16"],
)
def test_text_that_is_not_utf8_is_rejected_beside_tokens(document: bytes) -> None:
    assert b"NaN" in document
    with pytest.raises(ServeError, match="failed to parse the request JSON buffer"):
        parse_json(document)


def test_escaped_characters_are_read_beside_tokens() -> None:
    assert parse_json(b'{"id": "\\ud83d\\ude00", "data": [Infinity]}') == {"id": "😀", "data": [math.inf]}


def test_tokens_and_escapes_are_read_in_a_few_times_the_time_of_other_values() -> None:
    """The event loop reads both. Calls of Python for each number took sixteen times as long."""

    def least_s(token: bytes) -> float:
        document = b'{"id": "\\u0041", "data": [%s, %s]}' % (token, b",".join([b"0.5"] * 16_000))
        durations = []
        for _ in range(20):
            began = time.thread_time()
            assert len(parse_json(document)["data"]) == 16_001
            durations.append(time.thread_time() - began)
        return min(durations)

    assert least_s(b"NaN") < 9 * least_s(b"0")


def test_long_arrays_are_joined_in_a_lent_buffer() -> None:
    array = np.arange(100_000, dtype=np.float32)
    array[7] = np.nan
    tensor, memory = Tensor("y", DataType.FP32, array), LargeMemory()
    text = write_json({"data": write_array(array), "more": write_array(array[:5000])}, [tensor], memory)
    assert isinstance(text, memoryview)
    assert memory.kept_bytes >= len(text)
    assert bytes(text) == write_json({"data": write_array(array), "more": write_array(array[:5000])}, [tensor])


def test_few_long_texts_are_written_in_steps() -> None:
    texts = np.array(
        ["", "ä" * 700_000, 'a "quote"' * 100_000, "\x01", "😀" * 300_000, "\\n" * 100_000, "last"], object
    )
    for some in (texts, texts[::-1], texts[1:2]):
        text = write_json({"data": encode_json_data(some, DataType.BYTES)}, [])
        assert json.loads(bytes(text)) == {"data": some.tolist()}


def test_no_step_escapes_more_characters_than_the_loop_may() -> None:
    texts = np.array(["\x01" * 1_000_000, *["\x01" * 50_000] * 10], object)
    for encoded in (encode_json_data(texts, DataType.BYTES), encode_json_text(texts[0])):
        assert isinstance(encoded, LongJson)
        assert max(map(len, encoded.pieces)) <= len("\\u0001") * INLINE_CHARACTERS


INTEGERS = [datatype for datatype in DataType if datatype.numpy.kind in "iu" and datatype is not DataType.BF16]
FLOATS = [DataType.FP16, DataType.BF16, DataType.FP32, DataType.FP64]


def decode(data: list[Any], datatype: DataType, *shape: int) -> np.ndarray:
    array = decode_json_data(data, datatype, shape, "x")
    assert array.shape == shape
    assert array.dtype == datatype.numpy
    assert array.flags.c_contiguous
    return array


def refusal(data: list[Any], datatype: DataType, *shape: int) -> str:
    with pytest.raises(ServeError) as caught:
        decode_json_data(data, datatype, shape or (len(data),), "x")
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    return caught.value.message


def expect_wrong_type(data: list[Any], datatype: DataType, wanted: str, came: str) -> None:
    assert refusal(data, datatype) == (
        f"Unable to parse 'data' of input 'x': expected {wanted} for {datatype.value}, got {came}"
    )


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_are_decoded_within_their_range_only(datatype: DataType) -> None:
    limits = np.iinfo(datatype.numpy)
    low, high = int(limits.min), int(limits.max)
    assert decode([low, 0, high], datatype, 3).tolist() == [low, 0, high]
    for beyond in (low - 1, high + 1):
        expect_wrong_type([0, beyond], datatype, "integers", f"{beyond}: its range is {low} to {high}")


@pytest.mark.parametrize("datatype", INTEGERS)
@pytest.mark.parametrize(
    ("odd", "came"),
    [
        (1.5, "1.5"),
        (1.0, "1.0"),
        (float("nan"), "nan"),
        (1e300, "1e+300"),
        ("1", "a string"),
        (True, "a boolean"),
        (None, "null"),
        ({}, "an object"),
    ],
)
def test_only_integers_become_integers(datatype: DataType, odd: object, came: str) -> None:
    expect_wrong_type([odd], datatype, "integers", came)
    expect_wrong_type([1, odd, 1], datatype, "integers", came)


@pytest.mark.parametrize("datatype", FLOATS)
@pytest.mark.parametrize(
    ("odd", "came"), [("1", "a string"), (True, "a boolean"), (None, "null"), ({}, "an object"), ("NaN", "a string")]
)
def test_only_numbers_become_numbers(datatype: DataType, odd: object, came: str) -> None:
    expect_wrong_type([odd], datatype, "numbers", came)
    expect_wrong_type([1, odd, 0.5], datatype, "numbers", came)


@pytest.mark.parametrize(
    ("datatype", "largest", "beyond"),
    [
        (DataType.FP16, 65504, 65520),
        (DataType.BF16, 3.3895313892515355e38, 3.4e38),
        (DataType.BF16, 3.3895313892515355e38, 1e39),
        (DataType.FP32, 3.4028234663852886e38, 1e39),
        (DataType.FP64, 1.7976931348623157e308, 10**309),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_number_out_of_range_is_rejected_instead_of_infinite(
    datatype: DataType, largest: float, beyond: float, sign: int
) -> None:
    kept = decode([sign * largest], datatype, 1)
    assert float(values(kept, datatype)[0]) == sign * largest
    expect_wrong_type([0, sign * beyond], datatype, "numbers", "a number beyond its range")


@pytest.mark.parametrize("datatype", FLOATS)
def test_numbers_of_both_forms_and_non_finite_ones_arrive(datatype: DataType) -> None:
    decoded = values(decode([1, 0.5, -2, float("inf"), float("-inf"), float("nan")], datatype, 6), datatype)
    np.testing.assert_array_equal(decoded, [1, 0.5, -2, np.inf, -np.inf, np.nan])


def test_integers_are_decoded_as_floats() -> None:
    assert decode([1, -2], DataType.FP32, 2).tolist() == [1, -2]
    assert decode([2**64, -(2**70)], DataType.FP64, 2).tolist() == [float(2**64), float(-(2**70))]


LARGEST_ODD = 2.0**128 - 2.0**103
"""The middle between the largest FP32 and the next number, which FP32 cannot represent."""


@given(
    st.lists(
        st.one_of(
            st.floats(allow_nan=False),
            st.floats(width=32, allow_nan=False),
            st.integers(),
            st.sampled_from([LARGEST_ODD, 2**1024]),
        ),
        min_size=1,
    )
)
@example([LARGEST_ODD])
@example([np.nextafter(LARGEST_ODD, 0).item()])
@example([2**128 - 2**103 - 1, 1e-46, -0.0])
def test_single_precision_is_rounded_or_rejected_as_in_numpy(numbers: list[float]) -> None:
    try:
        with np.errstate(over="raise"):
            expected = np.array(numbers, np.float64).astype(np.float32)
    except (FloatingPointError, OverflowError):
        with pytest.raises(ServeError, match="FP32"):
            decode_json_data(numbers, DataType.FP32, (len(numbers),), "x")
    else:
        array = decode_json_data(numbers, DataType.FP32, (len(numbers),), "x")
        np.testing.assert_array_equal(array, expected)
        np.testing.assert_array_equal(np.signbit(array), np.signbit(expected))


def test_bfloat16_is_rounded_to_nearest_and_ties_to_even() -> None:
    numbers = [1.0, -2.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 1e-45, 0.0, -0.0]
    bits = decode(numbers, DataType.BF16, len(numbers))
    assert [hex(b) for b in bits] == ["0x3f80", "0xc000", "0x3f80", "0x3f82", "0x3f81", "0x0", "0x0", "0x8000"]


def test_bools_are_json_bools_or_0_and_1() -> None:
    assert decode([True, False, 1, 0], DataType.BOOL, 4).tolist() == [True, False, True, False]
    assert decode([1, 0], DataType.BOOL, 2).tolist() == [True, False]
    wanted = "booleans (true, false, 0 or 1)"
    for odd, came in ((2, "2"), (-1, "-1"), (1.0, "1.0"), ("true", "a string"), (None, "null")):
        expect_wrong_type([odd], DataType.BOOL, wanted, came)
        expect_wrong_type([True, 1, odd], DataType.BOOL, wanted, came)


def test_texts_with_any_characters_arrive() -> None:
    texts = ["", "a", "größer", "nul\0inside", "\U0001f600", "x" * 1000]
    assert decode(texts, DataType.BYTES, 6).tolist() == texts


@pytest.mark.parametrize(
    ("odd", "came"), [(1, "1"), (1.5, "1.5"), (True, "a boolean"), (None, "null"), ({}, "an object")]
)
def test_only_strings_become_strings(odd: object, came: str) -> None:
    expect_wrong_type([odd], DataType.BYTES, "strings", came)
    expect_wrong_type(["a", odd], DataType.BYTES, "strings", came)


def test_lone_surrogate_is_rejected() -> None:
    assert refusal(["a", "\ud800"], DataType.BYTES) == (
        "Unable to parse 'data' of input 'x': a string is not valid Unicode"
    )


@pytest.mark.parametrize(
    "data",
    [
        [1, 2, 3, 4, 5, 6],
        [[1, 2, 3], [4, 5, 6]],
        [[[1, 2, 3]], [[4, 5, 6]]],
        [[1, 2], [3, 4], [5, 6]],
        [[[[[1], [2], [3], [4], [5], [6]]]]],
    ],
)
@pytest.mark.parametrize("datatype", [DataType.INT32, DataType.FP32, DataType.BYTES])
def test_elements_are_read_in_row_major_order_at_any_nesting(datatype: DataType, data: list[Any]) -> None:
    if datatype is DataType.BYTES:
        data = orjson.loads("".join(f'"{c}"' if c.isdigit() else c for c in orjson.dumps(data).decode()))
    wanted = np.array([[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(decode(data, datatype, 2, 3).astype(int), wanted)


@pytest.mark.parametrize("datatype", DataType)
@pytest.mark.parametrize(("data", "shape"), [([], (0,)), ([], (2, 0)), ([[], []], (2, 0)), ([[[]]], (0, 7))])
def test_empty_data_is_valid(datatype: DataType, data: list[Any], shape: tuple[int, ...]) -> None:
    decode(data, datatype, *shape)


def test_scalar_is_a_list_of_one() -> None:
    assert decode([7], DataType.INT32).item() == 7
    assert decode(["a"], DataType.BYTES).item() == "a"


@pytest.mark.parametrize("datatype", [DataType.INT32, DataType.FP32, DataType.BOOL, DataType.BYTES])
@pytest.mark.parametrize(
    ("data", "shape", "spelled", "came"),
    [
        ([1, 0], (3,), "[3] takes 3 elements", "2 elements"),
        ([1, 0, 1, 0], (3,), "[3] takes 3 elements", "4 elements"),
        ([], (1,), "[1] takes 1 elements", "0 elements"),
        ([1], (0,), "[0] takes 0 elements", "1 elements"),
        ([], (), "[] takes 1 elements", "0 elements"),
        ([1], (2**40, 2**15), f"[{2**40},{2**15}] takes {2**55} elements", "1 elements"),
        ([[1, 0], [1]], (3,), "[3] takes 3 elements", "ragged lists"),
        ([[1, 0], 1], (3,), "[3] takes 3 elements", "ragged lists"),
        ([1, [0, 1]], (3,), "[3] takes 3 elements", "ragged lists"),
        ([[], [1]], (1,), "[1] takes 1 elements", "ragged lists"),
        ([[[1], [0, 1]], [[1]]], (4,), "[4] takes 4 elements", "ragged lists"),
    ],
)
def test_wrong_number_of_elements_is_rejected(
    datatype: DataType, data: list[Any], shape: tuple[int, ...], spelled: str, came: str
) -> None:
    with pytest.raises(ServeError) as caught:
        decode_json_data(data, datatype, shape, "x")
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == (
        "Unable to parse 'data': Shape does not match true shape of 'data' field: "
        f"input 'x' of shape {spelled}, got {came}"
    )


def test_lists_nest_up_to_64_levels() -> None:
    def nested(depth: int) -> list[Any]:
        data: Any = 1
        for _ in range(depth):
            data = [data]
        result: list[Any] = data
        return result

    assert decode(nested(64), DataType.INT32, 1).tolist() == [1]
    for depth in (65, 500):
        assert refusal(nested(depth), DataType.INT32, 1).endswith("got lists nested deeper than 64")


def test_long_string_beside_many_numbers_uses_no_extra_memory() -> None:
    data = ["x" * 20_000, *[1] * 20_000]  # an array with one text type would take 1.6 GB
    tracemalloc.start()
    try:
        expect_wrong_type(data, DataType.INT32, "integers", "a string")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000


def values(array: np.ndarray, datatype: DataType) -> np.ndarray:
    """An array of floats; BF16 is widened by its definition."""
    if datatype is DataType.BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


@pytest.mark.parametrize("datatype", [*INTEGERS, *FLOATS, DataType.BOOL, DataType.BYTES])
def test_every_datatype_is_encoded_flat_and_decoded_back(datatype: DataType) -> None:
    if datatype is DataType.BYTES:
        array = np.array([["a", "ü"], ["", "\0"]], object)
    elif datatype is DataType.BF16:
        array = np.array([[0x3F80, 0xC000], [0x7F7F, 0x0001]], np.uint16)
    else:
        array = np.array([[0, 1], [1, 0]]).astype(datatype.numpy)
    encoded: Any = encode_json_data(array, datatype)
    assert np.ndim(encoded) == 1
    data = orjson.loads(orjson.dumps(encoded, option=orjson.OPT_SERIALIZE_NUMPY))
    np.testing.assert_array_equal(decode(data, datatype, 2, 2), array)


@pytest.mark.parametrize("datatype", DataType)
def test_non_contiguous_array_is_encoded_in_row_major_order(datatype: DataType) -> None:
    array = np.arange(2, 8).reshape(2, 3).T.astype(str if datatype is DataType.BYTES else int).astype(datatype.numpy)
    encoded: Any = encode_json_data(array, datatype)
    again: Any = encode_json_data(np.ascontiguousarray(array), datatype)
    assert list(encoded) == list(again)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_single_precision_survives_its_decimal_form(numbers: list[float]) -> None:
    finite = [number for number in numbers if np.isfinite(number)]
    text = orjson.dumps(
        encode_json_data(np.array(finite, np.float32), DataType.FP32), option=orjson.OPT_SERIALIZE_NUMPY
    )
    np.testing.assert_array_equal(decode(orjson.loads(text), DataType.FP32, len(finite)), np.array(finite, np.float32))
