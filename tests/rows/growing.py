"""A graph that grows node by node. ONNX Runtime runs it at each step: each row alone, and batches of the rows.

Nodes run one at a time in sessions that are reused for the next graphs, so that thousands of graphs take seconds.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from ortserve.registry.request_shapes import CRASHING
from rows.brute_force import BATCHES, Observation, fill_memory

IR_VERSION: Final = 10
ROWS: Final = 3
RUNS: Final = [*((row,) for row in range(ROWS)), *BATCHES[1:]]
"""Single rows, then the batches."""

Runs: TypeAlias = list[np.ndarray | None]
"""A tensor in each of ``RUNS``; None if ONNX Runtime rejected it."""

_MAX_SESSIONS: Final = 3000
_SIZED: Final = frozenset({"ConstantOfShape", "Expand", "Pad", "Range", "Reshape", "Resize", "Tile"})
_LARGEST: Final = 1e5
"""Upper bound of numbers, so that differences are not caused by rounding."""


class Unsuitable(Exception):  # noqa: N818 - nothing is wrong
    """No such node fits here; the graph is unchanged."""


@dataclass(frozen=True, slots=True)
class Input:
    """An input: its type, its dimensions as declared, and the axis of its rows."""

    element_type: int
    dims: Sequence[int | str | None]
    axis: int | None


class GrowingGraph:
    """Nodes, weights and inputs, with the values of all tensors in all runs."""

    def __init__(self, rng: random.Random, opset: int) -> None:
        self.rng = rng
        self.opset = opset
        self.inputs: dict[str, Input] = {}
        self.weights: dict[str, np.ndarray] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.values: dict[str, Runs] = {}
        self._not_run: dict[str, list[int]] = {}
        self._names = 0

    def new_name(self, letter: str = "t") -> str:
        self._names += 1
        return f"{letter}{self._names}"

    def add_input(self, element_type: int, dims: Sequence[int | str | None], axis: int | None, rows: Runs) -> str:
        """Add an input; ``rows`` are its values for each row alone."""
        name = self.new_name("x")
        self.inputs[name] = Input(element_type, dims, axis)
        self.values[name] = [
            rows[run[0]] if axis is None else np.concatenate([there(rows[row]) for row in run], axis) for run in RUNS
        ]
        return name

    def add_weight(self, array: np.ndarray) -> str:
        name = self.new_name("w")
        self.weights[name] = array
        self.values[name] = [array] * len(RUNS)
        return name

    def add_ints(self, *numbers: int) -> str:
        return self.add_weight(np.array(numbers, np.int64))

    def add_scalar(self, number: int) -> str:
        return self.add_weight(np.array(number, np.int64))

    def add(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> str:
        return self.add_many(op, *inputs, outputs=outputs, domain=domain, **attributes)[0]

    def add_many(self, op: str, *inputs: str, outputs: int, domain: str = "", **attributes: Any) -> list[str]:
        """Run a node in all runs, and add it if it succeeds for each single row.

        Raises:
            Unsuitable: A single row is rejected, or its numbers are too large.
        """
        names = [self.new_name() for _ in range(outputs)]
        node = helper.make_node(op, list(inputs), names, domain=domain, **attributes)
        used = dict.fromkeys([*inputs, *captured(node)])
        used.pop("", None)
        if op in _SIZED and any(self._is_huge(name) for name in used):
            raise Unsuitable
        operands = {name: self.values[name] for name in used}
        session = _session(node, {name: there(runs[0]).dtype for name, runs in operands.items()}, self.opset)
        if session is None:
            raise Unsuitable
        results: list[list[np.ndarray] | None] = []
        for index in range(len(RUNS)):
            fill_memory(0x55 if index < ROWS else 0xAB)
            # Input names of the session, by position: the session may belong to another node.
            feeds = {f"i{position}": runs[index] for position, runs in enumerate(operands.values())}
            is_missing = any(array is None or (op in CRASHING and not array.size) for array in feeds.values())
            # ONNX Runtime 1.31.1 crashes the process if an operand has another rank than its term or the body declares.
            if op in ("Einsum", "Scan"):
                ranks = [there(runs[0]).ndim for runs in operands.values()]
                is_missing = is_missing or [array.ndim for array in feeds.values() if array is not None] != ranks
            try:
                result = None if is_missing else session.run(None, feeds)
            except Exception:
                result = None
            if index < ROWS and (result is None or not all(_is_tame(array) for array in result)):
                raise Unsuitable
            results.append(result)
        not_run = [index for index in range(len(RUNS)) if any(runs[index] is None for runs in operands.values())]
        for position, name in enumerate(names):
            self._not_run[name] = not_run
            self.values[name] = [None if result is None else np.asarray(result[position]) for result in results]
        self.nodes.append(node)
        return names

    def _is_huge(self, name: str) -> bool:
        """Whether a tensor, used as a shape, may request a huge result."""
        for array in self.values[name]:
            if array is None or array.dtype.kind != "i" or array.size >= 9:
                continue
            sizes: list[int] = [abs(int(size)) for size in array.ravel()]
            if prod([size for size in sizes if size]) > _LARGEST:
                return True
        return False

    def drop(self, count: int) -> None:
        """Remove all nodes after the first ``count``."""
        for node in self.nodes[count:]:
            for name in node.output:
                del self.values[name]
        del self.nodes[count:]

    def alone(self, name: str) -> np.ndarray:
        return there(self.values[name][0])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.alone(name).shape)

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        """The shapes in all runs."""
        return [tuple(array.shape) for array in self.values[name] if array is not None]

    def rows_axis(self, name: str) -> int | None:
        """The axis that is longer in a batch."""
        alone, batch = self.values[name][0], self.values[name][-1]
        if alone is None or batch is None or alone.ndim != batch.ndim:
            return None
        longer = [axis for axis in range(alone.ndim) if alone.shape[axis] != batch.shape[axis]]
        return longer[0] if longer else None

    def is_exact(self, name: str) -> bool:
        """Whether sums and products of these numbers are exact in any order."""
        for array in self.values[name]:
            if array is not None and array.dtype.kind == "f" and not np.array_equal(array * 16, np.rint(array * 16)):
                return False
        return True

    def observation(self, name: str) -> Observation:
        """The observations of a tensor. A batch counts as rejected by the node that rejected it, not by later ones."""
        runs, not_run = self.values[name], self._not_run.get(name, [])
        return Observation(
            runs[:ROWS], {RUNS[index]: runs[index] for index in range(ROWS, len(RUNS)) if index not in not_run}
        )

    def made(self) -> list[str]:
        """The tensors that nodes produce."""
        return [name for node in self.nodes for name in node.output]

    def model(self) -> onnx.ModelProto:
        """The whole graph as a model; its outputs are the tensors that no other node uses."""
        used = {name for node in self.nodes for name in [*node.input, *captured(node)]}
        ends = [name for name in self.made() if name not in used]
        graph = helper.make_graph(
            self.nodes,
            "random",
            [helper.make_tensor_value_info(name, one.element_type, one.dims) for name, one in self.inputs.items()],
            [onnx.ValueInfoProto(name=name) for name in ends],
            [numpy_helper.from_array(array, name) for name, array in self.weights.items()],
        )
        return _model(graph, self.opset)


def with_shapes(text: str, values: Mapping[str, Runs]) -> str:
    """A printed model with the shapes of its tensors, alone and in the largest batch, for failure messages."""
    lines = [text]
    for name, runs in values.items():
        batch = runs[-1]
        lines.append(f"{name}: {there(runs[0]).shape} together {None if batch is None else batch.shape}")
    return "\n".join(lines)


def with_shape_nodes(graph: GrowingGraph) -> tuple[onnx.ModelProto, list[str]]:
    """The model of a graph with a Shape node behind each tensor, and the names of their outputs."""
    model, shapes = graph.model(), []
    for name in graph.made():
        if isinstance(graph.values[name][0], np.ndarray):  # sequences have no shape
            shapes.append(f"shape_of_{name}")
            model.graph.node.append(helper.make_node("Shape", [name], shapes[-1:]))
            model.graph.output.append(helper.make_tensor_value_info(shapes[-1], TensorProto.INT64, [None]))
    return model, shapes


def observe_outputs(model: onnx.ModelProto, graph: GrowingGraph, names: list[str]) -> dict[str, Observation] | None:
    """The outputs ``names`` of a model with the inputs of a graph, run as a whole and optimized.

    Batches that ONNX Runtime rejects are left out. None if it rejects the model or a single row.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:
        return None
    results: dict[int, list[np.ndarray]] = {}
    for index in range(len(RUNS)):
        feeds = {name: graph.values[name][index] for name in graph.inputs}
        try:
            results[index] = session.run(names, feeds)
        except Exception:
            if index < ROWS:
                return None
    return {
        name: Observation(
            [results[row][place] for row in range(ROWS)],
            {RUNS[index]: result[place] for index, result in results.items() if index >= ROWS},
        )
        for place, name in enumerate(names)
    }


