"""Triton's trace files: which requests are traced, the record of a trace, and the files.

A thread of its own writes the files, so the event loop never waits for the disk. Records that cannot be written are
dropped, logged once and counted. One file grows and is valid JSON after each write; numbered files beside it appear
when they are complete.

A record holds all timestamps of a request. Triton writes one object per timestamp and its readers join those of one
``id``, so they read both forms (docs/user_guide/trace.md and qa/common/trace_summary.py of
triton-inference-server/server). Records never hold tensor contents.
"""

import contextlib
import json
import logging
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

from ortserve.core.timing import Timing
from ortserve.errors import invalid_input
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_NAMED_CHARACTERS: Final = 256
"""Callers choose how long the id of a request is; this much of it is written."""


def spell_record(
    number: int,
    model: str,
    version: str,
    request_id: str,
    protocol: str,
    timing: Timing,
    *,
    ended_ns: int,
    sent_ns: int | None,
) -> bytes:
    """Spell a trace as JSON.

    Args:
        number: Of the trace; those of a server differ.
        model: Whose trace it is.
        version: Digits.
        request_id: What the caller named it, or ``""``.
        protocol: ``http`` or ``grpc``.
        timing: Of the request; points that were not reached are left out.
        ended_ns: When the answer, or the error in its place, was ready to be sent.
        sent_ns: When it had been sent; None where nobody was there any more.
    """
    received_ns = timing.received_ns
    if protocol == "http":
        side = "HTTP"
        points = [("HTTP_RECV_START", timing.begun_ns or received_ns), ("HTTP_RECV_END", received_ns)]
    else:
        # How long a message took to come is grpc's knowledge.
        side = "GRPC"
        points = [("GRPC_WAITREAD_START", received_ns), ("GRPC_WAITREAD_END", received_ns)]
    points.append(("REQUEST_START", received_ns))
    if timing.queued_ns:
        points.append(("QUEUE_START", timing.queued_ns))
    if timing.taken_ns:
        points.append(("COMPUTE_START", timing.taken_ns))
        if timing.computed_ns:
            points += (("COMPUTE_INPUT_END", timing.staged_ns), ("COMPUTE_OUTPUT_START", timing.computed_ns))
        points.append(("COMPUTE_END", ended_ns))
    points.append(("REQUEST_END", ended_ns))
    if sent_ns is not None:
        points += ((f"{side}_SEND_START", ended_ns), (f"{side}_SEND_END", sent_ns))
    named = f',"request_id":{json.dumps(request_id[:_NAMED_CHARACTERS])}' if request_id else ""
    timestamps = ",".join(f'{{"name":"{name}","ns":{ns}}}' for name, ns in points)
    head = f'{{"id":{number},"model_name":{json.dumps(model)},"model_version":{int(version)}{named}'
    return f'{head},"timestamps":[{timestamps}]}}'.encode()


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


_GROWING_BYTES: Final = 64 * 1024
_NUMBERED_BYTES: Final = 4 * 1024 * 1024
"""Of traces that wait to be written together: beyond it they are written however many they were to be."""


class Files(Protocol):
    """Where traces go: ``telemetry.trace_files``."""

    def append(self, records: Sequence[bytes]) -> None: ...
    def number(self, records: Sequence[bytes]) -> None: ...


class Sampling:
    """Counts the requests that its settings hold for and gathers the traces of those it takes. Loop thread only.

    Settings are never changed but replaced, by a sampling that counts from the beginning.
    """

    def __init__(self, files: Files | None, *, is_on: bool, rate: int, count: int, log_frequency: int) -> None:
        """Take settings over.

        Args:
            files: Where traces go; None only if it is not on.
            is_on: Whether anything is traced.
            rate: One of so many requests is.
            count: How many will be; -1 for any number.
            log_frequency: How many traces make a numbered file; 0 for one file that grows, unless ``count`` ends them,
                which makes a numbered file of all of them.
        """
        self.is_on: Final = is_on and files is not None
        self.rate: Final = rate
        self.count = count
        """How many are still to be taken; -1 for any number."""
        self.log_frequency: Final = log_frequency
        self._files = files
        self._seen = 0
        self._under_way = 0
        self._records: list[bytes] = []
        self._size = 0
        self._is_closed = False

    def take(self) -> bool:
        """Count a request, and say whether it is traced, the ``rate``-th first; if so, ``collect`` is to follow."""
        if not self.is_on or not self.count:
            return False
        self._seen += 1
        if self._seen % self.rate:
            return False
        if self.count > 0:
            self.count -= 1
        self._under_way += 1
        return True

    def collect(self, record: bytes) -> None:
        """Gather the trace of a request that was taken."""
        self._under_way -= 1
        self._records.append(record)
        self._size += len(record)
        if self._is_closed:
            self._write_rest()
        elif self.log_frequency or self.count >= 0:
            is_last = self.count == 0 and not self._under_way
            if is_last or self._size >= _NUMBERED_BYTES or 0 < self.log_frequency <= len(self._records):
                self._write(numbered=True)
        elif self._size >= _GROWING_BYTES:
            self._write(numbered=False)

    def close(self) -> None:
        """Write what was gathered: other settings hold from now on. Requests that were taken may still be collected."""
        self._is_closed = True
        self._write_rest()

    def _write_rest(self) -> None:
        if self._records:
            self._write(numbered=self.log_frequency > 0)

    def _write(self, *, numbered: bool) -> None:
        assert self._files is not None
        records, self._records, self._size = self._records, [], 0
        if numbered:
            self._files.number(records)
        else:
            self._files.append(records)
