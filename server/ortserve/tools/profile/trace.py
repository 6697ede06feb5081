"""ONNX Runtime's trace of a session, as runs of operators with their self times. Pure.

The trace is a JSON array with one event per line, in the order in which the events end. The nodes of a graph inside an
If, Loop or Scan come before that node and after nothing that names it: they are nested by time, thread by thread.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import orjson

from ortserve.errors import ErrorKind, ServeError

_KERNEL: Final = "_kernel_time"
_EXECUTE: Final = "SequentialExecutor::Execute"

Shape: TypeAlias = tuple[str, tuple[int, ...]]
"""The element type of a tensor, as ONNX Runtime names it, and its shape."""


@dataclass(frozen=True, slots=True)
class TracedNode:
    """A node with one set of shapes.

    Attributes:
        name: Without what the profiler adds; ``<operator>_<index>`` if the node has none.
        op: Operator.
        provider: Execution provider that ran it.
        path: Names of the nodes whose graphs contain it, the outermost first.
        inputs: Without those that the kernel has prepacked.
        outputs: Tensors only.
        weight_bytes: Without prepacked weights.
        output_bytes: As ONNX Runtime counts them.
    """

    name: str
    op: str
    provider: str
    path: tuple[str, ...]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    weight_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a node.

    Attributes:
        node: Index into ``Trace.nodes``.
        depth: 0 in the main graph.
        start_us: Since the begin of the run.
        total_us: Graphs inside it included.
        self_us: Without them.
        gap_us: Since the operator before it in its graph ended, or since the graph began.
        thread_us: What the threads of the pool account for: work, waiting and handing out.
        wait_us: The waiting of the calling thread in that.
    """

    node: int
    depth: int
    start_us: int
    total_us: int
    self_us: int
    gap_us: int
    thread_us: int = 0
    wait_us: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the model.

    Attributes:
        total_us: As the profiler measured it.
        calls: Outer ones before those inside them.
        is_parallel: Whether nodes ran on several threads at a time, so that their times overlap.
        blocks: Blocks of work that each other thread of the pool has run since it started, by thread.
    """

    total_us: int
    calls: tuple[Call, ...]
    is_parallel: bool
    blocks: Mapping[str, int]

    @property
    def operators_us(self) -> int:
        """The sum of all self times."""
        return sum(call.self_us for call in self.calls)

    @property
    def gaps_us(self) -> int:
        """The sum of the gaps before all calls."""
        return sum(call.gap_us for call in self.calls)


@dataclass(slots=True)
class Trace:
    """The runs of a session.

    Attributes:
        nodes: Of all runs.
        runs: Complete ones, in order.
        dropped: Events that the profiler had no room for.
        opening_us: Loading and initialization of the session.
        arenas: By execution provider, the most bytes in use and held.
    """

    nodes: list[TracedNode] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    dropped: int = 0
    opening_us: int = 0
    arenas: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Event:
    start_us: int
    total_us: int
    name: str
    details: Mapping[str, Any] = field(default_factory=dict)
    """Of a node; empty for the execution of a graph."""
    inner: "list[_Event]" = field(default_factory=list)
    """Executions inside a node, or nodes inside an execution."""


def read_trace(lines: Iterable[bytes]) -> Trace:
    """Read a trace file.

    Raises:
        ServeError: internal, if it is no trace.
    """
    return _Reader().read(lines)


class _Reader:
    def __init__(self) -> None:
        self._trace = Trace()
        self._pending: dict[int, list[_Event]] = {}
        """By thread: events whose parents have not ended."""
        self._indices: dict[tuple[object, ...], int] = {}

    def read(self, lines: Iterable[bytes]) -> Trace:
        for event in _events(lines):
            name, thread = event["name"], event["tid"]
            known = _Event(event["ts"], event["dur"], name)
            if event["cat"] == "Node":
                known.details = event["args"]
                # A node contains the executions that began since it did. Other nodes are never inside it directly.
                known.inner = self._take(thread, known.start_us, of_nodes=False)
                self._pending.setdefault(thread, []).append(known)
            elif name == _EXECUTE:
                known.inner = self._take(thread, known.start_us, of_nodes=True)
                self._pending.setdefault(thread, []).append(known)
            elif name == "model_run":
                self._end_run(known)
            elif name == "profile_truncated":
                self._trace.dropped = int(event["args"].get("dropped_event_count", 0)) or 1
            elif name.startswith("model_loading") or name == "session_initialization":
                self._trace.opening_us += known.total_us
        return self._trace

    def _take(self, thread: int, start_us: int, *, of_nodes: bool) -> list[_Event]:
        """Take the last pending events of a thread that began at a time or later, as long as they are of one kind."""
        pending = self._pending.get(thread, [])
        first = len(pending)
        while first and bool(pending[first - 1].details) is of_nodes and pending[first - 1].start_us >= start_us:
            first -= 1
        taken = pending[first:]
        del pending[first:]
        return taken

    def _end_run(self, run: _Event) -> None:
        executions = [event for events in self._pending.values() for event in events if not event.details]
        elsewhere = [event for events in self._pending.values() for event in events if event.details]
        self._pending.clear()
        calls: list[Call] = []
        blocks: dict[str, int] = {}
        for execution in executions:
            # In parallel mode, nodes run on other threads than the execution that contains them.
            execution.inner = sorted([*execution.inner, *elsewhere], key=lambda event: event.start_us)
            self._add_calls(execution, run.start_us, (), calls, blocks)
        self._trace.runs.append(Run(run.total_us, tuple(calls), bool(elsewhere), blocks))

    def _add_calls(
        self, execution: _Event, zero_us: int, path: tuple[str, ...], calls: list[Call], blocks: dict[str, int]
    ) -> None:
        before_us = execution.start_us
        for event in execution.inner:
            index = self._index_of(event, path)
            nested_us = sum(inner.total_us for inner in event.inner)
            thread_us, wait_us = self._read_threads(event, blocks)
            calls.append(
                Call(
                    index,
                    len(path),
                    event.start_us - zero_us,
                    event.total_us,
                    max(0, event.total_us - nested_us),
                    max(0, event.start_us - before_us),
                    thread_us,
                    wait_us,
                )
            )
            before_us = event.start_us + event.total_us
            for inner in event.inner:
                self._add_calls(inner, zero_us, (*path, self._trace.nodes[index].name), calls, blocks)

    def _index_of(self, event: _Event, path: tuple[str, ...]) -> int:
        details = event.details
        provider = details.get("provider", "")
        if "mem_in_use_peak" in details:
            peak, held = self._trace.arenas.get(provider, (0, 0))
            self._trace.arenas[provider] = (
                max(peak, int(details["mem_in_use_peak"])),
                max(held, int(details.get("mem_arena_held", 0))),
            )
        inputs, outputs = details.get("input_type_shape", ()), details.get("output_type_shape", ())
        shapes = orjson.dumps((inputs, outputs))
        key = (path, event.name, details.get("op_name"), details.get("node_index"), provider, shapes)
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = len(self._trace.nodes)
            self._trace.nodes.append(
                TracedNode(
                    event.name.removesuffix(_KERNEL),
                    details.get("op_name", ""),
                    provider,
                    path,
                    tuple(_shapes(inputs)),
                    tuple(_shapes(outputs)),
                    int(details.get("parameter_size", 0)),
                    int(details.get("output_size", 0)),
                )
            )
        return index

    def _read_threads(self, event: _Event, blocks: dict[str, int]) -> tuple[int, int]:
        statistics = event.details.get("thread_scheduling_stats")
        if not statistics:
            return 0, 0
        for thread, counts in statistics.get("sub_threads", {}).items():
            blocks[thread] = counts.get("num_run", 0)
        main = statistics.get("main_thread", {})
        parts = [main.get(part, 0) for part in ("Distribution", "DistributionEnqueue", "Run", "Wait", "WaitRevoke")]
        return sum(parts), main.get("Wait", 0)


def _shapes(given: Iterable[Mapping[str, list[int]]]) -> Iterator[Shape]:
    for one in given:
        for dtype, sizes in one.items():
            yield dtype, tuple(sizes)


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The events of a file, one at a time: all of them together would take gigabytes."""
    count = 0
    for line in lines:
        text = line.strip().removesuffix(b",")
        if text in (b"", b"[", b"]"):
            continue
        try:
            event = orjson.loads(text.removeprefix(b"[").removesuffix(b"]"))
            yield {key: event[key] for key in ("cat", "tid", "dur", "ts", "name", "args")}
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            problem = f"line {count + 1} of ONNX Runtime's trace is no event: {error}"
            raise ServeError(ErrorKind.INTERNAL, problem) from None
        count += 1
