"""Records a share of a model's requests in files that ``ortserve``'s tools read for calibration.

``<record_dir>/<model>/<version>/<number>.npz`` holds one request: an array per input in the model's own form, with the
rows on axis 0 as in batches (``tools/inputs`` reads it). One thread writes all files. The event loop passes it
references to decoded arrays, which are never modified, so the loop copies nothing. It never waits, either: if too many
requests wait for the thread, further ones are dropped. A file gets its name when it is complete.
"""

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import IO, Final
from zipfile import ZipFile

import numpy as np

from ortserve.config.model import RecordOptions
from ortserve.core.batch import Arrays
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import is_absent
from ortserve.core.thread_pool import ThreadPool
from ortserve.errors import invalid_input
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

MAX_WAITING_BYTES: Final = 64 * 2**20
"""Maximum size of all requests that wait for the thread. A larger request is never recorded."""
_MIN_WAITING_BYTES: Final = 64 * 2**10
"""Minimum size counted for a request, because it may keep the buffer alive in which it was received."""
_BLOCK_BYTES: Final = 4096
"""Block size of the disk; files occupy whole blocks."""
_ARRAY_BYTES: Final = 1024
"""Overhead of an array in a file, besides its elements and two copies of its name."""
_CHUNK_BYTES: Final = 2**20
_UNFINISHED: Final = ".unfinished"
_STALE_S: Final = 600.0
"""Age after which an unfinished file is considered abandoned and is removed."""


class Recordings:
    """Manages the recordings of all models of a server. Loop thread only, except ``close``."""

    def __init__(self, folder: Path) -> None:
        """Create the folder, unless it exists. Blocks.

        Raises:
            ServeError: invalid_input, if no files can be written there.
        """
        try:
            folder.mkdir(0o700, exist_ok=True)
            is_usable = os.access(folder, os.W_OK | os.X_OK)
        except (OSError, ValueError):
            is_usable = False
        if not is_usable:
            raise invalid_input(f"record_dir: expected a writable folder, or a new name in one, got '{folder}'")
        self._folder = folder
        self._thread = ThreadPool(1, "recordings")
        self._is_closed = threading.Event()
        self._folders: dict[tuple[str, str], _Folder] = {}
        """Folder of each version. A draining load and its successor share it."""
        self._enqueued_bytes = 0
        self._done_bytes = 0
        """Bytes of requests that the thread has finished. Only the thread writes it."""

    def begin(self, name: str, version: str, signature: ModelSignature, options: RecordOptions) -> "Recording":
        """Start recording requests of a newly loaded version. ``signature`` is that of the model's instances."""
        assert Path(name).name == name, "it is the name of a folder"
        folder = self._folders.setdefault((name, version), _Folder(self._folder / name / version))
        log_event(logger, logging.INFO, "requests are recorded", model=name, version=version, share=options.share)
        return Recording(self, folder, signature, options)

    def enqueue(self, size: int, write: Callable[[], object]) -> bool:
        """Call ``write`` on the thread. Returns False if too many bytes already wait, or after ``close``."""
        size = max(size, _MIN_WAITING_BYTES)
        if self._is_closed.is_set() or self._enqueued_bytes + size - self._done_bytes > MAX_WAITING_BYTES:
            return False
        self._enqueued_bytes += size
        self._thread.submit(self._run, size, write)
        return True

    def close(self, timeout_s: float) -> None:
        """Write the waiting requests for at most ``timeout_s``, then discard the rest. Blocks."""
        last = self._thread.submit(int)
        try:
            last.result(timeout_s)
        except TimeoutError:
            log_event(logger, logging.WARNING, "waiting requests were not recorded", timeout_s=timeout_s)
        self._is_closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, size: int, write: Callable[[], object]) -> None:
        write()
        self._done_bytes += size


