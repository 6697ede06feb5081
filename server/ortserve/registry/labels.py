"""Labels of versions: which version each label of a model names, and which versions serve because of labels.

Labels and rollouts are set in ``model.yaml`` and by calls. Those of calls take precedence.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from ortserve.config.model import ModelOptions
from ortserve.config.rollout import RolloutOptions
from ortserve.core.version_names import STABLE
from ortserve.registry.catalog import Catalog
from ortserve.registry.repository.source import ModelSource, VersionSource, versions_to_serve
from ortserve.registry.state_file import StateFile
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)


class Labels:
    """The labels and rollouts in effect for all models. Loop thread only, except ``named_versions``."""

    def __init__(self, catalog: Catalog, sources: Mapping[str, ModelSource], state: StateFile) -> None:
        """``sources`` has the source of the latest load of each model, and is read at each call."""
        self._catalog = catalog
        self._sources = sources
        self._state = state
        self._configured: dict[str, dict[str, int]] = {}
        """Configured labels that are in effect, by model."""
        self._rollouts: dict[str, RolloutOptions] = {}
        """Configured rollouts, by model. Like labels, they stay in effect while the configuration cannot be read."""
        self._missing: dict[str, dict[str, int]] = {}
        """Labels of versions that do not exist, by model, as logged last."""

    def apply_configured(self, name: str) -> None:
        """Put the configured labels of a model into effect. A label moves only to a version that serves."""
        source, ready = self._sources[name], [record.version for record in self._catalog.ready(name)]
        there = {*source.versions, *ready}
        before = {label: version for label, version in self._configured.get(name, {}).items() if version in there}
        configured = move_labels(before, source.labels, ready)
        if not ready and any(record.is_on_demand for record in self._catalog.of(name).values()):
            ready = list(source.versions)  # The next request loads them.
        if ready and configured.get(STABLE) not in ready and STABLE not in self._catalog.labels(name):
            configured.pop(STABLE, None)  # The first one must not take the requests from the highest version either.
        self._configured[name] = configured
        if source.rollout is None:
            self._rollouts.pop(name, None)
        else:
            self._rollouts[name] = source.rollout
        self.apply(name)

    def forget(self, name: str) -> None:
        """Forget the configured labels of a model that was unloaded. Those of calls stay."""
        self._configured.pop(name, None)
        self._rollouts.pop(name, None)
        self._missing.pop(name, None)
        self.apply(name)

    def apply(self, name: str) -> None:
        """Put the labels of a model into effect in one step, those of calls before the configured ones."""
        self._report_missing(name)
        labels = {**self._configured.get(name, {}), **self._state.of(name).labels}
        before = self._catalog.labels(name)
        if labels == before:
            return
        self._catalog.set_labels(name, labels)
        moved = {label: labels.get(label) for label in {**labels, **before} if labels.get(label) != before.get(label)}
        texts = (f"{label}={'-' if version is None else version}" for label, version in moved.items())
        log_event(logger, logging.INFO, "labels changed", model=name, labels=", ".join(texts))

    def mix(self, source: ModelSource, serving: Mapping[int, VersionSource]) -> ModelSource:
        """Combine a source with versions that serve, and with the labels and the rollout in effect."""
        labels, rollout = self._configured.get(source.name, {}), self._rollouts.get(source.name)
        versions = {**source.versions, **serving}
        return replace(source, versions=versions, problem="", labels=labels, rollout=rollout, is_mixed=True)

    def rollout(self, name: str) -> RolloutOptions | None:
        """The rollout of a model that a call started, or else that of its configuration, unless it has ended."""
        state, given = self._state.of(name), self._rollouts.get(name)
        if state.rollout is not None:
            return state.rollout
        return None if given is not None and state.has_tried(given.candidate) else given

    def named_versions(self, name: str) -> frozenset[int]:
        """The versions of a model that calls or its configuration name, by labels or a rollout. Any thread."""
        rollout = self.rollout(name)
        candidate = {rollout.candidate} if rollout else frozenset()
        return self._state.versions_of(name) | candidate | frozenset(self._configured.get(name, {}).values())

    def _report_missing(self, name: str) -> None:
        """Log the labels of versions that do not exist, whether they are in effect or stay where they were. Once."""
        source = self._sources.get(name)
        if source is None:
            return
        there = {*self._catalog.of(name), *source.versions}
        labels = {**source.labels, **self._state.of(name).labels}
        missing = {label: version for label, version in labels.items() if version not in there}
        if missing and missing != self._missing.get(name):
            event = "labels name versions that do not exist"
            texts = ", ".join(f"{label}={version}" for label, version in missing.items())
            log_event(logger, logging.WARNING, event, model=name, labels=texts)
        self._missing[name] = missing


def move_labels(before: Mapping[str, int], given: Mapping[str, int], ready: Collection[int]) -> dict[str, int]:
    """Compute the labels of a ``model.yaml`` that are in effect after a change of the file or of the serving versions.

    A label moves from the version in ``before``, labels in effect until now, to that in ``given``, the labels in the
    file, when this version serves. Thus a version that fails to load takes no requests from one that serves.
    """
    return {label: version if version in ready else before.get(label, version) for label, version in given.items()}


def needed_versions(source: ModelSource, named: Collection[int]) -> set[int]:
    """The versions of a model that should serve: those chosen by its policy and those named by labels.

    All versions of a source with several configurations should.

    Args:
        source: Source of the model, which includes all these versions.
        named: Versions named by labels, by a rollout or as the target of a rollback.
    """
    if source.is_mixed:
        return set(source.versions)
    options: ModelOptions | None = next((one.configuration.options for one in source.versions.values()), None)
    if options is None:
        return set()
    return source.versions.keys() & versions_to_serve(options, source.versions, named)
