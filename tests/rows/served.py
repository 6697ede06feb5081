"""Random models as the server runs them, and requests to them.

A model is opened with the server's session options, its requests are joined by shape class, and an instance stages and
runs them. Only models with rows that are proven independent are served in this way.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import onnx
from onnx import helper

from ortserve.batching.groups import check_rows
from ortserve.batching.queue import Alone
from ortserve.config.model import ModelOptions
from ortserve.core.batch import Batch
from ortserve.core.conversion import repeated
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.engine.instance import Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.ort_errors import ORT_ERRORS
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.errors import ServeError
from ortserve.model_file.graph import Model
from ortserve.model_file.reading import parse_model
from ortserve.registry.load.analysed_model import analyse_model
from ortserve.registry.load.row_axes import Grounds
from ortserve.registry.request_shapes import ShapeClasses
from ortserve.rows import Value, claims
from rows.brute_force import Arrays
from rows.grower import TEXTS
from rows.growing import ROWS, GrowingGraph, captured, there
from rows.nested import nest

Outputs: TypeAlias = list[np.ndarray]


def with_proven_outputs(graph: GrowingGraph, rng: random.Random) -> onnx.ModelProto | None:
    """The part of a graph that computes one to three tensors whose entries are claimed to be rows; None without any.

    Half of the models have no free sizes besides the rows, and many have nodes in bodies and functions.
    """
    model = graph.model()
    axes = {name: one.axis for name, one in graph.inputs.items()}
    claimed = claims(parse_model(memoryview(model.SerializeToString())), axes, believe_names=rng.random() < 0.7)
    names = [name for name in graph.made() if name in claimed and _are_rows(claimed[name])]
    if not names:
        return None
    late = names[len(names) // 2 :]
    outputs = sorted({rng.choice(late) for _ in range(rng.randint(1, 3))})
    _prune(model, outputs)
    for name in outputs:
        array = graph.alone(name)
        element_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        model.graph.output.append(helper.make_tensor_value_info(name, element_type, [None] * array.ndim))
    if rng.random() < 0.5:
        for value in model.graph.input:
            if axes[value.name] is not None:
                for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                    if axis != axes[value.name]:
                        dim.dim_value = graph.shape(value.name)[axis]
    if rng.random() < 0.6:
        nest(model, graph, rng)
    return model


def _are_rows(value: Value) -> bool:
    return value.is_rows and value.is_plain and value.facts.stride == 0 and value.facts.padding is None


def _prune(model: onnx.ModelProto, outputs: Sequence[str]) -> None:
    """Keep only the nodes that the outputs need, and declare the outputs without shapes."""
    needed, nodes = set(outputs), []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            nodes.append(node)
            needed.update(node.input, captured(node))
    graph = onnx.GraphProto(name=model.graph.name)
    graph.node.extend(reversed(nodes))
    graph.input.extend(value for value in model.graph.input if value.name in needed)
    graph.initializer.extend(weight for weight in model.graph.initializer if weight.name in needed)
    model.graph.CopyFrom(graph)


class NotServed(Exception):  # noqa: N818 - nothing is wrong
    """The model does not load, or its rows are not proven to be independent."""


class Served:
    """An open model."""

    def __init__(self, session: Session, signature: ModelSignature, content: Model, instance: Instance) -> None:
        self.session = session
        self.signature = signature
        self.content = content
        self.instance = instance
        self.classes = ShapeClasses(signature, None)

    def run_alone(self, row: Arrays) -> Outputs | None:
        """ONNX Runtime's outputs for a request in the model's own form; None if it is rejected."""
        try:
            outputs = self.session.run([spec.name for spec in self.signature.outputs], row)
        except ORT_ERRORS:
            return None
        return [np.asarray(output) for output in outputs]

    def shape_class(self, row: Arrays) -> object:
        """A key that is equal for requests that may share a batch; None for a request that must run alone."""
        found = self.classes.find(self._in_batch_form(row))
        return None if isinstance(found, Alone) else found

    def run_together(self, rows: Sequence[Arrays], bucket: int) -> list[Outputs] | None:
        """The outputs of each request of one shape class, from one batch; None if the batch is rejected."""
        parts = tuple(zip(*map(self._in_batch_form, rows), strict=True))
        try:
            result = self.instance.run(Batch(parts, len(rows), max(bucket, len(rows))))
            check_rows(result.outputs, len(rows))
        except ServeError:
            return None
        specs = self.signature.outputs
        return [
            [
                output[index] if spec.batch_axis is None else np.moveaxis(output[index : index + 1], 0, spec.batch_axis)
                for output, spec in zip(result.outputs, specs, strict=True)
            ]
            for index in range(len(rows))
        ]

    def _in_batch_form(self, row: Arrays) -> tuple[np.ndarray, ...]:
        return tuple(
            repeated(row[spec.name], 1) if spec.batch_axis is None else np.moveaxis(row[spec.name], spec.batch_axis, 0)
            for spec in self.signature.inputs
        )


@contextmanager
def served(model: onnx.ModelProto, path: Path) -> Iterator[Served]:
    """Open a model as the server does, on the CPU with one thread.

    Raises:
        NotServed: The model does not load, or its rows are not proven to be independent.
    """
    path.write_bytes(model.SerializeToString())
    analysed = analyse_model(path, "m", ModelOptions())
    if analysed.rows.grounds is not Grounds.PROVEN:
        raise NotServed(analysed.rows.doubt)
    try:
        session = open_session(path, "m", SessionOptions(ProviderChoice(CPU), 1), analysed.content)
        signature = analysed.rows.apply(read_signature(session, analysed.content))
    except ServeError as error:
        raise NotServed(str(error)) from error
    if not signature.is_batched:
        raise NotServed(signature.unbatched_because)
    instance = Instance(session, signature, name="m", intra_op_threads=1, clock=time.monotonic_ns)
    try:
        yield Served(session, signature, analysed.content, instance)
    finally:
        instance.close()


@dataclass(frozen=True, slots=True)
class Request:
    """A request of one row, in the model's own form. A wild request contains extreme numbers."""

    inputs: Arrays
    is_wild: bool


