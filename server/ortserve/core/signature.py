"""The inputs and outputs of a model: names, datatypes, shapes and batch axes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ortserve.core.dtypes import DataType
from ortserve.core.ragged import RaggedTensors


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a model.

    Attributes:
        shape: The full shape, -1 for a free dimension.
        dim_names: The model's names of the dimensions, ``""`` for unnamed or fixed ones; empty if they were not read.
        is_optional: Requests may omit the input.
        batch_axis: The axis with one entry per row. None for a tensor without rows, which is the same for a whole
            batch, and for all tensors of a model that is not batched.
        has_any_shape: The model declares no shape, not even a number of axes; ``shape`` is then empty.
        least_axes: How many axes a request must bring at least, for an input with ``has_any_shape``.
        is_sequence: The output is a sequence of tensors in the model. Axis 0 is then the position in the sequence and
            never the batch axis.
        is_image: The input is the bytes of one image file, so that a request has no rows.
        needed_shape: ``shape`` with the sizes that the graph needs in place of free ones, as far as known; empty if
            they were not looked for. Requests are not checked against it.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    dim_names: tuple[str, ...] = field(default=(), compare=False)
    is_optional: bool = False
    batch_axis: int | None = 0
    has_any_shape: bool = False
    least_axes: int = 0
    is_sequence: bool = False
    is_image: bool = False
    needed_shape: tuple[int, ...] = field(default=(), compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return _pickled(self)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row, without the batch axis; the whole shape if there is none."""
        axis = self.batch_axis
        return self.shape if axis is None else self.shape[:axis] + self.shape[axis + 1 :]

    def accepts_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor may have this full shape."""
        if self.has_any_shape:
            return len(shape) >= self.least_axes
        if len(shape) != len(self.shape):
            return False
        for size, expected in zip(shape, self.shape, strict=True):  # noqa: SIM110 - a generator would take longer
            if size != expected and expected != -1:
                return False
        return True

    def why_no_rows(self, role: str) -> str:
        """Why ``batch_axis`` cannot be a batch axis; empty if it can, or if there is none."""
        axis = self.batch_axis
        if axis is None:
            return ""
        if self.is_sequence and axis == 0:
            return f"{role} '{self.name}' is a sequence of tensors"
        if self.is_image:
            return f"{role} '{self.name}' is one image file"
        if self.has_any_shape:
            return f"the model declares no shape for {role} '{self.name}'"
        if axis >= len(self.shape):
            return f"{role} '{self.name}' has no {f'axis {axis}' if self.shape else 'dimensions'}"
        if self.shape[axis] != -1:
            which = f"axis {axis}" if axis else "the first dimension"
            return f"{which} of {role} '{self.name}' is fixed at {self.shape[axis]}"
        return ""

    @property
    def leading(self) -> int:
        """Number of leading dimensions that a configuration's ``dims`` omit: 1 if axis 0 is the batch axis."""
        return 1 if self.batch_axis == 0 else 0


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Inputs and outputs of a model, in the model's order.

    Attributes:
        unbatched_because: Why each request must run alone; empty if rows of several requests may share a batch, along
            the tensors' ``batch_axis``.
        equal_sizes: Names of dimensions, sums such as ``past + current`` included, that must have one size throughout a
            request; otherwise the request runs alone.
        fixed_sizes: Sizes of dimensions, by name. A request with another size runs alone.
        longest_axis: A request with a longer axis of an input, beside that of the rows, runs alone; None for no limit.
        unserved_inputs: Optional inputs that are not served, with the reason by name.
        unserved_outputs: Outputs that are not served, with the reason by name.
        ragged: How requests of different shapes share a batch; None if the rows of a batch have one shape. With it,
            ``inputs`` and ``outputs`` have the shapes of requests, and lack the inputs that the server derives.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    unbatched_because: str = ""
    unserved_inputs: Mapping[str, str] = field(default_factory=dict)
    unserved_outputs: Mapping[str, str] = field(default_factory=dict)
    equal_sizes: tuple[str, ...] = ()
    fixed_sizes: tuple[tuple[str, int], ...] = ()
    longest_axis: int | None = None
    ragged: RaggedTensors | None = field(default=None, compare=False)
    has_optional_inputs: bool = field(init=False, repr=False, compare=False)
    has_sequences: bool = field(init=False, repr=False, compare=False)
    has_text_outputs: bool = field(init=False, repr=False, compare=False)
    rows_lead: bool = field(init=False, repr=False, compare=False)
    """Whether axis 0 is the batch axis of all outputs and of all required inputs."""
    inputs_by_name: Mapping[str, TensorSpec] = field(init=False, repr=False, compare=False)
    output_index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return _pickled(self)

    def __post_init__(self) -> None:
        if self.unbatched_because:
            for role in ("inputs", "outputs"):
                specs = tuple(replace(spec, batch_axis=None) for spec in getattr(self, role))
                object.__setattr__(self, role, specs)
        object.__setattr__(self, "has_optional_inputs", any(spec.is_optional for spec in self.inputs))
        object.__setattr__(self, "has_sequences", any(spec.is_sequence for spec in self.outputs))
        has_texts = any(spec.datatype is DataType.BYTES for spec in self.outputs)
        object.__setattr__(self, "has_text_outputs", has_texts)
        needed = [spec for spec in self.inputs if not spec.is_optional]
        rows_lead = self.is_batched and all(spec.batch_axis == 0 for spec in (*needed, *self.outputs))
        object.__setattr__(self, "rows_lead", rows_lead)
        object.__setattr__(self, "inputs_by_name", {spec.name: spec for spec in self.inputs})
        object.__setattr__(self, "output_index", {spec.name: i for i, spec in enumerate(self.outputs)})

    @property
    def is_batched(self) -> bool:
        return not self.unbatched_because

    @property
    def has_one_shape_class(self) -> bool:
        """Whether all requests have the same inputs, all with rows, of equal shapes per row, and so may share a batch.

        For a model that is not batched: whether all requests have the same inputs of equal shapes.
        """
        return not any(
            spec.is_optional
            or spec.has_any_shape
            or -1 in spec.row_shape
            or (self.is_batched and spec.batch_axis is None)
            for spec in self.inputs
        )

    def without_optional_whole(self, why: str) -> "ModelSignature":
        """This signature with its optional inputs without rows moved to ``unserved_inputs``."""
        whole = {spec.name: why for spec in self.inputs if spec.is_optional and spec.batch_axis is None}
        inputs = tuple(spec for spec in self.inputs if spec.name not in whole)
        return replace(self, inputs=inputs, unserved_inputs={**self.unserved_inputs, **whole})


def _pickled(value: TensorSpec | ModelSignature) -> tuple[Any, ...]:
    """Pickle by the constructor: classes that mypyc compiles lack the methods that ``slots=True`` adds for it."""
    return type(value), tuple([getattr(value, one.name) for one in fields(value) if one.init])
