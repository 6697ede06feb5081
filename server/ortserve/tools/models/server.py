"""The calls of ``ortserve models`` to a server, over HTTP. Each raises ServeError as ``Client`` does."""

from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import quote

import orjson
from pydantic import AliasPath, Field, TypeAdapter, ValidationError

from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.address import Address
from ortserve.tools.client import Answer, Client, another_kind, path_of
from ortserve.tools.console import ShowProgress
from ortserve.tools.models.result import VersionStatus

_PROGRESS_S: Final = 0.5
"""Interval between two readings of the progress of a load."""
_LATEST_LABEL: Final = "stable"

_Form = TypeVar("_Form")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A version that a server knows, or a model that it has not loaded: then all fields but the name are empty."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """A label and its version."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class ModelLabels:
    """The labels of a model, None for servers without labels, and the version that a rollback leads to."""

    labels: tuple[Label, ...] | None = None
    previous: str = ""

    @property
    def versions(self) -> dict[str, str]:
        """Versions by label."""
        return {label.name: label.version for label in self.labels or ()}


@dataclass(frozen=True, slots=True)
class Rollout:
    """The rollout of a model, as the server describes it."""

    rollout: dict[str, Any] | None
    problem: str
    figures: dict[str, Any]
    worst_errors: dict[str, Any]
    ended: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Counts:
    """The counts of a version, with the places that its statistics have them in."""

    version: str = ""
    requests: Annotated[int | None, Field(validation_alias=AliasPath("inference_stats", "success", "count"))] = None
    failed: Annotated[int | None, Field(validation_alias=AliasPath("inference_stats", "fail", "count"))] = None
    answered_ns: Annotated[int | None, Field(validation_alias=AliasPath("inference_stats", "success", "ns"))] = None


@dataclass(frozen=True, slots=True)
class _Statistics:
    model_stats: tuple[_Counts, ...] = ()


_INDEX: Final = TypeAdapter(tuple[IndexEntry, ...])
_LABELS: Final = TypeAdapter(ModelLabels)
_ROLLOUT: Final = TypeAdapter(Rollout)
_STATISTICS: Final = TypeAdapter(_Statistics)


class ModelServer:
    """A server whose models are shown and changed."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        """``timeout_s`` limits loads, unloads and changes of labels; other calls take 5 seconds at most."""
        self._address = address
        self._timeout_s = timeout_s
        self._client = Client(address)

    def close(self) -> None:
        self._client.close()

    def index(self) -> tuple[IndexEntry, ...]:
        """The versions that the server knows, and the models in its repositories."""
        return self._read("/v2/repository/index", b"{}", _INDEX)

    def labels(self, model: str) -> ModelLabels:
        """The labels of a model."""
        return self._read_if_known(f"{path_of(model)}/labels", _LABELS) or ModelLabels()

    def rollout(self, model: str) -> Rollout | None:
        """The rollout of a model; None for servers without rollouts."""
        return self._read_if_known(f"{path_of(model)}/rollout", _ROLLOUT)

    def versions(self, model: str, *, with_counts: bool = False) -> tuple[VersionStatus, ...]:
        """The versions of a model, or of all models.

        Raises:
            ServeError: not_found: the model is unknown; the message names the known ones. Others as ``Client``.
        """
        entries = self.index()
        known = dict.fromkeys(entry.name for entry in entries)
        if model and model not in known:
            found = f"the server has {', '.join(known)}" if known else "the server has none"
            raise ServeError(ErrorKind.NOT_FOUND, f"{self._address.url}: model '{model}' is not known; {found}")
        names = [model] if model else list(known)
        labels = {name: self.labels(name) for name in names}
        ready = {name: [e.version for e in entries if (e.name, e.state) == (name, "READY")] for name in names}
        counts = self._counts(model) if with_counts and ready[model] else {}
        return tuple(
            _status(entry, labels[entry.name], ready[entry.name], counts.get(entry.version, _Counts()))
            for entry in entries
            if entry.name in labels
        )

    def change(self, method: str, path: str, body: Mapping[str, Any]) -> None:
        """Make a call that may take long."""
        with closing(Client(self._address, self._timeout_s)) as client:
            client.expect_http()
            client.checked(client.exchange(client.prepare(path, orjson.dumps(body), method=method)))

    def change_watched(self, path: str, model: str, step: ShowProgress) -> None:
        """Make a POST for a model. Meanwhile, another thread passes the progress of the server to ``step``.

        The calling thread waits for the answer, so that Ctrl-C ends the call.
        """
        is_over = Event()

        def watch() -> None:
            while not is_over.wait(_PROGRESS_S):
                with suppress(ServeError):  # progress is optional
                    for entry in self.index():
                        if entry.name == model and entry.state in ("LOADING", "UNLOADING"):
                            step(0, f"version {entry.version}: {entry.reason or entry.state.lower()}")

        watching = Thread(target=watch)
        watching.start()
        try:
            self.change("POST", path, {})
        finally:
            is_over.set()
            watching.join()

    def _counts(self, model: str) -> dict[str, _Counts]:
        return {one.version: one for one in self._read(f"{path_of(model)}/stats", None, _STATISTICS).model_stats}

    def _read_if_known(self, path: str, form: TypeAdapter[_Form]) -> _Form | None:
        try:
            answer = self._client.call(path)
        except ServeError as error:
            if error.kind in (ErrorKind.NOT_FOUND, ErrorKind.UNSUPPORTED):
                return None
            raise
        return self._parse(path, answer, form)

    def _read(self, path: str, body: bytes | None, form: TypeAdapter[_Form]) -> _Form:
        return self._parse(path, self._client.call(path, body), form)

    def _parse(self, path: str, answer: Answer, form: TypeAdapter[_Form]) -> _Form:
        try:
            return form.validate_json(answer.body, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "document"
            seen = f"got an answer to {path} that cannot be read: {place}: {first['msg']}"
            raise another_kind(self._address, seen) from None


def repository_path(model: str, action: str) -> str:
    """The path of a load or unload."""
    return f"/v2/repository/models/{quote(model, safe='')}/{action}"


def _status(entry: IndexEntry, labels: ModelLabels, ready: list[str], counts: _Counts) -> VersionStatus:
    # Only a server with labels is known to number its versions. The longest number is the highest.
    highest = max(ready, key=lambda number: (len(number), number), default="")
    is_default = entry.state == "READY" and entry.version == labels.versions.get(_LATEST_LABEL, highest)
    mean_ms = counts.answered_ns / counts.requests / 1e6 if counts.requests and counts.answered_ns is not None else None
    return VersionStatus(
        model=entry.name,
        version=entry.version,
        state=entry.state,
        labels=tuple(name for name, number in labels.versions.items() if number == entry.version and number),
        is_default=None if labels.labels is None else is_default,
        requests=counts.requests,
        failed=counts.failed,
        mean_ms=None if mean_ms is None else round(mean_ms, 3),
        reason=entry.reason,
    )
