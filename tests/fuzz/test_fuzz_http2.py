"""Bad HTTP/2 on the gRPC port: every connection ends in time and releases its resources."""

import errno
import random
import socket
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import psutil
import pytest

from encodings_of_requests import grpc_raw
from fuzz.bounds import CASES, LONG_ENOUGH, SEED, watching_memory
from fuzz.messages import good_infer
from fuzz.mutations import flip
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.header_blocks import literal
from servers import SHORT_WARMUP, ServerProcess, read_metrics, serving, wait_for_sample

pytestmark = LONG_ENOUGH

CONNECTIONS: Final = CASES // 10
"""Number of connections, each with a few calls."""
MAX_S: Final = 20.0
MAX_GROWTH: Final = 100 * 2**20

PATHS: Final = ("ModelInfer", "ModelStreamInfer", "ServerLive", "ModelConfig", "Nothing")
INFER: Final = good_infer().SerializeToString()
LARGE: Final = b"\x3a\x80\x80\x80\x01" + bytes(2**21)
"""The beginning of raw contents of 2 MiB; the case may contain fewer bytes."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("--example", *SHORT_WARMUP, "--grpc-transport=native", "--max-body-bytes", "4000000") as server:
        yield server


def call_frames(rng: random.Random, stream_id: int) -> list[bytes]:
    """The frames of a valid call, except for the given changes."""
    path = f"/inference.GRPCInferenceService/{rng.choice(PATHS)}".encode()
    block = b"\x83\x86" + literal(b":path", path) + literal(b"content-type", b"application/grpc")
    if rng.random() < 0.3:
        name, value = rng.choice(((b"grpc-timeout", b"1m"), (b"grpc-encoding", b"gzip"), (b"x", b"y" * 5000)))
        block += bytes((rng.choice((0x00, 0x40)),)) + literal(name, value)[1:]
    is_large = rng.random() < 0.05
    message = INFER + LARGE[: rng.choice((66_000, 300_000, 1_500_000))] if is_large else INFER
    count = rng.choice((1, 1, 1, 0, 2, 2 if is_large else 20))
    body = b"".join(b"\0" + len(message).to_bytes(4, "big") + message for _ in range(count))
    size = rng.choice((16_384, 200_000, 1_000_000) if is_large else (16_384, 16_384, 100, 7))
    parts = [body[begin : begin + size] for begin in range(0, len(body), size)][:500] or [b""]
    sent = [frames.header_block(stream_id, block, rng.choice((16_384, 50)), is_end=False)]
    sent += [frames.frame(frames.DATA, 0, stream_id, part) for part in parts[:-1]]
    sent.append(frames.frame(frames.DATA, rng.choice((1, 1, 1, 0)), stream_id, parts[-1]))
    return sent


def other_frame(rng: random.Random, stream_id: int) -> bytes:
    """Another frame that is almost valid."""
    value = rng.choice((0, 1, 100, 16_384, 65_535, 2**31 - 1, 2**32 - 1))
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: frames.settings({rng.randrange(1, 8): value}),
        lambda: frames.frame(frames.SETTINGS, frames.ACK, 0),
        lambda: frames.window_update(rng.choice((0, stream_id)), value & frames.MAX_WINDOW),
        lambda: frames.frame(frames.PING, rng.choice((0, 1)), 0, rng.randbytes(8)),
        lambda: frames.rst_stream(stream_id, rng.choice(list(frames.ErrorCode))),
        lambda: frames.goaway(value & frames.MAX_STREAM_ID, frames.ErrorCode.NO_ERROR, rng.randbytes(5)),
        lambda: frames.frame(frames.PRIORITY, 0, stream_id, rng.randbytes(5)),
        lambda: frames.frame(rng.randrange(256), rng.randrange(256), stream_id, rng.randbytes(rng.randrange(50))),
    )
    return rng.choice(makers)()


def connection(rng: random.Random) -> bytes:
    """All bytes of a peer: some calls with interleaved frames, some of them changed."""
    calls = [call_frames(rng, 2 * number + 1) for number in range(rng.randrange(1, 6))]
    sent = [frames.PREFACE, frames.settings({})]
    while any(calls):
        number = rng.randrange(len(calls))
        if calls[number]:
            sent.append(calls[number].pop(0))
        if rng.random() < 0.1:
            sent.append(other_frame(rng, 2 * number + 1))
    kind = rng.randrange(6)
    if kind == 0:
        number = rng.randrange(len(sent))
        sent[number] = flip(rng, sent[number])
    elif kind == 1:
        sent.insert(rng.randrange(len(sent)), rng.choice(sent))
    elif kind == 2:
        del sent[rng.randrange(len(sent))]
    elif kind == 3:
        sent.insert(rng.randrange(1, len(sent) + 1), rng.randbytes(rng.randrange(1, 60)))
    data = b"".join(sent)
    return data[: rng.randrange(len(data))] if kind == 4 else data


def exchange(server: ServerProcess, rng: random.Random) -> bytes:
    """Send all bytes in pieces of any size, and read until the server closes."""
    host, port = server.grpc.split(":")
    data = connection(rng)
    received = bytearray()
    with socket.create_connection((host, int(port)), timeout=MAX_S) as peer:
        try:
            if rng.random() < 0.1:
                for begin in range(0, min(len(data), 2000), 50):
                    peer.sendall(data[begin : begin + 50])
                data = data[2000:]
            peer.sendall(data)
            if rng.random() < 0.1:
                return b""  # closed without an answer
            peer.shutdown(socket.SHUT_WR)
            while part := peer.recv(65536):
                received += part
        except ConnectionError:  # reset, because the client sent bytes after the end
            pass
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # a reset that shutdown is the first to notice
                raise
    return bytes(received)


def test_bad_connections_end_in_time_and_release_everything(server: ServerProcess) -> None:
    process = psutil.Process(server.pid)
    for number in range(100):  # until all one-time allocations exist
        exchange(server, random.Random(f"{SEED}/warm/{number}"))
    files = process.num_fds()
    codes: dict[int, int] = {}
    answered = 0
    with watching_memory(server, most_growth=MAX_GROWTH) as memory:
        for number in range(CONNECTIONS):
            received = exchange(server, random.Random(f"{SEED}/{number}"))
            answered += b"grpc-status" in received
            position = 0
            while position + 9 <= len(received):
                length_and_kind, _, _ = frames.read_header(received, position)
                if length_and_kind & 0xFF == frames.GOAWAY:
                    code = int.from_bytes(received[position + 13 : position + 17], "big")
                    codes[code] = codes.get(code, 0) + 1
                position += 9 + (length_and_kind >> 8)
            assert process.is_running()
            memory.after(f"{SEED}/{number}")
    assert codes.get(frames.ErrorCode.INTERNAL_ERROR, 0) == 0
    assert "Traceback" not in server.output
    # The cases must be varied.
    assert answered > CONNECTIONS / 10
    assert codes[frames.ErrorCode.PROTOCOL_ERROR] > CONNECTIONS / 50
    ones = {name: np.ones((1, 16), np.int32) for name in ("INPUT0", "INPUT1")}
    assert (grpc_raw(server, "simple", ones)["OUTPUT0"] == 2).all()
    wait_for_sample(server, "ortserve_grpc_streams", lambda open_now: open_now == 0)
    assert read_metrics(server).by_labels("ortserve_queue_rows", "model") == {}
    assert process.num_fds() <= files + 5
