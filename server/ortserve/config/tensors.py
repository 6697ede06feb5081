"""Options of a model's inputs and outputs, of their padding, and of its warm-up requests."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from ortserve.config.declaration import DECLARATION
from ortserve.core.dtypes import DataType

Dim = Annotated[int, Field(ge=-1, le=2**63 - 1)]
"""-1 for a free dimension."""
FileName = Annotated[str, StringConstraints(pattern=r"^\.*[^./\\\x00][^/\\\x00]*$", max_length=255)]
"""A file name without a folder; not ``.`` or ``..``."""


NO_ROWS: Final = "none"


class TensorOptions(BaseModel):
    """An input or output as clients see it. ``dims`` and ``reshape`` omit a batch dimension on axis 0."""

    model_config = DECLARATION

    datatype: DataType | None = None
    """Checked against the model."""
    dims: tuple[Dim, ...] | None = None
    """Checked against the model. A size in place of a free dimension fixes it."""
    reshape: tuple[Dim, ...] | None = None
    """The model's own dimensions, if clients see ``dims`` of another form with the same number of elements."""
    batch_axis: Annotated[int, Field(ge=0, le=63)] | Literal["none"] | None = None
    """The axis with one entry per row, or ``none`` for a tensor that is the same for all rows; requests then share a
    batch if their values of it are equal. If it is set for any tensor, the model is batched, and other tensors with a
    free first dimension use axis 0. Unset for all tensors: the axes that the model's graph proves."""


class InputOptions(TensorOptions):
    """An input as clients see it."""

    optional: bool = False
    """Whether requests may omit the input. The model must allow that."""
    ragged: bool = False
    """Whether requests with different shapes share a batch: their elements are joined to one tensor, which must have
    the shape ``[-1]`` in the model. ``dims`` are those of a row of a request; unset: ``[-1]``. Requires ``batched:
    true`` and ``max_rows``, and a model that keeps the requests apart, for example by its ``batch_inputs``."""


class BatchInputOptions(BaseModel):
    """An input that the server derives from another one."""

    model_config = DECLARATION

    kind: Literal[
        "element_count",
        "accumulated_element_count",
        "accumulated_element_count_with_zero",
        "max_element_count_as_shape",
        "item_shape",
        "item_shape_flatten",
    ]
    """Content of the input. ``element_count``: the number of elements of each request. ``accumulated_element_count``:
    the running sum of these numbers. ``accumulated_element_count_with_zero``: a zero, then the running sum.
    ``max_element_count_as_shape``: as many zeros as the largest request has elements. ``item_shape``: the shape of each
    row, one row per shape. ``item_shape_flatten``: the same shapes, joined along one axis."""
    source: str
    """Name of the input that it describes."""
    datatype: Literal["INT32", "FP32"] | None = None
    """Checked against the model, which must have one of these."""


class OutputOptions(TensorOptions):
    """An output as clients see it."""

    labels: str | tuple[str, ...] | None = None
    """Labels of the elements, for classification: a list, or a file in the model's folder with one label per line."""


def _not_nan(value: bool | int | float | str) -> bool | int | float | str:
    if value != value:  # NaN differs from itself: each poll would see changed options and reload the model
        raise ValueError("value: expected a number other than NaN, true, false or a text, got nan")
    return value


class PadAxis(BaseModel):
    """Padding of one axis of an input."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    axis: int
    multiple: int = Field(ge=1, le=1_048_576)
    value: Annotated[bool | int | float | str, AfterValidator(_not_nan)]


class WarmupInput(BaseModel):
    """An input of a warm-up request."""

    model_config = DECLARATION

    datatype: DataType | None = None
    """Checked against the model."""
    dims: tuple[Annotated[int, Field(ge=0, le=2**31 - 1)], ...] | None = None
    """Dimensions without the batch dimension. Unset: the dimensions that clients see, with 8 for free ones."""
    data: Literal["random", "zeros"] = "random"
    """``random``: floats from N(0, 1), integers 0 or 1, short texts. ``zeros``: all zero, or empty texts."""
    file: str | None = None
    """A file in the folder ``warmup`` of the model, instead of ``data``: the raw tensor of all rows, or of one row that
    all rows repeat."""


class WarmupSample(BaseModel):
    """A request that runs on every instance before the version is ready. If it fails, the load fails."""

    model_config = DECLARATION

    name: str = ""
    """Name in error messages."""
    rows: int = Field(default=1, ge=1, le=65536)
    """Number of rows, for a batched model."""
    count: int = Field(default=1, ge=1, le=10_000)
    """Number of runs."""
    inputs: Mapping[str, WarmupInput] = Field(default_factory=dict)
    """Inputs by name. Inputs that are not listed get synthetic values, controls and states those of a first request."""
