"""The headers of a call."""

import base64

import pytest

from ortserve.frontends.grpc.native.request_head import MalformedRequestError, read_head

PSEUDO = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/B"), (b":authority", b"x"))
GRPC = (b"content-type", b"application/grpc")


def test_call_without_anything_special() -> None:
    head = read_head((*PSEUDO, GRPC))
    assert (head.path, head.timeout_ns, head.encoding, head.http_status, head.refusal) == (
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
def test_timeout_that_is_none_is_refused(value: bytes) -> None:
    head = read_head((*PSEUDO, GRPC, (b"grpc-timeout", value)))
    assert head.refusal is not None
    assert "grpc-timeout" in head.refusal[1]


def test_metadata_is_text_or_binary_by_its_name() -> None:
    sent = ((b"x-a", b"b"), (b"x-bin", base64.b64encode(b"\0\xff").rstrip(b"=")), (b"y-bin", b"!"))
    metadata = dict(read_head((*PSEUDO, GRPC, *sent)).metadata)
    assert (metadata["x-a"], metadata["x-bin"], metadata["y-bin"]) == ("b", b"\0\xff", b"")


def test_space_around_values_of_metadata_is_none_of_theirs() -> None:
    sent = ((b"a", b" x"), (b"b", b"x y\t "), (b"c", b" \t"), (b"te", b"trailers "), (b"grpc-timeout", b" 1S"))
    head = read_head((*PSEUDO, GRPC, *sent))
    metadata = dict(head.metadata)
    assert (metadata["a"], metadata["b"], metadata["c"], head.timeout_ns) == ("x", "x y", "", 10**9)


def test_encodings_that_the_caller_takes_are_a_set() -> None:
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
        (*PSEUDO, (b"content-length", b"1" * 4301)),  # int() takes no more than 4300 digits
        (*PSEUDO, (b"content-length", b"1"), (b"content-length", b"2")),
    ],
)
def test_what_http2_forbids_is_malformed(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    with pytest.raises(MalformedRequestError):
        read_head(headers)
