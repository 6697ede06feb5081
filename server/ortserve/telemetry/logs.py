"""Log lines: one handler to standard error, one line an event, fields as ``key=value`` for people and ``grep``."""

import json
import logging
import sys
import time
from typing import Final, Literal, TextIO

ACCESS_LOGGERS: Final = ("ortserve.access", "uvicorn.access")
"""Loggers of one line a request; silent unless asked for."""


class LineFormatter(logging.Formatter):
    """``2030-01-31T12:00:00.123Z INFO ortserve.registry version is ready model=simple version=1``, in UTC."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        moment = f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03}Z"
        # What a caller sent may be in the message; it must not be able to forge a line.
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        fields = [f"{key}={_spell(value)}" for key, value in getattr(record, "fields", {}).items()]
        line = " ".join([moment, record.levelname, record.name, message, *fields])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class StderrHandler(logging.StreamHandler[TextIO]):
    """The server's one handler; a class of its own so that configuring twice replaces it."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(LineFormatter())


def configure_logging(level: Literal["debug", "info", "warning", "error"], access_log: bool) -> None:
    """Send all loggers' lines of at least ``level`` to standard error; called once, by whoever owns the process.

    uvicorn's lines come along if it is given ``log_config=None``, so that it leaves its loggers as they are.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, StderrHandler)]:
        root.removeHandler(handler)
    root.addHandler(StderrHandler())
    root.setLevel(level.upper())
    if level != "debug":
        # A line for each connection that brings no HTTP: anybody could fill the disk.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    for name in ACCESS_LOGGERS:
        logging.getLogger(name).disabled = not access_log


def log_event(logger: logging.Logger, level: int, message: str, **fields: object) -> None:
    """Log an event with fields such as ``model``, ``version``, ``request_id``, ``reason``.

    Args:
        logger: The module's logger.
        level: One of ``logging``'s numbers.
        message: What happened; no placeholders, what varies are fields.
        fields: In the order they are written.
    """
    logger.log(level, "%s", message, extra={"fields": fields}, stacklevel=2)


def _spell(value: object) -> str:
    text = str(value)
    # Quoted where it could be misread as more than one field or line.
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
