"""A generator process: it offers a load to targets and sends the outcomes over a pipe, in chunks.

The measuring process starts it (``generators``), computes statistics and draws the screen, so that this work delays no
requests.
"""

import asyncio
import gc
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import uvloop

from ortserve.batching.timers import best_timer
from ortserve.clock import monotonic_ns
from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.bench.outcomes import LOOK_EVERY, Recorder, Ticket
from ortserve.tools.bench.target import Plan, ServerPlan, Target

if TYPE_CHECKING:
    from ortserve.tools.bench.in_process import BareRuns

_CHUNK_S: Final = 0.25
_MIN_WAIT_S: Final = 0.001
"""Timers of the event loop wait for whole milliseconds, rounded: a shorter wait could end at once."""
_PAUSE_S: Final = 0.1
"""Pause of a caller after its connection failed."""
_LAST_RUN_S: Final = 10
"""Time limit of the last run of a model in this process, after the last request has timed out."""
_MAX_EARLY_NS: Final = 100_000
"""Limit of the time by which the generator wakes before a request is due. It then polls the clock."""
_EARLY_GAIN: Final = 0.05
"""Weight of the latest wake-up in the moving average of their delays."""
STOP: Final = "stop"
READY: Final = "ready"


@dataclass(frozen=True, slots=True)
class LoadPart:
    """The part of one load on one target that one process offers.

    Attributes:
        key: Parts with equal keys have equal plans, and share the target, which stays open.
        plan: The plan of the target.
        callers: Callers of a closed loop; None for an open loop.
        times_ns: Times to send in an open loop, from the beginning of the warm-up; None for a closed loop.
        warmup_s: Duration of the warm-up, which is not measured.
        seconds: Duration of the measurement after it.
        timeout_s: Time limit of an answer.
        look_every: As in ``Recorder``.
    """

    key: int
    plan: Plan
    callers: int | None
    times_ns: np.ndarray | None
    warmup_s: float
    seconds: float
    timeout_s: float
    look_every: int = LOOK_EVERY

    def times(self, start_ns: int) -> tuple[int, int, list[int]]:
        """The beginning and end of the measurement, and the due times of an open loop."""
        begin_ns = start_ns + int(self.warmup_s * 1e9)
        dues = [] if self.times_ns is None else (self.times_ns + start_ns).tolist()
        return begin_ns, begin_ns + int(self.seconds * 1e9), dues


@dataclass(frozen=True, slots=True)
class Finished:
    """The last message about a ``LoadPart``.

    Attributes:
        begin_ns: Beginning of the measurement (monotonic).
        end_ns: End of the sending: the planned one, or earlier if the part was stopped.
        cpu_ns: Processor time of the generator between them.
        due: Requests that should have been sent between them; None in a closed loop.
        batches: Counts of the batches of a batcher in this process, by rows.
        waited_ns: Sum over all answers of the time that an answer waited while the generator processed others that had
            arrived with it.
    """

    begin_ns: int
    end_ns: int
    cpu_ns: int
    due: int | None
    batches: dict[int, int]
    waited_ns: int = 0


class Channel:
    """The pipe to the measuring process.

    Threads read and write it, so the event loop never waits for it. The event loop itself would make the pipe
    non-blocking, which breaks large messages.
    """

    def __init__(self, pipe: Connection) -> None:
        """Start reading. Called on the thread of the event loop."""
        self._pipe = pipe
        self._received: asyncio.Queue[Any] = asyncio.Queue()
        self._writer = ThreadPoolExecutor(1)
        self._on_stop: Callable[[], object] | None = None
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, daemon=True).start()

    async def receive(self) -> Any:
        """The next message; None after the measuring process has closed the pipe."""
        return await self._received.get()

    @contextmanager
    def stopping(self, stop: Callable[[], object]) -> Iterator[None]:
        """Call ``stop`` for each message that arrives within the block, or has arrived since the last ``receive``.

        Used on the thread of the event loop.
        """
        self._on_stop = stop
        if not self._received.empty():
            stop()
        try:
            yield
        finally:
            self._on_stop = None

    def send(self, message: object) -> None:
        """Send a message without waiting. Thread-safe."""
        self._writer.submit(self._pipe.send, message)

    def _read(self) -> None:
        message: object = READY
        while message is not None:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                message = None
            self._loop.call_soon_threadsafe(self._on_message, message)

    def _on_message(self, message: object) -> None:
        if self._on_stop is not None:
            self._on_stop()
        if self._on_stop is None or message is None:
            self._received.put_nowait(message)


