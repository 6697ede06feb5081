"""The calls of ``ortserve models`` to a server, over HTTP. Each raises ServeError as ``Client`` does."""

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from threading import Event, Thread
from typing import Any, Final
from urllib.parse import quote

import orjson

from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.address import Address
from ortserve.tools.client import Client, another_kind, path_of
from ortserve.tools.models.result import VersionStatus

_PROGRESS_S: Final = 0.5
"""Interval between two readings of the progress of a load."""
_LATEST_LABEL: Final = "stable"


class ModelServer:
    """A server whose models are shown and changed."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        """``timeout_s`` limits loads, unloads and changes of labels; other calls take 5 seconds at most."""
        self._address = address
        self._timeout_s = timeout_s
        self._client = Client(address)

    def close(self) -> None:
        self._client.close()

    def index(self) -> list[dict[str, str]]:
        """The versions that the server knows, and the models in its repositories."""
        entries: list[dict[str, str]] = self._read("/v2/repository/index", b"{}", list)
        return entries

    def labels(self, model: str) -> dict[str, Any]:
        """The labels of a model and their origin; empty for servers without labels."""
        return self._read_if_known(f"{path_of(model)}/labels") or {}

    def rollout(self, model: str) -> dict[str, Any] | None:
        """The rollout of a model; None for servers without rollouts."""
        return self._read_if_known(f"{path_of(model)}/rollout")

    def versions(self, model: str = "", *, with_counts: bool = False) -> tuple[VersionStatus, ...]:
        """The versions of a model, or of all models.

        Raises:
            ServeError: not_found: the model is unknown; the message names the known ones. Others as ``Client``.
        """
        entries = self.index()
        known = dict.fromkeys(entry["name"] for entry in entries)
        if model and model not in known:
            found = f"the server has {', '.join(known)}" if known else "the server has none"
            raise ServeError(ErrorKind.NOT_FOUND, f"{self._address.url}: model '{model}' is not known; {found}")
        names = [model] if model else list(known)
        labels = {name: _versions_by_label(self.labels(name)) for name in names}
        ready = {
            name: [e["version"] for e in entries if (e["name"], e.get("state")) == (name, "READY")] for name in names
        }
        counts = self._counts(model) if with_counts and ready[model] else {}
        return tuple(
            _status(entry, labels[entry["name"]], ready[entry["name"]], counts.get(entry.get("version", ""), {}))
            for entry in entries
            if entry["name"] in labels
        )

    def change(self, method: str, path: str, body: Mapping[str, Any]) -> None:
        """Make a call that may take long."""
        with closing(Client(self._address, self._timeout_s)) as client:
            client.checked(client.exchange(client.prepare(path, orjson.dumps(body), method=method)))

    def change_watched(self, path: str, model: str, step: Callable[[float, str], None]) -> None:
        """Make a POST for a model. Meanwhile, another thread passes the progress of the server to ``step``.

        The calling thread waits for the answer, so that Ctrl-C ends the call.
        """
        is_over = Event()

        def watch() -> None:
            while not is_over.wait(_PROGRESS_S):
                with suppress(ServeError, LookupError):  # progress is optional
                    for entry in self.index():
                        if entry["name"] == model and entry["state"] in ("LOADING", "UNLOADING"):
                            step(0, f"version {entry['version']}: {entry.get('reason') or entry['state'].lower()}")

        watching = Thread(target=watch)
        watching.start()
        try:
            self.change("POST", path, {})
        finally:
            is_over.set()
            watching.join()

    def _counts(self, model: str) -> dict[str, dict[str, Any]]:
        stats = self._read(f"{path_of(model)}/stats", None, dict)
        return {one["version"]: one for one in stats.get("model_stats", ())}

    def _read_if_known(self, path: str) -> dict[str, Any] | None:
        try:
            document: dict[str, Any] = self._read(path, None, dict)
        except ServeError as error:
            if error.kind in (ErrorKind.NOT_FOUND, ErrorKind.UNSUPPORTED):
                return None
            raise
        return document

    def _read(self, path: str, body: bytes | None, kind: type) -> Any:
        document = self._client.call(path, body).json()
        if not isinstance(document, kind):
            raise another_kind(self._address, f"got another document as the answer to {path}")
        return document


def repository_path(model: str, action: str) -> str:
    """The path of a load or unload."""
    return f"/v2/repository/models/{quote(model, safe='')}/{action}"


def _versions_by_label(document: Mapping[str, Any]) -> dict[str, str] | None:
    """Versions by label; None for servers without labels."""
    return {label["name"]: label["version"] for label in document["labels"]} if "labels" in document else None


def _status(
    entry: Mapping[str, str], labels: Mapping[str, str] | None, ready: list[str], counts: Mapping[str, Any]
) -> VersionStatus:
    version, is_ready = entry.get("version", ""), entry.get("state") == "READY"
    # Only a server with labels is known to number its versions.
    default = None if labels is None else labels.get(_LATEST_LABEL, max(ready, key=int, default=""))
    success, failed = (counts.get("inference_stats", {}).get(name, {}) for name in ("success", "fail"))
    requests = success.get("count")
    return VersionStatus(
        model=entry["name"],
        version=version,
        state=entry.get("state", ""),
        labels=tuple(name for name, number in (labels or {}).items() if number == version and version),
        is_default=None if labels is None else is_ready and version == default,
        requests=requests,
        failed=failed.get("count"),
        mean_ms=round(success["ns"] / requests / 1e6, 3) if requests else None,
        reason=entry.get("reason", ""),
    )
