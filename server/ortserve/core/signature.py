"""What a model takes and gives: names, datatypes, shapes, and whether its leading axis is a batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ortserve.core.dtypes import DataType


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a model. ``shape`` is the full shape, -1 for a dimension that is free.

    ``dim_names`` are what the model calls its free dimensions, ``""`` where it does not or the dimension is fixed; the
    tuple is empty where nobody asked. A request may leave an input out that ``is_optional``.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    dim_names: tuple[str, ...] = field(default=(), compare=False)
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Inputs and outputs in the model's own order.

    ``unbatched_because`` is empty where axis 0 of every input and output is the batch axis, so that rows of several
    requests may run together; otherwise it says in words why each request must run alone.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    unbatched_because: str = ""
    inputs_by_name: Mapping[str, TensorSpec] = field(init=False, repr=False, compare=False)
    output_index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs_by_name", {spec.name: spec for spec in self.inputs})
        object.__setattr__(self, "output_index", {spec.name: i for i, spec in enumerate(self.outputs)})

    @property
    def is_batched(self) -> bool:
        return not self.unbatched_because

    @property
    def has_one_shape_class(self) -> bool:
        """Whether all requests have the same shape but for their rows."""
        first = 1 if self.is_batched else 0
        return all(-1 not in spec.shape[first:] for spec in self.inputs)