_sessions: Final[dict[bytes, Any]] = {}


def _session(node: onnx.NodeProto, dtypes: Mapping[str, np.dtype], opset: int) -> Any:
    """A session of a single node with inputs ``i0``, ``i1``, ...; None if ONNX Runtime has no such node."""
    renamed = onnx.NodeProto()
    renamed.CopyFrom(node)
    names = {name: f"i{position}" for position, name in enumerate(dtypes)}
    renamed.ClearField("input")
    renamed.input.extend(names.get(name, "") for name in node.input)
    del renamed.output[:]
    renamed.output.extend(f"o{position}" for position in range(len(node.output)))
    _renamecaptured(renamed, names)
    inputs = [_value(f"i{position}", dtype) for position, dtype in enumerate(dtypes.values())]
    outputs = [onnx.ValueInfoProto(name=name) for name in renamed.output]
    content = _model(helper.make_graph([renamed], "node", inputs, outputs), opset).SerializeToString()
    if content not in _sessions:
        if len(_sessions) >= _MAX_SESSIONS:
            _sessions.clear()
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_mem_pattern = False
        options.enable_cpu_mem_arena = False
        try:
            _sessions[content] = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception:
            _sessions[content] = None
    return _sessions[content]


def _model(graph: onnx.GraphProto, opset: int) -> onnx.ModelProto:
    versions = [
        helper.make_opsetid("", opset),
        helper.make_opsetid("com.microsoft", 1),
        helper.make_opsetid("ai.onnx.ml", 3),
    ]
    return helper.make_model(graph, opset_imports=versions, ir_version=IR_VERSION)


