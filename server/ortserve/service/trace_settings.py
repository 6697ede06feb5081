"""Trace files: the protocol's settings for them, and the choice of the requests that are written.

As in Triton's trace extension, each change restarts the count of requests. Models without settings of their own are
counted together. A model with some settings of its own uses those of the server for the others.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Final, TypeAlias

from ortserve.clock import Clock
from ortserve.config.option_groups import TraceFileOptions
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.registry import Registry
from ortserve.service.call import Call
from ortserve.telemetry.trace_files import Sampling, Traced, TraceFiles, encode_record

TraceSetting: TypeAlias = str | list[str]

TRACE: Final = "trace"
"""Name of the extension, announced if traces can be written."""

_MIN: Final = {"trace_rate": 1, "trace_count": -1, "log_frequency": 0}
_MAX: Final = 2**31 - 1
_INTEGER: Final = re.compile("-?[0-9]{1,10}")
_SETTINGS: Final = ("trace_level", *_MIN, "trace_file", "trace_mode")
_MODE: Final = "triton"


class TraceSettings:
    """Validates and stores the settings, and returns the sampling of a model's requests. Loop thread only."""

    def __init__(self, registry: Registry, options: TraceFileOptions, files: TraceFiles | None) -> None:
        """Begin with the settings of ``options``. Without ``files``, the only level is ``OFF``."""
        self._registry = registry
        self._files = files
        self._start: Final = {
            "trace_level": int(options.trace_level != "OFF"),
            "trace_rate": options.trace_rate,
            "trace_count": options.trace_count,
            "log_frequency": options.trace_log_frequency,
        }
        self._own: dict[str, dict[str, int]] = {"": {}}
        """Changed settings by model; ``""`` for the server."""
        self._server = self._sampling(self._start)
        self._models: dict[str, Sampling] = {}
        """The sampling of each model with settings of its own."""

    def read(self, model: str = "") -> dict[str, TraceSetting]:
        """All settings of a model or, for ``""``, of the server. ``trace_count`` is the remaining number.

        Raises:
            ServeError: not_found, for an unknown model.
        """
        self._check_model(model)
        sampling = self.of(model)
        return {
            "trace_level": ["TIMESTAMPS" if sampling.is_on else "OFF"],
            "trace_rate": str(sampling.rate),
            "trace_count": str(sampling.count),
            "log_frequency": str(sampling.log_frequency),
            "trace_file": self._files.name if self._files else "",
            "trace_mode": _MODE,
        }

    def update(self, changes: Mapping[str, object], model: str = "") -> dict[str, TraceSetting]:
        """Change some settings and return all.

        Args:
            changes: New values by setting. None, or an empty list, resets a setting: of a model to that of the server,
                of the server to the option.
            model: Name of the model; ``""`` for the server.

        Raises:
            ServeError: not_found, for an unknown model; invalid_input, for an unknown setting or an invalid value;
                unsupported, for another file, mode or level. No setting is changed then.
        """
        self._check_model(model)
        own = self._current(model)
        for key, value in changes.items():
            if key not in _SETTINGS:
                raise invalid_input(f"unknown trace setting '{key}', expected one of {', '.join(_SETTINGS)}")
            if value is None or value == []:
                own.pop(key, None)
            elif (number := _checked(key, value, can_trace=self._files is not None)) is not None:
                own[key] = number
        if changes:
            self._replace(model, own)
        return self.read(model)

    def of(self, model: str) -> Sampling:
        """The sampling of a model's requests."""
        return self._models.get(model, self._server)

    def close(self, timeout_s: float) -> None:
        """Write all collected traces for at most ``timeout_s``, at the end of the server."""
        for sampling in (self._server, *self._models.values()):
            sampling.close()
        if self._files is not None:
            self._files.close(timeout_s)

    def _replace(self, model: str, own: dict[str, int]) -> None:
        if model:
            self._replace_model(model, own)
        else:
            self._own[""] = own
            self._server.close()
            self._server = self._sampling(self._start | own)
            for name in list(self._models):
                self._replace_model(name, self._current(name))

    def _replace_model(self, model: str, own: dict[str, int]) -> None:
        known = self._models.pop(model, None)
        if known is not None:
            known.close()
        self._own.pop(model, None)
        if own:
            self._own[model] = own
            follows = self._start | self._own[""] | {"trace_count": self._server.count}
            self._models[model] = self._sampling(follows | own)

    def _current(self, model: str) -> dict[str, int]:
        """The changed settings of a model, or of the server, with the remaining count."""
        own = dict(self._own.get(model, {}))
        if "trace_count" in own:
            own["trace_count"] = self.of(model).count
        return own

    def _sampling(self, settings: Mapping[str, int]) -> Sampling:
        return Sampling(
            self._files,
            is_on=bool(settings["trace_level"]),
            rate=settings["trace_rate"],
            count=settings["trace_count"],
            log_frequency=settings["log_frequency"],
        )

    def _check_model(self, model: str) -> None:
        if model and not self._registry.knows(model):
            raise ServeError(ErrorKind.NOT_FOUND, f"Request for unknown model : {model}")


