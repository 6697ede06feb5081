"""Reports and pictures of profiles: complete, bounded, and safe for any name."""

import re
from dataclasses import replace
from functools import cache

import pytest

from ort_traces import flat_run, trace_file
from ortserve.tools.page import render_page
from ortserve.tools.profile.drawing import flame_view, tree_map
from ortserve.tools.profile.presentation import present
from ortserve.tools.profile.result import Fusion, NodeCost, Profile, ProfileResult
from ortserve.tools.profile.runs import Runs, RunTime
from ortserve.tools.profile.summary import profile_of
from ortserve.tools.profile.trace import read_trace
from ortserve.tools.report import Table


def runs() -> Runs:
    lines = [line for number in range(4) for line in flat_run(number * 10_000, 300, 100)]
    times = [RunTime(500_000, 500_000)] * 4
    return Runs("m", "p", 1, {}, "", 1, times, times, read_trace(trace_file(*lines)))


@cache
def profile() -> Profile:
    return profile_of(runs())


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    found = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', svg)
    return [(float(x), float(y), float(width), float(height)) for x, y, width, height in found]


def node(name: str, self_ms: float, op: str = "Add") -> NodeCost:
    return replace(profile().nodes[0], name=name, op=op, self_ms=self_ms)


def test_areas_of_the_tree_map_are_self_times() -> None:
    svg = tree_map([node("a", 6.0), node("b", 3.0, "Mul"), node("c", 1.0)])

    areas = [width * height for _, _, width, height in boxes(svg)]
    assert [area / sum(areas) for area in areas] == pytest.approx([0.6, 0.1, 0.3], abs=0.001)


def test_tree_map_takes_any_name_and_no_time() -> None:
    svg = tree_map([node('<script>"&', 1.0), node("none", 0.0)])

    assert "<script>" not in svg
    assert len(boxes(svg)) == 1
    assert "<svg" in tree_map([])


def test_flame_view_is_to_scale() -> None:
    held = runs()
    svg = flame_view(held.trace, held.quiet_run)

    (whole, first, second) = boxes(svg)
    assert first[2] / second[2] == pytest.approx(3, rel=0.01)
    assert whole[2] * 300 / 410 == pytest.approx(first[2], rel=0.01)


def test_page_of_thousands_of_nodes_stays_small() -> None:
    many = [node(f"{'long/' * 40}{number}", 1.0) for number in range(5000)]
    page = render_page(present(ProfileResult(profile=replace(profile(), nodes=many))))

    assert page.count("<tr>") > 5000
    assert "4,600 more nodes" in page
    assert len(page) < 4_000_000
    assert not re.search(r"<script|<link|https?://(?!www\.w3\.org)", page)


def test_counts_of_one_are_singular() -> None:
    held = replace(profile(), fusion=Fusion(1, 1, {}, {}))

    texts = str(present(ProfileResult(profile=held)).blocks)
    assert ", 1 row a run" in texts
    assert "The file has 1 node in its main graph" in texts


@pytest.mark.parametrize(("rows", "text"), [(1024, "1,024 rows"), (7.25, "7.25 rows"), (1234.5, "1,230 rows")])
def test_rows_of_a_run_have_no_exponent(rows: float, text: str) -> None:
    assert f", {text} a run" in str(present(ProfileResult(profile=replace(profile(), rows=rows))).blocks)


def test_operators_that_profiling_slows_down_are_named() -> None:
    """The profiler adds 0.7 ms, but only 0.1 ms of a run of 6.1 ms are not operators."""
    lines = [line for number in range(8) for line in flat_run(number * 10_000, 4000, 2000)]
    plain, profiled = ([RunTime(us * 1000, us * 1000)] * 8 for us in (5400, 6100))
    held = profile_of(Runs("m", "p", 2, {}, "", 1, plain, profiled, read_trace(trace_file(*lines))))

    tables = [block for block in present(ProfileResult(profile=held)).blocks if isinstance(block, Table)]
    (found,) = [table for table in tables if table.title == "Where the time goes"]
    assert held.balance.is_closed is False
    assert f"Profiling slows the operators down by at least {-held.balance.rest_ms:.3f} ms" in found.note


def test_missing_verdict_is_explained_by_its_own_cause() -> None:
    interrupted = [[1500 + 3000 * (place == number % 4) for place in range(4)] for number in range(8)]
    for times_us, plain_us, plain_cpu_us, wall_us, cpu_us, cause in (
        (interrupted, 7000, 5000, 9000, 6000, "Interruptions took 33.3 % of the time"),
        ([[10] * 600] * 8, 6600, 6600, 6600, 6600, "The profiler's clock counts whole µs"),
        ([[4000, 2000]] * 8, 200, 200, 6600, 6600, "A run takes less than 5 ms without the profiler"),
    ):
        lines = [line for number, of in enumerate(times_us) for line in flat_run(number * 10_000, *of, gap_us=0)]
        plain = [RunTime(plain_us * 1000, plain_cpu_us * 1000)] * 8
        profiled = [RunTime(wall_us * 1000, cpu_us * 1000)] * 8
        held = profile_of(Runs("m", "p", 1, {}, "", 1, plain, profiled, read_trace(trace_file(*lines))))

        tables = [block for block in present(ProfileResult(profile=held)).blocks if isinstance(block, Table)]
        (found,) = [table for table in tables if table.title == "Where the time goes"]
        assert held.balance.is_closed is None
        assert cause in found.note