def _value(name: str, dtype: np.dtype) -> onnx.ValueInfoProto:
    """Declare a value of a type with any rank."""
    element_type = helper.np_dtype_to_tensor_dtype(dtype)
    return helper.make_tensor_value_info(name, element_type, None)


def _bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [attribute.g for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]


def captured(node: onnx.NodeProto) -> list[str]:
    """Tensors that the bodies of a node read from outside."""
    found: dict[str, None] = {}
    for body in _bodies(node):
        inner = {value.name for value in body.input} | {name for one in body.node for name in one.output}
        inner |= {weight.name for weight in body.initializer}
        for one in body.node:
            found.update(dict.fromkeys(name for name in one.input if name and name not in inner))
        found.update(dict.fromkeys(value.name for value in body.output if value.name not in inner))
    return list(found)


def _renamecaptured(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    for body in _bodies(node):
        for one in body.node:
            one.input[:] = [names.get(name, name) for name in one.input]


def _is_tame(array: np.ndarray) -> bool:
    if not array.size:  # the proof covers nonempty axes: 0 in the target of a Reshape means another size
        return False
    if array.dtype.kind == "f":
        return bool(np.all(np.isfinite(array)) and float(np.abs(array).max()) < _LARGEST) and array.size < 5000
    return array.size < 5000 and (array.dtype.kind != "i" or bool(np.all(np.abs(array) < _LARGEST)))


def there(array: np.ndarray | None) -> np.ndarray:
    assert array is not None
    return array


FLOAT: Final[int] = TensorProto.FLOAT
INT64: Final[int] = TensorProto.INT64
BOOL: Final[int] = TensorProto.BOOL
