"""Connections whose bytes take long are read in short parts, and only as long as they do."""

import asyncio
import time
from typing import Final

import pytest

from fakes.transport import FakeTransport
from ortserve.frontends.long_reads import SHORT_READ_BYTES, end_read

LONG: Final = 256 * 1024


class Reader(asyncio.Protocol):
    """Takes ``read_s`` for each read, and stores their sizes."""

    def __init__(self, read_s: float) -> None:
        self.read_s = read_s
        self.sizes: list[int] = []
        self.transport = FakeTransport(asyncio.get_running_loop(), self)

    def data_received(self, data: bytes) -> None:
        began_ns = time.monotonic_ns()
        time.sleep(self.read_s)
        self.sizes.append(len(data))
        if len(data) > SHORT_READ_BYTES:
            end_read(self, self.transport, lambda: True, len(data), began_ns)


async def test_costly_read_is_followed_by_short_ones_until_they_are_cheap() -> None:
    reader = Reader(read_s=0.003)
    reader.transport.receive(bytes(LONG + 2 * SHORT_READ_BYTES))
    assert reader.sizes == [LONG, SHORT_READ_BYTES, SHORT_READ_BYTES]
    reader.transport.receive(b"a part that does not fill the buffer")
    reader.read_s = 0.0
    for _ in range(100):  # another program may have the processor during one of them
        reader.transport.receive(bytes(SHORT_READ_BYTES))
    reader.sizes.clear()
    reader.transport.receive(bytes(LONG))
    assert reader.sizes == [LONG]


async def test_protocol_that_took_the_place_of_the_reader_stays() -> None:
    reader = Reader(read_s=0.003)
    other = asyncio.BufferedProtocol()
    reader.transport.set_protocol(other)
    reader.data_received(bytes(LONG))
    assert reader.transport.get_protocol() is other


@pytest.mark.parametrize("size", [SHORT_READ_BYTES + 1, LONG])
async def test_cheap_read_is_followed_by_another_of_any_size(size: int) -> None:
    reader = Reader(read_s=0.0)
    for _ in range(100):
        reader.transport.receive(bytes(size))
    assert reader.sizes.count(size) > 50
