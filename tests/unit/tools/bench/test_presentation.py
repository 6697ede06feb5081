"""Reports of measurements."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ortserve.tools.bench.presentation import present
from ortserve.tools.bench.result import BenchResult, Generator, OutputCheck, Percentile, Point, ServerUsage
from ortserve.tools.report import Facts, Findings, Picture, Table
from ortserve.tools.statistics import Estimate

POINT = Point(
    *("http://host", "rest", "s 1", "1 caller", 1, None, 1),
    seconds=1.0,
    stopped_because="time",
    requests=100,
    answers=100,
    failures=(),
    throughput=Estimate(100.0),
    goodput_per_s=None,
    mean_ms=1.0,
    percentiles=(Percentile(50.0, 1.0, None, None), Percentile(99.0, 2.0, None, None)),
    most_ms=2.0,
    is_overloaded=False,
    phases=(),
    batches=(),
    usage=None,
    generator=Generator(1, 0.1, None, None, 1.0, ()),
    outputs=None,
    histogram_ms=(),
    histogram=(),
)


def result(*points: Point) -> BenchResult:
    return BenchResult(
        version="",
        began="",
        machine="",
        model="m",
        inputs="",
        percentile=99.0,
        slo_ms=None,
        points=points,
        capacities=(),
        is_interrupted=False,
        problems=(),
    )


@pytest.mark.parametrize(
    ("generator", "server", "busy", "is_found"),
    [
        (0.4, 1.6, 1.0, True),
        (0.4, 1.0, 0.7, False),
        (0.1, 1.9, 1.0, False),
        (0.02, 0.03, 1.0, False),  # other work keeps the machine busy
    ],
)
def test_generator_that_takes_much_of_busy_processors_is_named(
    generator: float, server: float, busy: float, *, is_found: bool
) -> None:
    point = replace(
        POINT,
        generator=replace(POINT.generator, cpu_share=generator),
        usage=ServerUsage(1, server, 10.0, 1, machine_busy=busy),
    )
    (found,) = [
        block.findings for block in present(result(point), has_pictures=False).blocks if isinstance(block, Findings)
    ]
    assert ["generator_beside_server"] * is_found == [finding.kind for finding in found]


@pytest.mark.parametrize(
    ("server", "callers", "per_s", "is_found"),
    [("", 1, 50_000.0, True), ("", 2, 190_000.0, False), ("", None, 50_000.0, False), ("s", 1, 50_000.0, False)],
)
def test_time_between_the_runs_of_a_caller_in_this_process_is_named(
    server: str, callers: int | None, per_s: float, *, is_found: bool
) -> None:
    point = replace(POINT, server=server, concurrency=callers, answers=10_000, throughput=Estimate(per_s), mean_ms=0.01)
    (found,) = [
        block.findings for block in present(result(point), has_pictures=False).blocks if isinstance(block, Findings)
    ]
    assert [(one.kind, "50% of the time passes" in one.seen) for one in found] == (
        [("generator_between_runs", True)] * is_found
    )


@pytest.mark.parametrize(("answered", "pictures"), [((True, True), 1), ((True, False), 0), ((False, False), 0)])
def test_loads_without_answers_are_not_drawn(answered: Sequence[bool], pictures: int) -> None:
    none = replace(POINT, answers=0, percentiles=(), mean_ms=None, most_ms=None)
    points = [replace(POINT if one else none, load=f"{number} callers") for number, one in enumerate(answered)]
    blocks = present(result(*points), has_pictures=True).blocks
    assert sum(isinstance(block, Picture) for block in blocks) == pictures


def test_missing_answers_and_server_names_leave_sentences_complete() -> None:
    reason = "nothing, because answers depend on earlier requests of a sequence"
    here = replace(POINT, target="models/m", server="", outputs=OutputCheck(12, 0, "bare runs", ""))
    points = (here, replace(POINT, outputs=OutputCheck(0, 0, reason, "")))
    blocks = present(result(*points), has_pictures=False).blocks
    (facts,) = [block.entries for block in blocks if isinstance(block, Facts)]
    (own,) = [block for block in blocks if isinstance(block, Table) and block.title == "Generator"]
    assert facts["server"] == "s 1"
    assert [row[-1] for row in own.rows] == ["12 with bare runs", reason]
