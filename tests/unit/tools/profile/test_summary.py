"""Profiles of known runs: the balance, tables that add up, interruptions, comparisons."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ort_traces import execution, flat_run, node, run, trace_file
from ortserve.tools.profile.presentation import present
from ortserve.tools.profile.result import ProfileResult
from ortserve.tools.profile.runs import Runs, RunTime, typical
from ortserve.tools.profile.summary import compare, profile_of
from ortserve.tools.profile.trace import read_trace
from ortserve.tools.report import Table, Text


def runs(plain: Sequence[RunTime], profiled: Sequence[RunTime], *lines: bytes, threads: int = 1) -> Runs:
    trace = read_trace(trace_file(*lines))
    return Runs("m", "CPUExecutionProvider", threads, {}, "", 1, list(plain), list(profiled), trace)


def runs_of(times_us: Sequence[Sequence[int]], *, plain_us: Sequence[int], cost_us: int) -> Runs:
    """Runs of nodes with these times, each 5 µs after the previous one; the call adds 15 µs."""
    lines: list[bytes] = []
    profiled = []
    for number, times in enumerate(times_us):
        lines += flat_run(number * 1_000_000, *times)
        profiled.append((sum(times) + 5 * len(times) + 15) * 1000)
    return runs(
        [RunTime(us * 1000, ns - cost_us * 1000) for us, ns in zip(plain_us, profiled, strict=True)],
        [RunTime(ns, ns) for ns in profiled],
        *lines,
    )


def test_balance_adds_up() -> None:
    """Operators 6,000 µs; around them 25 µs, of which 10 µs are the profiler."""
    balance = profile_of(runs_of([(4000, 2000)] * 8, plain_us=[6015] * 8, cost_us=10)).balance

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
    balance = profile_of(runs_of([(4000, 2000)] * 8, plain_us=[5425] * 8, cost_us=600)).balance

    assert balance.rest_share < -0.05
    assert balance.is_closed is False


def test_time_that_the_profiler_adds_at_few_nodes_of_each_run_is_not_an_interruption() -> None:
    """In each run, other 20 of 200 nodes take 20 µs longer, because the profiler allocates memory."""
    times = [[50 if node % 10 == run else 30 for node in range(200)] for run in range(8)]
    balance = profile_of(runs_of(times, plain_us=[6015] * 8, cost_us=400 + 5 * 200)).balance

    assert balance.operators_ms == pytest.approx(6.0)
    assert balance.profiler_ms == pytest.approx(1.4)
    assert balance.rest_ms == pytest.approx(0.015)
    assert balance.interrupted_ms == pytest.approx(0)


def test_balance_that_the_clock_makes_uncertain_gets_no_verdict() -> None:
    """The 2,000 calls may each lose up to 1 µs. Of 11.4 ms, 1.4 ms belong to no part."""
    for profiled_us, is_closed in ((3, None), (200, False)):
        times = [[profiled_us] * (6000 // profiled_us)] * 8
        measured = runs_of(times, plain_us=[7400] * 8, cost_us=0)
        measured.plain = [RunTime(7_400_000, 7_400_000)] * 8
        measured.profiled = [RunTime(11_400_000, 11_400_000)] * 8
        found = profile_of(measured)
        assert found.balance.rest_share > 0.05
        assert found.balance.is_closed is is_closed


def test_short_runs_that_were_disturbed_while_profiled_get_no_verdict() -> None:
    balance = profile_of(runs_of([(4000, 2000)] * 8, plain_us=[188] * 8, cost_us=600)).balance

    assert balance.is_closed is None


def test_short_runs_report_the_share_of_the_profiler() -> None:
    balance = profile_of(runs_of([(40, 35)] * 8, plain_us=[50] * 8, cost_us=50)).balance

    assert balance.is_closed is None
    assert balance.profiler_share == pytest.approx(0.5)


def test_share_of_the_profiler_is_not_shown_if_it_varied_too_much() -> None:
    times = [(40, 35)] * 8
    for plain_us, text in ((50, "the profiler takes 50.0 %"), (900, "share of a profiled run is not known")):
        measured = runs_of(times, plain_us=[50] * 8, cost_us=50)
        measured.plain = [RunTime(plain_us * 1000, plain_us * 1000)] * 8
        (balance,) = (
            block
            for block in present(ProfileResult(profile=profile_of(measured))).blocks
            if isinstance(block, Table) and block.title == "Where the time goes"
        )
        assert text in balance.note


def test_interruptions_are_named_and_not_charged_to_operators() -> None:
    quiet, first, second = (4000, 2000), (4000, 9000), (54000, 2000)
    measured = runs_of([quiet, first, quiet, second] * 4, plain_us=[6015] * 16, cost_us=10)
    for times, cpu_us in ((measured.plain, 6015), (measured.profiled, 6025)):
        times[:] = [replace(time, cpu_ns=cpu_us * 1000) for time in times]
    held = profile_of(measured)

    assert {node.name: node.self_ms for node in held.nodes} == {"n0": 4.0, "n1": 2.0}
    assert held.balance.interrupted_ms == pytest.approx(held.balance.profiled_ms - 6.025)
    assert held.balance.interrupted_ms > 1
    assert any("busy" in note for note in held.notes)


def test_self_times_are_without_the_profilers_own_part() -> None:
    lines: list[bytes] = []
    for zero_us in range(0, 8000, 1000):
        inner = [node(f"step{step}", zero_us + 30 * step, 20) for step in range(3)]
        lines += [*inner, execution(zero_us, 90), node("loop", zero_us, 100, op="Loop"), node("end", zero_us + 105, 2)]
        lines += [execution(zero_us, 110), run(zero_us, 120)]
    plain, profiled = ([RunTime(us * 1000, us * 1000)] * 8 for us in (100, 120))
    held = profile_of(replace(runs(plain, profiled, *lines), call_overhead_us=3.0))

    self_us = {one.name: one.self_ms * 1e3 for one in held.nodes}
    total_us = {one.name: one.total_ms * 1e3 for one in held.nodes}
    assert self_us == pytest.approx({"loop": 7, "step0": 17, "step1": 17, "step2": 17, "end": 0}, abs=1e-9)
    assert total_us == pytest.approx({"loop": 88, "step0": 17, "step1": 17, "step2": 17, "end": 0}, abs=1e-9)
    assert held.balance.operators_ms == pytest.approx(0.058)
    balance = held.balance
    assert balance.operators_ms + balance.profiler_ms + balance.rest_ms + balance.interrupted_ms == pytest.approx(0.12)


def test_runs_on_different_samples_are_averaged() -> None:
    assert typical(np.array([10, 20, 10, 20]), [[0, 2], [1, 3]]) == 15
    assert typical(np.array([10, 0]), [[0], [1]]) == 5, "a node that one of two samples does not run"
    assert typical(np.array([1, 1, 1, 5]), [[0, 1, 2], [3]]) == 2, "groups count by their runs"


def test_runs_of_other_shapes_or_nodes_are_other_work() -> None:
    lines: list[bytes] = []
    for number, (rows, steps) in enumerate([(1, 1), (2, 1), (1, 1), (1, 2)]):
        zero_us = number * 1000
        inner = [node("step", zero_us + 20 * step, 5) for step in range(steps)]
        lines += [*inner, execution(zero_us, 50), node("loop", zero_us, 60, op="Loop", outputs=[(rows, 4)])]
        lines += [execution(zero_us, 70), run(zero_us, 80)]
    times = [RunTime(80_000, 80_000)] * 4

    assert runs(times, times, *lines).groups == [[0, 2], [1], [3]]


def test_shares_and_operators_add_up() -> None:
    held = profile_of(runs_of([(100, 200, 700)] * 5, plain_us=[900] * 5, cost_us=1))

    assert sum(node.share for node in held.nodes) == pytest.approx(1)
    assert sum(operator.share for operator in held.operators) == pytest.approx(1)
    assert [operator.op for operator in held.operators] == ["Op2", "Op1", "Op0"]
    assert held.operators[0].mean_us == pytest.approx(700)


def test_nodes_that_only_the_warm_up_ran_are_left_out() -> None:
    held = runs([RunTime(90_000, 90_000)], [RunTime(95_000, 95_000)], *flat_run(0, 10, 20), *flat_run(1000, 30))
    del held.trace.runs[:1]

    found = profile_of(held)

    assert [(node.name, node.calls, node.self_ms) for node in found.nodes] == [("n0", 1, 0.03)]


def test_gaps_are_those_of_the_trace() -> None:
    lines = [line for number in range(4) for line in flat_run(number * 10_000, 100, 100, gap_us=400)]
    held = profile_of(runs([RunTime(1_000_000, 990_000)] * 4, [RunTime(1_010_000, 1_000_000)] * 4, *lines))

    assert held.balance.gaps_ms == pytest.approx(0.8)
    assert {node.name: node.gap_us for node in held.nodes} == pytest.approx({"n0": 400, "n1": 400})


def test_comparison_names_what_was_gained_and_lost() -> None:
    noisy = [6000, 6100, 5900, 6050] * 4
    one = runs_of([(4000, 2000)] * 16, plain_us=noisy, cost_us=10)
    other = runs_of([(1000,)] * 16, plain_us=[us // 6 for us in reversed(noisy)], cost_us=10)

    found = compare(replace(one, threads=2), other, profile_of(one), profile_of(other))
    assert found.ratio == pytest.approx(1 / 6, rel=0.05)
    assert found.is_beyond_noise
    assert [(row.op, row.nodes, row.other_nodes) for row in found.operators] == [("Op0", 1, 1), ("Op1", 1, None)]
    assert [row.other_self_ms - row.self_ms for row in found.operators] == pytest.approx([-3, -2])

    same = compare(one, replace(one, plain=one.plain[::-1]), profile_of(one), profile_of(one))
    assert not same.is_beyond_noise


@pytest.mark.parametrize(("pairs", "has_verdict"), [(1, False), (5, False), (6, True)])
def test_few_runs_allow_no_verdict(pairs: int, has_verdict: bool) -> None:
    """Without this rule, the interval of a single pair would be a point, and any difference beyond the noise."""
    slow = runs_of([(8000,)] * pairs, plain_us=[8000] * pairs, cost_us=10)
    fast = runs_of([(6000,)] * pairs, plain_us=[6000] * pairs, cost_us=10)

    one, other = profile_of(slow), profile_of(fast)
    comparison = compare(slow, fast, one, other)
    assert comparison.is_beyond_noise is has_verdict
    assert (one.balance.is_closed is not None) is has_verdict
    (text, *_) = present(ProfileResult(profile=one, other=other, comparison=comparison)).blocks
    assert isinstance(text, Text)
    assert ("too few for a verdict" in text.text) is not has_verdict


def test_time_on_the_processor_counts_only_if_one_thread_does_all_work() -> None:
    times = [RunTime(100_000, 100_000)]
    busy = {"main_thread": {"Run": 60}, "sub_threads": {"77": {"num_run": 12}}}

    def held(*, threads: int = 1, **args: Any) -> Runs:
        return runs(times, times, node("a", 0, 50, **args), execution(0, 60), run(0, 70), threads=threads)

    assert held().on_one_thread
    assert not held(threads=2).on_one_thread, "the trace does not say what the others did"
    assert not held(threads=2, thread_scheduling_stats=busy).on_one_thread
    busy["sub_threads"]["77"]["num_run"] = 0  # type: ignore[index]
    assert held(threads=2, thread_scheduling_stats=busy).on_one_thread
    assert not held(provider="CUDAExecutionProvider").on_one_thread


def test_copies_between_devices_are_listed_apart() -> None:
    times = [RunTime(100_000, 100_000)]
    held = profile_of(
        runs(
            times,
            times,
            node("to", 5, 30, op="MemcpyFromHost", provider="CUDAExecutionProvider"),
            node("a", 40, 50, provider="CUDAExecutionProvider"),
            execution(0, 100),
            run(0, 110),
        )
    )

    assert [(copy.op, copy.provider, copy.self_ms) for copy in held.copies] == [
        ("MemcpyFromHost", "CUDAExecutionProvider", 0.03)
    ]


def test_empty_graph_has_a_profile() -> None:
    held = profile_of(runs_of([()] * 2, plain_us=[10] * 2, cost_us=1))

    assert (held.nodes, held.operators) == ([], [])
