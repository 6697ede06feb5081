"""The maximum rows of a batch, corrected by the times of batches while enough rows wait."""

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest

from ortserve.batching.groups import RequestGroup
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import RequestQueue
from ortserve.batching.row_limit import RowLimit
from ortserve.batching.scheduler import Scheduler
from ortserve.batching.statistics import Decisions
from ortserve.core.inflight import InflightRequest
from ortserve.core.timing import Timing

MS = 1_000_000
MOST = 64

BatchNs = Callable[[int], float]


class Line:
    """A queue of requests of one row, of which ``queued`` wait whenever a batch is formed."""

    def __init__(self, max_rows: int, queued: int, loop: asyncio.AbstractEventLoop) -> None:
        self.changes: list[int] = []
        self.policy = BatchPolicy(max_rows)
        self.decisions = Decisions()
        self.key = "x"
        self.finish_by_ns: int | None = None
        self._queued = queued
        self._queue = RequestQueue()
        self._scheduler = Scheduler(self._queue, self.decisions, loop, lambda: 0, lambda: None)
        self._limit = RowLimit(MOST, self.changes.append)

    @property
    def waiting(self) -> int:
        return self._queue.rows

    def add(self) -> None:
        request = InflightRequest(Timing(0), (), 1)
        request.finish_by_ns = self.finish_by_ns
        request.on_settled = lambda _: None
        self._queue.push(self._queue.shape_class(self.key), request, self.policy.max_rows)

    def begin(self) -> RequestGroup:
        """Form a batch."""
        while self._queue.rows < self._queued:
            self.add()
        policy = self._limit.next_policy(self._queue, self.policy, 0)
        group = self._scheduler.next_group(policy, 0)
        assert isinstance(group, RequestGroup)
        if policy is not self.policy:
            self._limit.begin(group)
        return group

    def end(self, group: RequestGroup, ns: float) -> None:
        """End the run of a batch."""
        group.shape_class.batch_latency.observe(group.rows, int(ns))
        self.policy = self._limit.learn(group, int(ns), self.policy)

    def run(self, batch_ns: BatchNs, batches: int) -> list[int]:
        """Run batches one after the other. Returns the rows of each."""
        ran = []
        for _ in range(batches):
            group = self.begin()
            ran.append(group.rows)
            self.end(group, batch_ns(group.rows))
        return ran


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.parametrize("max_rows", [1, 2, 16, 64])
@pytest.mark.parametrize(
    ("batch_ns", "expected"),
    [
        (lambda rows: (100 + rows) * MS, 64),
        (lambda rows: (100 + rows) * 1e-3 * MS, 64),
        (lambda rows: 100 * MS * rows, 1),
        (lambda rows: (100 + rows**2) * MS, 8),
    ],
    ids=["gain", "gain of short runs", "no gain", "gain up to 8 rows"],
)
def test_a_wrong_maximum_is_corrected(
    batch_ns: BatchNs, max_rows: int, expected: int, loop: asyncio.AbstractEventLoop
) -> None:
    line = Line(max_rows, 128, loop)
    line.run(batch_ns, 600)
    assert line.policy.max_rows == expected
    assert [max_rows, *line.changes][-1] == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("fixed", "expected"), [(10, {64}), (0, {1, 2, 4, 8})])
def test_other_work_on_the_machine_decides_no_maximum(
    seed: int, fixed: int, expected: set[int], loop: asyncio.AbstractEventLoop
) -> None:
    """Half of the batches take up to twice as long, and all of them for a while."""
    noise = random.Random(seed)
    slow = [1.0]

    def batch_ns(rows: int) -> float:
        if noise.random() < 0.02:
            slow[0] = noise.choice([1.0, 2.0, 4.0])
        return (fixed + rows) * 20 * MS * slow[0] * noise.choice([1.0, noise.uniform(1, 2)])

    line = Line(16, 128, loop)
    line.run(batch_ns, 4000)
    assert line.policy.max_rows in expected


def test_chance_seldom_decides_for_a_maximum(loop: asyncio.AbstractEventLoop) -> None:
    """Of twenty models without gain whose runs vary by a fifth, few run in larger batches."""
    found = []
    for seed in range(20):
        noise = random.Random(seed)

        def batch_ns(rows: int, noise: random.Random = noise) -> float:
            return rows * 0.1 * MS * noise.lognormvariate(0, 0.2)

        line = Line(1, 16, loop)
        line.run(batch_ns, 2000)
        found.append(line.policy.max_rows)
    assert max(found) <= 2
    assert found.count(1) >= 12


