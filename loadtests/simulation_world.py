"""A batcher in virtual time: the server's batching code, runners that only take time, seeded arrivals.

Used by ``batching_simulation.py`` and by ``tests/simulation``. Batcher, planner, admission, queue and shared threads
are the server's own; only the clock, the event loop and the runs are simulated. Every request has one row.
"""

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from fakes.clock import FakeClock
from fakes.loop import VirtualTimeLoop, run_virtual
from fakes.runner import NeverOverdue
from ortserve.batching.admission import QueueLimits
from ortserve.batching.batch_runs import BatchRuns
from ortserve.batching.batcher import Batcher
from ortserve.batching.inline_runs import InlineBudget, InlineRuns
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import RequestQueue
from ortserve.batching.row_limit import RowLimit
from ortserve.batching.shared_threads import SharedThreads
from ortserve.batching.statistics import Decisions
from ortserve.core.batch import Arrays, Batch, BatchDone, BatchResult
from ortserve.core.inflight import FAILED, NO_TERMS, InflightRequest, Terms
from ortserve.core.timing import Timing
from ortserve.errors import ServeError

BLOCKS: Final = 20
"""Number of consecutive parts of a run whose means yield its standard error (method of batch means)."""
WARM_UP: Final = 0.05
"""Share of a run that is discarded, because it started with an empty queue."""

_ROOM: Final = QueueLimits(rows=10**9, nbytes=2**62)
_NO_INPUTS: Final[Arrays] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a device: a batch of n rows takes ``a_ns``·n + ``b_ns``, and at most ``max_rows`` run together.

    ``noise`` is the standard deviation of the logarithm of a run's duration.
    """

    name: str
    a_ns: int
    b_ns: int
    max_rows: int
    noise: float = 0.0

    def latency_ns(self, rows: int) -> int:
        return self.a_ns * rows + self.b_ns

    @property
    def capacity_per_s(self) -> float:
        """Rows per second when all batches are full."""
        return self.max_rows / self.latency_ns(self.max_rows) * 1e9

    def bound_ns(self, per_s: float) -> float:
        """Upper bound of the mean latency of Poisson arrivals that find an unbounded batch whenever the server is free.

        Source: Y. Inoue, Queueing analysis of GPU-based inference servers with dynamic batching, Performance
        Evaluation 147 (2021).
        """
        load = per_s * self.a_ns / 1e9
        return 1.5 * self.b_ns / (1 - load) + self.a_ns / 2 * (load + 2) / (1 - load**2)


GPU: Final = Machine("GPU-like", 50_000, 1_500_000, 64)
CPU: Final = Machine("CPU-like", 1_000_000, 1_000_000, 16)


class SimulatedRunner(NeverOverdue):
    """Takes the machine's time for each batch and computes nothing. ``busy_ns`` is the total duration of its runs."""

    def __init__(self, machine: Machine, loop: asyncio.AbstractEventLoop, clock: FakeClock, seed: int) -> None:
        self._machine = machine
        self._loop = loop
        self._clock = clock
        self._random = random.Random(seed)
        self.busy_ns = 0
        self.batches = 0
        self.rows = 0

    def run(self, batch: Batch) -> BatchResult:
        raise AssertionError("no simulated batch is short enough to run on the loop")

    def start(self, batch: Batch, done: BatchDone) -> None:
        took_ns = self._machine.latency_ns(batch.bucket)
        if self._machine.noise:
            took_ns = round(took_ns * self._random.lognormvariate(0.0, self._machine.noise))
        self.busy_ns += took_ns
        self.batches += 1
        self.rows += batch.rows
        began_ns = self._clock()

        def end() -> None:
            now_ns = self._clock()
            done(BatchResult(_NO_INPUTS, began_ns, now_ns, took_ns))

        self._loop.call_later(took_ns / 1e9, end)


@dataclass(frozen=True, slots=True)
class Stage:
    """A batcher with its only instance, on a device with one thread."""

    loop: VirtualTimeLoop
    clock: FakeClock
    runner: SimulatedRunner
    batcher: Batcher


