"""Decides by the shapes of requests which of them may share a batch, and how empty tensors are handled.

ONNX Runtime 1.31.1 with the CPU provider was run on empty tensors: the backend node tests of ONNX 1.22 and the models
of ``tests/rows``, with 0 elements along one axis. Most models returned empty outputs, exported transformers failed at a
Reshape, and the operators in ``CRASHING`` ended the process. Others left outputs unwritten (``load/empty_axes``).
"""

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from math import prod
from typing import Final, TypeAlias

import numpy as np

from ortserve.batching.queue import Alone
from ortserve.core.batch import Arrays
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import absent, format_shape, is_absent
from ortserve.engine.corrections.empty_checks import computes_empty
from ortserve.errors import ServeError, invalid_input
from ortserve.rows import sum_terms

_MAX_VALUE_BYTES: Final = 64 * 1024
"""Maximum size of an input without rows that is compared by value, such as a scale or a list of labels."""
_MAX_VERDICTS: Final = 256
"""Maximum number of sets of shapes whose verdict is cached."""

Shapes: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""The shape of a row of each input; None for an absent input."""


class ShapeClasses:
    """Finds the shape class of a request, for a model that has several. Any thread."""

    def __init__(self, signature: ModelSignature, padding: Padding | None, *, states_elsewhere: int = 0) -> None:
        """Prepare the search for classes.

        Args:
            signature: Signature of the model itself.
            padding: Padding of requests; None if requests are not padded.
            states_elsewhere: Number of inputs at the end that are states outside host memory
                (``SequenceTensors.kept_elsewhere``). Requests with such states are not padded.
        """
        self._states_elsewhere = states_elsewhere
        self._is_batched = signature.is_batched
        self._padding = padding
        self._joined: frozenset[int] = frozenset() if signature.ragged is None else signature.ragged.joined
        self._wholes = [
            (index, spec.is_optional)
            for index, spec in enumerate(signature.inputs)
            if signature.is_batched and spec.batch_axis is None
        ]
        self._sizes = EqualSizes(signature)
        added = [] if padding is None else [axis.multiple - 1 for axis in padding.axes if axis is not None]
        self._longest = (signature.longest_axis or sys.maxsize) - max(added, default=0)
        self._pads_fixed = padding is not None and bool(signature.fixed_sizes)
        self._may_share = lru_cache(_MAX_VERDICTS)(self._judge_shapes)

    def find(self, inputs: Arrays) -> Hashable:
        """Find the shape class of a request. Requests of equal classes may share a batch; ``Alone`` shares with none.

        A request runs alone if it sets an initializer of the model, if it has an axis without elements, or if the proof
        of independent rows does not hold for its sizes: they contradict names of dimensions, or an axis is too long.

        Raises:
            ServeError: invalid_input, for inputs that disagree on a padded dimension.
        """
        first = 1 if self._is_batched else 0
        shapes: Shapes = tuple([None if is_absent(array) else array.shape[first:] for array in inputs])
        if kept := self._states_elsewhere:
            shapes = (*shapes[:-kept], *[array[0].shape[first:] for array in inputs[-kept:]])
        if not self._is_batched:
            return shapes
        key: Hashable = shapes
        if self._padding is not None:
            key = self._padding.shape_class(inputs), tuple([shape is None for shape in shapes])
        if self._joined:
            key = tuple([() if index in self._joined else shape for index, shape in enumerate(shapes)])
        if not self._may_share(shapes):
            return Alone()
        for index, is_optional in self._wholes:
            if shapes[index] is None:
                continue
            value = inputs[index][0, ...]
            if is_optional or value.nbytes > _MAX_VALUE_BYTES:
                return Alone()
            elements = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
            key = key, blake2b(elements, digest_size=16).hexdigest()
        return key

    def _judge_shapes(self, shapes: Shapes) -> bool:
        if self._pads_fixed:  # padding changes sizes that a proof may assume
            return False
        sizes = [size for shape in shapes for size in shape or ()]
        return all(0 < size <= self._longest for size in sizes) and self._sizes.agree(shapes)


class EqualSizes:
    """The conditions on sizes of dimensions under which rows of a model are proven to be independent."""

    def __init__(self, signature: ModelSignature) -> None:
        self._fixed = dict(signature.fixed_sizes)
        self._names = {*signature.equal_sizes, *self._fixed}
        self._sums = {name: terms for name in signature.equal_sizes if (terms := sum_terms(name))}
        # The terms of sums are dimensions, too.
        self._names |= {term for terms in self._sums.values() for term in terms if isinstance(term, str)}
        self._dims = [
            tuple(name for axis, name in enumerate(spec.dim_names) if axis != spec.batch_axis)
            for spec in signature.inputs
        ]

    def agree(self, shapes: Shapes) -> bool:
        """Whether each dimension has one size in all shapes, fixed sizes are right, and sums equal those of terms."""
        if not self._names:
            return True
        sizes = dict(self._fixed)
        for names, shape in zip(self._dims, shapes, strict=True):
            for name, size in zip(names, shape or (), strict=False):
                if name in self._names and (
                    sizes.setdefault(name, size) != size or self._fixed.get(name, size) != size
                ):
                    return False
        return all(self._adds_up(name, terms, sizes) for name, terms in self._sums.items())

    def _adds_up(self, name: str, terms: Sequence[str | int], sizes: dict[str, int]) -> bool:
        if name not in sizes:  # A dimension of an absent optional input.
            return True
        unknown = [term for term in terms if isinstance(term, str) and term not in sizes]
        rest = sizes[name] - sum(term if isinstance(term, int) else sizes.get(term, 0) for term in terms)
        if not unknown:
            return rest == 0
        if len(unknown) > 1 or rest < 1:
            return False
        sizes[unknown[0]] = rest
        return True


CRASHING: Final[Mapping[str, bool]] = {
    "AttnLSTM": True,
    "DynamicQuantizeLSTM": True,
    "Einsum": False,
    "FeatureVectorizer": False,
    "FusedMatMul": False,
    "GRU": True,
    "GroupQueryAttention": False,
    "LSTM": True,
    "QAttention": False,
    "STFT": True,
    "Scan": True,
    "SkipLayerNormalization": False,
    "SkipSimplifiedLayerNormalization": False,
    "Unique": True,
}
"""Operators that end the process on an empty tensor, by their names in the optimized graph.

