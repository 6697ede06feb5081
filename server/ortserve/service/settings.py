"""Settings that clients may read and change while the server runs: of logging and of tracing."""

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.registry import Registry
from ortserve.telemetry.logs import LogSwitches

Setting: TypeAlias = bool | int | str
TraceSetting: TypeAlias = str | list[str]

LOG_FORMATS: Final = ("default", "ISO8601")
"""The protocol's names; this server's lines begin with a time of ISO 8601 by either."""

_MAX_UINT32: Final = 2**32 - 1


class LogSettings:
    """The protocol's log settings, over the process' own switches. Loop thread only."""

    def __init__(self, switches: LogSwitches) -> None:
        self._switches = switches
        self._format = LOG_FORMATS[0]

    def read(self) -> dict[str, Setting]:
        """All settings."""
        switches = self._switches
        return {
            "log_file": "",
            "log_info": switches.info,
            "log_warning": switches.warning,
            "log_error": switches.error,
            "log_verbose_level": switches.verbose_level,
            "log_format": self._format,
        }

    def update(self, changes: Mapping[str, object]) -> dict[str, Setting]:
        """Change some, all or none of them, and return them all. Unknown keys and values of None are passed over.

        Raises:
            ServeError: invalid_input, for a value that cannot be; unsupported, for ``log_file``. Then nothing changed.
        """
        known = {key: value for key, value in changes.items() if value is not None}
        if "log_file" in known:
            raise ServeError(ErrorKind.UNSUPPORTED, "log file location can not be updated through network protocol")
        for key in ("log_info", "log_warning", "log_error"):
            if key in known and not isinstance(known[key], bool):
                raise invalid_input(f"expect boolean for '{key}', got {known[key]!r}")
        level = known.get("log_verbose_level", 0)
        if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= _MAX_UINT32:
            raise invalid_input(f"expect unsigned integer for 'log_verbose_level', got {level!r}")
        if (log_format := known.get("log_format", self._format)) not in LOG_FORMATS:
            raise invalid_input(f"invalid argument for --log_format, got: {log_format}")
        self._format = str(log_format)
        switches = self._switches
        switches.set(
            info=bool(known.get("log_info", switches.info)),
            warning=bool(known.get("log_warning", switches.warning)),
            error=bool(known.get("log_error", switches.error)),
            verbose_level=level if "log_verbose_level" in known else switches.verbose_level,
        )
        return self.read()


class TraceSettings:
    """The protocol's trace settings: checked, kept and returned. Loop thread only.

    This server writes no trace files (its timings are in each answer and in the metrics), so that a level that would
    ask for traces is refused rather than kept as if they were written.
    """

    START: Final[Mapping[str, TraceSetting]] = {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "",
        "trace_mode": "triton",
    }

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._server: dict[str, TraceSetting] = {}
        self._models: dict[str, dict[str, TraceSetting]] = {}

    def read(self, model: str = "") -> dict[str, TraceSetting]:
        """All settings, of a model or, for ``""``, of the server.

        Raises:
            ServeError: not_found, for an unknown model.
        """
        self._check_model(model)
        return {**self.START, **self._server, **self._models.get(model, {})}

    def update(self, changes: Mapping[str, object], model: str = "") -> dict[str, TraceSetting]:
        """Change some, all or none of them, and return them all.

        Args:
            changes: None, or an empty list, takes a setting back: of a model to the server's, of the server to what it
                began with.
            model: As for ``read``.

        Raises:
            ServeError: not_found, for an unknown model; invalid_input, for an unknown setting or a value that cannot
                be; unsupported, for a level that asks for traces, another file or mode. Then nothing changed.
        """
        self._check_model(model)
        kept = dict(self._models.get(model, {}) if model else self._server)
        for key, value in changes.items():
            if key not in self.START:
                raise invalid_input(f"unknown trace setting '{key}', expected one of {', '.join(self.START)}")
            if value is None or value == []:
                kept.pop(key, None)
            else:
                kept[key] = _checked(key, value)
        if model:
            self._models[model] = kept
        else:
            self._server = kept
        return self.read(model)

    def _check_model(self, model: str) -> None:
        if model and not self._registry.knows(model):
            raise ServeError(ErrorKind.NOT_FOUND, f"Request for unknown model : {model}")


def _checked(key: str, value: object) -> TraceSetting:
    values = [str(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else [str(value)]
    if key == "trace_file":
        raise ServeError(ErrorKind.UNSUPPORTED, "trace file location can not be updated through network protocol")
    if key == "trace_level":
        return _checked_level(values)
    if len(values) != 1:
        raise invalid_input(f"expect one value for '{key}', got {len(values)}")
    if key == "trace_mode":
        if values[0] != TraceSettings.START[key]:
            raise ServeError(ErrorKind.UNSUPPORTED, f"trace_mode: expected 'triton', got '{values[0]}'")
        return values[0]
    least = -1 if key == "trace_count" else 0 if key == "log_frequency" else 1
    try:
        number = int(values[0])
    except ValueError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= 2**63 - 1:
        raise invalid_input(f"{key}: expected an integer, at least {least}, got '{values[0]}'")
    return str(number)


def _checked_level(values: Sequence[str]) -> list[str]:
    for level in values:
        if level not in ("OFF", "TIMESTAMPS", "TENSORS", "MIN", "MAX"):
            raise invalid_input(f"trace_level: expected OFF, TIMESTAMPS or TENSORS, got '{level}'")
        if level != "OFF":
            raise ServeError(
                ErrorKind.UNSUPPORTED,
                f"trace_level: expected OFF, got '{level}': this server writes no trace files; the times of a request "
                "are in its answer (Server-Timing, server-timing) and in the metrics",
            )
    return ["OFF"]