def set_stage(
    machine: Machine,
    loop: VirtualTimeLoop,
    clock: FakeClock,
    *,
    queue_delay_ns: int = 0,
    closed_loop_wait: bool = True,
    limits: QueueLimits = _ROOM,
    shared: SharedThreads | None = None,
    seed: int = 0,
    most_rows: int | None = None,
) -> Stage:
    """Create a batcher in its state after warm-up: it knows the latency of batches of powers of two.

    The maximum rows of a batch are corrected, up to ``most_rows`` if that is set.
    """
    runner = SimulatedRunner(machine, loop, clock, seed)
    sizes = {1 << power for power in range(machine.max_rows.bit_length())} | {machine.max_rows}
    known = [(rows, machine.latency_ns(rows)) for rows in sorted(sizes)]
    runs = BatchRuns(
        [runner],
        BatchPolicy(machine.max_rows, queue_delay_ns, closed_loop_wait=closed_loop_wait),
        RequestQueue(known, known),
        shared=shared or SharedThreads(1, loop),
        threads=1,
        inline=InlineRuns(InlineBudget(loop)),
        loop=loop,
        clock=clock,
        observe_batch=lambda *_: None,
        row_limit=None if most_rows is None else RowLimit(most_rows, lambda _: None),
    )
    batcher = Batcher(runs, limits, clock)
    return Stage(loop, clock, runner, batcher)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an open load; requests are in the order of arrival, without those of the warm-up.

    Attributes:
        latency_ns: Latency of each request; None if it was rejected or dropped.
        span_ns: Time from the first counted arrival to the last.
        decisions: The batcher's counts of its decisions, warm-up included.
        rows_a_batch: Mean rows per batch, warm-up included.
    """

    latency_ns: Sequence[int | None]
    span_ns: int
    decisions: Decisions
    rows_a_batch: float

    @property
    def answered_ns(self) -> list[int]:
        return [one for one in self.latency_ns if one is not None]

    @property
    def mean_ns(self) -> float:
        return statistics.fmean(self.answered_ns)

    @property
    def mean_error_ns(self) -> float:
        """Standard error of the mean latency."""
        return standard_error(block_means(self.answered_ns))

    def quantile_ns(self, share: float) -> int:
        ordered = sorted(self.answered_ns)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def goodput_per_s(self, slo_ns: int) -> float:
        """Requests per second that were answered within ``slo_ns``."""
        return sum(one is not None and one <= slo_ns for one in self.latency_ns) / self.span_ns * 1e9


def block_means(values: Sequence[float]) -> list[float]:
    """Means of ``BLOCKS`` consecutive parts."""
    size = len(values) // BLOCKS
    return [statistics.fmean(values[first * size : (first + 1) * size]) for first in range(BLOCKS)]


def standard_error(blocks: Sequence[float]) -> float:
    return statistics.stdev(blocks) / math.sqrt(len(blocks))


def ratio_error(over: Outcome, under: Outcome) -> float:
    """Standard error of ``over.mean_ns / under.mean_ns``; both must have answered all of the same arrivals."""
    ratio = over.mean_ns / under.mean_ns
    pairs = zip(block_means(over.answered_ns), block_means(under.answered_ns), strict=True)
    return standard_error([one - ratio * other for one, other in pairs]) / under.mean_ns


def poisson_ns(per_s: float, count: int, seed: int) -> list[int]:
    """Arrival times of a Poisson process from 0 on; equal arguments give equal times."""
    draw = random.Random(seed).expovariate
    now = 0.0
    times = []
    for _ in range(count):
        now += draw(per_s) * 1e9
        times.append(round(now))
    return times


def open_loop(
    machine: Machine,
    arrivals_ns: Sequence[int],
    *,
    queue_delay_ns: int = 0,
    closed_loop_wait: bool = True,
    slo_ns: int | None = None,
    limits: QueueLimits = _ROOM,
    most_rows: int | None = None,
) -> Outcome:
    """Send requests at given times, independent of earlier answers. ``slo_ns``, if set, is their deadline."""

    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> Outcome:
        stage = set_stage(
            machine,
            loop,
            clock,
            queue_delay_ns=queue_delay_ns,
            closed_loop_wait=closed_loop_wait,
            limits=limits,
            most_rows=most_rows,
        )
        began_ns = clock()
        requests: list[InflightRequest] = []
        over: asyncio.Future[None] = loop.create_future()
        due_ns = iter(arrivals_ns)

        def arrive() -> None:
            now_ns = clock()
            timing = Timing(now_ns)
            terms = Terms(answer_by_ns=now_ns + slo_ns) if slo_ns is not None else NO_TERMS
            requests.append(InflightRequest(timing, _NO_INPUTS))
            try:
                stage.batcher.submit(requests[-1], None, terms)
            except ServeError as error:
                requests[-1].fail(error)
            schedule()

        def schedule() -> None:
            next_ns = next(due_ns, None)
            if next_ns is None:
                over.set_result(None)
            else:
                loop.call_at((began_ns + next_ns) / 1e9, arrive)

        schedule()
        await over
        await stage.batcher.close()
        await asyncio.sleep(0)
        first = int(WARM_UP * len(requests))
        latency_ns = [_latency_ns(request) for request in requests[first:]]
        runner = stage.runner
        return Outcome(
            latency_ns,
            arrivals_ns[-1] - arrivals_ns[first],
            stage.batcher.learned().decisions,
            runner.rows / max(1, runner.batches),
        )

    return run_virtual(main)


def _latency_ns(request: InflightRequest) -> int | None:
    return None if request.state == FAILED else request.timing.computed_ns - request.timing.received_ns


@dataclass(frozen=True, slots=True)
class Loop:
    """The result of closed-loop clients: requests per second with its standard error, and the mean latency."""

    per_s: float
    error_per_s: float
    mean_ns: float
    rows_a_batch: float
    decisions: Decisions = field(default_factory=Decisions)


Think = Callable[[random.Random], float]
"""Draws the pause in nanoseconds between an answer and the client's next request."""