class Recording:
    """Records requests of one load of a version. Loop thread only, except where a docstring says otherwise."""

    def __init__(
        self, recordings: Recordings, folder: "_Folder", signature: ModelSignature, options: RecordOptions
    ) -> None:
        self._recordings = recordings
        self._folder = folder
        self._signature = signature
        self._options = options
        # A random choice, because with clients that take turns each n-th request may be alike. A fixed seed repeats it.
        self._random = Random("/".join(folder.path.parts[-2:]))  # noqa: S311 - a choice of samples
        self._is_begun = False
        self._ended_because = ""
        """Set by the thread, like ``_recorded`` and ``_failed``."""
        self._recorded = self._failed = 0
        self._dropped = 0

    def observe(self, inputs: Arrays, rows: int) -> None:
        """Record an answered request if it is chosen for the share. Returns at once.

        Args:
            inputs: Inputs of the request, as the batcher received them. They are not modified any more.
            rows: Requests of 0 rows are not recorded.
        """
        if self._ended_because or not rows or self._random.random() >= self._options.share:
            return
        if not self._recordings.enqueue(sum(map(_memory_bytes, inputs)), lambda: self._write(inputs)):
            self._dropped += 1

    def counts(self) -> dict[str, int]:
        """The number of chosen requests by outcome. Any thread."""
        return {"recorded": self._recorded, "dropped": self._dropped, "failed": self._failed}

    def describe(self) -> str:
        """The text for the model's metadata. It contains no path."""
        state = f"off: {self._ended_because}" if self._ended_because else f"{self._options.share:.4g} of the requests"
        return f"{state}; " + ", ".join(f"{count} {outcome}" for outcome, count in self.counts().items())

    def _write(self, inputs: Arrays) -> None:
        """Write one request. Called on the recording thread."""
        if self._ended_because:
            self._failed += 1
            return
        try:
            if not self._is_begun:
                self._folder.scan()
                self._is_begun = True
            arrays = _as_columns(self._signature, inputs)
            size = sum(array.nbytes + 2 * len(name.encode()) + _ARRAY_BYTES for name, array in arrays.items())
            if self._folder.nbytes + _on_disk(size) > self._options.max_bytes:
                self._failed += 1
                used = f"the files have {self._folder.nbytes} bytes, and the next one {size}"
                self._end(logging.INFO, f"record.max_bytes: {used}")
                return
            self._folder.add(arrays)
        except (UnrecordableError, UnicodeEncodeError):
            self._failed += 1
        except Exception as error:  # noqa: BLE001 - a failed write must not end the thread unnoticed
            self._failed += 1
            self._end(logging.ERROR, (isinstance(error, OSError) and error.strerror) or repr(error))
        else:
            self._recorded += 1

    def _end(self, level: int, reason: str) -> None:
        self._ended_because = reason
        path = self._folder.path
        fields = {"model": path.parent.name, "version": path.name, "reason": reason, "folder": str(path)}
        log_event(logger, level, "recording has ended", **fields)


class UnrecordableError(Exception):
    """A request with texts that a numpy array of bytes cannot store unchanged, or only with much more memory."""


class _Folder:
    """Files of one version. Used only on the recording thread."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self.nbytes = 0
        """Bytes on the disk, in whole blocks."""
        self._next = 1

    def scan(self) -> None:
        """Create the folder if necessary, count its files, and remove stale unfinished ones. Raises OSError."""
        for folder in (self.path.parent, self.path):
            folder.mkdir(0o700, exist_ok=True)
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise NotADirectoryError(None, "expected a folder, not a link", str(folder))
        self.nbytes = 0
        for path in list(self.path.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # another server may rename or remove it
                status = path.lstat()
                if path.name.endswith(_UNFINISHED) and status.st_mtime < time.time() - _STALE_S:
                    path.unlink()
                    continue
                self.nbytes += _on_disk(status.st_size)
                number = path.name.partition(".")[0]
                self._next = max(self._next, int(number) + 1) if number.isdecimal() else self._next

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the next file, which gets its name when it is complete. Raises OSError, and then leaves no file."""
        while True:
            path = self.path / f"{self._next:08d}.npz"
            unfinished = self.path / f".{path.name}{_UNFINISHED}"
            self._next += 1
            try:
                # The unfinished file reserves the number among servers that share the folder. O_CLOEXEC is the default.
                descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            except FileExistsError:
                continue
            try:
                with os.fdopen(descriptor, "wb") as file:
                    if path.exists():
                        unfinished.unlink()
                        continue
                    write_arrays(file, arrays)
                    size = file.tell()
                unfinished.rename(path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
            self.nbytes += _on_disk(size)
            return


def write_arrays(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Write an ``.npz`` as ``numpy.savez`` does, with any array names, in pieces that release the interpreter lock."""
    with ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            contiguous = np.ascontiguousarray(array)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, np.lib.format.header_data_from_array_1_0(contiguous))
                data = contiguous.reshape(-1).view(np.uint8).data
                for begin in range(0, len(data), _CHUNK_BYTES):
                    member.write(data[begin : begin + _CHUNK_BYTES])


def _as_columns(signature: ModelSignature, inputs: Arrays) -> dict[str, np.ndarray]:
    """The arrays by input name, without omitted inputs. An unbatched request becomes one sample on a new axis 0.

    Raises:
        UnrecordableError: A text ends with a NUL, which numpy cuts off, or padding all texts to the longest takes too
            much memory.
        UnicodeEncodeError: A text cannot be encoded in UTF-8.
    """
    arrays = {}
    for spec, array in zip(signature.inputs, inputs, strict=True):
        if not is_absent(array):
            column = array if signature.is_batched else array[np.newaxis]
            arrays[spec.name] = encode_texts(column) if column.dtype.hasobject else column
    return arrays


def encode_texts(array: np.ndarray) -> np.ndarray:
    """Encode texts in UTF-8 as a numpy array of bytes. Raises the errors of ``_as_columns``."""
    texts = [text.encode() for text in array.reshape(-1).tolist()]
    longest = max(map(len, texts), default=0)
    if longest * len(texts) > MAX_WAITING_BYTES or any(text.endswith(b"\0") for text in texts):
        raise UnrecordableError
    return np.array(texts, f"S{max(longest, 1)}").reshape(array.shape)


def _memory_bytes(array: np.ndarray) -> int:
    return array.nbytes + (sum(map(len, array.reshape(-1).tolist())) if array.dtype.hasobject else 0)


def _on_disk(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