def make_requests(graph: GrowingGraph, signature: ModelSignature, rng: random.Random, count: int) -> list[Request]:
    """Requests of one row: the rows of the graph, and others with small or extreme numbers and other sizes."""
    grown = [{spec.name: there(graph.values[spec.name][row]) for spec in signature.inputs} for row in range(ROWS)]
    if any(grown[0][spec.name].shape[axis] != 1 for spec in signature.inputs if (axis := spec.batch_axis) is not None):
        return []  # the proof found other axes than the graph has
    requests = [Request(row, False) for row in grown]
    for _ in range(count):
        wild = rng.choice((0.0, 0.0, 0.1, 0.5, 1.0))
        sizes: dict[str, int] = {}
        inputs = {spec.name: _vary(rng, spec, grown[0][spec.name], sizes, wild) for spec in signature.inputs}
        requests.append(Request(inputs, wild > 0))
    return requests


EXTREMES: Final[Mapping[str, Sequence[float]]] = {
    "f": (np.inf, -np.inf, np.nan, -0.0, 3e38, 1e-40),
    "i": (-1, 0, 2**31 - 1),
    "u": (0, 255),
    "b": (0, 1),
}
"""Numbers at the limits of types, by kind of type."""


def _vary(rng: random.Random, spec: TensorSpec, like: np.ndarray, sizes: dict[str, int], wild: float) -> np.ndarray:
    """Another value for an input, usually in the shape of ``like``, and with one size for each name of a dimension."""
    if spec.batch_axis is None and rng.random() < 0.9:
        return like
    shape = list(like.shape)
    for axis, (declared, name) in enumerate(zip(spec.shape, spec.dim_names, strict=True)):
        if declared == -1 and axis != spec.batch_axis:
            size = shape[axis]
            drawn = rng.choice((rng.randint(1, 4), 2 * size, 3 * size)) if rng.random() < 0.25 else size
            shape[axis] = drawn if not name or rng.random() < 0.05 else sizes.setdefault(name, drawn)
    count, kind = prod(shape), like.dtype.kind
    if kind == "O":
        return np.array([rng.choice(TEXTS) for _ in range(count)], object).reshape(shape)
    low, high = (0, 1) if kind == "b" else (0 if kind == "u" else -3, 4)
    numbers = [rng.choice(EXTREMES[kind]) if rng.random() < wild else rng.randint(low, high) for _ in range(count)]
    with np.errstate(all="ignore"):
        return np.array(numbers).astype(like.dtype).reshape(shape)