def closed_loop(
    machine: Machine, clients: int, think: Think, *, closed_loop_wait: bool, requests: int = 20_000
) -> Loop:
    """Let ``clients`` each send, wait for the answer, pause and repeat. Each client draws pauses with its own seed."""

    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> Loop:
        stage = set_stage(machine, loop, clock, closed_loop_wait=closed_loop_wait)
        warm_up = int(WARM_UP * requests)
        answered_ns: list[int] = []
        latency_ns: list[int] = []
        over: asyncio.Future[None] = loop.create_future()

        def ask(draw: random.Random) -> None:
            if over.done():
                return
            asked_ns = clock()
            request = InflightRequest(Timing(asked_ns), _NO_INPUTS)
            request.on_settled = lambda _: answer(draw, asked_ns)
            stage.batcher.submit(request, None)

        def answer(draw: random.Random, asked_ns: int) -> None:
            answered_ns.append(clock())
            latency_ns.append(clock() - asked_ns)
            if len(answered_ns) == requests:
                over.set_result(None)
            else:
                loop.call_later(think(draw) / 1e9, ask, draw)

        for client in range(clients):
            draw = random.Random(client)
            loop.call_later(_first_ns(machine, clients, draw) / 1e9, ask, draw)
        await over
        await stage.batcher.close()
        counted = answered_ns[warm_up:]
        size = len(counted) // BLOCKS
        rates = [
            size / (counted[first + size - 1] - answered_ns[warm_up + first - 1]) * 1e9
            for first in range(0, size * BLOCKS, size)
        ]
        return Loop(
            (len(counted) - 1) / (counted[-1] - counted[0]) * 1e9,
            standard_error(rates),
            statistics.fmean(latency_ns[warm_up:]),
            stage.runner.rows / stage.runner.batches,
            stage.batcher.learned().decisions,
        )

    return run_virtual(main)


def _first_ns(machine: Machine, clients: int, draw: random.Random) -> float:
    """Time of a client's first request. The times differ, because clients with equal pauses would stay synchronized."""
    return draw.uniform(0, machine.latency_ns(clients))


def ideal_closed_loop(machine: Machine, clients: int, think: Think, *, requests: int = 20_000) -> float:
    """Requests per second of an ideal batcher that knows when each client will send next.

    The maximum over two kinds of policy: start each batch at the time that maximizes rows per second up to its end;
    or start each batch once k rows wait, for every k up to the number of clients and the largest batch.
    """
    counts = range(1, min(clients, machine.max_rows) + 1)
    rates = [_foresee(machine, clients, think, least, requests) for least in counts]
    return max(_foresee(machine, clients, think, None, requests), *rates)


def _greedy(machine: Machine, ready: list[float], now: float) -> int:
    """The batch size that maximizes rows per second from ``now`` on; ``ready`` are the sorted arrival times."""
    most = min(len(ready), machine.max_rows)
    return max(
        range(1, most + 1),
        key=lambda rows: rows / (machine.latency_ns(rows) + max(0.0, ready[rows - 1] - now)),
    )


def _foresee(machine: Machine, clients: int, think: Think, least: int | None, requests: int) -> float:
    """Requests per second if a batch starts once ``least`` requests wait; None selects the best size for each batch."""
    draws = [random.Random(client) for client in range(clients)]
    back = sorted((_first_ns(machine, clients, draw), client) for client, draw in enumerate(draws))
    now = 0.0
    answered = 0
    while answered < requests:
        rows = least or _greedy(machine, [at for at, _ in back], now)
        begin = max(now, back[rows - 1][0])
        while rows < min(len(back), machine.max_rows) and back[rows][0] <= begin:
            rows += 1
        now = begin + machine.latency_ns(rows)
        riding = [client for _, client in back[:rows]]
        back = sorted(back[rows:] + [(now + think(draws[client]), client) for client in riding])
        answered += rows
    return answered / now * 1e9


@dataclass(frozen=True, slots=True)
class SharedTime:
    """The share of one device's time that each saturated model received, in the order of the models."""

    shares: list[float]
    batches: list[int]


def share_device(machines: Sequence[Machine], *, seconds: float) -> SharedTime:
    """Keep the queue of every model full on one device with one thread, and measure each model's share."""

    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> SharedTime:
        shared = SharedThreads(1, loop)
        stages = [set_stage(machine, loop, clock, shared=shared, seed=seed) for seed, machine in enumerate(machines)]
        over = False

        def ask(stage: Stage) -> None:
            if not over:
                request = InflightRequest(Timing(clock()), _NO_INPUTS)
                request.on_settled = lambda _: ask(stage)
                stage.batcher.submit(request, None)

        for machine, stage in zip(machines, stages, strict=True):
            for _ in range(4 * machine.max_rows):
                ask(stage)
        await asyncio.sleep(seconds)
        busy_ns = [stage.runner.busy_ns for stage in stages]
        batches = [stage.runner.batches for stage in stages]
        over = True
        for stage in stages:
            await stage.batcher.close()
        return SharedTime([one / sum(busy_ns) for one in busy_ns], batches)

    return run_virtual(main)
