"""Limits of incomplete input and errors for invalid requests, by literals."""

import httptools
import pytest

from fakes.http import LIMITS
from ortserve.errors import ErrorKind
from ortserve.frontends.http.limits import (
    Stage,
    UnfinishedInput,
    announced_chunk_bytes,
    header_bytes,
    parse_error,
    tick_s,
)
from ortserve.frontends.http.responses import failure


def test_each_limit_is_checked_four_times() -> None:
    assert tick_s(LIMITS) == 0.5


def test_header_size_counts_the_received_bytes() -> None:
    head = b"/v2 HTTP/1.1\r\n" + b"a: b\r\n" + b"long-name: value\r\n"
    assert header_bytes(b"/v2 HTTP/1.1\r\n", [(b"a", b"b"), (b"long-name", b"value")]) == len(head)


@pytest.mark.parametrize(
    ("data", "content_bytes", "size"),
    [
        (b"ff\r\n", 0, 255),
        (b"ff\r\nabc", 3, 255),
        (b"8000000000000000\r\n", 0, 2**63),
        (b"x: y\r\n\r\n00FF\r\n\r\n", 2, 255),
        (b"5\r\nabcde\r\nA;a=b\r\n12", 2, 10),
        (b"ff\r\nff\r\nff\r\n", 8, 255),
        (b"\r\n", 0, 0),
        (b";a=b\r\n1", 1, 0),
        (b"\n", 0, 0),
    ],
)
def test_chunk_size_is_read_from_its_line(data: bytes, content_bytes: int, size: int) -> None:
    assert announced_chunk_bytes(data, content_bytes) == size


@pytest.mark.parametrize("begin", range(1, 16))
def test_chunk_size_from_a_partial_line_never_exceeds_the_chunk(begin: int) -> None:
    assert announced_chunk_bytes(b"0123456789abcdef\r\n"[begin:], 0) <= 0x0123456789ABCDEF


@pytest.mark.parametrize(
    ("reason", "data", "text"),
    [
        ("Invalid HTTP version", b"GET / HTTP/1.2\r\n", "expected HTTP/1.1 or HTTP/1.0, got HTTP/1.2"),
        ("Invalid HTTP version", b"GET / HTTP/1.1\r\n\r\nGET / HTTP/7.1\r\n", "got HTTP/7.1"),
        ("Invalid HTTP version", b".3\r\n", "got another version"),
        ("Pause on PRI/Upgrade", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "got HTTP/2.0"),
    ],
)
def test_other_http_versions_are_named(reason: str, data: bytes, text: str) -> None:
    error = parse_error(httptools.HttpParserError(reason), memoryview(data))
    assert (error.kind, failure(error).status) == (ErrorKind.UNSUPPORTED, 505)
    assert error.message.endswith(text)


def test_rejection_has_the_reason_of_the_parser() -> None:
    error = parse_error(httptools.HttpParserInvalidMethodError("Invalid method encountered"), b"")
    assert (error.kind, error.message) == (
        ErrorKind.INVALID_INPUT,
        "malformed HTTP request: invalid method encountered",
    )


def test_tls_on_a_plain_port_is_named() -> None:
    fault = httptools.HttpParserInvalidMethodError("Invalid method encountered")
    error = parse_error(fault, memoryview(b"\x16\x03\x01\x02\x00\x01"))
    assert error.message == "malformed HTTP request: got a TLS handshake, but this port has no TLS: use http://"


def test_head_that_arrives_in_parts_is_limited_by_all_its_bytes() -> None:
    unfinished = UnfinishedInput(1000)
    headers = [(b"host", b"x")]
    assert not unfinished.includes(headers)
    assert unfinished.check(Stage.HEADERS, b"/v2", headers, 5000, 0) is None, "most of the read is another request"
    assert unfinished.includes(headers)
    visible = header_bytes(b"/v2", headers)
    assert unfinished.check(Stage.HEADERS, b"/v2", headers, 1000 - visible, 0) is None
    error = unfinished.check(Stage.HEADERS, b"/v2", headers, 1, 0)
    assert error is not None
    assert error.kind is ErrorKind.HEADERS_TOO_LARGE
    assert unfinished.check(Stage.HEADERS, b"/v2", [(b"host", b"y")], 1000, 0) is None, "another request"


def test_framing_of_a_body_is_limited_by_its_content() -> None:
    unfinished = UnfinishedInput(1000)
    headers = [(b"host", b"x")]
    assert unfinished.check(Stage.BODY, b"/v2", headers, 5000, 100) is None, "its first read holds the head, too"
    assert unfinished.check(Stage.BODY, b"/v2", headers, 1000 + 17 * 50, 150) is None
    error = unfinished.check(Stage.BODY, b"/v2", headers, 1, 150)
    assert error is not None
    assert error.kind is ErrorKind.HEADERS_TOO_LARGE
