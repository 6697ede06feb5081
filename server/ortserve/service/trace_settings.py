"""The protocol's trace settings: of the server, and of models that have some of their own.

As Triton has it (its trace extension): each change begins the counting of requests anew; models without settings of
their own count together; one that has some follows the server's in the rest, whenever those change.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from ortserve.config.option_groups import TraceFileOptions
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.registry import Registry
from ortserve.telemetry.trace_files import Sampling, TraceFiles

TraceSetting: TypeAlias = str | list[str]

TRACE: Final = "trace"
"""The extension's name; announced where traces can be had."""

_LEAST: Final = {"trace_rate": 1, "trace_count": -1, "log_frequency": 0}
_MOST: Final = 2**31 - 1
_INTEGER: Final = re.compile("-?[0-9]{1,10}")
_SETTINGS: Final = ("trace_level", *_LEAST, "trace_file", "trace_mode")
_MODE: Final = "triton"


class TraceSettings:
    """Checks, keeps and returns the settings, and says what they make of requests. Loop thread only."""

    def __init__(self, registry: Registry, options: TraceFileOptions, files: TraceFiles | None) -> None:
        """Begin with the options; without ``files`` no level but ``OFF`` can be set."""
        self._registry = registry
        self._files = files
        self._start: Final = {
            "trace_level": int(options.trace_level != "OFF"),
            "trace_rate": options.trace_rate,
            "trace_count": options.trace_count,
            "log_frequency": options.trace_log_frequency,
        }
        self._own: dict[str, dict[str, int]] = {"": {}}
        """By model, ``""`` for the server: what was set and not taken back."""
        self._server = self._sampling(self._start)
        self._models: dict[str, Sampling] = {}
        """Of models with settings of their own."""

    def read(self, model: str = "") -> dict[str, TraceSetting]:
        """All settings, of a model or, for ``""``, of the server. The count is what is left of it.

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
        """Change some, all or none of them, and return them all.

        Args:
            changes: None, or an empty list, takes a setting back: of a model to the server's, of the server to what it
                began with.
            model: As for ``read``.

        Raises:
            ServeError: not_found, for an unknown model; invalid_input, for an unknown setting or a value that cannot
                be; unsupported, for another file, mode or level than there is. Then nothing changed.
        """
        self._check_model(model)
        own = self._kept(model)
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
        """What holds for the requests of a model."""
        return self._models.get(model, self._server)

    def close(self) -> None:
        """Wait until all that was gathered is written, at the end of the server."""
        for sampling in (self._server, *self._models.values()):
            sampling.close()
        if self._files is not None:
            self._files.close()

    def _replace(self, model: str, own: dict[str, int]) -> None:
        if model:
            self._replace_model(model, own)
        else:
            self._own[""] = own
            self._server.close()
            self._server = self._sampling(self._start | own)
            for name in list(self._models):
                self._replace_model(name, self._kept(name))

    def _replace_model(self, model: str, own: dict[str, int]) -> None:
        known = self._models.pop(model, None)
        if known is not None:
            known.close()
        self._own.pop(model, None)
        if own:
            self._own[model] = own
            follows = self._start | self._own[""] | {"trace_count": self._server.count}
            self._models[model] = self._sampling(follows | own)

    def _kept(self, model: str) -> dict[str, int]:
        """What was set for a model, or the server, with what is left of its count."""
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


def _checked(key: str, value: object, *, can_trace: bool) -> int | None:
    """The setting as a number; None for one that has no other value. Raises ServeError."""
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
    least = _LEAST[key]
    number = int(values[0]) if _INTEGER.fullmatch(values[0]) else least - 1
    if isinstance(value, bool) or not least <= number <= _MOST:
        raise invalid_input(f"{key}: expected an integer, {least} to {_MOST}, got '{values[0]}'")
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
            "trace_level: expected OFF or TIMESTAMPS, got 'TENSORS': this server writes nothing of a request's or an "
            "answer's tensors to any file",
        )
    if not can_trace:
        raise ServeError(
            ErrorKind.UNSUPPORTED,
            f"trace_level: expected OFF, got '{values[0]}': this server was started without --trace-file, the file "
            "that traces would be written to",
        )
    return 1
