"""Decoding on threads: reserves the memory of requests, and releases it once no thread uses it."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from ortserve.codecs.bounds import INLINE_TEXTS, JSON_GROWTH
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import InflightRequest
from ortserve.core.request import InferRequest
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.codec_threads import CodecThreads
from ortserve.service.gate import BodyGate, Reservation, memory_bytes


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
        self._waiting: OrderedDict[Decoding, None] = OrderedDict()
        """The requests that wait for memory, in their order."""

    def begin(
        self,
        decode: Callable[[], asyncio.Future[InferRequest]],
        call: InflightRequest,
        growth_bytes: int,
        *,
        json_bytes: int = 0,
        body_bytes: int = 0,
    ) -> "Decoding":
        """Decode the request of a call once its memory is reserved.

        It waits for memory, for as many decodings as were ahead of it: most requests need much less for their tensors
        than for decoding. Later requests that fit do not wait for it. A reservation for texts is at most half of the
        limit, so that a body of any size is admitted alone.

        Args:
            decode: Begins to decode on a thread.
            call: The call, for ``CodecThreads.run``.
            growth_bytes: Memory that decoding may take; 0 if all tensors become views of the body.
            json_bytes: JSON in the body, if another process decodes it. Its size is limited otherwise, so its memory is
                reserved whole.
            body_bytes: Size of the body. A call that ends before the thread releases its own reservation of it. If
                all tensors become views of the body, it is then reserved here until the thread has finished.

        Returns:
            The decoding, which fails as ``decode`` does, or with the error overloaded. The caller must release it.
        """
        nbytes = min(growth_bytes, max(self._most_text_bytes, (JSON_GROWTH + 1) * json_bytes))
        last = self._ended + self._running + len(self._waiting)
        decoding = Decoding(self, self._gate, nbytes, last, 0 if growth_bytes else body_bytes)
        if not self._reserve(decoding):
            self._waiting[decoding] = None
        work = self._decode(decode, call, decoding.reserved, decoding.reservation)
        decoding.task = asyncio.get_running_loop().create_task(work)
        return decoding

    def drop(self, decoding: "Decoding") -> None:
        """Drop a request that waits for memory, and with it the last reference to its body."""
        del self._waiting[decoding]
        decoding.reserved.cancel()
        self._continue_waiting()

    async def _decode(
        self,
        decode: Callable[[], asyncio.Future[InferRequest]],
        call: InflightRequest,
        reserved: asyncio.Future[None],
        reservation: Reservation,
    ) -> InferRequest:
        """Decode the request. A variable for the ``Decoding`` would close a cycle through the frames of an error."""
        try:
            await reserved
        finally:
            del reserved  # the same cycle
        try:
            request = await decode()
            if not reservation.size:
                return request
            measure = partial(memory_bytes, request.inputs)
            has_many = (
                sum([each.array.size for each in request.inputs if each.datatype is DataType.BYTES]) > INLINE_TEXTS
            )
            reservation.set_unchecked(await self._codecs.run(measure, call) if has_many else measure())
        except BaseException:
            reservation.release()  # before the next one tries to reserve
            raise
        finally:
            self._running -= 1
            self._ended += 1
            self._continue_waiting()
        return request

    def _reserve(self, decoding: "Decoding") -> bool:
        """Reserve memory for a request, or reject it. Returns False if it has to wait for others."""
        try:
            decoding.reservation.grow(decoding.nbytes)
        except ServeError as error:
            if self._running and self._ended < decoding.last:
                return False
            decoding.reserved.set_exception(error.with_traceback(None))  # a reference cycle: its frames
        else:
            self._running += 1
            decoding.reserved.set_result(None)
        return True

    def _continue_waiting(self) -> None:
        """Reserve memory for the requests that wait, in order, until one does not fit.

        If all tried again after each end, and waited for all that run, hundreds of them would block the event loop.
        """
        while self._waiting and self._reserve(next(iter(self._waiting))):
            self._waiting.popitem(last=False)


class Decoding:
    """The decoding of one request, with its memory. Loop thread only.

    Attributes:
        reservation: Memory reserved for decoding, and then for the tensors.
        nbytes: Memory that decoding may take.
        last: Number of decodings after whose end the request is rejected if its memory is still missing.
        late_bytes: Memory reserved if the call ends before the thread that uses it.
        reserved: Has a result once the memory is reserved, or the error.
        task: Decodes the request.
    """

    task: asyncio.Task[InferRequest]

    def __init__(self, decodings: Decodings, gate: BodyGate, nbytes: int, last: int, late_bytes: int) -> None:
        self.reservation = Reservation(gate, 0)
        self.nbytes = nbytes
        self.last = last
        self.late_bytes = late_bytes
        self.reserved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._decodings = decodings

    async def result(self, left_ns: int | None) -> InferRequest:
        """Wait for the decoded request for ``left_ns``; None without a limit.

        Raises:
            ServeError: The error of decoding; deadline, after the limit.
        """
        await asyncio.wait((self.task,), timeout=None if left_ns is None else left_ns / 1e9)
        if not self.task.done():
            raise ServeError(ErrorKind.DEADLINE, "deadline cannot be met: it passed before the request was decoded")
        task = self.task
        try:
            return task.result()
        finally:
            del self, task  # a reference cycle: the frames of its error

    def release(self, _: object = None) -> None:
        """Release the memory, now that the call has ended: at once, or when the thread that uses it has finished.

        A thread cannot be stopped. A request that still waits for memory is not decoded any more.
        """
        if self.task.done():
            self.reservation.release()
            if not self.task.cancelled():
                self.task.exception()  # marks it as retrieved: the call may have ended before
            return
        if not self.reserved.done():
            self._decodings.drop(self)
        elif self.late_bytes:
            self.reservation.set_unchecked(self.late_bytes)
        self.task.add_done_callback(self.release)
