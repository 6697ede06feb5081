"""The search for the capacity, with targets of known capacity."""

from argparse import Namespace
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ortserve.tools.bench.generator import Finished, LoadPart
from ortserve.tools.bench.generators import Generators, Seen
from ortserve.tools.bench.measure import Measurement, bracket, first_rate, next_rate
from ortserve.tools.bench.outcomes import Chunk
from ortserve.tools.bench.prepare import Prepared
from ortserve.tools.bench.target import ModelPlan
from ortserve.tools.subject import Subject


def search(capacity: float, start: float) -> dict[float, bool]:
    tries: dict[float, bool] = {}
    rate: float | None = start
    while rate is not None:
        tries[rate] = rate <= capacity
        rate = next_rate(tries)
    return tries


@pytest.mark.parametrize("capacity", [3.0, 480.0, 12_345.0])
@pytest.mark.parametrize("factor", [0.01, 0.3, 1.5, 20.0])
def test_search_finds_the_capacity(capacity: float, factor: float) -> None:
    tries = search(capacity, first_rate(capacity * factor / 0.3))

    low, high = bracket(tries)
    assert low is not None
    assert high is not None
    assert low <= capacity < high <= low * 1.13
    assert len(tries) <= 14


def test_target_that_sustains_nothing_has_no_capacity() -> None:
    tries = search(0.0, 100.0)

    assert bracket(tries) == (None, list(tries)[-1])
    assert len(tries) < 10


def test_target_without_a_limit_ends_the_search() -> None:
    assert bracket(search(1e12, 1.0))[1] is None


def test_noise_below_the_bracket_is_not_believed() -> None:
    """A rate that was sustained once counts only below the lowest rate that was not sustained."""
    assert bracket({100: True, 200: False, 150: False, 170: True}) == (100, 150)


class SlowGenerators:
    """Generators on a busy machine: from ``most`` requests per second on, they fall behind. The target never does."""

    def __init__(self, most: float, count: int = 1) -> None:
        self.most, self.count = most, count

    def offer(self, parts: Sequence[LoadPart], _: object) -> Seen:
        seen = [self._outcome(part) for part in parts]
        return Seen([chunk for chunk, _ in seen], [finished for _, finished in seen])

    def _outcome(self, part: LoadPart) -> tuple[Chunk, Finished]:
        assert part.callers != 0
        due = np.arange(1000) * 1_000_000 if part.times_ns is None else part.times_ns
        is_late = part.times_ns is not None and len(due) / part.seconds > self.most
        sent = due + (np.linspace(0, 5e9, len(due)).astype(np.int64) if is_late else 0)
        times = np.stack([due, sent, sent + 1_000_000, np.ones_like(due)], axis=1)
        finished = Finished(0, int(part.seconds * 1e9), 0, None if part.callers else len(due), {})
        return Chunk(array("q", times.ravel().tolist())), finished


@pytest.mark.parametrize("processes", [1, 16])
def test_search_goes_on_below_a_rate_that_the_generators_missed(processes: int) -> None:
    plan = ModelPlan(Subject("m", Path("m")), "run", None, None, (), 1)
    given: dict[str, Any] = {"warmup_s": 0.0, "seconds": 1.0, "timeout_s": 1.0, "percentile": 99.0, "slo_ms": None}
    generators = cast("Generators", SlowGenerators(120.0 / processes, processes))
    measurement = Measurement(generators, Namespace(**given, arrivals="constant"), lambda line: None)

    points, capacity = measurement.find_capacity(Prepared("url", "rest", "s", 1, plan, "", (), "", lambda *_: {}))

    assert capacity.sustained_per_s is not None
    assert 120 / 1.13 < capacity.sustained_per_s <= 120
    assert capacity.exceeded_per_s is None, "the target may sustain more"
    assert [point.rate for point in points if point.generator.too_slow_because]
