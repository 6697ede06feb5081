"""The file ``golden.yaml`` beside golden samples: how far outputs may be from the expected ones."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, Field

from ortserve.config.declaration import DECLARATION, InvalidValuesError, validate
from ortserve.config.yaml_file import read_yaml
from ortserve.errors import invalid_input
from ortserve.paths import exists


class Tolerance(BaseModel):
    """Bounds of one output's errors over all samples. Measures that are not set are not bounded."""

    model_config = DECLARATION

    max: float | None = Field(default=None, ge=0)
    """Largest absolute difference of two elements; for texts and booleans 1 if any differ."""
    relative: float | None = Field(default=None, ge=0)
    """The same divided by the largest absolute element that is expected in any sample."""
    cosine: float | None = Field(default=None, ge=0, le=2)
    """1 minus the cosine between a sample's output and the expected one, for the worst sample."""
    top1: float | None = Field(default=None, ge=0, le=1)
    """Share of positions whose largest element along the last axis has another index."""

    def bounds(self) -> dict[str, float]:
        """The measures that are bounded."""
        return self.model_dump(exclude_none=True)


class GoldenFile(BaseModel):
    """The keys of ``golden.yaml``."""

    model_config = DECLARATION

    tolerances: Mapping[str, Tolerance] = Field(default_factory=dict)
    """By the name of an output. Outputs without a measure have the tolerance of their datatype."""


def load_golden_file(path: Path) -> GoldenFile:
    """Read a ``golden.yaml``; a missing file counts as empty. Blocks on the file.

    Raises:
        ServeError: invalid_input; the message has the file's name, the key, the expectation and the value.
    """
    if not exists(path):
        return GoldenFile()
    try:
        return validate(GoldenFile, read_yaml(path))
    except (ValueError, InvalidValuesError) as error:
        raise invalid_input(f"{path.name}: {error}") from None
