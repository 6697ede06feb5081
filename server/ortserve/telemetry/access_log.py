"""A line for each inference request, the lines of one turn of the event loop written together.

One at a time and by way of ``logging``, a line costs several times as much, beside a request of some 50 µs.
"""

import asyncio
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

from ortserve.telemetry.logs import LogFormat, LogSwitches, json_line, text_line


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
