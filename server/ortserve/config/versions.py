"""Options of the versions of a model: which of them serve, and their labels."""

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ortserve.core.version_names import LABEL_FORM, MAX_VERSION, is_label

MAX_LABELS: Final = 64
"""Maximum number of labels of one model."""

MAX_SPECIFIC: Final = 1024
"""Maximum number of versions that a policy names. Each missing one is a failed version, which a load reports."""

Version: TypeAlias = Annotated[int, Field(ge=1, le=MAX_VERSION)]
"""The number of a version."""


class LatestVersions(BaseModel):
    """Serve the ``latest`` highest version numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    latest: int = Field(ge=1, le=2**32 - 1)  # Triton's messages hold no larger number here


class AllVersions(BaseModel):
    """Serve every version in the repository."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    all: Literal[True]


class SpecificVersions(BaseModel):
    """Serve these versions only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    specific: tuple[Version, ...] = Field(min_length=1, max_length=MAX_SPECIFIC)


VersionPolicy: TypeAlias = LatestVersions | AllVersions | SpecificVersions
"""Which versions serve."""


def _label(name: str) -> str:
    if not is_label(name):
        raise ValueError(f"expected names of {LABEL_FORM}, got '{name:.100}'")
    return name


Label: TypeAlias = Annotated[str, AfterValidator(_label)]
"""A name of a version that requests may use instead of its number."""
