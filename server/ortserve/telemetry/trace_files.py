"""Triton's trace files: which requests are traced, the record of a trace, and the files.

A separate thread writes the files, so the event loop never waits for the disk. Records that cannot be written are
dropped, logged once and counted. One file grows and is valid JSON after each write. Numbered files beside it appear
only when they are complete.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ortserve.core.thread_pool import ThreadPool
from ortserve.core.timing import Timing
from ortserve.errors import invalid_input
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_MAX_ID_CHARACTERS: Final = 256
"""Maximum number of characters of a request id, whose length callers choose."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A request, or a step of an ensemble, whose trace is written.

    Attributes:
        number: Number of the trace, unique in the server.
        model: Name of the model.
        version: The version as digits.
        request_id: The caller's id, or ``""``.
        protocol: ``http`` or ``grpc``; not used for a step.
        parent: For a step, the number of the trace of its ensemble; 0 for a request.
    """

    number: int
    model: str
    version: str
    request_id: str
    protocol: str
    parent: int = 0


def encode_record(traced: Traced, timing: Timing, *, ended_ns: int, sent_ns: int | None) -> bytes:
    """Encode the record of a trace as JSON.

    Args:
        traced: The request.
        timing: Its timing; points that were not reached are omitted.
        ended_ns: Time at which the answer or error was ready to be sent.
        sent_ns: Time at which it was sent; None if the caller had disconnected, and for a step of an ensemble.
    """
    received_ns = timing.received_ns
    side = traced.protocol.upper()
    points: list[tuple[str, int]] = []
    if not traced.parent and traced.protocol == "http":
        points = [("HTTP_RECV_START", timing.begun_ns or received_ns), ("HTTP_RECV_END", received_ns)]
    elif not traced.parent:
        # The time of receiving a message is unknown.
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
    document: dict[str, object] = {
        "id": traced.number,
        "model_name": traced.model,
        "model_version": int(traced.version),
    }
    if traced.parent:
        document["parent_id"] = traced.parent
    if traced.request_id:
        document["request_id"] = traced.request_id[:_MAX_ID_CHARACTERS]
    document["timestamps"] = [{"name": name, "ns": ns} for name, ns in points]
    return json.dumps(document, separators=(",", ":")).encode()


_MAX_WAITING_BYTES: Final = 16 * 1024 * 1024
"""Maximum size of records that wait for the thread; beyond it, records are dropped because the disk is too slow."""

_MIN_FILE_BYTES: Final = 4096
"""Minimum size with which a numbered file counts, because it takes a block on the disk. It limits the number of tiny
files."""

# Never follow a link, because other users may write to the folder. O_CLOEXEC is Python's default.
_FRESH: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW


class TraceFiles:
    """Writes records to ``path``, and to ``path`` with a number from 0 on appended. Loop thread only."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        """Check the path. The first write creates the file.

        Args:
            path: The growing file, in an existing folder. The first write replaces an existing file.
            max_bytes: Limit of the total size of all records and files.

        Raises:
            ServeError: invalid_input: the file cannot be written.
        """
        if not _can_hold_file(path):
            raise invalid_input(f"trace_file: expected a regular file or a new name in a writable folder, got '{path}'")
        self._path = path
        self._max_bytes = max_bytes
        self._writer = ThreadPool(1, "traces")
        self._next_number = 0
        self._handed_bytes = 0
        self._is_closed = False
        self._dropped = 0
        # Only the writing thread assigns the following attributes.
        self._done_bytes = 0
        self._failed = 0
        self._growing: _GrowingArray | None = None

    @property
    def name(self) -> str:
        """The file's name, without its folder."""
        return self._path.name

    def append(self, records: Sequence[bytes]) -> None:
        """Append records to the growing file."""
        if self._can_queue(records, 0):
            self._writer.submit(self._append, records)

    def write_numbered(self, records: Sequence[bytes]) -> None:
        """Write records to the next numbered file."""
        if self._can_queue(records, _MIN_FILE_BYTES):
            path = self._path.with_name(f"{self._path.name}.{self._next_number}")
            self._next_number += 1
            self._writer.submit(self._write_whole, path, records)

    def close(self, timeout_s: float) -> None:
        """Write the queued records for at most ``timeout_s``, and drop later ones. Called when the server stops."""
        self._is_closed = True
        try:
            self._writer.submit(int).result(timeout_s)
        except TimeoutError:  # the folder may never answer
            log_event(logger, logging.WARNING, "queued traces were not written", timeout_s=timeout_s)
            self._writer.shutdown(wait=False, cancel_futures=True)
            return
        self._writer.shutdown()
        if self._growing is not None:
            self._growing.close()
        if dropped := self._dropped + self._failed:
            log_event(logger, logging.WARNING, "traces were dropped", count=dropped)

    def _can_queue(self, records: Sequence[bytes], least: int) -> bool:
        """Count records as queued and return True, or as dropped if a limit is reached."""
        size = _size(records, least)
        if self._is_closed:
            return False
        if self._handed_bytes + size > self._max_bytes:
            reason = f"trace_max_bytes: {self._max_bytes} bytes have been written"
        elif self._handed_bytes + size - self._done_bytes > _MAX_WAITING_BYTES:
            reason = "the disk is too slow"
        else:
            self._handed_bytes += size
            return True
        if not self._dropped:
            log_event(logger, logging.WARNING, "traces are dropped", reason=reason)
        self._dropped += len(records)
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
            with unfinished.open("xb") as file:  # never follows a link, as above
                file.write(b"[%b]" % b",".join(records))
            unfinished.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            self._fail(records, error)
        self._done_bytes += _size(records, _MIN_FILE_BYTES)

    def _fail(self, records: Sequence[bytes], error: OSError) -> None:
        if not self._failed:
            log_event(logger, logging.ERROR, "traces cannot be written", file=str(self._path), reason=str(error))
        self._failed += len(records)


