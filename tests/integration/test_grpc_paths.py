"""Calls with an arbitrary unknown ``:path`` fail alone, on both transports."""

import asyncio

import grpc
import hpack
import pytest

from fakes.service import FakeInferenceService, FakeModelService
from grpc_frontends import LONG_S, frontend, infer_request
from ortserve.frontends.grpc.calls import SERVICE_NAME
from ortserve.frontends.grpc.native import frames
from transports import ON_BOTH_TRANSPORTS

pytestmark = ON_BOTH_TRANSPORTS

INFER = f"/{SERVICE_NAME}/ModelInfer"
PATHS = (b"/a/\xff\xfe", b"/\xc3(/x", b"/" + SERVICE_NAME.encode() + b"/\x80", b"/a/b%ff", b"//", b"/\xed\xa0\x80/x")


def call(path: bytes) -> bytes:
    """The bytes of a connection that makes a call with this path."""
    headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")]
    block = hpack.Encoder().encode([*headers, (b"content-type", b"application/grpc"), (b"te", b"trailers")])
    return b"".join(
        (
            frames.PREFACE,
            frames.settings({}),
            frames.header_block(1, block, frames.MIN_FRAME_SIZE, is_end=False),
            frames.frame(frames.DATA, frames.END_STREAM, 1, bytes(5)),
        )
    )


@pytest.mark.parametrize("path", PATHS)
async def test_any_path_leaves_the_port_serving(path: bytes, grpc_transport: str) -> None:
    inference = FakeInferenceService()
    async with frontend(inference, FakeModelService(), grpc_transport) as (front, channel):
        send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(INFER)
        held = send(infer_request("held"), timeout=LONG_S)
        await asyncio.wait_for(inference.held.wait(), LONG_S)
        host, _, port = front.address.rpartition(":")
        for _ in range(4):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(call(path))
            await asyncio.wait_for(reader.readuntil(b"grpc-status"), LONG_S)
            writer.close()
            assert await send(infer_request("double"), timeout=LONG_S)
        inference.release.set()
        assert await held
