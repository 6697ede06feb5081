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

LogFormat: TypeAlias = Literal["text", "json"]

_NUMBERS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


_KEYS: Final = ("time", "level", "logger", "message", "exception")
"""Of a JSON line; fields of these names get others."""


_MOST_IN_LINE: Final = 399
"""Characters of a line of text, so that logs stay readable."""


class LineFormatter(logging.Formatter):
    """``2030-01-31T12:00:00.123Z INFO ortserve.registry version is ready model=simple version=1``, in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        # What a caller sent may be in the message; it must not be able to forge a line.
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = text_line(record.created, record.levelname, record.name, message, getattr(record, "fields", {}))
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, the event's fields, ``exception``.

    A field that has the name of one of these is called ``field_<name>``. Values that JSON does not know become text.
    """

    def format(self, record: logging.LogRecord) -> str:
        exception = self.formatException(record.exc_info) if record.exc_info else ""
        fields = getattr(record, "fields", {})
        return json_line(record.created, record.levelname, record.name, record.getMessage(), fields, exception)


def text_line(created: float, level: str, logger: str, message: str, fields: Mapping[str, object]) -> str:
    """A line for people; ``created`` in seconds since the epoch, ``level`` as ``INFO``."""
    return " ".join(
        [_moment(created), level, logger, message, *[f"{key}={_spell(value)}" for key, value in fields.items()]]
    )


def json_line(
    created: float, level: str, logger: str, message: str, fields: Mapping[str, object], exception: str = ""
) -> str:
    """A line for machines, as ``JsonFormatter`` has it."""
    line: dict[str, object] = {"time": _moment(created), "level": level.lower(), "logger": logger, "message": message}
    for key, value in fields.items():
        line[f"field_{key}" if key in _KEYS else key] = _json_value(value)
    if exception:
        line["exception"] = exception
    return json.dumps(line, default=str)


class LogSwitches:
    """Which lines are written, each severity by itself; may be turned while the process runs. From any thread."""

    def __init__(self, level: Literal["debug", "info", "warning", "error"]) -> None:
        """All severities from ``level`` up."""
        number = _NUMBERS[level]
        self.info = number <= logging.INFO
        self.warning = number <= logging.WARNING
        self.error = True
        self.verbose_level = int(number <= logging.DEBUG)
        """Above 0, lines for developers are written too."""

    def set(self, *, info: bool, warning: bool, error: bool, verbose_level: int) -> None:
        """Turn all of them; holds for the next line."""
        self.info, self.warning, self.error, self.verbose_level = info, warning, error, verbose_level
        self.apply()

    def apply(self) -> None:
        """Have loggers drop early what no handler would write, so that it costs no more than asking."""
        wanted = (number for number in sorted(_NUMBERS.values()) if self.allows(number))
        logging.getLogger().setLevel(next(wanted, logging.CRITICAL + 1))

    def allows(self, number: int) -> bool:
        """Whether lines of this severity, one of ``logging``'s numbers, are written."""
        if number >= logging.ERROR:
            return self.error
        if number >= logging.WARNING:
            return self.warning
        if number >= logging.INFO:
            return self.info
        return self.verbose_level > 0


class StderrHandler(logging.StreamHandler[TextIO]):
    """The server's one handler; a class of its own so that configuring twice replaces it."""

    def __init__(self, switches: LogSwitches, log_format: LogFormat) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(JsonFormatter() if log_format == "json" else LineFormatter())
        self.addFilter(lambda record: switches.allows(record.levelno))


