"""Trace files: one that grows and numbered ones beside it, written by a thread of their own.

Whoever hands traces over never waits for the disk. What cannot be written is lost, said once in the log, and counted;
no request notices. The file that grows is whole JSON after each write, numbered ones appear when they are whole.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from ortserve.errors import invalid_input
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_MOST_WAITING_BYTES: Final = 16 * 1024 * 1024
"""Of traces that the thread has not written yet; a disk that is slower than that loses some."""

_LEAST_FILE_BYTES: Final = 4096
"""What a numbered file counts as at least, since it takes a block and a name: there is an end to tiny ones, too."""

# Never through a link: others may write in the folder, too. O_CLOEXEC is Python's default.
_FRESH: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW


class TraceFiles:
    """Writes traces to ``path`` and to ``path`` with numbers from 0 appended. Loop thread only."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        """Check the path; files are made when there is something to write.

        Args:
            path: In a folder that is there. A file of the same name is replaced by the first write.
            max_bytes: Most that is written in all.

        Raises:
            ServeError: invalid_input, when no file can be written there.
        """
        if not _can_hold_file(path):
            raise invalid_input(
                f"trace_file: expected a plain file, or none yet, in a folder that can be written to, got '{path}'"
            )
        self._path = path
        self._max_bytes = max_bytes
        self._writer = ThreadPoolExecutor(1, "traces")
        self._next_number = 0
        self._handed_bytes = 0
        self._is_closed = False
        self._lost = 0
        # Written by the thread alone.
        self._done_bytes = 0
        self._failed = 0
        self._growing: _GrowingArray | None = None

    @property
    def name(self) -> str:
        """The file's name, without its folder."""
        return self._path.name

    def append(self, records: Sequence[bytes]) -> None:
        """Have records written to the file that grows."""
        if self._enter(records, 0):
            self._writer.submit(self._append, records)

    def number(self, records: Sequence[bytes]) -> None:
        """Have records written to a numbered file of their own, the next one."""
        if self._enter(records, _LEAST_FILE_BYTES):
            path = self._path.with_name(f"{self._path.name}.{self._next_number}")
            self._next_number += 1
            self._writer.submit(self._write_whole, path, records)

    def close(self) -> None:
        """Wait until everything is written, at the end of the server. What is handed over later is lost."""
        self._is_closed = True
        self._writer.shutdown()
        if self._growing is not None:
            self._growing.close()
        if lost := self._lost + self._failed:
            log_event(logger, logging.WARNING, "traces were lost", count=lost)

    def _enter(self, records: Sequence[bytes], least: int) -> bool:
        """Whether there is room for records; counts them as handed over, or as lost."""
        size = _size(records, least)
        if self._is_closed:
            return False
        if self._handed_bytes + size > self._max_bytes:
            reason = f"trace_max_bytes: {self._max_bytes} bytes are written"
        elif self._handed_bytes + size - self._done_bytes > _MOST_WAITING_BYTES:
            reason = "the disk is slower than traces come"
        else:
            self._handed_bytes += size
            return True
        if not self._lost:
            log_event(logger, logging.WARNING, "traces are dropped", reason=reason)
        self._lost += len(records)
        return False

    def _append(self, records: Sequence[bytes]) -> None:
        try:
            if self._growing is None:
                self._growing = _GrowingArray(self._path)
            self._growing.append(b",".join(records))
        except OSError as error:
            self._fail(records, error)
        self._done_bytes += _size(records, 0)

    def _write_whole(self, path: Path, records: Sequence[bytes]) -> None:
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            unfinished.unlink(missing_ok=True)
            with unfinished.open("xb") as file:  # never through a link, as above
                file.write(b"[%b]" % b",".join(records))
            unfinished.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            self._fail(records, error)
        self._done_bytes += _size(records, _LEAST_FILE_BYTES)

    def _fail(self, records: Sequence[bytes], error: OSError) -> None:
        if not self._failed:
            log_event(logger, logging.ERROR, "traces cannot be written", file=str(self._path), reason=str(error))
        self._failed += len(records)


class _GrowingArray:
    """A file that holds a JSON array whenever nothing is being written to it."""

    def __init__(self, path: Path) -> None:
        """Begin it anew. Raises OSError."""
        self._descriptor = os.open(path, _FRESH, 0o666)
        self._size = 0

    def append(self, elements: bytes) -> None:
        """Write further elements over the bracket at the end. Raises OSError; then it is as before."""
        at = max(self._size - 1, 0)
        text = memoryview(b"%b%b]" % (b"," if self._size else b"[", elements))
        end = at + len(text)
        try:
            while text:
                text = text[os.pwrite(self._descriptor, text, end - len(text)) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, at)
                if at:
                    os.pwrite(self._descriptor, b"]", at)
            raise
        self._size = end

    def close(self) -> None:
        os.close(self._descriptor)


def _can_hold_file(path: Path) -> bool:
    try:
        is_free = stat.S_ISREG(path.lstat().st_mode)  # a link is not, wherever it leads
    except FileNotFoundError:
        is_free = path.parent.is_dir()
    except (OSError, ValueError):  # no name for a file, too long, or in what is no folder
        return False
    return is_free and os.access(path.parent, os.W_OK)


def _size(records: Sequence[bytes], least: int) -> int:
    return max(sum(map(len, records)) + len(records) + 1, least)
