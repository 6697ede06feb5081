"""Options of an ensemble: a model that consists of other models, which pass tensors to each other."""

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import BaseModel, Field, StringConstraints

from ortserve.config.declaration import DECLARATION
from ortserve.core.version_names import MAX_VERSION

MAX_STEPS: Final = 256
"""Maximum number of steps of one ensemble."""
LATEST: Final = -1

_Name = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class EnsembleStep(BaseModel):
    """One run of a model for each request of the ensemble."""

    model_config = DECLARATION

    model: _Name
    """Name of the model, which may be an ensemble itself."""
    version: int = Field(default=LATEST, ge=LATEST, le=MAX_VERSION)
    """Version of the model. -1: the one that answers requests without a version."""
    inputs: Mapping[_Name, _Name] = Field(min_length=1)
    """The tensor of the ensemble for each input of the model. Optional inputs may be left out."""
    outputs: Mapping[_Name, _Name] = Field(min_length=1)
    """The tensor of the ensemble that each output of the model becomes. Outputs that are not used may be left out."""


class EnsembleOptions(BaseModel):
    """The steps of an ensemble. A step starts as soon as its inputs exist."""

    model_config = DECLARATION

    steps: tuple[EnsembleStep, ...] = Field(min_length=1, max_length=MAX_STEPS)
    """Models, in any order: the tensors that they read and write decide when each starts."""
    max_inflight_requests: int = Field(default=0, ge=0, le=2**32 - 1)
    """Maximum number of the ensemble's requests in each step at a time; further ones wait. 0: no limit."""
