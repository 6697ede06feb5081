"""The process of a generator: offers a load to targets, and reports what it sees in chunks, over a pipe.

It does nothing else, so that statistics and the screen, which are the measuring process's, do not make it late. Started
by ``generators``.
"""

import asyncio
import gc
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import uvloop

from ortserve.batching.timers import best_timer
from ortserve.clock import monotonic_ns
from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.bench.load import Load
from ortserve.tools.bench.plans import Plan
from ortserve.tools.bench.samples import Chunk, Recorder, Ticket
from ortserve.tools.bench.target import Target
from ortserve.tools.bench.targets import make_target

if TYPE_CHECKING:
    from ortserve.tools.bench.in_process import BareRuns

_CHUNK_S: Final = 0.25
_PAUSE_S: Final = 0.1
"""Of a caller whose connection failed, before it tries again."""
STOP: Final = "stop"
GO_ON: Final = "opened"


@dataclass(frozen=True, slots=True)
class Work:
    """One load on one target, as one process offers it.

    Attributes:
        key: Equal for equal plans: their targets stay open from one work to the next.
        plan: Makes the target.
        load: The share of this process.
        times_ns: When to send, from the beginning of warm-up, in an open loop; None in a closed one.
        warmup_s: Not measured.
        seconds: Measured afterwards.
        timeout_s: For an answer.
        look_every: Each so many answers one is looked at.
    """

    key: str
    plan: Plan
    load: Load
    times_ns: np.ndarray | None
    warmup_s: float
    seconds: float
    timeout_s: float
    look_every: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a target cannot be opened."""

    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a work.

    Attributes:
        begin_ns: Of the measured time (monotonic).
        end_ns: Of it: when the last request was sent, or when it was stopped.
        due: Requests that should have been sent in this time; None in a closed loop.
        batches: Sizes and numbers of the batches of the batcher in this process; None if there is none.
    """

    begin_ns: int
    end_ns: int
    due: int | None
    batches: dict[int, int] | None


