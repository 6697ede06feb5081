"""The result of ``ortserve models``, as ``--json`` prints it."""

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
        is_default: Whether it serves requests that name no version; null if the server does not say.
        requests: Answered requests; null for other actions than status, and if the version does not serve.
        failed: Failed requests; null as above.
        mean_ms: Mean time of answered requests; null without any.
        reason: Why it is in this state, or the current step of its load.
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
        schema: Name and number of this schema.
        action: list, status, load, unload, labels, rollout, promote or rollback.
        url: URL of the server.
        versions: All versions of the server, or those of the model that the action names.
        labels: Versions by label, with versions that do not serve; empty for list.
        previous: The version that a rollback would make stable again; empty if there is none.
        rollout: The rollout of the model and its figures, as the server describes it; null for other actions than
            status and rollout, and for servers that have no rollouts.
        note: Why the action changed nothing; usually empty.
    """

    schema: str = "ortserve.models/1"
    action: str
    url: str
    versions: tuple[VersionStatus, ...]
    labels: dict[str, str]
    previous: str = ""
    rollout: dict[str, Any] | None = None
    note: str = ""
