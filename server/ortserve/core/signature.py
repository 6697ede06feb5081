"""What a model takes and gives: names, datatypes, shapes, and whether its leading axis is a batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ortserve.core.dtypes import DataType


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a model. ``shape`` is the full shape, -1 for a dimension that is free.

    ``dim_names`` are what the model calls its free dimensions, ``""`` where it does not or the dimension is fixed; the
    tuple is empty where nobody asked. A request may leave an input out that ``is_optional``.
    ``batch_axis`` is the axis with one entry for each row. It is None for a tensor without rows, which is the same for
    a whole batch, and for all tensors of a model that is not batched. ``has_any_shape`` says that the model declares no
    shape, not even how many axes; ``shape`` is empty then. ``is_sequence`` marks an output that is a sequence of
    tensors in the model; axis 0 is then the place in the sequence, and never the batch axis.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    dim_names: tuple[str, ...] = field(default=(), compare=False)
    is_optional: bool = False
    batch_axis: int | None = 0
    has_any_shape: bool = False
    is_sequence: bool = False

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row, without the batch axis; the whole shape where there is none."""
        axis = self.batch_axis
        return self.shape if axis is None else self.shape[:axis] + self.shape[axis + 1 :]

    def why_no_rows(self, role: str) -> str:
        """Why its batch axis cannot be one, in words; empty where it can, or there is none."""
        axis = self.batch_axis
        if axis is None:
            return ""
        if self.is_sequence and axis == 0:
            return f"{role} '{self.name}' is a sequence of tensors"
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
        """How many leading dimensions a configuration's ``dims`` leave out: 1 where axis 0 is the batch axis."""
        return 1 if self.batch_axis == 0 else 0


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Inputs and outputs in the model's own order.

    ``unbatched_because`` is empty where rows of several requests may run together, along the tensors' ``batch_axis``;
    otherwise it says in words why each request must run alone. ``equal_sizes`` are names of dimensions that must have
    one size throughout a request, sums such as ``past + current`` among them, or it must run alone.
    ``unserved_inputs`` and ``unserved_outputs`` are what the model has besides, and can do without: their names, and
    why they are not served.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    unbatched_because: str = ""
    unserved_inputs: Mapping[str, str] = field(default_factory=dict)
    unserved_outputs: Mapping[str, str] = field(default_factory=dict)
    equal_sizes: tuple[str, ...] = ()
    has_optional_inputs: bool = field(init=False, repr=False, compare=False)
    has_sequences: bool = field(init=False, repr=False, compare=False)
    inputs_by_name: Mapping[str, TensorSpec] = field(init=False, repr=False, compare=False)
    output_index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.unbatched_because:
            for role in ("inputs", "outputs"):
                specs = tuple(replace(spec, batch_axis=None) for spec in getattr(self, role))
                object.__setattr__(self, role, specs)
        object.__setattr__(self, "has_optional_inputs", any(spec.is_optional for spec in self.inputs))
        object.__setattr__(self, "has_sequences", any(spec.is_sequence for spec in self.outputs))
        object.__setattr__(self, "inputs_by_name", {spec.name: spec for spec in self.inputs})
        object.__setattr__(self, "output_index", {spec.name: i for i, spec in enumerate(self.outputs)})

    @property
    def is_batched(self) -> bool:
        return not self.unbatched_because

    @property
    def rows_lead(self) -> bool:
        """Whether rows are on axis 0 of all outputs, and of all inputs that a request must bring."""
        needed = [spec for spec in self.inputs if not spec.is_optional]
        return self.is_batched and all(spec.batch_axis == 0 for spec in (*needed, *self.outputs))

    @property
    def has_one_shape_class(self) -> bool:
        """Whether all requests may share a batch: they have the same inputs, all with rows, of one shape but for them.

        Of a model that is not batched: whether all requests have the same inputs of one shape.
        """
        return not any(
            spec.is_optional
            or spec.has_any_shape
            or -1 in spec.row_shape
            or (self.is_batched and spec.batch_axis is None)
            for spec in self.inputs
        )

    def without_optional_whole(self, why: str) -> "ModelSignature":
        """This signature with the optional inputs that have no rows among the unserved ones."""
        whole = {spec.name: why for spec in self.inputs if spec.is_optional and spec.batch_axis is None}
        inputs = tuple(spec for spec in self.inputs if spec.name not in whole)
        return replace(self, inputs=inputs, unserved_inputs={**self.unserved_inputs, **whole})
