"""Checks claims about the rows of a batch against ONNX Runtime: each row alone, and the same rows together.

``observe`` runs a model and records all tensors of all runs; ``disagreement`` compares one claim with one tensor. A
surviving claim is not proven; a contradicted claim is wrong.
"""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
import onnxruntime as ort

Arrays: TypeAlias = dict[str, np.ndarray]
Together: TypeAlias = tuple[int, ...]
"""The rows of a batch, in order, as indices of rows that ran alone. A row may occur twice."""

BATCHES: Final[tuple[Together, ...]] = ((0,), (1, 0), (2, 1), (0, 1, 2), (2, 0, 1, 0, 2))
"""Batches of 1, 2, 3 and 5 from three rows: permuted, repeated, and with different neighbours."""


class Kind(Enum):
    """The content of a claim about a tensor. Mixed and unknown tensors have no claims."""

    ROWS = "rows"
    FREE = "free"
    SIZE = "size"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the proof in plain numbers, for requests of one shape.

    Attributes:
        kind: Rows along ``axis``, equal for all batches, equal for all batches of one size, or no claim.
        axis: The axis of rows, of ``outer * rows * inner`` entries. ``outer``, ``inner`` and ``stride`` are None if the
            proof has a number for them that is not known here; any number may then fit.
        stride: The value in the batch is the value alone plus the position of the row times ``stride``.
        shape_only: Values contain the positions of rows in a way that is not described here.
        nonneg: No value of a single row is negative.
        below: Every value of a single row is less than this.
        elements: The values for each size of a batch, in flat order; None for an unknown value.
    """

    kind: Kind
    axis: int = 0
    outer: int | None = 1
    inner: int | None = 1
    stride: float | None = 0
    shape_only: bool = False
    nonneg: bool = False
    below: int | None = None
    elements: Mapping[int, Sequence[float | None]] | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """One tensor in all runs. A run that ONNX Runtime rejected is None."""

    alone: Sequence[np.ndarray | None]
    batches: Mapping[Together, np.ndarray | None]


class RefusedError(Exception):
    """ONNX Runtime does not load the model, or rejects a single row, so there is nothing to compare."""


def disagreement(claim: Claim, seen: Observation) -> str:
    """The contradiction of the claim; empty if there is none, or if a single row was rejected."""
    alone = [array for array in seen.alone if array is not None]
    if claim.kind is Kind.NONE or len(alone) < len(seen.alone):
        return ""
    for rows, array in seen.batches.items():
        if array is None:
            if claim.kind is Kind.SIZE:  # a table may be too short for the number of rows, and no output may be a size
                continue
            return f"rows {rows} together are refused, though each is accepted alone"
        parts = [alone[row] for row in rows]
        text = {Kind.ROWS: _contradicts_rows, Kind.FREE: _contradicts_free, Kind.SIZE: _contradicts_size}[claim.kind](
            claim, parts, array
        )
        if text:
            return f"rows {rows}: {text}"
    return _contradicts_facts(claim, alone, seen.batches)


def observe(
    model: onnx.ModelProto,
    rows: Sequence[Mapping[str, np.ndarray]],
    axes: Mapping[str, int | None],
    batches: Iterable[Together] = BATCHES,
    *,
    inside: bool = True,
) -> dict[str, Observation]:
    """Run rows alone and together. Returns all tensors of the main graph by name.

    Args:
        model: Any model that ONNX Runtime loads.
        rows: Requests of one row each, all of the same shapes, and equal in inputs without rows.
        axes: For each input the axis along which rows are joined, or None.
        batches: The rows to run together.
        inside: Also observe intermediate tensors, which prevents ONNX Runtime from optimizing the graph. Without it,
            the outputs are those of the model as it is served.

    Raises:
        RefusedError: ONNX Runtime does not load the model, or rejects a single row.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    if inside:
        model = with_all_outputs(model)
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    fill_memory(0x55)
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        alone = [_run(session, row) for row in rows]
    except Exception as error:
        raise RefusedError(str(error)) from error
    fill_memory(0xAB)
    together: dict[Together, Arrays | None] = {}
    for batch in batches:
        try:
            together[batch] = _run(session, join([rows[row] for row in batch], axes))
        except Exception:
            together[batch] = None
    return {
        name: Observation(
            [arrays[name] for arrays in alone],
            {batch: None if arrays is None else arrays[name] for batch, arrays in together.items()},
        )
        for name in alone[0]
    }


def fill_memory(byte: int) -> None:
    """Fill memory allocated from now on, so that values that a kernel does not write differ between runs.

    Of two bytes, one needs to be above 127: the numbers then differ in sign, also in sums that saturate at 0.
    """
    _LIBC.mallopt(_PERTURB, byte)


_LIBC: Final = ctypes.CDLL(None)
_PERTURB: Final = -6
"""``M_PERTURB`` of glibc, which fills with the complement of the byte."""


def join(rows: Sequence[Mapping[str, np.ndarray]], axes: Mapping[str, int | None]) -> Arrays:
    """Join rows to the inputs of a batch."""
    return {
        name: rows[0][name] if (axis := axes.get(name)) is None else np.concatenate([row[name] for row in rows], axis)
        for name in rows[0]
    }


def with_all_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with each tensor that a node of its main graph produces as an output."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    known = {output.name for output in copy.graph.output}
    for node in copy.graph.node:
        for name in node.output:
            if name and name not in known:
                copy.graph.output.append(onnx.ValueInfoProto(name=name))
                known.add(name)
    return copy


