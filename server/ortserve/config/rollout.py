"""Options of a rollout: the version on trial in place of ``stable``, the mode of the trial, and its rules."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from ortserve.config.declaration import DECLARATION, InvalidValuesError, validate
from ortserve.core.version_names import MAX_VERSION, STABLE
from ortserve.errors import invalid_input

Measure = Literal["max", "relative", "cosine", "top1"]


class RolloutRules(BaseModel):
    """When a rollout ends by itself. Rules that are not set decide nothing."""

    model_config = DECLARATION

    min_requests: int = Field(default=100, ge=1, le=10**9)
    """Number of requests to the candidate from which rates and times count. A rollout is rolled back earlier if its
    errors or disagreements are already too many for that number."""
    max_error_rate: float | None = Field(default=None, ge=0, le=1)
    """Share of requests that the candidate may fail and ``stable`` answers. If more fail, the rollout is rolled
    back."""
    max_disagreement: float | None = Field(default=None, ge=0, le=1)
    """Share of compared requests, in the mode ``shadow``, whose outputs may differ by more than ``tolerance``."""
    max_p99_ratio: float | None = Field(default=None, gt=0, le=1000)
    """Maximum ratio of the candidate's 99th percentile of times to that of ``stable``: 1.5 for half as long again. Both
    need ``min_requests``."""
    promote_after: int | None = Field(default=None, ge=1, le=10**9)
    """Number of requests to the candidate after which it is promoted, if it has kept all rules. Unset: never."""


class RolloutOptions(BaseModel):
    """The trial of a version with requests of clients."""

    model_config = DECLARATION

    candidate: int = Field(ge=1, le=MAX_VERSION)
    """The version that is tried in place of the version that is labelled ``stable``."""
    mode: Literal["shadow", "canary"] = "shadow"
    """``shadow``: ``stable`` answers, and copies of requests run on the candidate while the server has time for them;
    outputs are compared. ``canary``: the candidate answers; if it fails, ``stable`` does."""
    share: float = Field(default=0.1, ge=0, le=1)
    """Share of the requests for ``stable`` or without a version."""
    sticky: str = Field(default="", max_length=256)
    """Name of a request parameter, such as ``user``. Requests with equal values go to the same version; those on the
    candidate stay there when the share grows. Requests without it are chosen by ``sticky_header``."""
    sticky_header: str = Field(
        default="",
        max_length=256,
        pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]*$",
        json_schema_extra={"expects": "name of a header"},
    )
    """Name of an HTTP header, or of gRPC metadata, such as ``x-user-id``, whose value counts as that of ``sticky``; the
    parameter has precedence. Requests with neither are chosen at random. Empty: only the parameter is used."""
    tolerance: Mapping[Measure, Annotated[float, Field(ge=0)]] = Field(
        default={"relative": 0.01},
        min_length=1,
        json_schema_extra={"expects": "{max: x, relative: x, cosine: x, top1: x}"},
    )
    """Largest error of a request that agrees, by measure, as in ``ortserve compare``."""
    rules: RolloutRules = Field(default_factory=RolloutRules)
    """Rules that end the rollout automatically."""


def why_without_effect(options: RolloutOptions, model: str, stable: int | None) -> str:
    """The reason why a rollout has no candidate beside the version that is labelled ``stable``; empty if it has one."""
    if stable is None:
        return f"rollout: expected model '{model}' to have the label '{STABLE}', got none"
    if stable == options.candidate:
        return f"rollout: expected another candidate than version {stable}, which is labelled '{STABLE}'"
    return ""


def make_rollout_options(given: Mapping[str, object]) -> RolloutOptions:
    """Validate options that do not come from a ``model.yaml``.

    Raises:
        ServeError: invalid_input; the message names every invalid key.
    """
    try:
        return validate(RolloutOptions, given)
    except InvalidValuesError as error:
        raise invalid_input(f"rollout: {error}") from None
