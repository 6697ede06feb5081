"""Bodies inflated within bounds, and compressed only if that shrinks them."""

import contextlib
import gzip
import os
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortserve.codecs.compression import Encoding, Inflater, compress, compress_long, is_worth_compressing
from ortserve.core.large_memory import LargeMemory
from ortserve.errors import ErrorKind, ServeError

LIMIT = 1000
BOTH = list(Encoding)


def inflate(body: bytes, encoding: Encoding, *, limit: int = LIMIT, step: int = 300) -> bytes:
    inflater = Inflater(body, encoding, limit)
    parts = []
    while not inflater.is_done:
        parts.append(inflater.read(step))
        assert len(parts[-1]) <= step
    return b"".join(parts)


def refusal(body: bytes, encoding: Encoding, limit: int = LIMIT) -> ServeError:
    with pytest.raises(ServeError) as caught:
        inflate(body, encoding, limit=limit)
    return caught.value


@given(st.binary(max_size=LIMIT), st.sampled_from(BOTH), st.integers(1, 1500))
def test_body_is_inflated_in_steps_of_any_size(body: bytes, encoding: Encoding, step: int) -> None:
    assert inflate(compress(body, encoding), encoding, step=step) == body


@pytest.mark.parametrize("encoding", BOTH)
def test_long_body_is_compressed_in_steps_to_lent_memory(encoding: Encoding) -> None:
    memory = LargeMemory()
    for body in (b"", b"a", os.urandom(1_000_000), b"1.5, " * 300_000):
        smaller = compress_long(body, encoding, memory)
        assert zlib.decompress(smaller, zlib.MAX_WBITS + 32) == body
        assert len(smaller) <= len(compress(body, encoding)) * 1.01 + 20
    assert memory.kept_bytes >= 1_000_000


def test_bodies_agree_with_other_programs() -> None:
    body = os.urandom(600)
    assert gzip.decompress(compress(body, Encoding.GZIP)) == body
    assert zlib.decompress(compress(body, Encoding.DEFLATE)) == body
    assert inflate(gzip.compress(body, 9), Encoding.GZIP) == body
    assert inflate(zlib.compress(body, 9), Encoding.DEFLATE) == body


@pytest.mark.parametrize("encoding", BOTH)
def test_limit_is_exact(encoding: Encoding) -> None:
    assert len(inflate(compress(bytes(LIMIT), encoding), encoding)) == LIMIT
    error = refusal(compress(bytes(LIMIT + 1), encoding), encoding)
    assert error.kind is ErrorKind.TOO_LARGE
    assert "larger than max_body_bytes" in error.message
    assert encoding.value in error.message


@pytest.mark.parametrize("encoding", BOTH)
def test_decompression_bomb_stays_within_the_limit(encoding: Encoding) -> None:
    bomb = compress(bytes(64 * 1024 * 1024), encoding)
    limit = 4 * 1024 * 1024
    assert len(bomb) < limit
    tracemalloc.start()
    try:
        with pytest.raises(ServeError) as caught:
            inflate(bomb, encoding, limit=limit, step=limit * 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.kind is ErrorKind.TOO_LARGE
    assert peak < 4 * limit


@pytest.mark.parametrize("encoding", BOTH)
def test_truncated_body_is_rejected(encoding: Encoding) -> None:
    whole = compress(os.urandom(100), encoding)
    for size in range(len(whole)):
        error = refusal(whole[:size], encoding)
        assert error.kind is ErrorKind.INVALID_INPUT
        assert encoding.value in error.message


@pytest.mark.parametrize("encoding", BOTH)
@given(noise=st.binary(max_size=200))
def test_random_bytes_are_inflated_or_rejected(encoding: Encoding, noise: bytes) -> None:
    with contextlib.suppress(ServeError):
        inflate(noise, encoding)


@pytest.mark.parametrize("encoding", BOTH)
def test_trailing_bytes_are_rejected_and_counted(encoding: Encoding) -> None:
    whole = compress(b"body", encoding)
    assert "3 bytes follow its end" in refusal(whole + b"abc", encoding).message
    long = os.urandom(70_000)  # more than is decompressed in one step
    assert f"{70_000} bytes follow its end" in refusal(whole + long, encoding).message


@given(st.lists(st.binary(max_size=LIMIT // 5), min_size=1, max_size=4), st.integers(1, 1500))
def test_body_of_several_gzip_members_is_inflated(bodies: list[bytes], step: int) -> None:
    """As ``cat a.gz b.gz``, ``bgzip`` and some HTTP clients make them."""
    members = [compress(body, Encoding.GZIP) for body in bodies]
    assert inflate(b"".join(members), Encoding.GZIP, step=step) == b"".join(bodies)
    assert "truncated" in refusal(b"".join([*members, members[0][:-1]]), Encoding.GZIP).message


def test_members_share_the_limit_and_have_one() -> None:
    half = compress(bytes(LIMIT // 2), Encoding.GZIP)
    assert len(inflate(half * 2, Encoding.GZIP)) == LIMIT
    assert refusal(half * 2 + compress(b"x", Encoding.GZIP), Encoding.GZIP).kind is ErrorKind.TOO_LARGE
    assert "at most 4096 members" in refusal(compress(b"", Encoding.GZIP) * 4097, Encoding.GZIP).message
    streams = compress(b"a", Encoding.DEFLATE) * 2
    assert "bytes follow its end" in refusal(streams, Encoding.DEFLATE).message


def test_wrong_checksum_is_rejected() -> None:
    whole = bytearray(compress(b"body", Encoding.GZIP))
    whole[-8] ^= 1
    assert "incorrect data check" in refusal(bytes(whole), Encoding.GZIP).message


def test_stream_without_output_ends() -> None:
    stored = zlib.compressobj(0, zlib.DEFLATED, 15)
    empty = b"".join(stored.flush(zlib.Z_FULL_FLUSH) for _ in range(50_000)) + stored.flush()
    assert inflate(empty, Encoding.DEFLATE) == b""


def test_only_shrinking_bodies_are_compressed() -> None:
    assert is_worth_compressing(b"[" + b"0.123456," * 3000)
    assert is_worth_compressing(bytes(100_000))
    assert not is_worth_compressing(os.urandom(100_000))
    assert not is_worth_compressing(b"{}" + os.urandom(100_000))
    assert not is_worth_compressing(b"")