class LoopDriver(Recorder):
    """Offers a load to a ``Target`` on the event loop, and sends the next requests when it records outcomes."""

    def __init__(self, target: Target, part: LoadPart, channel: Channel, start_ns: int) -> None:
        """``start_ns`` is the beginning of the warm-up (monotonic), in the future."""
        self._target, self._part, self._channel = target, part, channel
        self._loop = asyncio.get_running_loop()
        self._start_ns = start_ns
        begin_ns, self._end_ns, self._dues = part.times(start_ns)
        super().__init__(begin_ns, part.look_every)
        self._next = 0
        self._under_way = 0
        self._stopped, self._drained = asyncio.Event(), asyncio.Event()
        self._timer = best_timer(self._loop, self._on_timer)
        self._wakes_ns = 0
        self._wake_delay_ns = 0.0
        self._waited_ns = 0
        self._turn_ns: int | None = None
        target.sink = self

    def stop(self) -> None:
        """Send no more requests."""
        self._stopped.set()

    async def run(self) -> Finished:
        """Send all requests, or those before ``stop``, and wait until each is answered or late."""
        part, target, begin_ns = self._part, self._target, self._begin_ns
        await asyncio.sleep((self._start_ns - monotonic_ns()) / 1e9)
        self._set_timer(monotonic_ns())
        for caller in range(0 if self._stopped.is_set() else part.callers or 0):
            self._send(caller, monotonic_ns())
        await self._wait(self._stopped, begin_ns)
        cpu_ns, before = time.process_time_ns(), target.batches()
        await self._wait(self._stopped, self._end_ns)
        end_ns, cpu_ns = _ended(begin_ns, self._end_ns, cpu_ns)
        self._stopped.set()
        if self._under_way:
            await self._wait(self._drained)
        self._timer.close()
        batches = {rows: number - before.get(rows, 0) for rows, number in target.batches().items()}
        due = None if part.callers else sum(begin_ns <= due_ns < end_ns for due_ns in self._dues)
        return Finished(begin_ns, end_ns, cpu_ns, due, batches, self._waited_ns)

    async def _wait(self, event: asyncio.Event, until_ns: float = math.inf) -> None:
        """Wait for an event or a time. Meanwhile and at the end, send the outcomes, and fail requests that are late."""
        while True:
            self._target.expire(monotonic_ns() - int(self._part.timeout_s * 1e9))
            self._channel.send(self.take())
            left_s = (until_ns - monotonic_ns()) / 1e9
            if event.is_set() or left_s <= 0:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), max(_MIN_WAIT_S, min(_CHUNK_S, left_s)))

    def answered(
        self, ticket: Ticket, done_ns: int, nbytes: int, timing: bytes | None = None, body: object = None
    ) -> None:
        """Record an answer, as a failure if it came too late for the target to notice.

        All answers of one turn of the event loop arrived before that turn began.
        """
        if done_ns - ticket.sent_ns > self._part.timeout_s * 1e9:
            self.failed(ticket, done_ns, "timeout", "no answer in time")
            return
        if self._turn_ns is None:
            self._turn_ns = done_ns
            self._loop.call_soon(self._end_turn)
        elif ticket.due_ns >= self._begin_ns:
            self._waited_ns += done_ns - self._turn_ns
        super().answered(ticket, done_ns, nbytes, timing, body)
        self._under_way -= 1
        self._go_on(ticket, is_failed=False)

    def _end_turn(self) -> None:
        self._turn_ns = None

    def failed(self, ticket: Ticket, done_ns: int, kind: str, example: str) -> None:
        super().failed(ticket, done_ns, kind, example)
        self._under_way -= 1
        if kind.startswith("connection") and not self._stopped.is_set():
            self._loop.call_later(_PAUSE_S, partial(self._go_on, ticket, is_failed=True))
        else:
            self._go_on(ticket, is_failed=True)

    def _go_on(self, ticket: Ticket, *, is_failed: bool) -> None:
        """Send the next request of the ticket's caller, unless the part is stopped."""
        if self._stopped.is_set():
            if not self._under_way:
                self._drained.set()
        elif callers := self._part.callers:
            number = self._part.plan.next_number(ticket.number, callers, is_failed=is_failed)
            self._send(number, monotonic_ns())

    def _send(self, number: int, due_ns: int) -> None:
        self._under_way += 1
        part = self._part
        now_ns = due_ns if part.callers else monotonic_ns()
        request = part.plan.request_of(number, part.callers)
        self._target.send(Ticket(number, due_ns, now_ns, self.wants_body(number, due_ns), request))

    def _set_timer(self, now_ns: int) -> None:
        """Set the timer for the next request, earlier by the usual delay of a wake-up: 50 µs on an idle processor."""
        if self._next < len(self._dues) and not self._stopped.is_set():
            self._wakes_ns = max(now_ns, self._dues[self._next] - int(self._wake_delay_ns))
            self._timer.set(self._wakes_ns, now_ns)

    def _on_timer(self) -> None:
        """Send all requests that are due, and set the timer for the next one."""
        dues, now_ns = self._dues, monotonic_ns()
        delay_ns = min(now_ns - self._wakes_ns, _MAX_EARLY_NS)
        self._wake_delay_ns += _EARLY_GAIN * (delay_ns - self._wake_delay_ns)
        while now_ns < dues[self._next]:
            now_ns = monotonic_ns()
        while not self._stopped.is_set() and self._next < len(dues) and dues[self._next] <= now_ns:
            self._send(self._next, dues[self._next])
            self._next += 1
        self._set_timer(now_ns)


