"""Requests wait for the memory of decoding, in their order."""

import asyncio
from typing import Any

from ortserve.codecs.rest import RestRequest
from ortserve.core.encoded import DecodingPlace
from ortserve.core.inflight import InflightRequest
from ortserve.core.request import InferRequest
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.codec_threads import CodecThreads
from ortserve.service.decodings import Decodings
from ortserve.service.gate import BodyGate, Hold

SIZE = 100
DECODED = InferRequest("m", "", "", [], [], {})


class CountingGate:
    """A gate that counts reservations, also those that it rejects."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.gate = BodyGate(max_bytes)
        self.tries = 0

    def hold(self, _: int) -> "CountingHold":
        return CountingHold(self)


class CountingHold:
    def __init__(self, gate: CountingGate) -> None:
        self._gate = gate
        self._hold = Hold(gate.gate)
        self.release, self.set_unchecked = self._hold.release, self._hold.set_unchecked

    def grow(self, size: int) -> None:
        self._gate.tries += 1
        self._hold.grow(size)


class Stage:
    """Begins requests whose decoding ends when the test says so."""

    def __init__(self, max_running: int) -> None:
        self.gate = CountingGate(max_running * SIZE)
        gate: Any = self.gate
        self._decodings = Decodings(gate, CodecThreads(1))
        self.begun: list[asyncio.Future[InferRequest]] = []
        self.calls: list[InflightRequest] = []

    def begin(self, count: int, nbytes: int = SIZE) -> list[asyncio.Task[InferRequest]]:
        tasks = []
        for _ in range(count):
            self.calls.append(InflightRequest(Timing(0)))
            tasks.append(self._decodings.begin(self._decode, self.calls[-1], nbytes, json_bytes=nbytes)[0])
        return tasks

    def _decode(self) -> asyncio.Future[InferRequest]:
        self.begun.append(asyncio.get_running_loop().create_future())
        return self.begun[-1]


async def turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_end_of_a_decoding_wakes_only_requests_that_fit() -> None:
    """All others tried again and waited for all that ran: with 400 of them, each end blocked the loop for 0.6 s."""
    stage = Stage(20)
    tasks = stage.begin(60)
    await turns()
    assert len(stage.begun) == 20
    for ended in range(40):
        tries = stage.gate.tries
        stage.begun[ended].set_result(DECODED)
        await turns()
        assert len(stage.begun) == 21 + ended
        assert stage.gate.tries - tries <= 2
    for decoding in stage.begun[40:]:
        decoding.set_result(DECODED)
    await asyncio.gather(*tasks)
    assert stage.gate.gate.held_bytes == 0


async def test_cancelled_request_is_dropped_although_one_before_it_waits() -> None:
    stage = Stage(3)
    running = stage.begin(3)
    large, other = stage.begin(1, 3 * SIZE) + stage.begin(1, 3 * SIZE)
    await turns()
    stage.calls[-1].cancel()
    stage.begun[0].set_result(DECODED)
    await turns()
    error = other.exception()
    assert isinstance(error, ServeError)
    assert error.kind is ErrorKind.CANCELLED
    assert not large.done()
    for decoding in stage.begun[1:]:
        decoding.set_result(DECODED)
    await turns()
    stage.begun[-1].set_result(DECODED)
    await asyncio.gather(*running, large)


async def test_request_that_does_not_fit_is_rejected_after_the_last_decoding_ends() -> None:
    stage = Stage(2)
    with Hold(stage.gate.gate) as tensors:
        tensors.grow(SIZE)
        running, too_large = stage.begin(1) + stage.begin(1, 2 * SIZE)
        await turns()
        assert not too_large.done()
        stage.begun[0].set_result(DECODED)
        await turns()
        error = too_large.exception()
    assert isinstance(error, ServeError)
    assert error.kind is ErrorKind.OVERLOADED
    await running


async def test_request_that_others_overtake_is_rejected_after_as_many_as_were_ahead() -> None:
    """Otherwise it would wait, with its body, for as long as smaller requests keep coming."""
    stage = Stage(3)
    small = stage.begin(2)
    await turns()
    (large,) = stage.begin(1, 3 * SIZE)
    await turns()
    for ended in range(2):
        assert not large.done()
        small += stage.begin(1)
        await turns()
        stage.begun[ended].set_result(DECODED)
        await turns()
    error = large.exception()
    assert isinstance(error, ServeError)
    assert error.kind is ErrorKind.OVERLOADED
    for decoding in stage.begun[2:]:
        decoding.set_result(DECODED)
    await asyncio.gather(*small)
    assert stage.gate.gate.held_bytes == 0


async def test_large_tensors_behind_json_are_admitted_alone() -> None:
    """Behind JSON of more than 64 KiB, five times their size was reserved, as for texts."""
    head, tensors, limit = 70_000, 4_000_000, 10_000_000
    body = RestRequest(bytes(head + tensors), head, "m", "")
    assert body.decoding_place() is DecodingPlace.PROCESS
    gate = BodyGate(limit)
    decodings = Decodings(gate, CodecThreads(1))
    begun: asyncio.Future[InferRequest] = asyncio.get_running_loop().create_future()
    begun.set_result(DECODED)
    with gate.hold(head + tensors):
        call = InflightRequest(Timing(0))
        decoding, hold = decodings.begin(lambda: begun, call, body.growth_bytes, json_bytes=body.json_bytes)
        assert await decoding is DECODED
        hold.release()
    assert gate.held_bytes == 0
