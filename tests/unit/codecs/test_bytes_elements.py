"""BYTES elements with their length prefixes."""

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortserve.codecs.bytes_elements import decode_bytes_elements, encode_bytes_elements
from ortserve.errors import ErrorKind, ServeError


def spell(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def expect_invalid(data: bytes, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(ServeError) as caught:
        decode_bytes_elements(data, shape, "x")
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == text


@given(st.lists(st.text(), max_size=20))
def test_texts_come_back_as_they_went(texts: list[str]) -> None:
    array = np.array([*texts, None], object)[:-1]
    data = encode_bytes_elements(array)
    assert data == spell(*(text.encode() for text in texts))
    decoded = decode_bytes_elements(data, (len(texts),), "x")
    assert decoded.dtype == object
    assert decoded.tolist() == texts
    assert all(type(element) is str for element in decoded)


@given(st.binary(max_size=40), st.integers(0, 4))
def test_no_bytes_at_all_do_more_than_be_refused(data: bytes, count: int) -> None:
    with contextlib.suppress(ServeError):
        decoded = decode_bytes_elements(data, (count,), "x")
        assert encode_bytes_elements(decoded) == data


def test_elements_are_in_row_major_order_and_may_be_views_of_a_body() -> None:
    data = memoryview(b"body" + spell(b"a", b"", "ü".encode(), b"d\0d"))[4:]
    assert decode_bytes_elements(data, (2, 2), "x").tolist() == [["a", ""], ["ü", "d\0d"]]


def test_strided_array_is_spelled_in_row_major_order() -> None:
    array = np.array([["a", "b"], ["c", "d"]], object)
    assert encode_bytes_elements(array.T) == spell(b"a", b"c", b"b", b"d")


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_no_elements_are_no_bytes(shape: tuple[int, ...]) -> None:
    assert decode_bytes_elements(b"", shape, "x").shape == shape
    assert encode_bytes_elements(np.empty(shape, object)) == b""


def test_scalar_is_one_element() -> None:
    decoded = decode_bytes_elements(spell(b"one"), (), "x")
    assert decoded.shape == ()
    assert decoded.item() == "one"


def test_wrong_number_of_elements_is_refused() -> None:
    expect_invalid(spell(b"a"), (2,), "expected 2 string elements for inference input 'x', got 5 bytes")
    expect_invalid(spell(b"aaaa"), (2,), "expected 2 string elements for inference input 'x', got 1")
    expect_invalid(spell(b"a", b"b", b"c"), (2,), "expected 2 string elements for inference input 'x', got more")
    expect_invalid(spell(b"a"), (0,), "expected 0 string elements for inference input 'x', got more")


def test_broken_lengths_are_refused() -> None:
    expect_invalid(spell(b"a") + b"\1\0", (1,), "incomplete string length indicator for inference input 'x' at byte 5")
    expect_invalid(
        struct.pack("<I", 9) + b"abc",
        (1,),
        "string element 0 of inference input 'x' has length 9, but only 3 bytes are left",
    )
    expect_invalid(
        spell(b"a") + b"\xff\xff\xff\xff",
        (2,),
        "string element 1 of inference input 'x' has length 4294967295, but only 0 bytes are left",
    )


def test_huge_shape_is_refused_by_the_size_of_the_data() -> None:
    expect_invalid(b"", (2**31, 2**29), f"expected {2**60} string elements for inference input 'x', got 0 bytes")


def test_the_first_fault_is_told_also_where_it_is_in_one_element_too_many() -> None:
    bad = "is not valid UTF-8 (invalid start byte at byte 1); ONNX string tensors hold text"
    expect_invalid(spell(b"a", b"b\xff", b"\xff"), (3,), f"string element 1 of inference input 'x' {bad}")
    expect_invalid(spell(b"a", b"b\xff"), (1,), f"string element 1 of inference input 'x' {bad}")
    expect_invalid(
        spell(b"a", b"bcd")[:-1],
        (1,),
        "string element 1 of inference input 'x' has length 3, but only 2 bytes are left",
    )
    # cut off within a character: the length is what is wrong, not the text
    cut = spell(b"a", "ü".encode())[:-1]
    expect_invalid(cut, (2,), "string element 1 of inference input 'x' has length 2, but only 1 bytes are left")


def test_as_many_elements_as_asked_for_may_be_followed_by_nothing() -> None:
    two = spell(b"a", b"b")
    for rest in (b"\0", b"\0\0", b"\0\0\0"):
        expect_invalid(two + rest, (2,), "incomplete string length indicator for inference input 'x' at byte 10")
    expect_invalid(two + b"\0\0\0\0", (2,), "expected 2 string elements for inference input 'x', got more")


@pytest.mark.parametrize("element", [b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xc0\x80"])
def test_bytes_that_are_not_utf8_are_refused_and_named(element: bytes) -> None:
    with pytest.raises(ServeError) as caught:
        decode_bytes_elements(spell(b"good", element), (2,), "x")
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message.startswith("string element 1 of inference input 'x' is not valid UTF-8 (")