class Channel:
    """The pipe to the measuring process. Threads read and write it, so that the event loop never waits for it."""

    def __init__(self, pipe: Connection) -> None:
        """Begin to read, on the loop's thread."""
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        self._received: asyncio.Queue[Any] = asyncio.Queue()
        self._to_send: SimpleQueue[object] = SimpleQueue()
        self.on_stop: Callable[[], object] | None = None
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    async def receive(self) -> Any:
        """The next message; None when the measuring process needs nothing more."""
        return await self._received.get()

    def send(self, message: object) -> None:
        """Send soon. From any thread."""
        self._to_send.put(message)

    def _read(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                message = None
            self._loop.call_soon_threadsafe(self._on_message, message)
            if message is None:
                return

    def _write(self) -> None:
        while True:
            try:
                self._pipe.send(self._to_send.get())
            except OSError:
                return

    def _on_message(self, message: object) -> None:
        if self.on_stop is None:
            self._received.put_nowait(message)
        elif message is None:  # in the middle of a measurement: the measuring process was killed
            os._exit(1)
        else:
            self.on_stop()


class LoopDriver:
    """Offers a load to a target on the event loop. Also the target's ``Sink``."""

    def __init__(self, target: Target, work: Work, channel: Channel, start_ns: int) -> None:
        self._target = target
        self._work = work
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._start_ns = start_ns
        self._begin_ns = start_ns + int(work.warmup_s * 1e9)
        self._end_ns = self._begin_ns + int(work.seconds * 1e9)
        self._recorder = Recorder(self._begin_ns)
        self._number = itertools.count()
        self._under_way = self._sent = 0
        self._is_stopped = False
        self._drained = self._loop.create_future()
        self._timers: list[asyncio.TimerHandle] = []
        self._cpu_at_begin_ns: int | None = None
        self._cpu_ns = 0
        self._batches: dict[int, int] = {}
        self._times: list[int] = [] if work.times_ns is None else (work.times_ns + start_ns).tolist()
        self._next = 0
        self._timer = best_timer(self._loop, self._fire)
        target.sink = self

    async def run(self) -> Finished:
        """Offer the load, report, and wait for the answers."""
        self._channel.on_stop = self.stop
        self._call_later(_CHUNK_S, self._report)
        self._call_later((self._begin_ns - monotonic_ns()) / 1e9, self._on_begin)
        self._call_later((self._end_ns - monotonic_ns()) / 1e9, self.stop)
        if self._work.times_ns is not None:
            self._timer.set(self._times[0] if self._times else self._end_ns, monotonic_ns())
        else:
            for _ in range(self._work.load.concurrency or 0):
                self._send(monotonic_ns())
        try:
            await self._drained
        finally:
            self._channel.on_stop = None
            self._timer.close()
            for timer in self._timers:  # the target may be used again
                timer.cancel()
        self._channel.send(self._take())
        before, now = self._batches, self._target.batches()
        batches = {rows: count - before.get(rows, 0) for rows, count in now.items() if count > before.get(rows, 0)}
        due = sum(self._begin_ns <= time_ns < self._end_ns for time_ns in self._times)
        return Finished(self._begin_ns, self._end_ns, due if self._times else None, batches or None)

    def stop(self) -> None:
        """Send nothing more; ``run`` returns when all is answered, or late."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._end_ns = max(self._begin_ns + 1, min(self._end_ns, monotonic_ns()))
        self._count_cpu()
        self._call_later(self._work.timeout_s, self._give_up)
        self._check_drained()

    def answered(
        self, ticket: Ticket, done_ns: int, nbytes: int, timing: bytes | None = None, body: object = None
    ) -> None:
        """As ``Sink.answered``."""
        self._recorder.answered(ticket, done_ns, nbytes, timing, body)
        self._under_way -= 1
        self._go_on()

    def failed(self, ticket: Ticket, done_ns: int, kind: str, example: str) -> None:
        """As ``Sink.failed``."""
        self._recorder.failed(ticket, done_ns, kind, example)
        self._under_way -= 1
        if kind.startswith("connection") and not self._is_stopped:
            self._call_later(_PAUSE_S, self._go_on)
        else:
            self._go_on()

    def _call_later(self, delay_s: float, call: Callable[[], object]) -> None:
        self._timers.append(self._loop.call_later(max(0.0, delay_s), call))

    def _go_on(self) -> None:
        if self._is_stopped:
            self._check_drained()
        elif self._work.times_ns is None:
            self._send(monotonic_ns())

    def _send(self, due_ns: int) -> None:
        number = next(self._number)
        self._under_way += 1
        if due_ns >= self._begin_ns:
            self._sent += 1
        now_ns = due_ns if self._work.times_ns is None else monotonic_ns()
        self._target.send(Ticket(number, due_ns, now_ns, number % self._work.look_every == 0))

    def _fire(self) -> None:
        """Send all requests that are due, and set the timer for the next one."""
        if self._is_stopped:
            return
        times, now_ns = self._times, monotonic_ns()
        while self._next < len(times) and times[self._next] <= now_ns:
            self._send(times[self._next])
            self._next += 1
        if self._next < len(times):
            self._timer.set(times[self._next], now_ns)

    def _on_begin(self) -> None:
        self._batches = self._target.batches()
        self._cpu_at_begin_ns = time.process_time_ns()

    def _count_cpu(self) -> None:
        if self._cpu_at_begin_ns is not None:
            self._cpu_ns = time.process_time_ns() - self._cpu_at_begin_ns

    def _take(self) -> Chunk:
        if not self._is_stopped:
            self._count_cpu()
        return self._recorder.take(self._sent, self._cpu_ns, self._under_way)

    def _report(self) -> None:
        if self._drained.done():
            return
        self._target.expire(monotonic_ns() - int(self._work.timeout_s * 1e9))
        self._channel.send(self._take())
        self._timers = [timer for timer in self._timers if timer.when() > self._loop.time()]
        self._call_later(_CHUNK_S, self._report)

    def _check_drained(self) -> None:
        if self._is_stopped and not self._under_way and not self._drained.done():
            self._drained.set_result(None)

    def _give_up(self) -> None:
        self._target.expire(monotonic_ns())
        if not self._drained.done():
            self._drained.set_result(None)


def run_threads(target: "BareRuns", work: Work, channel: Channel, start_ns: int) -> Finished:
    """Offer a load to blocking runs: each caller is a thread. An open loop has one, which runs one at a time."""
    begin_ns = start_ns + int(work.warmup_s * 1e9)
    end_ns = begin_ns + int(work.seconds * 1e9)
    times = None if work.times_ns is None else (work.times_ns + start_ns).tolist()
    callers = work.load.concurrency or 1
    stop, lock, recorder = threading.Event(), threading.Lock(), Recorder(begin_ns)
    channel.on_stop = stop.set
    numbers = itertools.count()
    sent = [0] * callers

    def call(thread: int) -> None:
        run, look_every = target.caller(), work.look_every
        while not stop.is_set():
            number = next(numbers)
            now_ns = monotonic_ns()
            if times is None:
                due_ns = sent_ns = now_ns
            else:
                if number >= len(times):
                    return
                due_ns = sent_ns = times[number]  # behind another run it is not the generator that is late
                if due_ns > now_ns:
                    stop.wait(max(0.0, (due_ns - now_ns) / 1e9))
                    sent_ns = monotonic_ns()
            if due_ns >= end_ns:
                return
            ticket = Ticket(number, due_ns, sent_ns)
            try:
                read = run(number)
            except ServeError as error:
                with lock:
                    recorder.failed(ticket, monotonic_ns(), error.kind.value, error.message)
                continue
            done_ns = monotonic_ns()
            body = read() if number % look_every == 0 else None
            with lock:
                recorder.answered(ticket, done_ns, 0, None, body)
            sent[thread] += due_ns >= begin_ns

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(callers)]
    cpu_at_begin_ns: int | None = None
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and monotonic_ns() < end_ns + work.timeout_s * 1e9:
        stop.wait(_CHUNK_S / 5 if cpu_at_begin_ns is None else _CHUNK_S)
        now_ns = monotonic_ns()
        if now_ns >= begin_ns and cpu_at_begin_ns is None:
            cpu_at_begin_ns = time.process_time_ns()
        with lock:
            channel.send(recorder.take(sum(sent), time.process_time_ns() - (cpu_at_begin_ns or 0), 0))
        if stop.is_set():
            for thread in threads:
                thread.join(work.timeout_s)
    channel.on_stop = None
    with lock:
        channel.send(recorder.take(sum(sent), time.process_time_ns() - (cpu_at_begin_ns or 0), 0))
    return Finished(begin_ns, max(begin_ns + 1, min(end_ns, monotonic_ns())), None, None)


async def _serve(pipe: Connection) -> None:
    """Do one work after the other, until the pipe closes."""
    channel = Channel(pipe)
    targets: dict[str, Target | BareRuns] = {}
    while (work := await channel.receive()) is not None:
        if not isinstance(work, Work):  # the end of a work that could not begin
            continue
        try:
            target = targets.get(work.key)
            if target is None:
                target = targets[work.key] = make_target(work.plan)
            if isinstance(target, Target):
                await target.open(work.load.concurrency or 8)
        except ServeError as error:
            channel.send(Problem(error.kind, error.message))
            continue
        except OSError as error:
            channel.send(Problem(ErrorKind.NOT_READY, f"no server answers: {error.strerror or error}"))
            continue
        channel.send(GO_ON)
        start_ns = await channel.receive()
        if not isinstance(start_ns, int):  # another generator could not open its target
            continue
        gc.collect()
        if isinstance(target, Target):
            channel.send(await LoopDriver(target, work, channel, start_ns).run())
        else:
            channel.send(await asyncio.to_thread(run_threads, target, work, channel, start_ns))
    for target in targets.values():
        if isinstance(target, Target):
            await target.close()


def main() -> None:
    """Serve the pipe that the measuring process has opened."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the measuring process's, which keeps what was measured
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)  # collections in the middle of a measurement would make requests late
    with Connection(int(sys.argv[1])) as pipe, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(pipe))