def configure_logging(
    level: Literal["debug", "info", "warning", "error"], log_format: LogFormat = "text"
) -> LogSwitches:
    """Send all loggers' lines of at least ``level`` to standard error; called once, by whoever owns the process.

    uvicorn's lines come along if it is given ``log_config=None``, so that it leaves its loggers as they are.

    Returns:
        What turns severities on and off from now on.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, StderrHandler)]:
        root.removeHandler(handler)
    switches = LogSwitches(level)
    root.addHandler(StderrHandler(switches, log_format))
    switches.apply()
    if level != "debug":
        # A line for each connection that brings no HTTP: anybody could fill the disk.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        # One for each try to reach a collector, and for each trace header that is too long.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    # It writes every header that it reads, and so the keys of callers.
    logging.getLogger("hpack").setLevel(logging.WARNING)
    return switches


def log_event(logger: logging.Logger, level: int, message: str, **fields: object) -> None:
    """Log an event with fields such as ``model``, ``version``, ``request_id``, ``reason``.

    Args:
        logger: The module's logger.
        level: One of ``logging``'s numbers.
        message: What happened; no placeholders, what varies are fields.
        fields: In the order they are written.
    """
    logger.log(level, "%s", message, extra={"fields": fields}, stacklevel=2)


def fit_fields(fields: Mapping[str, object], logger: str, message: str) -> dict[str, object]:
    """The leading fields of an event that its line has room for: the one that exceeds ``_MOST_IN_LINE`` is cut.

    For events with long fields, which something else, such as a model's metadata, has in full. Lines are measured as
    text; as JSON they are a little longer.
    """
    room = _MOST_IN_LINE - len(text_line(0, "WARNING", logger, message, {}))
    fitting: dict[str, object] = {}
    for key, value in fields.items():
        room -= len(f" {key}=")
        spelled = len(_spell(value))
        if spelled > room:
            text = str(value)
            while text and len(_spell(f"{text}…")) > room:
                text = text[: room - len(_spell(f"{text}…"))]  # by as many as are too many, some of which are escaped
            if text:
                fitting[key] = f"{text}…"
            break
        fitting[key] = value
        room -= spelled
    return fitting


def log_fault(logger: logging.Logger, message: str, fault: BaseException, /, **fields: object) -> None:
    """As ``log_event``, of a fault of ours, whose traceback is to be seen."""
    logger.error("%s", message, exc_info=fault, extra={"fields": fields}, stacklevel=2)


def _moment(created: float) -> str:
    seconds = int(created)
    return f"{_second(seconds)}.{int((created - seconds) * 1000):03}Z"


@lru_cache(maxsize=1)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _json_value(value: object) -> object:
    # JSON has no numbers for infinity and for what is none.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _spell(value: object) -> str:
    text = str(value)
    # Quoted where it could be misread as more than one field or line.
    is_printable = text.isprintable()
    if text and is_printable and " " not in text and '"' not in text and "=" not in text:
        return text
    return json.dumps(text, ensure_ascii=not is_printable)


class AccessLog:
    """Writes to standard error, as all log lines go there. Loop thread only."""

    def __init__(self, switches: LogSwitches, log_format: LogFormat) -> None:
        """Lines have severity ``info``, which ``switches`` turns on and off."""
        self._switches = switches
        self._line = json_line if log_format == "json" else text_line
        self._lines: list[str] = []
        self._stream: TextIO | None = sys.stderr  # None where the process was started without one

    def write(self, fields: Mapping[str, object]) -> None:
        """Tell of one request; the line is written when this turn of the loop ends."""
        if self._stream is None or not self._switches.info:
            return
        if not self._lines:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._lines.append(self._line(time.time(), "INFO", "ortserve.access", "request", fields))

    def _end_turn(self) -> None:
        lines, self._lines = self._lines, []
        assert self._stream is not None
        with suppress(OSError, ValueError):  # where nobody reads lines any more, there is nowhere else to say so
            self._stream.write("\n".join([*lines, ""]))
            self._stream.flush()


logger: Final = logging.getLogger(__name__)

_PERIOD_NS: Final = 60_000_000_000


class RejectionLog:
    """Of one model version. Loop thread only."""

    def __init__(self, model: str, version: str) -> None:
        """The first rejection is logged at once."""
        self._model = model
        self._version = version
        self._due_ns: int | None = None
        self._unlogged = 0

    def note(self, error: ModelRejectionError, now_ns: int) -> None:
        """Count a rejected request, and log it together with those before it if the last line is a minute old.

        The line names the node and leaves out ONNX Runtime's text, which may quote elements of the request's tensors.
        """
        self._unlogged += 1
        if self._due_ns is not None and now_ns < self._due_ns:
            return
        requests, self._unlogged = self._unlogged, 0
        self._due_ns = now_ns + _PERIOD_NS
        log_event(
            logger,
            logging.INFO,
            "model rejected requests",
            model=self._model,
            version=self._version,
            requests=requests,
            by=error.node or "the check of the inputs",
        )
