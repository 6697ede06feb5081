"""Log lines: one handler to standard error, one line per event.

As text, fields are ``key=value``; as JSON, each line is one object. Tensor contents of requests and answers are never
logged. The access log writes its lines without ``logging``, and rejections by models are logged once a minute.
"""

import asyncio
import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Final, Literal, TextIO, TypeAlias

from ortserve.errors import ModelRejectionError
from ortserve.telemetry.standard_error import StandardError

logger: Final = logging.getLogger(__name__)

LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

_SEVERITIES: Final[Mapping[LogLevel, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
"""The numbers of ``logging``, in ascending order."""

_KEYS: Final = ("time", "level", "logger", "message", "exception")
"""Reserved keys of a JSON line; fields with these names are renamed."""

_MAX_IN_LINE: Final = 399
"""Maximum number of characters of a text line, so that logs stay readable."""

_REJECTIONS_EVERY_NS: Final = 60_000_000_000
"""Minimum time between two lines of a ``RejectionLog``."""


def text_line(
    created: float, level: str, logger: str, message: str, fields: Mapping[str, object], exception: str = ""
) -> str:
    """``2030-01-31T12:00:00.123Z INFO ortserve.registry version is ready model=simple version=1``, in UTC.

    ``created`` is in seconds since 1970. A traceback, ``exception``, follows in further lines.
    """
    # The message may contain text of a caller, which must not be able to forge a line.
    message = message.replace("\r", "\\r").replace("\n", "\\n")
    line = " ".join(
        [_moment(created), level, logger, message, *[f"{key}={_spell(value)}" for key, value in fields.items()]]
    )
    return f"{line}\n{exception}" if exception else line


def json_line(
    created: float, level: str, logger: str, message: str, fields: Mapping[str, object], exception: str = ""
) -> str:
    """One JSON object: ``time`` (UTC), ``level``, ``logger``, ``message``, the event's fields, ``exception``.

    A field with one of these names is written as ``field_<name>``. Values that JSON cannot represent become text. So do
    versions, which are empty where they are unknown: stores of logs give a field one type for all lines.
    """
    line: dict[str, object] = {"time": _moment(created), "level": level.lower(), "logger": logger, "message": message}
    for key, value in fields.items():
        line[f"field_{key}" if key in _KEYS else key] = str(value) if key == "version" else _json_value(value)
    if exception:
        line["exception"] = exception
    return json.dumps(line, default=str)


_LINES: Final = {"text": text_line, "json": json_line}
"""Writes a line, by the value of ``log_format``."""


class LineFormatter(logging.Formatter):
    """Writes records as lines of a format."""

    def __init__(self, log_format: LogFormat) -> None:
        super().__init__()
        self._line = _LINES[log_format]

    def format(self, record: logging.LogRecord) -> str:
        exception = self.formatException(record.exc_info) if record.exc_info else ""
        fields = getattr(record, "fields", {})
        return self._line(record.created, record.levelname, record.name, record.getMessage(), fields, exception)


class LogSwitches:
    """Enables and disables the lines of each severity while the process runs. Thread-safe."""

    def __init__(self, level: LogLevel) -> None:
        """Enable all severities from ``level`` on."""
        number = _SEVERITIES[level]
        self.info = number <= logging.INFO
        self.warning = number <= logging.WARNING
        self.error = True
        self.verbose_level = int(number <= logging.DEBUG)
        """Above 0, debug lines are written, too."""

    def set(self, *, info: bool, warning: bool, error: bool, verbose_level: int) -> None:
        """Set all severities. Takes effect with the next line."""
        self.info, self.warning, self.error, self.verbose_level = info, warning, error, verbose_level
        self.apply()

    def apply(self) -> None:
        """Set the root logger's level, so that disabled lines cost only a check."""
        wanted = (number for number in _SEVERITIES.values() if self.allows(number))
        logging.getLogger().setLevel(next(wanted, logging.CRITICAL + 1))

    def allows(self, number: int) -> bool:
        """Whether lines of this severity (a number of ``logging``) are written."""
        if number >= logging.ERROR:
            return self.error
        if number >= logging.WARNING:
            return self.warning
        if number >= logging.INFO:
            return self.info
        return self.verbose_level > 0


class StderrHandler(logging.StreamHandler[TextIO]):
    """The server's only handler. The class of its own lets a second configuration find and replace it."""

    def __init__(self, switches: LogSwitches, log_format: LogFormat) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(LineFormatter(log_format))
        self.addFilter(lambda record: switches.allows(record.levelno))


def configure_logging(level: LogLevel, log_format: LogFormat = "text") -> LogSwitches:
    """Send the lines of all loggers from ``level`` on to standard error. Called once, by the owner of the process.

    uvicorn's lines are included if it runs with ``log_config=None``, which leaves its loggers unchanged.

    Returns:
        The switches of the severities.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, StderrHandler)]:
        root.removeHandler(handler)
    switches = LogSwitches(level)
    root.addHandler(StderrHandler(switches, log_format))
    switches.apply()
    if level != "debug":
        # uvicorn logs each connection without valid HTTP: any caller could fill the disk.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        # OpenTelemetry logs each failed export, and each trace header that is too long.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    # At level debug, hpack logs every header, and with the headers the keys of callers.
    logging.getLogger("hpack").setLevel(logging.WARNING)
    # It logs OTEL_EXPORTER_OTLP_HEADERS if it cannot parse them, and with them the key of a collector.
    logging.getLogger("opentelemetry.util.re").setLevel(logging.ERROR)
    return switches


def never_wait_for_standard_error(log_format: LogFormat) -> None:
    """Replace ``sys.stderr`` by a stream that never blocks. Called by the owner of the process, before
    ``configure_logging``.
    """
    if sys.stderr is None:  # the process was started without standard error
        return
    line = _LINES[log_format]

    def describe(dropped: int) -> str:
        message = "log lines were dropped, because standard error was blocked"
        return line(time.time(), "WARNING", __name__, message, {"lines": dropped})

    sys.stderr = StandardError(sys.stderr.fileno(), describe)


def log_event(logger: logging.Logger, level: int, message: str, **fields: object) -> None:
    """Log an event with fields such as ``model``, ``version``, ``request_id``, ``reason``.

    Args:
        logger: The module's logger.
        level: One of ``logging``'s numbers.
        message: The event, without placeholders; values that vary are fields.
        fields: Written in this order.
    """
    logger.log(level, "%s", message, extra={"fields": fields}, stacklevel=2)


def fit_fields(fields: Mapping[str, object], logger: str, message: str) -> dict[str, object]:
    """The leading fields that fit in a line. The first field that does not fit is truncated, later ones are dropped.

    This is for events with long fields that are available in full elsewhere, for example in a model's metadata. The
    limit ``_MAX_IN_LINE`` applies to text lines; a JSON line is slightly longer.
    """
    room = _MAX_IN_LINE - len(text_line(0, "WARNING", logger, message, {}))
    fitting: dict[str, object] = {}
    for key, value in fields.items():
        room -= len(f" {key}=")
        spelled = len(_spell(value))
        if spelled > room:
            text = str(value)
            while text and len(_spell(f"{text}…")) > room:
                text = text[: room - len(_spell(f"{text}…"))]  # removes the excess, some of which is escape characters
            if text:
                fitting[key] = f"{text}…"
            break
        fitting[key] = value
        room -= spelled
    return fitting


def log_fault(logger: logging.Logger, message: str, fault: BaseException, /, **fields: object) -> None:
    """Log an internal error with its traceback. See ``log_event`` for the fields."""
    logger.error("%s", message, exc_info=fault, extra={"fields": fields}, stacklevel=2)


def _moment(created: float) -> str:
    seconds = int(created)
    return f"{_second(seconds)}.{int((created - seconds) * 1000):03}Z"


@lru_cache(maxsize=1)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _json_value(value: object) -> object:
    # JSON has no infinity and no NaN.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _spell(value: object) -> str:
    text = str(value)
    # Quote the text if it could be misread as several fields or lines.
    is_printable = text.isprintable()
    if text and is_printable and " " not in text and '"' not in text and "=" not in text:
        return text
    return json.dumps(text, ensure_ascii=not is_printable)


class AccessLog:
    """One line per inference request, to standard error. Loop thread only.

    The lines of one turn of the event loop are written together and without ``logging``. Through ``logging``, one by
    one, a line would cost several times as much, which matters for a request of about 50 us.
    """

    def __init__(self, switches: LogSwitches, log_format: LogFormat) -> None:
        """The lines have severity ``info`` of ``switches``."""
        self._switches = switches
        self._line = _LINES[log_format]
        self._lines: list[str] = []
        self._stream: TextIO | None = sys.stderr  # None if the process has no standard error

    def write(self, fields: Mapping[str, object]) -> None:
        """Add the line of one request; it is written at the end of this turn of the loop."""
        if self._stream is None or not self._switches.info:
            return
        if not self._lines:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._lines.append(self._line(time.time(), "INFO", "ortserve.access", "request", fields))

    def _end_turn(self) -> None:
        lines, self._lines = self._lines, []
        assert self._stream is not None
        with suppress(OSError, ValueError):  # if standard error is closed, the failure cannot be reported
            self._stream.write("\n".join([*lines, ""]))
            self._stream.flush()


class RejectionLog:
    """Logs the requests that one model version rejected: at most one line per minute. Loop thread only."""

    def __init__(self, model: str, version: str) -> None:
        self._model = model
        self._version = version
        self._due_ns: int | None = None
        self._unlogged = 0

    def note(self, error: ModelRejectionError, now_ns: int) -> None:
        """Count a rejected request, and log the count if the last line is at least a minute old.

        The line names the node. It omits ONNX Runtime's text, which may quote elements of the request's tensors.
        """
        self._unlogged += 1
        if self._due_ns is not None and now_ns < self._due_ns:
            return
        requests, self._unlogged = self._unlogged, 0
        self._due_ns = now_ns + _REJECTIONS_EVERY_NS
        log_event(
            logger,
            logging.INFO,
            "model rejected requests",
            model=self._model,
            version=self._version,
            requests=requests,
            by=error.node or "the check of the inputs",
        )