GRU and LSTM call ``std::terminate`` for 0 rows or 0 steps, and Unique if an axis other than its own is empty. Einsum
divides by 0 for 0 rows, STFT for an empty window, and Scan for a tensor without elements of which it reads slices along
another axis than 0. The value is False for operators that crash only if axis 0 is empty or one of the axes that
``load/empty_axes`` excludes: a decoder with an Einsum may begin with a past of length 0."""

_MAX_ELEMENTS: Final = 2**23
"""Maximum number of elements of a placeholder row of an input with free dimensions, 32 MiB of FP32. A request that
contains no data chooses the sizes of these dimensions."""
_MAX_TEXTS: Final = 2**14
"""The same maximum for texts; ``batching.large_requests`` has the same limit for a run."""


def crashing_operators(operators: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Select the operators of a model that crash on empty tensors. The operators are listed by execution provider."""
    found = {
        name
        for provider, kinds in operators.items()
        for name in kinds
        if not (name == "FusedMatMul" and computes_empty(provider))
    }
    return tuple(sorted(found & CRASHING.keys()))


def check_not_empty(inputs: Arrays, signature: ModelSignature, model: str, crashing: Sequence[str]) -> None:
    """Reject empty inputs on which one of the model's ``crashing`` operators may crash.

    Raises:
        ServeError: invalid_input, naming the first such input and the operators.
    """
    for spec, array in zip(signature.inputs, inputs, strict=True):
        if array.size or is_absent(array):
            continue
        if found := [name for name in crashing if CRASHING[name] or not array.shape[0]]:
            raise invalid_input(
                f"input '{spec.name}' is empty for model '{model}', whose operators {', '.join(found)} may crash on "
                f"empty tensors in ONNX Runtime: expected at least 1 element, got shape {format_shape(array.shape)}"
            )


