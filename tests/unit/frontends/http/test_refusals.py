"""Why a request is refused before it is whole, by literals."""

import httptools
import pytest

from ortserve.errors import ErrorKind
from ortserve.frontends.http.answers import failure
from ortserve.frontends.http.refusals import announced_chunk_bytes, malformed


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
def test_size_of_a_chunk_is_that_of_the_line_before_its_content(data: bytes, content_bytes: int, size: int) -> None:
    assert announced_chunk_bytes(data, content_bytes) == size


@pytest.mark.parametrize("begin", range(1, 16))
def test_rest_of_a_line_never_spells_more_than_the_chunk_has(begin: int) -> None:
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
def test_other_versions_are_named_where_they_are_seen(reason: str, data: bytes, text: str) -> None:
    error = malformed(httptools.HttpParserError(reason), memoryview(data))
    assert (error.kind, failure(error).status) == (ErrorKind.UNSUPPORTED, 505)
    assert error.message.endswith(text)


def test_fault_of_a_request_is_the_parsers_reason() -> None:
    error = malformed(httptools.HttpParserInvalidMethodError("Invalid method encountered"), b"")
    assert (error.kind, error.message) == (
        ErrorKind.INVALID_INPUT,
        "malformed HTTP request: invalid method encountered",
    )
