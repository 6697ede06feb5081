"""What can be said of a model's inputs and outputs, and of the requests that warm it up."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from ortserve.core.dtypes import DataType

_CONFIG = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

Dim = Annotated[int, Field(ge=-1, le=2**63 - 1)]
"""-1 is free."""
FileName = Annotated[str, StringConstraints(pattern=r"^\.*[^./\\\x00][^/\\\x00]*$", max_length=255)]
"""A file's name without a folder, and not ``.`` or ``..``."""


NO_ROWS: Final = "none"


class TensorOptions(BaseModel):
    """How clients see an input or output. ``dims`` and ``reshape`` leave out a batch dimension on axis 0."""

    model_config = _CONFIG

    datatype: DataType | None = None
    """Checked against the model."""
    dims: tuple[Dim, ...] | None = None
    """Checked against the model; a size in the place of a free dimension fixes it."""
    reshape: tuple[Dim, ...] | None = None
    """The model's own dimensions, where clients see ``dims`` of another form and as many elements."""
    batch_axis: Annotated[int, Field(ge=0, le=63)] | Literal["none"] | None = None
    """The axis that has one entry for each row, or ``none`` for a tensor that is the same for all rows: requests share
    a batch where they bring equal values of it. Set for any tensor, the model is batched; axis 0 is taken for those
    where it is not set and the first dimension is free. Unset for all: as the model's graph tells."""


class InputOptions(TensorOptions):
    """How clients see an input."""

    model_config = _CONFIG

    optional: bool = False
    """Whether requests may leave it out; only where the model lets them."""


class OutputOptions(TensorOptions):
    """How clients see an output."""

    model_config = _CONFIG

    labels: str | tuple[str, ...] | None = None
    """Names of its elements, for classification: a list, or a file in the model's folder with one label a line."""


class WarmupInput(BaseModel):
    """An input of a request that warms a model up."""

    model_config = _CONFIG

    datatype: DataType | None = None
    """Checked against the model."""
    dims: tuple[Annotated[int, Field(ge=0, le=2**31 - 1)], ...] | None = None
    """Without the batch dimension. Unset: as clients see the input, with 8 for free dimensions."""
    data: Literal["random", "zeros"] = "random"
    """Floats from N(0, 1), integers 0 or 1, short texts; or all zero, which for texts is empty."""
    file: str | None = None
    """A file in the model's folder ``warmup`` that holds the raw tensor of all rows, instead of ``data``."""


class WarmupSample(BaseModel):
    """A request that runs on every instance before the version is ready. One that fails fails the load."""

    model_config = _CONFIG

    name: str = ""
    """Told in errors."""
    rows: int = Field(default=1, ge=1, le=65536)
    """Rows of a batched model."""
    count: int = Field(default=1, ge=1, le=10_000)
    """How often it runs."""
    inputs: Mapping[str, WarmupInput] = Field(default_factory=dict)
    """Inputs that are not named here are made up."""
