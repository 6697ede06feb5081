"""The log settings, which clients may read and change while the server runs."""

from collections.abc import Mapping
from typing import Final, TypeAlias

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.telemetry.logs import LogSwitches

Setting: TypeAlias = bool | int | str

LOG_FORMATS: Final = ("default", "ISO8601")
"""The protocol's names. By ``ISO8601`` the time of a line is of ISO 8601; so it is by this server's default, so that
either holds. Whether lines are text or JSON is the operator's choice alone: who collects them expects it."""

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