class TraceWriter:
    """Writes the traces of the requests that the settings sample. Loop thread only."""

    def __init__(self, settings: TraceSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._numbers = count(1)

    def observe(self, call: Call, timing: Timing, ended_ns: int, *, is_answered: bool = True) -> None:
        """Count a request that has ended, and write its trace if it is sampled.

        Args:
            call: A call whose version was found.
            timing: Its times, which must not change any more: they are read in the next turn of the loop.
            ended_ns: When the answer or the error was ready (monotonic).
            is_answered: False if the request was cancelled.
        """
        request, served = call.request, call.served
        assert served is not None
        sampling = self._settings.of(served.name)
        if sampling.take():
            request_id = "" if request is None else request.id
            traced = Traced(next(self._numbers), served.name, served.version, request_id, call.protocol)
            # In the next turn of the loop, because this one sends the answer, unless a thread compresses it first.
            asyncio.get_running_loop().call_soon(self._collect, sampling, traced, timing, ended_ns, is_answered)

    def _collect(self, sampling: Sampling, traced: Traced, timing: Timing, ended_ns: int, is_answered: bool) -> None:
        sent_ns = self._clock() if is_answered else None
        records = [encode_record(traced, timing, ended_ns=ended_ns, sent_ns=sent_ns)]
        records += self._steps(timing, traced)
        # A single element, because the sampling counts requests.
        sampling.collect(b",".join(records))

    def _steps(self, timing: Timing, parent: Traced) -> Iterator[bytes]:
        """Yield the records of the steps of an ensemble, each before those of its own steps."""
        for step in timing.steps:
            number = next(self._numbers)
            traced = replace(parent, number=number, model=step.model, version=step.version, parent=parent.number)
            yield encode_record(traced, step.timing, ended_ns=step.ended_ns, sent_ns=None)
            yield from self._steps(step.timing, traced)


def _checked(key: str, value: object, *, can_trace: bool) -> int | None:
    """The setting as a number; None for a setting with a single possible value. Raises ServeError."""
    values = [str(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else [str(value)]
    if key == "trace_file":
        raise ServeError(ErrorKind.UNSUPPORTED, "trace file location can not be updated through network protocol")
    if key == "trace_level":
        return _checked_level(values, can_trace=can_trace)
    if len(values) != 1:
        raise invalid_input(f"expect one value for '{key}', got {len(values)}")
    if key == "trace_mode":
        if values[0] != _MODE:
            raise ServeError(ErrorKind.UNSUPPORTED, f"trace_mode: expected '{_MODE}', got '{values[0]}'")
        return None
    least = _MIN[key]
    number = int(values[0]) if _INTEGER.fullmatch(values[0]) else least - 1
    if isinstance(value, bool) or not least <= number <= _MAX:
        raise invalid_input(f"{key}: expected an integer, {least} to {_MAX}, got '{values[0]}'")
    return number


def _checked_level(values: Sequence[str], *, can_trace: bool) -> int:
    for level in values:
        if level not in ("OFF", "TIMESTAMPS", "TENSORS", "MIN", "MAX"):
            raise invalid_input(f"trace_level: expected OFF or TIMESTAMPS, got '{level}'")
    if "OFF" in values:
        if len(values) > 1:
            raise invalid_input(f"trace_level: expected OFF alone or TIMESTAMPS, got {', '.join(values)}")
        return 0
    if "TENSORS" in values:
        raise ServeError(
            ErrorKind.UNSUPPORTED,
            "trace_level: expected OFF or TIMESTAMPS, got 'TENSORS': this server never writes tensors to trace files",
        )
    if not can_trace:
        raise ServeError(
            ErrorKind.UNSUPPORTED,
            f"trace_level: expected OFF, got '{values[0]}': the server was started without --trace-file, which names "
            "the file for traces",
        )
    return 1
