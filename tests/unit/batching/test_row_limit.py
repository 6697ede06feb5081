"""The maximum rows of a batch, corrected by the times of batches while enough rows wait."""

import random
from collections.abc import Callable

import pytest

from ortserve.batching.groups import RequestGroup
from ortserve.batching.latency import LatencyModel
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import ShapeClass
from ortserve.batching.row_limit import RowLimit

MS = 1_000_000
MOST = 64


def shape_class(key: str = "x") -> ShapeClass:
    return ShapeClass(key, LatencyModel(), LatencyModel())


def serve(
    batch_ns: Callable[[int], float], max_rows: int, *, batches: int = 2000, queued: int = 1000
) -> tuple[list[int], int]:
    """Run batches while ``queued`` rows wait. Returns the rows of each batch, and the last maximum."""
    changes: list[int] = []
    limit, known, policy = RowLimit(MOST, changes.append), shape_class(), BatchPolicy(max_rows)
    ran = []
    for _ in range(batches):
        rows = min(queued, limit.next_policy(policy, queued).max_rows)
        ran.append(rows)
        policy = limit.learn(RequestGroup(known, (), rows), int(batch_ns(rows)), policy)
    assert [max_rows, *changes][-1] == policy.max_rows
    return ran, policy.max_rows


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
def test_a_wrong_maximum_is_corrected(batch_ns: Callable[[int], float], max_rows: int, expected: int) -> None:
    assert serve(batch_ns, max_rows)[1] == expected


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("fixed", "expected"), [(10, {64}), (0, {1, 2, 4, 8})])
def test_other_work_on_the_machine_decides_no_maximum(seed: int, fixed: int, expected: set[int]) -> None:
    """Half of the batches take up to twice as long, and all of them for a while."""
    noise = random.Random(seed)
    slow = [1.0]

    def batch_ns(rows: int) -> float:
        if noise.random() < 0.02:
            slow[0] = noise.choice([1.0, 2.0, 4.0])
        return (fixed + rows) * 20 * MS * slow[0] * noise.choice([1.0, noise.uniform(1, 2)])

    assert serve(batch_ns, 16, batches=4000)[1] in expected


def test_a_maximum_without_gain_in_larger_batches_is_seldom_exceeded() -> None:
    ran, max_rows = serve(lambda rows: rows * 0.1 * MS, 1, batches=20_000)
    assert max_rows == 1
    assert 40 < sum(rows > 1 for rows in ran) < 100


def test_short_batches_are_never_made_smaller() -> None:
    ran, max_rows = serve(lambda rows: rows * 0.1 * MS, 64)
    assert {*ran, max_rows} == {64}


def test_only_rows_that_wait_are_tried() -> None:
    assert serve(lambda rows: (100 + rows) * MS, 8, queued=7) == ([7] * 2000, 8)
    assert max(serve(lambda rows: (100 + rows) * MS, 8, queued=31)[0]) == 16


def test_only_batches_of_one_shape_are_compared() -> None:
    """Rows of the second class take a tenth of the time."""
    changes: list[int] = []
    limit, classes = RowLimit(MOST, changes.append), (shape_class("x"), shape_class("y"))
    policy = BatchPolicy(1)
    for number in range(1000):
        rows = limit.next_policy(policy, 100).max_rows
        group = RequestGroup(classes[number % 2], (), rows)
        policy = limit.learn(group, rows * (MS // 10 if number % 2 else MS), policy)
    assert changes == []
