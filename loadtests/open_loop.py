"""Load generators over HTTP: an open loop with the arrival times of a Poisson process, and a closed loop.

They use HTTP/1.1 on persistent connections with a minimal parser, so that they take a fraction of the server's CPU
time.
"""

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import uvloop

MAX_CONNECTIONS = 4000
"""Just below the server's default of ``http_max_connections``. Requests that find no connection count as refused."""

Check = Callable[[int, bytes], None]
"""Raises an exception if a body is not the answer to the request with that number."""


@dataclass
class Outcome:
    """The result of one stretch of load. Latencies of answers with status 200 are in seconds since the due time."""

    seconds: float
    offered: int = 0
    latencies_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    checked: int = 0

    @property
    def answers_per_s(self) -> float:
        return len(self.latencies_s) / self.seconds

    def in_time_per_s(self, deadline_s: float) -> float:
        """Answers within the deadline, per second."""
        return sum(latency <= deadline_s for latency in self.latencies_s) / self.seconds

    def quantile_ms(self, share: float) -> float:
        return float(np.quantile(self.latencies_s, share)) * 1e3 if self.latencies_s else float("nan")


def offer(
    port: int,
    requests: Sequence[bytes],
    check: Check,
    *,
    rate: float,
    seconds: float,
    seed: int,
    check_every: int = 20,
) -> Outcome:
    """Send ``rate`` requests per second for ``seconds``, independent of answers, then wait for all answers.

    Args:
        port: Port of the server on this machine.
        requests: Complete HTTP requests, sent in turns.
        check: Called with every ``check_every``-th body of status 200.
        rate: Mean rate of the Poisson process, per second.
        seconds: Duration of sending.
        seed: Seed of the arrival times; equal seeds give equal times.
        check_every: See ``check``.
    """
    gaps = np.random.default_rng(seed).exponential(1 / rate, int(rate * seconds * 1.5) + 100)
    times = np.cumsum(gaps)
    due = times[times < seconds].tolist()

    async def run() -> Outcome:
        client = _Client(port, requests, check, check_every)
        await client.connect(64)
        began = time.perf_counter()
        for number, due_s in enumerate(due):
            wait_s = began + due_s - time.perf_counter()
            # Timers of the loop round to whole milliseconds, so requests due within 0.5 ms are sent at once.
            if wait_s > 0.0005:
                await asyncio.sleep(wait_s)
            elif number % 8 == 0:
                await asyncio.sleep(0)  # lets the loop read answers
            client.send(began + due_s)
        return await client.finish(seconds)

    return _run(run)


def closed_loop(
    port: int, requests: Sequence[bytes], check: Check, *, callers: int, seconds: float, check_every: int = 20
) -> Outcome:
    """Let each of ``callers`` clients send one request after the other for ``seconds``."""

    async def run() -> Outcome:
        client = _Client(port, requests, check, check_every)
        await client.connect(callers)
        end = time.perf_counter() + seconds

        def again() -> None:
            now = time.perf_counter()
            if now < end:
                client.send(now)

        client.on_answer = again
        for _ in range(callers):
            client.send(time.perf_counter())
        await asyncio.sleep(seconds)
        return await client.finish(seconds)

    return _run(run)


class _Client:
    def __init__(self, port: int, requests: Sequence[bytes], check: Check, check_every: int) -> None:
        self._port = port
        self._requests = requests
        self._check = check
        self._check_every = check_every
        self.idle: deque[_Connection] = deque()
        self.on_answer: Callable[[], None] | None = None
        self.outcome = Outcome(0.0)
        self._connections: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._under_way = 0
        self._is_finishing = False
        self._done = asyncio.Event()
        self._failure: Exception | None = None

    async def connect(self, count: int) -> None:
        await asyncio.gather(*(self._open() for _ in range(count)))

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self), "127.0.0.1", self._port)
        self._connections.add(connection)
        self.idle.append(connection)

    def send(self, due: float) -> None:
        number = self.outcome.offered
        self.outcome.offered += 1
        if self.idle:
            self._under_way += 1
            self.idle.pop().send(number, due, self._requests[number % len(self._requests)])
        elif len(self._connections) + len(self._opening) < MAX_CONNECTIONS:
            self._under_way += 1
            task = asyncio.ensure_future(self._open_and_send(number, due))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            self.outcome.statuses[0] += 1

    async def _open_and_send(self, number: int, due: float) -> None:
        try:
            await self._open()
        except OSError as error:
            self._failure = error
            self._settle()
            return
        self.idle.pop().send(number, due, self._requests[number % len(self._requests)])

    def answered(self, connection: "_Connection", status: int, body: bytes) -> None:
        self.idle.append(connection)
        self.outcome.statuses[status] += 1
        if status == 200:
            self.outcome.latencies_s.append(time.perf_counter() - connection.due)
            if connection.number % self._check_every == 0:
                try:
                    self._check(connection.number, body)
                except Exception as error:  # in a callback of the loop; ``finish`` raises it
                    self._failure = error
                self.outcome.checked += 1
        if self.on_answer is not None:
            self.on_answer()
        self._settle()

    def lost(self, connection: "_Connection") -> None:
        self._connections.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)
        elif connection.is_waiting:
            self._failure = ConnectionError("the server closed a connection instead of answering")
            self._settle()

    def _settle(self) -> None:
        self._under_way -= 1
        if self._is_finishing and not self._under_way:
            self._done.set()

    async def finish(self, seconds: float) -> Outcome:
        async with asyncio.timeout(120):
            self._is_finishing = True
            if self._under_way:
                await self._done.wait()
        for connection in list(self._connections):
            connection.close()
        if self._failure is not None:
            raise self._failure
        assert self.outcome.checked, "no answer was checked"
        self.outcome.seconds = seconds
        return self.outcome


class _Connection(asyncio.Protocol):
    def __init__(self, client: _Client) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self.number = 0
        self.due = 0.0
        self.is_waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are not subclasses

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.lost(self)

    def send(self, number: int, due: float, request: bytes) -> None:
        assert self._transport is not None
        self.number, self.due, self.is_waiting = number, due, True
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._received, 0, end + 2)
        assert length is not None
        if len(self._received) < end + 4 + int(length[1]):
            return
        status, body = int(self._received[9:12]), self._received[end + 4 :]
        self._received = b""
        self.is_waiting = False
        self._client.answered(self, status, body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


_LENGTH = re.compile(rb"content-length: (\d+)\r\n")


def _run(main: Callable[[], Coroutine[None, None, Outcome]]) -> Outcome:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())
