"""Starts, shows and ends rollouts: by configuration, by call, and by their own rules."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ortserve.clock import Clock
from ortserve.config.rollout import RolloutOptions, make_rollout_options, why_without_effect
from ortserve.core.thread_pool import ThreadPool
from ortserve.core.version_names import STABLE
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.registry import Registry
from ortserve.registry.repository.source import VersionSource
from ortserve.registry.served_model import ServedModel
from ortserve.registry.state_file import EndedRollout
from ortserve.service.labels import LabelService, ModelLabels
from ortserve.service.rollout.decision import Decision, Figures
from ortserve.service.rollout.live import LiveRollout
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.readings import RolloutReading

logger: Final = logging.getLogger(__name__)

_RETRY_S: Final = 5.0
"""Delay of another attempt to store the end of a rollout."""


@dataclass(frozen=True, slots=True)
class _Compared:
    """The versions that the figures of a rollout compare: the version ``stable``, its files, and the candidate's."""

    stable: int | None
    stable_source: VersionSource | None
    candidate_source: VersionSource | None


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """The rollout of a model.

    Attributes:
        options: Options of the rollout; None for a model without a rollout.
        problem: Why requests do not reach the candidate, or the end of the rollout could not be stored; else empty.
        figures: Figures since the start of the rollout or of the server, or since files of a version changed.
        worst: Largest error of any compared request, by measure.
        ended: How the last rollout ended; None if no rollout has ended.
    """

    options: RolloutOptions | None
    problem: str
    figures: Figures
    worst: Mapping[str, float]
    ended: EndedRollout | None

    def describe(self) -> dict[str, Any]:
        """The status as a document. Errors may be infinite."""
        return {
            "rollout": None if self.options is None else self.options.model_dump(mode="json"),
            "problem": self.problem,
            "figures": asdict(self.figures),
            "worst_errors": dict(self.worst),
            "ended": None if self.ended is None else asdict(self.ended),
        }