def differ(left: np.ndarray, right: np.ndarray, scale: float | None = None) -> bool:
    """Whether two arrays differ by more than rounding; ``scale`` is the magnitude of their numbers."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return True
    if left.dtype.names is not None:
        return any(differ(left[name], right[name], scale) for name in left.dtype.names)
    if np.array_equal(left, right):
        return False
    if left.dtype.kind not in "fc":
        return True
    # Kernels sum in a different order for a different number of rows.
    rounding = 1e-4 if left.dtype.itemsize > 2 else 2e-2
    left, right = left.astype(np.float64), right.astype(np.float64)
    finite = np.isfinite(right)
    if scale is None:
        scale = float(np.abs(right[finite]).max()) if finite.any() else 0.0
    return not np.allclose(left, right, rtol=rounding, atol=rounding * max(scale, 0.02), equal_nan=True)


def _contradicts_rows(claim: Claim, parts: Sequence[np.ndarray], array: np.ndarray) -> str:
    count, axis, first = len(parts), claim.axis, parts[0]
    if axis >= first.ndim or array.ndim != first.ndim:
        return f"no axis {axis}: alone {first.shape}, together {array.shape}"
    if any(part.shape != first.shape for part in parts):
        return f"alone the rows have different shapes: {[part.shape for part in parts]}"
    length = first.shape[axis]
    expected = (*first.shape[:axis], length * count, *first.shape[axis + 1 :])
    if array.shape != expected:
        return f"alone {first.shape}, together {array.shape}, not {expected}"
    if claim.shape_only:
        return ""
    texts = [_contradicts_layout(claim, outer, inner, parts, array) for outer, inner in _layouts(length, claim)]
    if not texts:
        return f"{length} entries alone are not outer {claim.outer} times inner {claim.inner}"
    return "" if "" in texts else texts[0]


def _layouts(length: int, claim: Claim) -> Iterable[tuple[int, int]]:
    """All (outer, inner) that are consistent with the claim."""
    if length == 0:
        return [] if claim.outer and claim.inner else [(claim.outer or 0, claim.inner or 0)]
    return [
        (outer, length // outer)
        for outer in range(1, length + 1)
        if length % outer == 0 and claim.outer in (None, outer) and claim.inner in (None, length // outer)
    ]


def _contradicts_layout(claim: Claim, outer: int, inner: int, parts: Sequence[np.ndarray], array: np.ndarray) -> str:
    axis, shape = claim.axis, parts[0].shape
    folded = array.reshape(*shape[:axis], outer, len(parts), inner, *shape[axis + 1 :])
    scale = _scale(parts)
    stride = claim.stride
    for position, part in enumerate(parts):
        own = folded.take(position, axis + 1).reshape(shape)
        if stride is None and position and own.size:
            stride = float((own.astype(np.float64) - part.astype(np.float64)).ravel()[0]) / position
        expected = part if not stride or not position else (part + np.asarray(position * stride)).astype(part.dtype)
        if differ(own, expected, scale):
            return f"the row at {position} has {_short(own)}, alone {_short(part)} (outer {outer}, inner {inner})"
    return ""


def _contradicts_free(_: Claim, parts: Sequence[np.ndarray], array: np.ndarray) -> str:
    scale = _scale(parts)
    for part in parts:
        if differ(array, part, scale):
            return f"together {_short(array)}, alone {_short(part)}, which is to be the same for all"
    return ""


def _contradicts_size(_: Claim, parts: Sequence[np.ndarray], array: np.ndarray) -> str:
    for part in parts:
        if array.shape != part.shape:
            return f"together {array.shape}, alone {part.shape}"
        if differ(part, parts[0]):
            return f"alone {_short(part)} and {_short(parts[0])}, which no row is to change"
    return ""


def _contradicts_facts(claim: Claim, alone: Sequence[np.ndarray], batches: Mapping[Together, np.ndarray | None]) -> str:
    by_count: dict[int, np.ndarray] = {}
    for rows, array in batches.items():
        if array is None:
            continue
        if claim.kind is Kind.SIZE and differ(array, by_count.setdefault(len(rows), array)):
            return f"batches of {len(rows)} rows have {_short(array)} and {_short(by_count[len(rows)])}"
        values = (claim.elements or {}).get(len(rows))
        if values is not None and claim.kind is not Kind.ROWS:
            flat = array.ravel().tolist()
            if len(flat) != len(values) or any(
                wanted is not None and float(wanted) != float(is_) for is_, wanted in zip(flat, values, strict=True)
            ):
                return f"rows {rows}: the elements are {flat}, claimed {list(values)}"
    for array in alone:
        if claim.nonneg and array.size and array.min() < 0:
            return f"{_short(array)} is negative"
        if claim.below is not None and array.size and array.max() >= claim.below:
            return f"{_short(array)} is not below {claim.below}"
    return ""


def _scale(parts: Sequence[np.ndarray]) -> float | None:
    """The largest number of all rows; numbers that cancel out in one row were rounded at this magnitude."""
    if parts[0].dtype.kind not in "fc":
        return None
    largest = 0.0
    for part in parts:
        finite = part[np.isfinite(part)]
        largest = max(largest, float(np.abs(finite).max())) if finite.size else largest
    return largest


def _short(array: np.ndarray) -> str:
    with np.printoptions(precision=4, threshold=8, edgeitems=3):
        return " ".join(str(array).split())[:120]


def _run(session: Any, feeds: Mapping[str, np.ndarray]) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    return {name: _as_array(value) for name, value in zip(names, session.run(names, dict(feeds)), strict=True)}


def _as_array(value: Any) -> np.ndarray:
    """Sequences of maps, as ZipMap produces them, have a record for each row; other sequences are arrays of objects."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        keys = sorted(value[0])
        record = np.dtype([(str(key), np.asarray(value[0][key]).dtype) for key in keys])
        return np.array([tuple(entry[key] for key in keys) for entry in value], record)
    return np.asarray(value, dtype=object) if isinstance(value, list) else np.asarray(value)
