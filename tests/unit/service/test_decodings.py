"""Requests wait for the memory of decoding, in their order."""

import asyncio
import gc
import weakref

import pytest

from ortserve.codecs.rest import RestRequest
from ortserve.core.inflight import InflightRequest
from ortserve.core.request import DecodingPlace, InferRequest
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.codec_threads import CodecThreads
from ortserve.service.decodings import Decoding, Decodings
from ortserve.service.gate import BodyGate, Reservation

SIZE = 100
DECODED = InferRequest("m", "", "", [], [], {})


class CountingReservation:
    """Counts the reservations of all requests, also those that are rejected."""

    tries = 0

    def __init__(self, gate: BodyGate, size: int) -> None:
        self._reservation = Reservation(gate, size)
        self.release, self.set_unchecked = self._reservation.release, self._reservation.set_unchecked

    @property
    def size(self) -> int:
        return self._reservation.size

    def grow(self, size: int) -> None:
        CountingReservation.tries += 1
        self._reservation.grow(size)


class Body:
    """Can be referred to weakly."""


class Stage:
    """Begins requests whose decoding ends when the test says so."""

    def __init__(self, max_running: int) -> None:
        self.gate = BodyGate(max_running * SIZE)
        self._decodings = Decodings(self.gate, CodecThreads(1))
        self.begun: list[asyncio.Future[InferRequest]] = []
        self.decodings: list[Decoding] = []

    def begin(self, count: int, nbytes: int = SIZE) -> list[asyncio.Task[InferRequest]]:
        tasks = []
        for _ in range(count):
            call = InflightRequest(Timing(0))
            self.decodings.append(self._decodings.begin(self._decode, call, nbytes, json_bytes=nbytes))
            tasks.append(self.decodings[-1].task)
        return tasks

    def begin_with(self, body: "Body") -> Decoding:
        """Begin a request with a body."""
        return self._decodings.begin(lambda: self._decode(body), InflightRequest(Timing(0)), SIZE, json_bytes=SIZE)

    def _decode(self, _body: "Body | None" = None) -> asyncio.Future[InferRequest]:
        self.begun.append(asyncio.get_running_loop().create_future())
        return self.begun[-1]


async def turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_end_of_a_decoding_wakes_only_requests_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others tried again and waited for all that ran: with 400 of them, each end blocked the loop for 0.6 s."""
    monkeypatch.setattr("ortserve.service.decodings.Reservation", CountingReservation)
    stage = Stage(20)
    tasks = stage.begin(60)
    await turns()
    assert len(stage.begun) == 20
    for ended in range(40):
        tries = CountingReservation.tries
        stage.begun[ended].set_result(DECODED)
        await turns()
        assert len(stage.begun) == 21 + ended
        assert 0 < CountingReservation.tries - tries <= 2
    for decoding in stage.begun[40:]:
        decoding.set_result(DECODED)
    await asyncio.gather(*tasks)
    assert stage.gate.held_bytes == 0


async def test_cancelled_request_is_dropped_at_once() -> None:
    """It held its body, which nothing counted any more, until the next decoding ended."""
    stage = Stage(3)
    running = stage.begin(1, 2 * SIZE)
    large, small, waiting = stage.begin(1, 3 * SIZE) + stage.begin(1, SIZE) + stage.begin(1, 2 * SIZE)
    await turns()
    assert len(stage.begun) == 2, "the small one has overtaken the large one"
    body = Body()
    hidden = weakref.ref(body)
    stage.begin_with(body).release()
    del body
    stage.decodings[3].release()
    stage.decodings[1].release()
    await turns()
    assert large.cancelled()
    assert waiting.cancelled()
    assert hidden() is None
    for decoding in stage.begun:
        decoding.set_result(DECODED)
    await asyncio.gather(*running, small)
    assert stage.gate.held_bytes == 0


async def test_request_behind_a_dropped_one_is_decoded_as_soon_as_it_fits() -> None:
    stage = Stage(3)
    running = stage.begin(1, 2 * SIZE)
    stage.begin(1, 3 * SIZE)
    behind = stage.begin(1, 2 * SIZE)
    stage.gate.max_bytes = 4 * SIZE
    stage.decodings[1].release()
    await turns()
    assert len(stage.begun) == 2
    for decoding in stage.begun:
        decoding.set_result(DECODED)
    await asyncio.gather(*running, *behind)


async def test_memory_is_released_when_the_thread_of_a_cancelled_request_has_finished() -> None:
    stage = Stage(3)
    (running,) = stage.begin(1)
    await turns()
    stage.decodings[0].release()
    await turns()
    assert stage.gate.held_bytes == SIZE
    stage.begun[0].set_exception(ValueError())
    await turns()
    assert stage.gate.held_bytes == 0
    assert running.done()


async def test_failed_request_is_freed_without_the_garbage_collector() -> None:
    stage = Stage(3)
    body = Body()
    hidden = weakref.ref(body)
    decoding = stage.begin_with(body)
    del body
    gc.disable()
    try:
        await turns()
        stage.begun.pop().set_exception(ValueError())
        await turns()
        decoding.release()
        del decoding
        assert hidden() is None
    finally:
        gc.enable()


async def test_request_that_does_not_fit_is_rejected_after_the_last_decoding_ends() -> None:
    stage = Stage(2)
    with Reservation(stage.gate, SIZE):
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
    assert stage.gate.held_bytes == 0


async def test_large_tensors_behind_json_are_admitted_alone() -> None:
    """Behind JSON of more than 64 KiB, five times their size was reserved, as for texts."""
    head, tensors, limit = 70_000, 4_000_000, 10_000_000
    body = RestRequest(bytes(head + tensors), head, "m", "")
    assert body.decoding_place() is DecodingPlace.PROCESS
    gate = BodyGate(limit)
    decodings = Decodings(gate, CodecThreads(1))
    begun: asyncio.Future[InferRequest] = asyncio.get_running_loop().create_future()
    begun.set_result(DECODED)
    with Reservation(gate, head + tensors):
        call = InflightRequest(Timing(0))
        decoding = decodings.begin(lambda: begun, call, body.growth_bytes, json_bytes=body.json_bytes)
        assert await decoding.task is DECODED
        decoding.release()
    assert gate.held_bytes == 0


async def test_rejected_request_is_freed_without_the_garbage_collector() -> None:
    """The frames of its error referred to it, and the body stayed while memory was short."""
    stage = Stage(1)
    body = Body()
    hidden = weakref.ref(body)
    gc.disable()
    try:
        with Reservation(stage.gate, SIZE):
            decoding = stage.begin_with(body)
            del body
            with pytest.raises(ServeError, match="max_inflight_bytes") as raised:
                await decoding.result(None)
        decoding.release()
        await turns()
        del decoding, raised
        assert hidden() is None
    finally:
        gc.enable()
