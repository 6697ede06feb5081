"""Cached header blocks decode as in the hpack library, after any earlier blocks."""

import time
from itertools import pairwise
from urllib.parse import unquote

import grpc
import hpack
import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.huffman_table import decode_huffman as library_huffman
from hypothesis import given, settings
from hypothesis import strategies as st

from ortserve.core.compiled import IS_COMPILED
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError
from ortserve.frontends.grpc.native.header_blocks import HeaderReader, decode_huffman, literal, status_block

MAX_LIST = 16 * 1024
MOST_LIST = 128 * 1024
NAMES = [b":path", b"te", b"user-agent", b"grpc-timeout", b"x-trace", b"authorization"]
VALUES = [b"", b"trailers", b"/inference.GRPCInferenceService/ModelInfer", b"100m", b"a" * 300, b"b" * 4200]


def integer(value: int, bits: int, first: int) -> bytes:
    limit = (1 << bits) - 1
    if value < limit:
        return bytes((first | value,))
    out = bytearray((first | limit,))
    value -= limit
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def string(text: bytes) -> bytes:
    return integer(len(text), 7, 0) + text


def huffman(text: bytes) -> bytes:
    coded = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(text)
    return integer(len(coded), 7, 0x80) + coded


field = st.one_of(
    st.builds(lambda index: integer(index, 7, 0x80), st.integers(1, 75)),
    st.builds(
        lambda first, name, value, code: bytes((first,)) + code(name) + code(value),
        st.sampled_from([0x00, 0x10, 0x40, 0x40]),
        st.sampled_from(NAMES),
        st.sampled_from(VALUES),
        st.sampled_from([string, huffman]),
    ),
    st.builds(
        lambda index, value: integer(index, 6, 0x40) + string(value), st.integers(1, 70), st.sampled_from(VALUES)
    ),
    st.builds(
        lambda first, index, value: integer(index, 4, first) + huffman(value),
        st.sampled_from([0x00, 0x10]),
        st.integers(0, 70),
        st.sampled_from(VALUES),
    ),
    st.binary(max_size=3),
)
resize = st.builds(lambda size: integer(size, 5, 0x20), st.sampled_from([0, 100, 400, 4096, 4097]))
a_block = st.builds(
    lambda resizes, fields: b"".join((*resizes, *fields)), st.lists(resize, max_size=1), st.lists(field, max_size=4)
)
blocks = st.builds(
    lambda pool, order: [pool[number % len(pool)] for number in order],
    st.lists(a_block, min_size=1, max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=40),
)


@settings(max_examples=400)
@given(blocks)
def test_cached_decoder_equals_a_plain_decoder(sent: list[bytes]) -> None:
    reader = HeaderReader()
    decoder = hpack.Decoder(max_header_list_size=MOST_LIST)
    for block in sent:
        try:
            expected = tuple((bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True))
        except (hpack.HPACKError, IndexError):
            with pytest.raises(Http2ConnectionError):
                reader.read(block)
            return
        is_kept = sum(len(name) + len(value) + 32 for name, value in expected) <= MAX_LIST
        assert reader.read(block) == (expected if is_kept else None)


@given(st.lists(st.one_of(st.integers(0, 255), st.sampled_from([0x1F, 0xFF])), max_size=12).map(bytes))
def test_huffman_code_is_read_as_in_the_library(coded: bytes) -> None:
    try:
        expected = library_huffman(coded)
    except hpack.HPACKError:
        with pytest.raises(ValueError, match="not Huffman code"):
            decode_huffman(coded)
    else:
        assert decode_huffman(coded) == expected


@pytest.mark.skipif(IS_COMPILED, reason="tests compile without optimization, which is slower than the interpreter")
def test_largest_huffman_string_takes_less_time_than_in_the_library() -> None:
    """The library takes 9 to 17 ms, during which the event loop runs nothing else."""
    coded = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(b"0" * 100_000)
    times_s: list[float] = []
    for decode in (decode_huffman, library_huffman):
        began_s = [time.thread_time() for _ in range(10) if decode(coded)]
        times_s.append(min(end - begin for begin, end in pairwise(began_s)))
    assert times_s[0] < 0.75 * times_s[1]