class _GrowingArray:
    """A file that holds a valid JSON array after each write."""

    def __init__(self, path: Path) -> None:
        """Create or truncate the file. Raises OSError."""
        self._descriptor = os.open(path, _FRESH, 0o666)
        self._size = 0

    def append(self, elements: bytes) -> None:
        """Write elements over the closing bracket. Raises OSError and restores the file."""
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
        is_free = stat.S_ISREG(path.lstat().st_mode)  # False for a link
    except FileNotFoundError:
        is_free = path.parent.is_dir()
    except (OSError, ValueError):  # an invalid or too long name, or a parent that is not a folder
        return False
    return is_free and os.access(path.parent, os.W_OK)


def _size(records: Sequence[bytes], least: int) -> int:
    """The bytes that records take in a file, with brackets and commas; at least ``least``."""
    return max(sum(map(len, records)) + len(records) + 1, least)


_GROWING_BYTES: Final = 64 * 1024
_NUMBERED_BYTES: Final = 4 * 1024 * 1024
"""Size at which gathered records are written, even if fewer than the configured number."""


class Sampling:
    """Selects requests by one set of trace settings, and gathers their records. Loop thread only.

    The settings are immutable: a change creates a new ``Sampling``, which counts from the beginning.
    """

    def __init__(self, files: TraceFiles | None, *, is_on: bool, rate: int, count: int, log_frequency: int) -> None:
        """Start counting.

        Args:
            files: Receives the records; None disables tracing.
            is_on: Whether requests are traced.
            rate: One of this many requests is traced.
            count: Number of requests to trace; -1 for unlimited.
            log_frequency: Number of records per numbered file. 0: one growing file, or, if ``count`` is limited, one
                numbered file for all records.
        """
        self.is_on: Final = is_on and files is not None
        self.rate: Final = rate
        self.count = count
        """Number of requests still to be traced; -1 for unlimited."""
        self.log_frequency: Final = log_frequency
        self._files = files
        self._seen = 0
        self._under_way = 0
        self._records: list[bytes] = []
        self._size = 0
        self._is_closed = False

    def take(self) -> bool:
        """Count a request and return whether it is traced: every ``rate``-th one. If so, ``collect`` must follow."""
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
        """Add the record of a traced request."""
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
        """Write the gathered records when new settings apply. ``collect`` still accepts records of traced requests."""
        self._is_closed = True
        self._write_rest()

    def _write_rest(self) -> None:
        if self._records:
            self._write(numbered=self.log_frequency > 0)

    def _write(self, *, numbered: bool) -> None:
        assert self._files is not None
        records, self._records, self._size = self._records, [], 0
        if numbered:
            self._files.write_numbered(records)
        else:
            self._files.append(records)
