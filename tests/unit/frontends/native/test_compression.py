"""Messages with and without their compression."""

import gzip
import zlib

import grpc
import pytest

from ortserve.frontends.grpc.native.compression import deflate, inflate
from ortserve.frontends.grpc.native.messages import RefusedMessageError


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
@pytest.mark.parametrize("message", [b"", b"x", bytes(100_000)])
def test_message_comes_back(encoding: bytes, message: bytes) -> None:
    assert inflate(deflate(message, encoding), encoding, len(message)) == message


def test_other_peoples_compression_is_understood() -> None:
    assert inflate(gzip.compress(b"hello"), b"gzip", 100) == b"hello"
    assert inflate(zlib.compress(b"hello"), b"deflate", 100) == b"hello"


@pytest.mark.parametrize(
    ("message", "encoding", "code"),
    [
        (b"x", b"identity", grpc.StatusCode.INTERNAL),
        (b"x", b"br", grpc.StatusCode.UNIMPLEMENTED),
        (b"x", b"gzip", grpc.StatusCode.INTERNAL),
        (gzip.compress(b"hello")[:-9], b"gzip", grpc.StatusCode.INTERNAL),
        (gzip.compress(b"hello") + b"more", b"gzip", grpc.StatusCode.INTERNAL),
        (gzip.compress(bytes(101)), b"gzip", grpc.StatusCode.RESOURCE_EXHAUSTED),
        (gzip.compress(bytes(10_000_000), 1), b"gzip", grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    # Those of gzip hold the time.
    ids=["identity", "unknown", "nothing of gzip", "cut off", "more behind", "too long", "far too long"],
)
def test_what_cannot_be_inflated_is_refused(message: bytes, encoding: bytes, code: grpc.StatusCode) -> None:
    with pytest.raises(RefusedMessageError) as caught:
        inflate(message, encoding, 100)
    assert caught.value.code is code