def test_repeated_block_is_not_decoded_again() -> None:
    reader = HeaderReader()
    encoder = hpack.Encoder()
    headers = [(b":path", b"/x"), (b"te", b"trailers")]
    first, *others = (encoder.encode(headers) for _ in range(4))
    assert first != others[0]  # the first one inserts
    read = [reader.read(block) for block in (first, *others)]
    assert read == [tuple(headers)] * 4
    assert read[1] is read[2] is read[3]
    assert list(reader._kept) == [others[0]]


def test_block_that_changes_the_table_is_never_cached() -> None:
    reader = HeaderReader()
    for block in (b"\x40\x01a\x01b", b"\x20\x82", b"\x3f\xe1\x1f\x82"):
        reader.read(block)
        assert block not in reader._kept


def test_cache_is_cleared_when_the_table_changes() -> None:
    reader = HeaderReader()
    reader.read(b"\x40\x01a\x01b")
    assert reader.read(b"\xbe") == ((b"a", b"b"),)
    reader.read(b"\x40\x01c\x01d")
    assert reader.read(b"\xbe") == ((b"c", b"d"),)
    reader.read(b"\x20")
    with pytest.raises(Http2ConnectionError):
        reader.read(b"\xbe")


def test_block_cache_is_bounded() -> None:
    reader = HeaderReader()
    for number in range(1000):
        reader.read(literal(b"x", b"%d" % number))
        reader.read(literal(b"x", b"y" * 3000))
        assert len(reader._kept) <= 64
        assert max(map(len, reader._kept)) <= 2048


def test_oversized_header_list_differs_from_a_malformed_block() -> None:
    for block, code in (
        (literal(b"x", bytes(MOST_LIST)), ErrorCode.ENHANCE_YOUR_CALM),
        (b"\x82" * 4000, ErrorCode.ENHANCE_YOUR_CALM),
        (b"\xff\xff\xff", ErrorCode.COMPRESSION_ERROR),
        (b"\x00\x05ab", ErrorCode.COMPRESSION_ERROR),
        (b"\x00\x81\xff\x00", ErrorCode.COMPRESSION_ERROR),
    ):
        with pytest.raises(Http2ConnectionError) as caught:
            HeaderReader().read(block)
        assert caught.value.code is code


def test_discarded_header_list_still_updates_the_table() -> None:
    reader = HeaderReader()
    encoder = hpack.Encoder()
    small = [(b"a", b"b"), (b"c", b"d")]
    large = [*small, *((b"x-%d" % number, b"y") for number in range(500))]
    for _ in range(3):
        assert reader.read(encoder.encode(large)) is None
        assert reader.read(encoder.encode(small)) == tuple(small)
    # An entry that is larger than the table empties it.
    assert reader.read(b"\x40\x01a" + integer(20_000, 7, 0) + bytes(20_000)) is None
    with pytest.raises(Http2ConnectionError):
        reader.read(b"\xbe")


@given(st.binary(min_size=1, max_size=300), st.binary(max_size=70_000))
def test_literal_is_readable_by_a_decoder(name: bytes, value: bytes) -> None:
    decoder = hpack.Decoder(max_header_list_size=100_000)
    assert [tuple(header) for header in decoder.decode(literal(name, value), raw=True)] == [(name, value)]


@pytest.mark.parametrize("details", [" expected a tensor ", "é" * 999 + " " * 9, "four " * 9_000, "\n", " "])
def test_status_message_has_no_space_at_an_end(details: str) -> None:
    """HTTP/2 clients reject such header values."""
    trailers = dict(hpack.Decoder().decode(status_block(grpc.StatusCode.INTERNAL, details, []), raw=True))
    message = trailers[b"grpc-message"].decode()
    assert message == message.strip(" ")
    assert details.strip(" ").startswith(unquote(message))
