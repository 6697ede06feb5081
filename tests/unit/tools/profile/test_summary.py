"""Profiles of known runs: the balance, tables that add up, interruptions, comparisons."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ort_traces import execution, flat_run, node, run, trace_file
from ortserve.tools.profile.balance import Groups, Runs, RunTime, typical
from ortserve.tools.profile.result import Profile
from ortserve.tools.profile.summary import compare, profile_of
from ortserve.tools.profile.trace import read_trace


def runs_of(
    times_us: Sequence[Sequence[int]], *, plain_us: Sequence[int], cost_us: int, groups: Groups | None = None
) -> Runs:
    """Runs of nodes with these times, each 5 µs after the one before; the call adds 15 µs."""
    lines: list[bytes] = []
    profiled = []
    for number, times in enumerate(times_us):
        lines += flat_run(number * 1_000_000, *times)
        profiled.append((sum(times) + 5 * len(times) + 15) * 1000)
    return Runs(
        [RunTime(us * 1000, ns - cost_us * 1000) for us, ns in zip(plain_us, profiled, strict=True)],
        [RunTime(ns, ns) for ns in profiled],
        read_trace(trace_file(*lines)),
        groups or [range(len(times_us))],
        is_single_threaded=True,
    )


def profile(runs: Runs) -> Profile:
    return profile_of(
        runs,
        label="m",
        provider="CPUExecutionProvider",
        threads=1,
        settings={},
        inputs="",
        rows=1,
        source=None,
        optimized=None,
        notes=[],
    )


def test_balance_adds_up() -> None:
    """Operators 6,000 µs; around them 25 µs, of which 10 µs are the profiler."""
    balance = profile(runs_of([(4000, 2000)] * 8, plain_us=[6015] * 8, cost_us=10)).balance

    assert balance.operators_ms == pytest.approx(6.0)
    assert balance.profiler_ms == pytest.approx(0.010)
    assert balance.rest_ms == pytest.approx(0.015)
    assert balance.interrupted_ms == pytest.approx(0)
    parts = balance.operators_ms + balance.profiler_ms + balance.rest_ms + balance.interrupted_ms
    assert parts == pytest.approx(balance.profiled_ms)
    assert balance.plain_ms == pytest.approx(6.015)
    assert balance.is_closed


def test_balance_that_does_not_close_says_so() -> None:
    """The profiler adds 600 µs by the processor's clock, but only 25 µs of the run are not operators."""
    balance = profile(runs_of([(4000, 2000)] * 8, plain_us=[5425] * 8, cost_us=600)).balance

    assert balance.rest_share < -0.05
    assert balance.is_closed is False


def test_short_runs_report_the_share_of_the_profiler() -> None:
    balance = profile(runs_of([(40, 35)] * 8, plain_us=[50] * 8, cost_us=50)).balance

    assert balance.is_closed is None
    assert balance.profiler_share == pytest.approx(0.5)
    assert balance.profiler_event_us == pytest.approx(50 / 4)


def test_interruptions_are_named_and_not_charged_to_operators() -> None:
    quiet, first, second = (4000, 2000), (4000, 9000), (54000, 2000)
    held = profile(runs_of([quiet, first, quiet, second] * 4, plain_us=[6015] * 16, cost_us=10))

    assert {node.name: node.self_ms for node in held.nodes} == {"n0": 4.0, "n1": 2.0}
    assert held.balance.interrupted_ms == pytest.approx(held.balance.profiled_ms - 6.025)
    assert held.balance.interrupted_ms > 1
    assert any("busy" in note for note in held.notes)


def test_runs_on_different_samples_are_averaged() -> None:
    values = {0: 10.0, 1: 20.0, 2: 10.0, 3: 20.0}

    assert typical(values, [[0, 2], [1, 3]]) == 15
    assert typical({0: 10.0}, [[0], [1]]) == 5, "a node that one of two samples does not run"
    assert typical({0: 1.0, 1: 1.0, 2: 1.0, 3: 5.0}, [[0, 1, 2], [3]]) == 2, "groups count by their runs"


def test_shares_and_operators_add_up() -> None:
    held = profile(runs_of([(100, 200, 700)] * 5, plain_us=[900] * 5, cost_us=1))

    assert sum(node.share for node in held.nodes) == pytest.approx(1)
    assert sum(operator.share for operator in held.operators) == pytest.approx(1)
    assert [operator.op for operator in held.operators] == ["Op2", "Op1", "Op0"]
    assert held.operators[0].mean_us == pytest.approx(700)


def test_gap_is_reported_where_it_is_long() -> None:
    lines: list[bytes] = []
    for number in range(4):
        lines += flat_run(number * 10_000, 100, 100, gap_us=400)
    runs = Runs(
        [RunTime(1_000_000, 990_000)] * 4,
        [RunTime(1_010_000, 1_000_000)] * 4,
        read_trace(trace_file(*lines)),
        [range(4)],
    )
    gaps = profile(runs).gaps

    assert gaps is not None
    assert gaps.total_ms == pytest.approx(0.8)
    assert gaps.longest == {"n0": 400, "n1": 400}


def test_comparison_names_what_was_gained_and_lost() -> None:
    noisy = [6000, 6100, 5900, 6050] * 4
    one_runs = runs_of([(4000, 2000)] * 16, plain_us=noisy, cost_us=10)
    other_runs = runs_of([(1000,)] * 16, plain_us=[us // 6 for us in reversed(noisy)], cost_us=10)
    one, other = profile(one_runs), profile(other_runs)

    found = compare(one, other, replace(one_runs, is_single_threaded=False), other_runs)
    assert found.ratio == pytest.approx(1 / 6, rel=0.05)
    assert found.is_beyond_noise
    assert [(row.op, row.nodes, row.other_nodes) for row in found.operators] == [("Op0", 1, 1), ("Op1", 1, None)]
    assert [row.difference_ms for row in found.operators] == pytest.approx([-3, -2])

    reverse = replace(one_runs, plain=one_runs.plain[::-1])
    same = compare(one, one, one_runs, reverse)
    assert not same.is_beyond_noise


def test_copies_between_devices_are_listed_apart() -> None:
    lines = trace_file(
        node("to", 5, 30, op="MemcpyFromHost", provider="CUDAExecutionProvider"),
        node("a", 40, 50, provider="CUDAExecutionProvider"),
        execution(0, 100),
        run(0, 110),
    )
    times = [RunTime(100_000, 100_000)]
    held = profile(Runs(times, times, read_trace(lines), [[0]]))

    assert [(copy.op, copy.provider, copy.self_ms) for copy in held.copies] == [
        ("MemcpyFromHost", "CUDAExecutionProvider", 0.03)
    ]


def test_empty_graph_has_a_profile() -> None:
    held = profile(runs_of([()] * 2, plain_us=[10] * 2, cost_us=1))

    assert (held.nodes, held.operators) == ([], [])
