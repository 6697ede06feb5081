"""Long reads are processed in parts: one iteration of the loop has a time limit, and no byte is lost or moved."""

import asyncio
import time
from typing import Final

import pytest

from fakes.transport import FakeTransport
from ortserve.frontends.long_reads import SHORT_READ_BYTES, read_long, resume_reads

LONG: Final = 256 * 1024
COSTLY_S: Final = 0.003


class Reader(asyncio.Protocol):
    """Takes ``part_s`` for each part, and stores the received bytes."""

    def __init__(self, part_s: float) -> None:
        self.part_s = part_s
        self.parts: list[bytes] = []
        self.reads: list[bytes] = []
        self.ends: list[int] = []
        self.is_paused = False
        self.progress = asyncio.Event()
        self.transport = FakeTransport(asyncio.get_running_loop(), self)

    def data_received(self, data: bytes) -> None:
        if len(data) > SHORT_READ_BYTES:
            read_long(self, self.transport, data)
        else:
            self.on_part(data)
            self.on_read(data)

    def on_part(self, data: bytes) -> None:
        if self.part_s:
            time.sleep(self.part_s)
        self.parts.append(data)
        self.progress.set()

    def on_read(self, data: bytes) -> None:
        self.reads.append(data)

    def may_read(self) -> bool:
        return not self.is_paused

    def eof_received(self) -> bool:
        self.ends.append(sum(map(len, self.parts)))
        return False

    async def have_processed(self, nbytes: int) -> None:
        async with asyncio.timeout(30):
            while sum(map(len, self.parts)) < nbytes:
                self.progress.clear()
                await self.progress.wait()


def content(nbytes: int) -> bytes:
    return b"".join(number.to_bytes(4, "big") for number in range(nbytes // 4))


async def test_costly_read_takes_one_part_in_a_turn_and_nothing_is_read_meanwhile() -> None:
    reader = Reader(COSTLY_S)
    data = content(LONG)
    reader.transport.receive(data)
    first = len(reader.parts)
    assert first == 1
    assert not reader.transport.is_reading()
    await reader.have_processed(2 * len(reader.parts[0]))
    assert first < len(reader.parts) <= 3
    await reader.have_processed(LONG)
    assert b"".join(reader.parts) == data
    assert max(map(len, reader.parts)) < LONG / 8
    assert reader.reads == [data]
    assert reader.transport.is_reading()


async def test_costly_read_is_followed_by_short_ones_until_they_are_cheap() -> None:
    reader = Reader(COSTLY_S)
    reader.transport.receive(bytes(LONG))
    await reader.have_processed(LONG)
    reader.parts.clear()
    reader.transport.receive(bytes(2 * SHORT_READ_BYTES))  # the second half arrives as from a TLS session
    assert [*map(len, reader.parts)] == [SHORT_READ_BYTES]
    assert not reader.transport.is_reading()
    await reader.have_processed(2 * SHORT_READ_BYTES)
    assert reader.transport.is_reading()
    reader.transport.receive(b"a part that does not fill the buffer")
    reader.part_s = 0.0
    for _ in range(100):  # another program may have the processor during one of them
        reader.transport.receive(bytes(SHORT_READ_BYTES))
    assert reader.transport.get_protocol() is reader


async def test_rest_waits_until_the_reader_may_read_again() -> None:
    reader = Reader(COSTLY_S)
    data = content(LONG)
    reader.transport.receive(data)
    processed = len(reader.parts)
    reader.is_paused = True
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(reader.parts) == processed
    assert not reader.transport.is_reading()
    reader.is_paused = False
    resume_reads(reader.transport)
    await reader.have_processed(LONG)
    assert b"".join(reader.parts) == data
    assert reader.transport.is_reading()


async def test_reader_that_pauses_in_a_cheap_read_gets_no_more_of_it() -> None:
    reader = Reader(0)
    reader.is_paused = True
    reader.transport.receive(content(LONG))
    assert not reader.parts
    reader.is_paused = False
    resume_reads(reader.transport)
    await reader.have_processed(LONG)
    assert b"".join(reader.parts) == content(LONG)


async def test_bytes_that_arrive_before_the_rest_is_processed_follow_it() -> None:
    reader = Reader(COSTLY_S)
    data = content(LONG + 100)
    reader.transport.receive(data[:LONG])
    reader.transport.resume_reading()  # as a reader does that had paused the transport
    reader.transport.receive(data[LONG:])
    assert not reader.transport.is_reading()
    await reader.have_processed(len(data))
    assert b"".join(reader.parts) == data


async def test_end_of_the_peer_follows_the_rest() -> None:
    reader = Reader(COSTLY_S)
    reader.transport.receive(bytes(LONG))
    reader.transport.receive_eof()
    assert not reader.ends
    assert not reader.transport.is_closing()
    await reader.have_processed(LONG)
    assert reader.ends == [LONG]
    assert reader.transport.is_closing()


async def test_rest_of_a_lost_connection_is_dropped() -> None:
    reader = Reader(COSTLY_S)
    reader.transport.receive(bytes(LONG))
    count = len(reader.parts)
    reader.transport.abort()
    for _ in range(3):
        await asyncio.sleep(0)
    assert reader.transport.is_lost
    assert len(reader.parts) == count


@pytest.mark.parametrize("size", [SHORT_READ_BYTES + 1, LONG])
async def test_cheap_read_is_processed_in_one_turn(size: int) -> None:
    reader = Reader(0.0)
    whole = 0
    for _ in range(100):  # another program may have the processor during some of them
        reader.transport.receive(bytes(size))
        whole += reader.transport.get_protocol() is reader
        await reader.have_processed(size)
        reader.parts.clear()
        reader.transport.set_protocol(reader)
    assert whole > 50
