"""Small models written as text, and requests of one row each for their runs.

Inputs carry rows along the dimension named ``N``; inputs without it have no rows. Weights without values are random.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from rows.brute_force import BATCHES, Claim, Kind, Observation, disagreement, observe

ROWS: Final = 3
"""Number of requests of each case."""

_SIZES: Final = {"N": 1, "L": 5, "T": 4, "P": 3}
"""Sizes of free dimensions, by name."""

_IR_VERSION: Final = 10


@dataclass(frozen=True)
class Case:
    """A model and its requests.

    Attributes:
        name: Starts with the family of operators.
        inputs: Inputs in ONNX's textual syntax: ``float[N,4] x, int64[N,L] ids``.
        body: Nodes; results named ``y``, ``y1``, ... are the outputs.
        weights: Initializers, with or without values.
        opset: Version of the default domain.
        ml_opset: Version of ai.onnx.ml.
        functions: Local functions.
        below: Integers of the inputs are at least 0 and less than this.
        scale: Factor of the floats of the inputs, which are normally distributed.
        feeds: Values of some inputs, one per row, in place of random ones.
        function_domain: Domain of the functions.
        function_opset: Version of the functions' default domain, if it differs.
        sizes: Sizes of free dimensions in addition to the usual ones.
        refused_alone: ONNX Runtime rejects a single row, so brute force shows nothing.
    """

    name: str
    inputs: str
    body: str
    weights: str = ""
    opset: int = 17
    ml_opset: int = 3
    functions: str = ""
    below: int = 4
    scale: float = 3.0
    feeds: Mapping[str, Sequence[object]] = field(default_factory=dict)
    function_domain: str = "local"
    function_opset: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    refused_alone: bool = False

    @cached_property
    def model(self) -> onnx.ModelProto:
        outputs = sorted(set(re.findall(r"\by\d?\b", self.body)))
        text = f"""<ir_version: {_IR_VERSION}, opset_import: ["": {self.opset}, "com.microsoft": 1,
            "ai.onnx.ml": {self.ml_opset}, "local": 1]>
            model ({self.inputs}) => ({", ".join(outputs)}) <{self.weights}> {{ {self.body} }}"""
        if self.functions:
            text += f'<domain: "{self.function_domain}", opset_import: ["": {self.function_opset or self.opset}]>'
            text += self.functions
        model = onnx.parser.parse_model(text)
        fill_weights(model)
        return model

    @property
    def axes(self) -> dict[str, int | None]:
        """The hypothesis: for each input the axis named N."""
        return {
            value.name: next((axis for axis, dim in enumerate(_dims(value)) if dim == "N"), None)
            for value in self.model.graph.input
        }

    def rows(self, seed: int = 0) -> list[dict[str, np.ndarray]]:
        """Requests of one row each."""
        rng = np.random.default_rng(seed)
        rows: list[dict[str, np.ndarray]] = [{} for _ in range(ROWS)]
        for value in self.model.graph.input:
            carries = self.axes[value.name] is not None
            shared: np.ndarray | None = None
            for index, row in enumerate(rows):
                if value.name in self.feeds:
                    dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
                    row[value.name] = np.asarray(self.feeds[value.name][index], dtype)
                elif carries or shared is None:
                    row[value.name] = shared = self._make(rng, value)
                else:
                    row[value.name] = shared
        return rows

    def observe(self, *, inside: bool) -> dict[str, Observation]:
        return observe(self.model, self.rows(), self.axes, BATCHES, inside=inside)

    def _make(self, rng: np.random.Generator, value: onnx.ValueInfoProto) -> np.ndarray:
        shape = [{**_SIZES, **self.sizes}[dim] if isinstance(dim, str) else dim for dim in _dims(value)]
        return random_array(rng, value.type.tensor_type.elem_type, shape, self.below, self.scale)


def rows_meet(seen: Mapping[str, Observation]) -> bool:
    """Whether no layout of rows explains some output; this is the weakest evidence of brute force against a model."""
    return any(not any(disagreement(claim, one) == "" for claim in _explanations(one)) for one in seen.values())


def fill_weights(model: onnx.ModelProto, seed: int = 0) -> None:
    """Assign random values to weights without values."""
    rng = np.random.default_rng(seed)
    made = {name for node in model.graph.node for name in node.output}
    for value in list(model.graph.value_info):
        if value.name not in made:
            array = random_array(rng, value.type.tensor_type.elem_type, [int(dim) for dim in _dims(value)], 5, 1.0)
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
            model.graph.value_info.remove(value)


def random_array(
    rng: np.random.Generator, element_type: int, shape: Sequence[int], below: int = 4, scale: float = 3.0
) -> np.ndarray:
    if element_type == TensorProto.STRING:
        texts = np.array(["red", "green", "blue", "a b c", ""], object)
        return np.asarray(texts[rng.integers(0, 5, shape)], object).reshape(shape)
    dtype = helper.tensor_dtype_to_np_dtype(element_type)
    if dtype.kind == "b":
        return np.asarray(rng.integers(0, 2, shape), bool)
    if dtype.kind in "iu":
        return np.asarray(rng.integers(0, below, shape), dtype)
    return np.asarray(rng.normal(0, scale, shape), dtype)


def _explanations(seen: Observation) -> Iterator[Claim]:
    alone = seen.alone[0]
    yield Claim(Kind.FREE)
    for axis in range(0 if alone is None else alone.ndim):
        yield Claim(Kind.ROWS, axis)


def _dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
