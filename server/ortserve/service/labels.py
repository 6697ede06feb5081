"""Labels of versions while the server runs: calls read them, change them, promote versions and roll back."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final
from weakref import WeakValueDictionary

from ortserve.config.versions import MAX_LABELS
from ortserve.core.version_names import LABEL_FORM, STABLE, is_label
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.catalog import State, VersionRecord
from ortserve.registry.registry import Registry
from ortserve.registry.state_file import ModelState


@dataclass(frozen=True, slots=True)
class Label:
    """A label of a model.

    Attributes:
        name: Name of the label.
        version: The version that it names.
        state: State of the version, as the log names it; ``UNKNOWN`` for a version that the server does not have.
        is_set_by_call: Whether a call set the label; otherwise the model's configuration did.
    """

    name: str
    version: int
    state: str
    is_set_by_call: bool


@dataclass(frozen=True, slots=True)
class ModelLabels:
    """The labels of a model.

    Attributes:
        labels: The labels, sorted by name.
        previous: The version that ``rollback`` would make ``stable`` again; None if there is none.
    """

    labels: tuple[Label, ...]
    previous: int | None


class LabelService:
    """Answers calls about labels. A change is on disk before it takes effect, in one step. Loop thread only."""

    def __init__(self, registry: Registry) -> None:
        self._registry: Final = registry
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def read(self, model: str) -> ModelLabels:
        """The labels of a model. Raises ServeError: not_found."""
        states = self._states(model)
        changed = self._registry.state_of(model)
        labels = sorted(self._registry.labels(model).items())
        return ModelLabels(
            tuple(
                Label(name, version, states[version].name if version in states else "UNKNOWN", name in changed.labels)
                for name, version in labels
            ),
            changed.previous,
        )

    async def change(self, model: str, changes: Mapping[str, int | None]) -> ModelLabels:
        """Change labels of a model, all in one step. Labels that ``changes`` does not name do not change.

        After a change of ``stable``, there is no version to roll back to.

        Args:
            model: Name of the model.
            changes: Versions by label, which must serve. None removes the version that a call set, so that the version
                in the configuration applies again, if it has the label.

        Raises:
            ServeError: not_found, for an unknown model or version; not_ready, for a version that does not serve;
                invalid_input, for a name that cannot be a label; conflict, if the change cannot be stored.
        """
        for label in changes:
            if not is_label(label):
                raise invalid_input(f"label '{label:.100}': expected {LABEL_FORM}")
        async with self.lock(model):
            self._states(model)
            state = self._registry.state_of(model)
            labels = {**state.labels, **changes}
            kept = {label: version for label, version in labels.items() if version is not None}
            if (count := len(kept.keys() - {STABLE})) >= MAX_LABELS:  # a promotion needs a place for ``stable``
                expected = f"at most {MAX_LABELS - 1} labels of model '{model}' beside '{STABLE}'"
                raise invalid_input(f"labels: expected {expected}, got {count}")
            for label, version in changes.items():
                if version is not None:
                    await self.check_serves(model, version, f"label '{label}'")
            previous = None if STABLE in changes else state.previous  # it belongs to the replaced ``stable``
            await self._registry.change_state(model, replace(state, labels=kept, previous=previous))
        return self.read(model)

    async def promote(self, model: str, version: int) -> ModelLabels:
        """Make a version ``stable`` in one step. The present ``stable`` version continues to serve, for ``rollback``.

        Raises:
            ServeError: The errors of ``change``; conflict, if the version is ``stable`` already.
        """
        async with self.lock(model):
            await self.check_serves(model, version, "promote")
            previous = self.replaced_by(model, version)
            state = self._registry.state_of(model)
            labels = {**state.labels, STABLE: version}
            await self._registry.change_state(model, replace(state, labels=labels, previous=previous))
        return self.read(model)

    async def rollback(self, model: str) -> ModelLabels:
        """Make the version ``stable`` again that was ``stable`` before the last ``promote``.

        Raises:
            ServeError: The errors of ``change``; conflict, if there is no such version.
        """
        async with self.lock(model):
            self._states(model)
            state: ModelState = self._registry.state_of(model)
            if state.previous is None:
                raise ServeError(ErrorKind.CONFLICT, f"model '{model}' has no promotion to roll back")
            await self.check_serves(model, state.previous, "rollback")
            labels = {**state.labels, STABLE: state.previous}
            await self._registry.change_state(model, replace(state, labels=labels, previous=None))
        return self.read(model)

    def replaced_by(self, model: str, version: int) -> int | None:
        """The version that answers requests without a version until ``version`` is promoted; None if that is the same.

        Raises:
            ServeError: conflict, if ``version`` is ``stable`` already.
        """
        labels = self._registry.labels(model)
        if labels.get(STABLE) == version:
            raise ServeError(ErrorKind.CONFLICT, f"version {version} of model '{model}' is already labelled '{STABLE}'")
        before = labels[STABLE] if STABLE in labels else max(self._registry.ready_versions(model), default=None)
        return None if before == version else before

    def _states(self, model: str) -> dict[int, State]:
        """The states of a model's versions. Raises ServeError: not_found."""
        if not self._registry.knows(model):
            raise ServeError(ErrorKind.NOT_FOUND, f"Request for unknown model: '{model}' is not found")
        return {record.version: record.state for record in self._registry.records_of(model)}

    async def check_serves(self, model: str, version: int, what: str) -> None:
        """Check that a version serves. A model that is not in memory is loaded first.

        Raises:
            ServeError: not_found or not_ready, beginning with ``what``; another kind if the load fails.
        """
        self._states(model)
        record = self._record(model, version)
        if record is not None and record.makes_requests_wait:
            try:
                await self._registry.wait_for(model, str(version))
            except ServeError as error:
                raise ServeError(error.kind, f"{what}: {error.message}", retry_after_s=error.retry_after_s) from None
            record = self._record(model, version)
        if record is not None and record.state is State.READY:
            return
        ready = ", ".join(map(str, self._registry.ready_versions(model))) or "none"
        state = "not known" if record is None else record.state.name
        reason = f" ({record.explanation})" if record is not None and record.explanation else ""
        raise ServeError(
            ErrorKind.NOT_FOUND if record is None else ErrorKind.NOT_READY,
            f"{what}: expected a version of model '{model}' that serves ({ready}), got {version}, which is "
            f"{state}{reason}",
        )

    def _record(self, model: str, version: int) -> VersionRecord | None:
        return next((one for one in self._registry.records_of(model) if one.version == version), None)

    def lock(self, model: str) -> asyncio.Lock:
        """The lock that is held during a change of a model's state."""
        return self._locks.setdefault(model, asyncio.Lock())
