"""Reading traces: nesting by time, self times, and events that the profiler omitted."""

import pytest

from ort_traces import event, execution, flat_run, node, run, trace_file
from ortserve.errors import ServeError
from ortserve.tools.profile.trace import Trace, read_trace


def self_times(trace: Trace) -> dict[str, int]:
    """Self times of the first run, by path and name."""
    found: dict[str, int] = {}
    for call in trace.runs[0].calls:
        node = trace.nodes[call.node]
        name = "/".join((*node.path, node.name))
        found[name] = found.get(name, 0) + call.self_us
    return found


def test_flat_run_has_self_times_and_gaps() -> None:
    trace = read_trace(trace_file(*flat_run(100, 30, 20, gap_us=7)))

    assert self_times(trace) == {"n0": 30, "n1": 20}
    assert [call.gap_us for call in trace.runs[0].calls] == [7, 7]
    assert [call.start_us for call in trace.runs[0].calls] == [7, 44]


def test_nested_graphs_count_once() -> None:
    """A loop with two iterations. In the second an If runs a node. The loop itself takes 10 µs of the 200."""
    lines = trace_file(
        node("before", 0, 10),
        node("step", 25, 60),
        execution(20, 70),
        node("step", 95, 30),
        node("chosen", 140, 40, op="Mul"),
        execution(135, 50),
        node("if", 130, 60, op="If"),
        execution(92, 120),
        node("loop", 15, 200, op="Loop"),
        node("after", 220, 5),
        execution(0, 230),
        run(0, 240),
    )
    trace = read_trace(lines)

    assert self_times(trace) == {
        "before": 10,
        "loop": 10,
        "loop/step": 90,
        "loop/if": 10,
        "loop/if/chosen": 40,
        "after": 5,
    }
    assert {node.path for node in trace.nodes} == {(), ("loop",), ("loop", "if")}
    assert sum(call.total_us for call in trace.runs[0].calls if not trace.nodes[call.node].path) == 215


def test_sibling_of_the_same_microsecond_is_no_child() -> None:
    lines = trace_file(node("a", 10, 0), node("b", 10, 0), execution(9, 5), run(9, 6))

    assert self_times(read_trace(lines)) == {"a": 0, "b": 0}


def test_nodes_on_other_threads_belong_to_the_run() -> None:
    lines = trace_file(node("a", 10, 50, thread=2), node("b", 12, 50, thread=3), execution(5, 70), run(0, 80))
    trace = read_trace(lines)

    assert trace.runs[0].is_parallel
    assert self_times(trace) == {"a": 50, "b": 50}


def test_other_shapes_are_another_entry_of_the_node() -> None:
    lines = trace_file(
        node("a", 0, 5, outputs=[(1, 4)]), node("a", 10, 5, outputs=[(2, 4)]), execution(0, 20), run(0, 20)
    )
    trace = read_trace(lines)

    assert [one.outputs for one in trace.nodes] == [(("float", (1, 4)),), (("float", (2, 4)),)]


def test_run_that_was_cut_off_is_left_out() -> None:
    cut = event("profile_truncated", 500, 0, dropped_event_count="7", max_num_events="1000000")

    assert len(read_trace(trace_file(*flat_run(0, 10), node("n0", 400, 10), cut)).runs) == 1


def test_threads_are_read() -> None:
    statistics = {
        "main_thread": {"Run": 60, "Wait": 30, "Distribution": 10, "DistributionEnqueue": 0, "WaitRevoke": 0},
        "sub_threads": {"77": {"num_run": 12, "core": 1}},
    }
    line = node("a", 0, 100, thread_scheduling_stats=statistics)
    trace = read_trace(trace_file(line, execution(0, 100), run(0, 100)))

    assert (trace.runs[0].calls[0].thread_us, trace.runs[0].calls[0].wait_us) == (100, 30)
    assert trace.runs[0].blocks == {"77": 12}


@pytest.mark.parametrize("line", [b"not json\n", b'{"name": "x"}\n', b"3\n"])
def test_file_that_is_no_trace_is_rejected(line: bytes) -> None:
    with pytest.raises(ServeError, match="is not an event"):
        read_trace([line])