@pytest.mark.parametrize("seed", range(5))
def test_an_interrupted_full_batch_makes_no_batches_smaller(seed: int, loop: asyncio.AbstractEventLoop) -> None:
    """Full batches take 8 ms, and now and then over 10 ms. Smaller ones take longer per row."""
    noise = random.Random(seed)
    line = Line(8, 8, loop)
    line.run(lambda rows: (1 + rows) * 0.9 * MS * noise.lognormvariate(0, 0.3), 3000)
    assert line.changes == []


def test_nearly_equal_sizes_are_changed_ever_more_rarely(loop: asyncio.AbstractEventLoop) -> None:
    noise = random.Random(0)
    line = Line(16, 128, loop)
    line.run(lambda rows: rows**0.95 * 2 * MS * noise.gauss(1, 0.2), 10_000)
    assert len(line.changes) < 10


def test_a_maximum_without_gain_in_larger_batches_is_seldom_exceeded(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(1, 16, loop)
    ran = line.run(lambda rows: rows * 0.1 * MS, 20_000)
    assert line.policy.max_rows == 1
    assert 40 < sum(rows > 1 for rows in ran) < 100


def test_short_batches_are_never_made_smaller(loop: asyncio.AbstractEventLoop) -> None:
    """Bursts of one and a half full batches, whose first batch takes longer than the rest."""
    line = Line(64, 0, loop)
    for _ in range(1000):
        for _ in range(96):
            line.add()
        for factor in (1.2, 1.0):
            group = line.begin()
            line.end(group, group.rows * 0.01 * MS * factor)
    assert line.changes == []


@pytest.mark.parametrize(("queued", "most"), [(7, 7), (31, 16)])
def test_only_rows_that_wait_are_tried(queued: int, most: int, loop: asyncio.AbstractEventLoop) -> None:
    line = Line(8, queued, loop)
    assert max(line.run(lambda rows: (100 + rows) * MS, 500)) == most


def test_batches_of_other_sizes_decide_nothing_unless_they_were_tried(loop: asyncio.AbstractEventLoop) -> None:
    """A piece of a large request may have more rows than a batch."""
    line = Line(64, 64, loop)
    for _ in range(200):
        group = line.begin()
        line.end(group, 64 * MS)
        line.end(RequestGroup(group.shape_class, [*group.requests] * 2, 128), 65 * MS)
    assert line.changes == []


def test_batches_are_compared_within_their_shape_class(loop: asyncio.AbstractEventLoop) -> None:
    """Classes in turn; a batch of the second one takes a hundredth of the time, and both gain from larger batches."""
    line = Line(1, 0, loop)
    for number in range(2000):
        line.key = "xy"[number % 2]
        for _ in range(64):
            line.add()
        group = line.begin()
        is_second = group.shape_class.key == "y"
        line.end(group, (100 + group.rows) * MS * (0.01 if is_second else 1))
    assert line.policy.max_rows == 64

    line = Line(1, 0, loop)
    for number in range(2000):
        line.key = "xy"[number % 2]
        for _ in range(2):
            line.add()
        group = line.begin()
        line.end(group, group.rows * MS * (0.01 if group.shape_class.key == "y" else 1))
    assert line.changes == []


def test_a_size_whose_runs_fail_is_tried_ever_more_rarely(loop: asyncio.AbstractEventLoop) -> None:
    """Runs that fail or are terminated teach nothing."""
    line = Line(8, 64, loop)
    larger = 0
    for _ in range(20_000):
        group = line.begin()
        if group.rows == 8:
            line.end(group, 8 * MS)
        larger += group.rows > 8
    assert line.policy.max_rows == 8
    assert 8 <= larger < 80


def test_instances_that_run_side_by_side_try_one_batch_at_a_time(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(8, 128, loop)
    running = [line.begin() for _ in range(4)]
    larger = 0
    for _ in range(400):
        ended = running.pop(0)
        larger += ended.rows > 8
        line.end(ended, ended.rows * MS)
        running.append(line.begin())
        assert sum(group.rows > 8 for group in running) <= 1
    assert 8 <= larger < 40


@pytest.mark.parametrize(("first_ms", "rest_ms", "expected"), [(5, 9, 4), (1000, 1000, 8)])
def test_no_request_misses_its_deadline_because_of_a_larger_batch(
    first_ms: int, rest_ms: int, expected: int, loop: asyncio.AbstractEventLoop
) -> None:
    """Batches of 4 take 4 ms, and those of 8 take 6. One request in each 8 is the first that must be answered."""
    line = Line(4, 0, loop)
    for _ in range(500):
        for number in range(8):
            line.finish_by_ns = (rest_ms if number else first_ms) * MS
            line.add()
        while line.waiting:
            group = line.begin()
            line.end(group, (2 + 0.5 * group.rows) * MS)
    assert line.decisions.dropped_late == 0
    assert line.policy.max_rows == expected
