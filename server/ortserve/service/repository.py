"""The model repositories: their index, and loading and unloading on request or when their files change."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ortserve.codecs.json_text import LoadParameter
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.catalog import State, VersionRecord
from ortserve.registry.registry import Registry
from ortserve.service.loop_turns import LoopTurns
from ortserve.telemetry.logs import log_event, log_fault

logger: Final = logging.getLogger(__name__)

ControlMode: TypeAlias = Literal["none", "poll", "explicit"]

ALL_MODELS: Final = "*"

_MAX_PARAMETERS: Final = 16 * 1024
"""Maximum number of parameters of a load, most of which are files: as many as the fields of a gRPC message."""

_PER_TURN: Final = 250
"""Number of models that are listed in one turn of the event loop; with encoding that takes about 2 ms."""

_PROTOCOL_STATES: Final = {
    State.LOADING: "LOADING",
    State.WARMING: "LOADING",
    State.READY: "READY",
    State.DRAINING: "UNLOADING",
    State.GONE: "UNAVAILABLE",
    State.FAILED: "UNAVAILABLE",
}


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A version in the index, or a model that was never loaded: then all fields but the name are empty."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class RepositoryService:
    """Answers the repository calls. Loop thread only."""

    def __init__(
        self,
        registry: Registry,
        *,
        mode: ControlMode,
        load_models: Collection[str] = (),
        turns: LoopTurns | None = None,
    ) -> None:
        """Load nothing yet.

        Args:
            registry: The models.
            mode: How the set of models changes.
            load_models: The models that the mode ``explicit`` loads at the start; ``*`` means all.
            turns: As in ``StatisticsService``.
        """
        self._registry = registry
        self._turns = turns or LoopTurns()
        self._mode = mode
        self._load_models = load_models

    async def start(self) -> None:
        """Load the models that the mode loads at the start.

        Raises:
            ServeError: invalid_input, if a repository cannot be read.
        """
        takes_all = self._mode != "explicit" or ALL_MODELS in self._load_models
        await self._registry.load_all(None if takes_all else frozenset(self._load_models))

    async def watch(self, interval_s: float) -> None:
        """Poll the repositories until cancelled, in the mode ``poll``; otherwise return at once."""
        reported = ""
        while self._mode == "poll":
            await self._registry.wait_for_poll(interval_s)
            try:
                changes = await self._registry.begin_poll()
                changes.add_done_callback(_report_fault)
                reported = ""
            except ServeError as error:
                if error.message != reported:  # once, not at every poll
                    reported = error.message
                    log_event(logger, logging.ERROR, "the repositories cannot be polled", reason=reported)
            except Exception as error:  # noqa: BLE001 - a later poll may succeed
                log_fault(logger, "the repositories could not be polled", error)

    async def index(self, *, only_ready: bool = False) -> AsyncIterator[IndexEntry]:
        """Every version that the server knows, and every model that is in the repositories now, sorted by name.

        Yields some in each turn of the event loop, because a server may have thousands.
        """
        # In order, because a sorted list is sorted again much faster than a set.
        present: dict[str, None] = {}
        if not only_ready:
            try:
                present = dict.fromkeys(await self._registry.names_in_repositories())
            except ServeError as error:
                log_event(logger, logging.WARNING, "the index shows only known models", reason=error.message)
        for number, name in enumerate(sorted(dict.fromkeys(self._registry.names()) | present)):
            if number % _PER_TURN == 0:
                await self._turns.next()
            records = self._registry.records_of(name)
            for record in records:
                if not only_ready or record.state is State.READY:
                    yield _entry(record)
            if not records and name in present:
                yield IndexEntry(name)

    async def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Load or reload a model. Returns when it serves.

        Args:
            name: Name of the model.
            parameters: ``config``, a configuration as JSON text, and with it the model's files as bytes, named
                ``file:<version>/<file>``. They are in effect until the next load.

        Raises:
            ServeError: not_ready, in a mode without explicit control; invalid_input, for an invalid name or parameter;
                internal, if loading fails.
        """
        self._check(name)
        if len(parameters) > _MAX_PARAMETERS:
            raise invalid_input(f"load: expected at most {_MAX_PARAMETERS} parameters, got {len(parameters)}")
        config: str | None = None
        files: dict[str, bytes | memoryview] = {}
        for parameter, value in parameters.items():
            if parameter == "config":
                if not isinstance(value, str):
                    raise invalid_input(f"parameter 'config': expected JSON text, got {type(value).__name__}")
                config = value
            elif parameter.startswith("file:"):
                if not isinstance(value, bytes | memoryview):
                    raise invalid_input(f"parameter '{parameter}': expected bytes, got {type(value).__name__}")
                files[parameter] = value
            else:
                raise invalid_input(f"unrecognized load parameter '{parameter}'.")
        await self._registry.load(name, config=config, files=files)

    async def unload(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Unload a model if it is loaded. Returns when its last request is answered.

        Args:
            name: Name of the model.
            parameters: ``unload_dependents``, a boolean: whether the members of an ensemble are unloaded, too, except
                those that other ensembles contain.

        Raises:
            ServeError: not_ready, in a mode without explicit control; invalid_input, for an invalid name or parameter.
        """
        self._check(name)
        for parameter, value in parameters.items():
            if parameter != "unload_dependents":
                raise invalid_input(f"unrecognized unload parameter '{parameter}'.")
            if not isinstance(value, bool):
                raise invalid_input(f"parameter 'unload_dependents': expected a boolean, got {value!r}")
        await self._registry.unload(name, with_members=parameters.get("unload_dependents") is True)

    def _check(self, name: str) -> None:
        if self._mode != "explicit":
            raise ServeError(
                ErrorKind.NOT_READY,
                "explicit model load / unload is not allowed if polling is enabled: model_control_mode is "
                f"'{self._mode}', expected 'explicit'",
            )
        if not name:
            raise invalid_input("Model name cannot be empty. Please enter a valid name to deploy.")
        if name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise invalid_input(f"invalid model name '{name}', model name must not contain path traversal characters")


def _entry(record: VersionRecord) -> IndexEntry:
    return IndexEntry(record.model, record.shown_version, _PROTOCOL_STATES[record.state], record.explanation)


def _report_fault(changes: "asyncio.Task[None]") -> None:
    if not changes.cancelled() and (error := changes.exception()) is not None:
        log_fault(logger, "the changes of a poll failed unexpectedly", error)
