"""ONNX Runtime's trace of a session, as runs of operators with their self times. Pure.

The trace is a JSON array with one event per line, in the order in which the events end. The nodes of a graph inside an
If, Loop or Scan precede that node and do not name it. Which event contains another one follows from their times and
threads.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import orjson

from ortserve.errors import ErrorKind, ServeError

_EXECUTE: Final = "SequentialExecutor::Execute"

TensorShape: TypeAlias = tuple[str, tuple[int, ...]]
"""The element type of a tensor, as ONNX Runtime names it, and its shape."""
NodeKey: TypeAlias = tuple[tuple[str, ...], str, str, str]
"""Path, name, operator and index."""


@dataclass(frozen=True, slots=True)
class TracedNode:
    """A node with one set of shapes.

    Attributes:
        path: Names of the nodes whose graphs contain it, the outermost first.
        name: ``<operator>_<index>`` if the node has none; another node may have this name.
        inputs: Shapes of the inputs, without those that the kernel has prepacked.
        index: Number of the node in its graph.
    """

    path: tuple[str, ...]
    name: str
    op: str
    provider: str
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    index: str = ""

    @property
    def key(self) -> NodeKey:
        return self.path, self.name, self.op, self.index


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a node.

    Attributes:
        node: Index into ``Trace.nodes``.
        start_us: Time from the beginning of the run.
        total_us: Duration, with the graphs inside the node.
        self_us: Duration without these graphs.
        calls: The number of calls in ``total_us``: this one and those in inner graphs.
        gap_us: Time since the previous operator of the graph ended, or since the graph began.
        thread_us: Time of the calling thread in parallel sections: distributing work, running it and waiting.
        wait_us: The part of ``thread_us`` spent waiting.
    """

    node: int
    start_us: int
    total_us: int
    self_us: int
    calls: int
    gap_us: int
    thread_us: int
    wait_us: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the model.

    Attributes:
        calls: The calls of nodes, each before the calls inside it.
        is_parallel: Whether nodes ran concurrently on several threads, so that their times overlap.
        blocks: Blocks of work that each other thread of the pool has run since its start, by thread.
    """

    total_us: int
    calls: tuple[Call, ...]
    is_parallel: bool
    blocks: Mapping[str, int]


@dataclass(slots=True)
class Trace:
    """The complete runs of a session, in order, and the nodes of all of them, in the order of their first calls."""

    nodes: list[TracedNode] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)


@dataclass(slots=True)
class _Event:
    """A node, or the execution of a graph, which has no ``details``. ``inner`` has the events directly inside it."""

    start_us: int
    total_us: int
    name: str
    details: Mapping[str, Any] = field(default_factory=dict)
    inner: "list[_Event]" = field(default_factory=list)


def read_trace(lines: Iterable[bytes]) -> Trace:
    """Read a trace line by line, because all events together may take gigabytes.

    Raises:
        ServeError: internal: a line is no event.
    """
    reader = _Reader()
    for number, line in enumerate(lines, 1):
        text = line.strip().removesuffix(b",").removeprefix(b"[").removesuffix(b"]")
        if not text:
            continue
        try:
            event = orjson.loads(text)
            known = _Event(event["ts"], event["dur"], event["name"])
            reader.add(known, event["tid"], event["args"] if event["cat"] == "Node" else None)
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            problem = f"line {number} of ONNX Runtime's trace is not an event: {error}"
            raise ServeError(ErrorKind.INTERNAL, problem) from None
    return reader.trace


class _Reader:
    def __init__(self) -> None:
        self.trace = Trace()
        self._pending: dict[int, list[_Event]] = defaultdict(list)
        """Events whose parents have not ended, by thread."""
        self._indices: dict[tuple[object, ...], int] = {}

    def add(self, event: _Event, thread: int, details: Mapping[str, Any] | None) -> None:
        """Add the next event. Only nodes have ``details``."""
        if event.name == "model_run":
            self._end_run(event)
        elif details or event.name == _EXECUTE:
            # A node contains the executions that began after it, and an execution contains the nodes that did.
            event.details = details or {}
            pending = self._pending[thread]
            first = len(pending)
            while first and bool(pending[first - 1].details) is not bool(details):
                if pending[first - 1].start_us < event.start_us:
                    break
                first -= 1
            event.inner = pending[first:]
            pending[first:] = [event]

    def _end_run(self, run: _Event) -> None:
        events = [event for pending in self._pending.values() for event in pending]
        self._pending.clear()
        elsewhere = [event for event in events if event.details]
        calls: list[Call] = []
        blocks: dict[str, int] = {}
        for execution in events:
            if not execution.details:
                # In parallel mode, nodes run on other threads than the execution that contains them.
                execution.inner = sorted([*execution.inner, *elsewhere], key=lambda event: event.start_us)
                self._add_calls(execution, run.start_us, (), calls, blocks)
        self.trace.runs.append(Run(run.total_us, tuple(calls), bool(elsewhere), blocks))

    def _add_calls(
        self, execution: _Event, zero_us: int, path: tuple[str, ...], calls: list[Call], blocks: dict[str, int]
    ) -> None:
        before_us = execution.start_us
        for event in execution.inner:
            index = self._index_of(event, path)
            thread_us, wait_us = _thread_times(event, blocks)
            call = Call(
                node=index,
                start_us=event.start_us - zero_us,
                total_us=event.total_us,
                self_us=max(0, event.total_us - sum(inner.total_us for inner in event.inner)),
                calls=_count_calls(event),
                gap_us=max(0, event.start_us - before_us),
                thread_us=thread_us,
                wait_us=wait_us,
            )
            calls.append(call)
            before_us = event.start_us + event.total_us
            for inner in event.inner:
                self._add_calls(inner, zero_us, (*path, self.trace.nodes[index].name), calls, blocks)

    def _index_of(self, event: _Event, path: tuple[str, ...]) -> int:
        details = event.details
        name, op = event.name.removesuffix("_kernel_time"), details["op_name"]
        inputs, outputs = details.get("input_type_shape", ()), details.get("output_type_shape", ())
        number = details.get("node_index", "")
        key = (path, name, op, number, orjson.dumps((inputs, outputs)))
        index = self._indices.setdefault(key, len(self.trace.nodes))
        if index == len(self.trace.nodes):
            node = TracedNode(path, name, op, details.get("provider", ""), _shapes(inputs), _shapes(outputs), number)
            self.trace.nodes.append(node)
        return index


def _count_calls(event: _Event) -> int:
    return 1 + sum(_count_calls(node) for execution in event.inner for node in execution.inner)


def _thread_times(event: _Event, blocks: dict[str, int]) -> tuple[int, int]:
    """``Call.thread_us`` and ``wait_us``; adds the threads' counts to ``blocks``."""
    statistics = event.details.get("thread_scheduling_stats") or {}
    for thread, counts in statistics.get("sub_threads", {}).items():
        blocks[thread] = counts.get("num_run", 0)
    main = statistics.get("main_thread", {})
    parts = ("Distribution", "DistributionEnqueue", "Run", "Wait", "WaitRevoke")
    return sum(main.get(part, 0) for part in parts), main.get("Wait", 0)


def _shapes(given: Iterable[Mapping[str, list[int]]]) -> tuple[TensorShape, ...]:
    return tuple((dtype, tuple(sizes)) for one in given for dtype, sizes in one.items())