class RolloutService:
    """Answers calls about rollouts, and owns at most one live rollout per model. Loop thread only."""

    def __init__(self, registry: Registry, labels: LabelService, clock: Clock) -> None:
        self._registry = registry
        self._labels = labels
        self._clock = clock
        self._live: dict[str, LiveRollout] = {}
        self._compared: dict[str, _Compared] = {}
        """The versions that the live rollout of each model compares."""
        self._reported: dict[str, str] = {}
        self._threads = ThreadPool(1, "compare")
        self._ending: set[asyncio.Task[None]] = set()
        registry.on_model_change = self._refresh

    def read(self, model: str) -> RolloutStatus:
        """The rollout of a model. Raises ServeError: not_found."""
        self._labels.read(model)
        options = self._registry.rollout(model)
        return self._status(model, options, "" if options is None else self._problem(model, options))

    def read_all(self) -> dict[str, RolloutStatus]:
        """The rollouts of all models that have or had one. Fast if there are none."""
        found = {}
        for model in sorted({*self._live, *self._reported, *self._registry.changed_models()}):
            options = self._registry.rollout(model)
            if self._registry.knows(model) and (options is not None or self._registry.state_of(model).ended):
                found[model] = self._status(model, options, "" if options is None else self._reported.get(model, ""))
        return found

    async def start(self, model: str, document: Mapping[str, object]) -> RolloutStatus:
        """Start a rollout, or change the running one. It replaces that of the configuration.

        Raises:
            ServeError: not_found, for an unknown model or version; invalid_input, for invalid options; conflict,
                without a label ``stable`` on another version, for sequences and ensembles, or if the change cannot be
                stored; not_ready, if the candidate does not serve.
        """
        self._labels.read(model)
        options = make_rollout_options(document)
        async with self._labels.lock(model):
            await self._labels.check_serves(model, options.candidate, "candidate")
            if problem := self._problem(model, options):
                raise ServeError(ErrorKind.CONFLICT, problem)
            state, before = self._registry.state_of(model), self._live.get(model)
            await self._registry.change_state(model, state.with_rollout(options))
            if before is not None and self._live.get(model) is before:
                self._refresh(model, is_anew=True)  # with the same options: its rules may have ended it already
        return self.read(model)

    async def stop(self, model: str) -> RolloutStatus:
        """End a rollout without a change of labels. Raises ServeError: not_found; conflict, without a rollout."""
        self._labels.read(model)
        async with self._labels.lock(model):
            options = self._registry.rollout(model)
            if options is None:
                raise ServeError(ErrorKind.CONFLICT, f"model '{model}' has no rollout")
            await self._end(model, EndedRollout(options.candidate, "stopped", "by a call"))
        return self.read(model)

    async def promote(self, model: str, version: int | None) -> ModelLabels:
        """Make a version ``stable`` in one step; None for the candidate of the rollout. Promoting it ends the rollout.

        Raises:
            ServeError: The errors of ``LabelService.promote``; conflict, with neither a version nor a rollout.
        """
        self._labels.read(model)
        async with self._labels.lock(model):
            options = self._registry.rollout(model)
            if options is not None and version in (None, options.candidate):
                await self._labels.check_serves(model, options.candidate, "promote")
                await self._end(model, EndedRollout(options.candidate, "promoted", "by a call"))
                return self._labels.read(model)
        if version is None:
            raise ServeError(ErrorKind.CONFLICT, f"model '{model}' has no rollout: expected the version to promote")
        return await self._labels.promote(model, version)

    async def rollback(self, model: str) -> ModelLabels:
        """End the rollout of a model; without one, undo the last promotion.

        Raises:
            ServeError: The errors of ``LabelService.rollback``.
        """
        self._labels.read(model)
        async with self._labels.lock(model):
            options = self._registry.rollout(model)
            if options is not None:
                await self._end(model, EndedRollout(options.candidate, "rolled_back", "by a call"))
                return self._labels.read(model)
        return await self._labels.rollback(model)

    def readings(self) -> list[RolloutReading]:
        """The readings of all live rollouts, for metrics. Only reads, so a scrape may call it on its own thread."""
        return [live.reading() for live in list(self._live.values())]

    def _status(self, model: str, options: RolloutOptions | None, problem: str) -> RolloutStatus:
        live = self._live.get(model)
        figures, worst = (Figures(), {}) if live is None else (live.figures(), live.worst)
        problem = problem or ("" if live is None else live.problem)
        return RolloutStatus(options, problem, figures, worst, self._registry.state_of(model).ended)

    async def _end(self, model: str, ended: EndedRollout) -> None:
        """Store the end of a rollout and, if it promotes, the label. The caller holds the model's lock."""
        state = self._registry.state_of(model).with_end(ended)
        if ended.result == "promoted":
            previous = self._labels.replaced_by(model, ended.candidate)
            state = replace(state, labels={**state.labels, STABLE: ended.candidate}, previous=previous)
        await self._registry.change_state(model, state)
        log_event(
            logger,
            logging.INFO if ended.result != "rolled_back" else logging.WARNING,
            "rollout ended",
            model=model,
            candidate=ended.candidate,
            result=ended.result,
            reason=ended.reason,
        )

    def _refresh(self, model: str, *, is_anew: bool = False) -> None:
        """Begin, replace or end the live rollout of a model after a change. With ``is_anew``, it begins again."""
        options = self._registry.rollout(model)
        compared = None if options is None else self._what_is_compared(model, options.candidate)
        live = self._live.get(model)
        problem = "" if options is None else self._problem(model, options)
        if not problem:
            self._reported.pop(model, None)
        elif self._reported.get(model) != problem:
            self._reported[model] = problem
            log_event(logger, logging.WARNING, "rollout has no effect", model=model, reason=problem)
        is_same = live is not None and live.options == options and self._compared[model] == compared
        if is_same and not problem and not is_anew:
            return
        if live is not None:
            live.is_over = True
            del self._live[model], self._compared[model]
        if options is None or compared is None or problem or self._is_coming(model, options.candidate):
            self._registry.set_rollout(model, None)
        else:
            self._live[model] = LiveRollout(
                model, options, self._registry.find_or_begin, self._clock, self._threads, self._on_decision
            )
            self._compared[model] = compared
            self._registry.set_rollout(model, self._live[model])
            log_event(
                logger,
                logging.INFO,
                "rollout began",
                model=model,
                candidate=options.candidate,
                mode=options.mode,
                share=options.share,
            )

    def _is_coming(self, model: str, candidate: int) -> bool:
        """Whether the candidate is being loaded, so that the rollout begins later."""
        return any(record.version == candidate and record.is_loading for record in self._registry.records_of(model))

    def _what_is_compared(self, model: str, candidate: int) -> _Compared:
        stable = self._registry.labels(model).get(STABLE)
        sources = {record.version: record.source for record in self._registry.records_of(model)}
        return _Compared(stable, None if stable is None else sources.get(stable), sources.get(candidate))

    def _problem(self, model: str, options: RolloutOptions) -> str:
        """Why a rollout cannot send requests to its candidate; empty if it can. A candidate may still be loading."""
        records = self._registry.records_of(model)
        if records and all(record.is_unloaded for record in records):
            return f"rollout: expected model '{model}' to serve, but it was unloaded"
        stable = self._registry.labels(model).get(STABLE)
        if reason := why_without_effect(options, model, stable):
            return reason
        if records and all(record.version != options.candidate for record in records):
            return f"rollout: the candidate, version {options.candidate} of model '{model}', does not exist"
        if records and all(record.version != stable for record in records):
            return f"rollout: version {stable} of model '{model}', which is labelled '{STABLE}', does not exist"
        for record in records:
            served = record.served
            if record.version in (stable, options.candidate) and served is not None:
                if served.takes_sequences:
                    return f"rollout: expected requests that stand alone, got sequences of model '{model}'"
                if not isinstance(served, ServedModel):
                    return f"rollout: expected a model file, got the ensemble '{model}'"
        return ""

    def _on_decision(self, live: LiveRollout, decision: Decision) -> None:
        task = asyncio.get_running_loop().create_task(self._conclude(live, decision))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _conclude(self, live: LiveRollout, decision: Decision) -> None:
        """Carry out a decision of the rules. If it cannot be stored, try again later, without requests meanwhile."""
        model, candidate = live.model, live.options.candidate
        async with self._labels.lock(model):
            self._refresh(model)  # versions may serve other files by now, to which the figures do not apply
            if self._live.get(model) is not live:
                return  # a call has ended or changed the rollout, or it was replaced
            try:
                if decision.result == "promoted":
                    await self._labels.check_serves(model, candidate, "promote")
                    if self._live.get(model) is not live:
                        return  # the candidate was not in memory, and has been loaded from other files
                await self._end(model, EndedRollout(candidate, decision.result, decision.reason))
            except ServeError as error:
                asyncio.get_running_loop().call_later(_RETRY_S, self._on_decision, live, decision)
                decided = f"{decision.result} by its rules ({decision.reason})"
                problem = f"rollout: {decided}, but the result cannot be stored: {error.message}"
                if problem == live.problem:
                    return
                live.problem = problem
                log_event(
                    logger,
                    logging.ERROR,
                    "the end of a rollout cannot be stored; the server tries again",
                    model=model,
                    candidate=candidate,
                    result=decision.result,
                    problem=error.message,
                    reason=decision.reason,
                )