def check_empty_axes(
    inputs: Arrays, signature: ModelSignature, model: str, empty_axes: Mapping[str, frozenset[int]]
) -> None:
    """Reject empty inputs for which ONNX Runtime may leave a part of a tensor unwritten, or may crash.

    ``inputs`` have the form of batches and at least one row. ``empty_axes`` are from ``load/empty_axes``.

    Raises:
        ServeError: invalid_input, naming the first such input.
    """
    for spec, array in zip(signature.inputs, inputs, strict=False):
        if array.size or is_absent(array) or 0 in spec.shape:
            continue
        axes = [axis for axis, size in enumerate(array.shape) if not size]
        if signature.is_batched:  # rows are on axis 0 of the array, wherever the model has them
            at = spec.batch_axis
            axes = [axis - 1 if at is None or axis <= at else axis for axis in axes]
        if not empty_axes.get(spec.name, frozenset()).intersection(axes):
            raise invalid_input(
                f"input '{spec.name}' is empty for model '{model}', and ONNX Runtime may leave a part of an output "
                f"unwritten then, or crash: expected at least 1 element, got none along axis {axes[0]}"
            )


def placeholder_row(inputs: Arrays, signature: ModelSignature, model: str) -> Arrays:
    """Make a row of zeros and empty texts for a request without rows. Other dimensions are those of the request.

    Raises:
        ServeError: invalid_input, if a row has too many elements.
    """
    return tuple([_one_row(spec, array, model) for spec, array in zip(signature.inputs, inputs, strict=True)])


def drop_rows(outputs: Arrays, signature: ModelSignature) -> Arrays:
    """Remove the placeholder row from the outputs. Outputs without rows stay as they are."""
    return tuple(
        [
            output if spec.batch_axis is None else output[:0]
            for spec, output in zip(signature.outputs, outputs, strict=True)
        ]
    )


def shape_error(shape: tuple[int, ...], spec: TensorSpec, signature: ModelSignature, model: str) -> ServeError:
    """The error for an input whose shape does not match ``spec``."""
    if signature.is_batched and not shape:
        return invalid_input(f"input '{spec.name}' has no shape but model requires batch dimension for '{model}'")
    expected = f"at least {spec.least_axes} axes" if len(shape) < spec.least_axes else format_shape(spec.shape)
    return invalid_input(
        f"unexpected shape for input '{spec.name}' for model '{model}'. Expected {expected}, got {format_shape(shape)}"
    )


def unequal_rows_error(name: str, model: str, expected: int, rows: int) -> ServeError:
    """The error for an input ``name`` whose number of rows differs from that of the inputs before it."""
    return invalid_input(
        f"input '{name}' batch size does not match other inputs for '{model}': expected {expected}, got {rows}"
    )


def _one_row(spec: TensorSpec, array: np.ndarray, model: str) -> np.ndarray:
    axis = spec.batch_axis
    if is_absent(array):
        return absent(1)
    if axis is None:
        return array
    shape = (*array.shape[:axis], 1, *array.shape[axis + 1 :])
    most = _MAX_TEXTS if array.dtype.hasobject else _MAX_ELEMENTS
    if -1 in spec.row_shape and prod(shape) > most:
        raise invalid_input(
            f"input '{spec.name}' has no rows for model '{model}': expected at most {most} elements a row then, "
            f"got shape {format_shape(array.shape)}"
        )
    return np.full(shape, "", array.dtype) if array.dtype.hasobject else np.zeros(shape, array.dtype)
