"""What ``ortserve models --json`` prints."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionStatus:
    """A version that the server knows, or a model that it has not loaded.

    Attributes:
        model: Name of the model.
        version: Number of the version; empty for a model that was never loaded.
        state: READY, LOADING, UNLOADING or UNAVAILABLE; empty for a model that was never loaded.
        labels: Names of the version.
        is_default: Whether requests without a version go to it; null if the server does not say.
        requests: Answered requests; null if they were not asked for, or the version does not serve.
        failed: Failed requests; null as above.
        mean_ms: Mean time of answered requests; null without any.
        reason: Why it is in this state, or what its load is doing.
    """

    model: str
    version: str
    state: str
    labels: tuple[str, ...] = ()
    is_default: bool | None = None
    requests: int | None = None
    failed: int | None = None
    mean_ms: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsResult:
    """The models of a server, after the action.

    Attributes:
        schema: Of this result.
        action: list, status, load, unload, labels, rollout, promote or rollback.
        url: Of the server.
        versions: All of the server, or those of the model that the action was about.
        labels: Versions by label, those that do not serve included; empty for list.
        previous: The version that a rollback would make stable again; empty for none.
        rollout: The rollout of the model and its figures, as the server describes it; null for other actions than
            status and rollout, and for servers that have no rollouts.
        note: What the action did not do, because there was nothing to do; usually empty.
    """

    schema: str = "ortserve.models/1"
    action: str
    url: str
    versions: tuple[VersionStatus, ...]
    labels: dict[str, str]
    previous: str = ""
    rollout: dict[str, Any] | None = None
    note: str = ""