def run_threads(target: "BareRuns", part: LoadPart, channel: Channel, start_ns: int, stop: threading.Event) -> Finished:
    """Offer a load to blocking runs until ``stop``. Each caller is a thread; an open loop has one thread.

    Requests of an open loop that wait for longer than the time limit fail, as on a server.
    """
    begin_ns, end_ns, dues = part.times(start_ns)
    lock, recorder = threading.Lock(), Recorder(begin_ns, part.look_every)
    timeout_ns = int(part.timeout_s * 1e9)
    # Numbers and due times, which the threads take in turn (not from a generator, which only one thread may run). In a
    # closed loop requests are due at once.
    turns: Iterator[tuple[int, int]] = zip(count(), repeat(0), strict=False) if part.callers else enumerate(dues)

    def call() -> None:
        run = target.caller()
        for number, due in turns:
            due_ns = sent_ns = due or monotonic_ns()
            if stop.is_set() or due_ns >= end_ns:
                return
            if sent_ns > monotonic_ns():  # a later one waited for an earlier run, so the generator was not late
                stop.wait((sent_ns - monotonic_ns()) / 1e9)
                sent_ns = monotonic_ns()
            ticket = Ticket(number, due_ns, sent_ns)
            if monotonic_ns() - due_ns > timeout_ns:
                with lock:
                    recorder.failed(ticket, monotonic_ns(), "timeout", "earlier runs took until its time was over")
                continue
            try:
                read = run(number)
                done_ns = monotonic_ns()
                with lock:
                    wants_body = recorder.wants_body(number, due_ns)
                body = read() if wants_body else None
            except ServeError as error:
                with lock:
                    recorder.failed(ticket, monotonic_ns(), error.kind.value, error.message)
                continue
            with lock:
                recorder.answered(ticket, done_ns, sum(array.nbytes for array in body or ()), None, body)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(part.callers or 1)]
    for thread in threads:
        thread.start()
    stop.wait(max(0.0, (begin_ns - monotonic_ns()) / 1e9))
    cpu_at_begin_ns = time.process_time_ns()
    for thread in threads:
        while thread.is_alive() and monotonic_ns() < end_ns + timeout_ns + _LAST_RUN_S * 1e9:
            thread.join(_CHUNK_S)
            with lock:
                channel.send(recorder.take())
    last_ns, cpu_ns = _ended(begin_ns, end_ns, cpu_at_begin_ns)
    return Finished(begin_ns, last_ns, cpu_ns, None, {})


def _ended(begin_ns: int, planned_end_ns: int, cpu_at_begin_ns: int) -> tuple[int, int]:
    """The end of a measurement that ends now, and its processor time: none if it was stopped before it began."""
    now_ns, cpu_ns = monotonic_ns(), time.process_time_ns() - cpu_at_begin_ns
    return max(begin_ns + 1, min(planned_end_ns, now_ns)), cpu_ns if now_ns > begin_ns else 0


def make_target(plan: Plan) -> "Target | BareRuns":
    """Make the target of a plan. Imports what it needs: importing ONNX Runtime and its users takes over a second."""
    if isinstance(plan, ServerPlan):
        from ortserve.tools.bench.connections import Connections, HttpConnection
        from ortserve.tools.bench.grpc_client import GrpcConnection

        return Connections(plan, GrpcConnection if plan.address.is_grpc else HttpConnection)
    from ortserve.tools.bench.in_process import BareRuns, BatcherTarget

    return BatcherTarget(plan) if plan.way == "batcher" else BareRuns(plan)


async def _serve(pipe: Connection) -> None:
    """Offer one part after the other, until the pipe closes."""
    channel = Channel(pipe)
    targets: dict[int, Target | BareRuns] = {}
    while (part := await channel.receive()) is not None:
        if not isinstance(part, LoadPart):  # STOP, for a part that this generator could not begin
            continue
        try:
            target = targets.get(part.key) or targets.setdefault(part.key, make_target(part.plan))
            if isinstance(target, Target):
                await target.open(part.callers or 8)
        except ServeError as error:
            channel.send(error)
            continue
        except OSError as error:
            plan = part.plan
            what = f"{plan.address.url}: cannot reach the server" if isinstance(plan, ServerPlan) else plan.way
            channel.send(ServeError(ErrorKind.NOT_READY, f"{what}: {error.strerror or error}"))
            continue
        gc.collect()  # now, as it takes a tenth of a second on a busy machine, which would be part of the measurement
        channel.send(READY)
        if (start_ns := await channel.receive()) is None:
            break
        if not isinstance(start_ns, int):  # another generator could not open its target
            continue
        if isinstance(target, Target):
            driver = LoopDriver(target, part, channel, start_ns)
            with channel.stopping(driver.stop):
                finished = await driver.run()
        else:
            stop = threading.Event()
            with channel.stopping(stop.set):
                finished = await asyncio.to_thread(run_threads, target, part, channel, start_ns, stop)
        channel.send(finished)
    for target in targets.values():
        if isinstance(target, Target):
            await target.close()


def main() -> None:
    """Serve the pipe whose descriptor is the argument of the process."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)  # collections in the middle of a measurement would make requests late
    with Connection(int(sys.argv[1])) as pipe, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(pipe))
