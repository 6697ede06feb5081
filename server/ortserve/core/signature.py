"""What a model takes and gives: names, datatypes, shapes, and whether its leading axis is a batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ortserve.core.dtypes import DataType


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a model. ``shape`` is the full shape, -1 for a dimension that is free.

    ``dim_names`` are what the model calls its free dimensions, ``""`` where it does not or the dimension is fixed; the
    tuple is empty where nobody asked. A request may leave an input out that ``is_optional``.
    In a batched model all inputs have axis 0 in common but one that ``is_whole``: it is the same for all rows of a
    request, which then runs by itself. ``has_any_shape`` says that the model declares none, not even how many axes;
    ``shape`` is empty then.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    dim_names: tuple[str, ...] = field(default=(), compare=False)
    is_optional: bool = False
    is_whole: bool = False
    has_any_shape: bool = False


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Inputs and outputs in the model's own order.

    ``unbatched_because`` is empty where axis 0 of inputs and outputs is the batch axis, so that rows of several
    requests may run together; otherwise it says in words why each request must run alone. ``unserved_inputs`` and
    ``unserved_outputs`` are what the model has besides, and can do without: their names, and why they are not served.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    unbatched_because: str = ""
    unserved_inputs: Mapping[str, str] = field(default_factory=dict)
    unserved_outputs: Mapping[str, str] = field(default_factory=dict)
    has_optional_inputs: bool = field(init=False, repr=False, compare=False)
    inputs_by_name: Mapping[str, TensorSpec] = field(init=False, repr=False, compare=False)
    output_index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_optional_inputs", any(spec.is_optional for spec in self.inputs))
        object.__setattr__(self, "inputs_by_name", {spec.name: spec for spec in self.inputs})
        object.__setattr__(self, "output_index", {spec.name: i for i, spec in enumerate(self.outputs)})

    @property
    def is_batched(self) -> bool:
        return not self.unbatched_because

    @property
    def has_one_shape_class(self) -> bool:
        """Whether all requests have the same inputs, of the same shape but for their rows."""
        first = 1 if self.is_batched else 0
        return not self.has_optional_inputs and not any(
            spec.has_any_shape or -1 in spec.shape[first:] for spec in self.inputs
        )

    def without_whole_inputs(self, why: str) -> "ModelSignature":
        """This signature with the inputs that are the same for all rows among the unserved ones."""
        whole = {spec.name: why for spec in self.inputs if spec.is_whole}
        inputs = tuple(spec for spec in self.inputs if not spec.is_whole)
        return replace(self, inputs=inputs, unserved_inputs={**self.unserved_inputs, **whole})
