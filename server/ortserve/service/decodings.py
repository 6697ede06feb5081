"""Decoding on threads: reserves the memory of requests, and releases it once no thread uses it."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ortserve.codecs.bounds import INLINE_TEXTS, JSON_GROWTH
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import InflightRequest
from ortserve.core.request import InferRequest
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.codec_threads import CodecThreads, no_longer_waits
from ortserve.service.gate import BodyGate, Hold, memory_bytes

T = TypeVar("T")


class Decodings:
    """Reserves the memory of requests while threads decode them. Loop thread only."""

    def __init__(self, gate: BodyGate, codecs: CodecThreads) -> None:
        self._gate = gate
        self._codecs = codecs
        self._most_text_bytes = gate.max_bytes // 2
        self._running = 0
        """Number of requests whose memory is reserved and that are not decoded yet."""
        self._ended = 0
        """Number of decodings that have ended."""
        self._waiting: deque[_Waiting] = deque()

    def begin(
        self,
        decode: Callable[[], asyncio.Future[InferRequest]],
        call: InflightRequest,
        growth_bytes: int,
        *,
        json_bytes: int = 0,
    ) -> tuple[asyncio.Task[InferRequest], Hold]:
        """Decode the request of a call once its memory is reserved.

        It waits for memory, for as many decodings as were ahead of it: most requests need much less for their tensors
        than for decoding. Later requests that fit do not wait for it. A reservation for texts is at most half of the
        limit, so that a body of any size is admitted alone.

        Args:
            decode: Begins to decode on a thread.
            call: The call; not decoded if it is settled before.
            growth_bytes: Memory that decoding may take.
            json_bytes: JSON in the body, if another process decodes it. Its size is limited otherwise, so its memory is
                reserved whole.

        Returns:
            The decoded request, which fails as ``decode`` does, or with the error overloaded; and its reservation,
            which then is that of the tensors.
        """
        hold = self._gate.hold(0)
        nbytes = min(growth_bytes, max(self._most_text_bytes, (JSON_GROWTH + 1) * json_bytes))
        return asyncio.get_running_loop().create_task(self._decode(decode, call, hold, nbytes)), hold

    async def _decode(
        self, decode: Callable[[], asyncio.Future[InferRequest]], call: InflightRequest, hold: Hold, nbytes: int
    ) -> InferRequest:
        last = self._ended + self._running + len(self._waiting)
        waiting = _Waiting(call, hold, nbytes, asyncio.get_running_loop().create_future(), last)
        if not self._reserve(waiting):
            self._waiting.append(waiting)
        await waiting.reserved
        try:
            request = await decode()
            measure = partial(memory_bytes, request.inputs)
            has_many = (
                sum([each.array.size for each in request.inputs if each.datatype is DataType.BYTES]) > INLINE_TEXTS
            )
            hold.set_unchecked(await self._codecs.run(measure, call) if has_many else measure())
        except BaseException:
            hold.release()  # before the next one tries to reserve
            raise
        finally:
            self._running -= 1
            self._ended += 1
            self._continue_waiting()
        return request

    def _reserve(self, waiting: "_Waiting") -> bool:
        """Settle a request that waits for memory, if possible. Returns False if it has to wait for others."""
        if waiting.reserved.done():  # cancelled with its task
            return True
        if waiting.call.is_settled:
            waiting.reserved.set_exception(no_longer_waits())
            return True
        try:
            waiting.hold.grow(waiting.nbytes)
        except ServeError as error:
            if self._running and self._ended < waiting.last:
                return False
            waiting.reserved.set_exception(error)
        else:
            self._running += 1
            waiting.reserved.set_result(None)
        return True

    def _continue_waiting(self) -> None:
        """Reserve memory for the requests that wait, in order, until one does not fit.

        If all tried again after each end, and waited for all that run, hundreds of them would block the event loop.
        """
        for waiting in self._waiting:
            if waiting.call.is_settled:
                self._reserve(waiting)  # frees its body, although it is not the first
        while self._waiting and self._reserve(self._waiting[0]):
            self._waiting.popleft()


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that is decoded once ``nbytes`` are added to ``hold``; ``reserved`` then has a result, or an error.

    If they are still missing when ``last`` decodings have ended, it is rejected.
    """

    call: InflightRequest
    hold: Hold
    nbytes: int
    reserved: asyncio.Future[None]
    last: int


async def decoded_in(decoding: asyncio.Future[T], left_ns: int | None) -> T:
    """Wait for a decoded request for ``left_ns``; None without a limit.

    Decoding continues after a cancellation or the limit: a thread cannot be stopped.

    Raises:
        ServeError: The error of decoding; deadline, after the limit.
    """
    decoding.add_done_callback(_note_error)
    await asyncio.wait((decoding,), timeout=None if left_ns is None else left_ns / 1e9)
    if not decoding.done():
        raise ServeError(ErrorKind.DEADLINE, "deadline cannot be met: it passed before the request was decoded")
    return decoding.result()


def _note_error(decoding: asyncio.Future[Any]) -> None:
    """Mark the error of decoding as retrieved, which nothing else does for a call that was answered before."""
    if not decoding.cancelled():
        decoding.exception()


def release_when_decoded(decoding: asyncio.Future[T], hold: Hold, _: object) -> None:
    """Release memory once no thread uses it: decoding continues on its thread after a call is cancelled."""
    if decoding.done():
        hold.release()
        _note_error(decoding)  # the task of a call that was cancelled at once has not begun to wait
    else:
        decoding.add_done_callback(partial(release_when_decoded, decoding, hold))


def hold_until_decoded(decoding: asyncio.Future[Any], gate: BodyGate, size: int) -> None:
    """Reserve memory for a body of ``size`` bytes while a thread refers to it.

    For a call that no longer waits: its protocol releases the reservation of the body.
    """
    if not decoding.done():
        hold = gate.hold(0)
        hold.set_unchecked(size)
        release_when_decoded(decoding, hold, None)
