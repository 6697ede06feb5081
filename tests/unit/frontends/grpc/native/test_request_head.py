"""The headers of a call."""

import base64
import sys

import grpc
import pytest

from ortserve.frontends.grpc.native.request_head import MalformedRequestError, check_trailers, read_head

PSEUDO = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/B"), (b":authority", b"x"))
GRPC = (b"content-type", b"application/grpc")


def test_plain_call_is_accepted() -> None:
    head = read_head((*PSEUDO, GRPC))
    assert (head.path, head.timeout_ns, head.encoding, head.http_status, head.rejection) == (
        "/a/B",
        None,
        b"identity",
        200,
        None,
    )


@pytest.mark.parametrize(
    ("value", "ns"),
    [(b"1H", 3600 * 10**9), (b"2M", 120 * 10**9), (b"3S", 3 * 10**9), (b"4m", 4 * 10**6), (b"5u", 5000), (b"6n", 6)],
)
def test_timeout_has_a_unit(value: bytes, ns: int) -> None:
    assert read_head((*PSEUDO, GRPC, (b"grpc-timeout", value))).timeout_ns == ns


@pytest.mark.parametrize("value", [b"", b"S", b"1", b"123456789S", b"-1S", b"1.5S", b"\xb2S"])
def test_malformed_timeout_is_rejected(value: bytes) -> None:
    head = read_head((*PSEUDO, GRPC, (b"grpc-timeout", value)))
    assert head.rejection is not None
    text = f"grpc-timeout: expected up to 8 digits and a unit, got '{value.decode('latin-1')}'"
    assert head.rejection == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_metadata_is_text_or_binary_by_its_name() -> None:
    sent = ((b"x-a", b"b"), (b"x-bin", base64.b64encode(b"\0\xff").rstrip(b"=")), (b"y-bin", b"!"))
    metadata = dict(read_head((*PSEUDO, GRPC, *sent)).metadata)
    assert (metadata["x-a"], metadata["x-bin"], metadata["y-bin"]) == ("b", b"\0\xff", b"")


def test_white_space_around_metadata_values_is_removed() -> None:
    sent = ((b"a", b" x"), (b"b", b"x y\t "), (b"c", b" \t"), (b"te", b"trailers "), (b"grpc-timeout", b" 1S"))
    head = read_head((*PSEUDO, GRPC, *sent))
    metadata = dict(head.metadata)
    assert (metadata["a"], metadata["b"], metadata["c"], head.timeout_ns) == ("x", "x y", "", 10**9)


def test_accepted_encodings_are_a_set() -> None:
    head = read_head((*PSEUDO, GRPC, (b"grpc-accept-encoding", b"identity, gzip,deflate"), (b"grpc-encoding", b"gzip")))
    assert head.accepts == {b"identity", b"gzip", b"deflate"}
    assert head.encoding == b"gzip"


@pytest.mark.parametrize(
    "headers",
    [
        PSEUDO[1:],
        PSEUDO[:2],
        (*PSEUDO[:2], (b":path", b"")),
        (*PSEUDO, PSEUDO[0]),
        (*PSEUDO, (b":status", b"200")),
        (PSEUDO[0], GRPC, *PSEUDO[1:]),
        (*PSEUDO[:2], (b"x", b"y"), *PSEUDO[2:]),
        (*PSEUDO[:3], (b":authority", b"user:password@x")),
        (*PSEUDO, (b"Te", b"trailers")),
        (*PSEUDO, (b"te", b"gzip")),
        (*PSEUDO, (b"connection", b"close")),
        (*PSEUDO, (b"transfer-encoding", b"chunked")),
        (*PSEUDO, (b"", b"x")),
        (*PSEUDO, (b"a b", b"x")),
        (*PSEUDO, (b"a:b", b"x")),
        (*PSEUDO, (b"a", b"x\r\ny: z")),
        (*PSEUDO, (b"a", b"\0")),
        (*PSEUDO, (b"a", b" x\0 ")),
        (*PSEUDO[:2], (b":path", b"/a/B ")),
        (*PSEUDO, (b"content-length", b"+1")),
        (*PSEUDO, (b"content-length", b"9" * 19)),
        (*PSEUDO, (b"content-length", b"1" * 4301)),  # int() accepts at most 4300 digits
        (*PSEUDO, (b"content-length", b"1"), (b"content-length", b"2")),
    ],
)
def test_header_that_http2_forbids_is_malformed(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    with pytest.raises(MalformedRequestError):
        read_head(headers)


@pytest.mark.parametrize(
    "name", [b"authorization", b"cookie", b"x-api-key", b"token-bin", b"grpc-timeout", b"any-name"]
)
def test_possible_keys_are_not_cached(name: bytes) -> None:
    value = bytes(bytearray(b"Bearer s3cret"))
    before = sys.getrefcount(value)
    assert name.decode() in dict(read_head((*PSEUDO, GRPC, (name, value))).metadata)
    assert sys.getrefcount(value) == before


def test_calls_with_different_own_values_share_the_cached_rest() -> None:
    one, other = (
        read_head(
            (*PSEUDO, (b"grpc-accept-encoding", b"gzip"), GRPC, (b"grpc-timeout", timeout), (b"traceparent", trace))
        )
        for timeout, trace in ((b"1S", b"00-1-1-01"), (b"2S", b"00-2-2-01"))
    )
    assert one.path is other.path
    assert one.accepts is other.accepts
    assert (one.timeout_ns, other.timeout_ns) == (10**9, 2 * 10**9)
    assert (dict(one.metadata)["traceparent"], dict(other.metadata)["traceparent"]) == ("00-1-1-01", "00-2-2-01")


@pytest.mark.parametrize(
    "trailer",
    [
        (b":path", b"/a/B"),
        (b":status", b"200"),
        (b"X-A", b"b"),
        (b"connection", b"close"),
        (b"te", b"trailers"),
        (b"a b", b"c"),
    ],
)
def test_trailers_that_http2_forbids_are_malformed(trailer: tuple[bytes, bytes]) -> None:
    check_trailers(((b"x-a", b"b"), (b"x-bin", b"AAAA")))
    with pytest.raises(MalformedRequestError):
        check_trailers((trailer,))


@pytest.mark.parametrize("value", [b"x\r\ny: z", b"\0"])
def test_trailer_values_are_checked(value: bytes) -> None:
    with pytest.raises(MalformedRequestError):
        check_trailers(((b"x-a", value),))
