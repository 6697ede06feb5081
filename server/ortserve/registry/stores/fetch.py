"""Fetches an object of a store into a file, and checks its size and digests."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ortserve.clock import Clock
from ortserve.registry.stores.objects import Store, StoredObject, StoreError
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_ATTEMPTS: Final = 2
_WAIT_S: Final = 0.2
"""Wait between attempts. The client retries requests itself; further attempts are for truncated or wrong contents."""
_REPORT_NS: Final = 10 * 10**9


class FetchProgress:
    """Counts the fetched bytes of one repository, and logs a line every 10 s. Any thread."""

    def __init__(self, repository: str, clock: Clock) -> None:
        self._repository = repository
        self._clock = clock
        self._lock = threading.Lock()
        self._began_ns = self._due_ns = 0
        self._active = self._expected = self._done = 0
        self.total_bytes = 0
        """Bytes fetched since the start of the server."""

    def begin(self, expected: int) -> None:
        """Record that the fetch of ``expected`` bytes begins, for the files of one model."""
        with self._lock:
            if not self._active:
                self._began_ns = self._clock()
                self._due_ns = self._began_ns + _REPORT_NS
                self._expected = self._done = 0
            self._active += 1
            self._expected += expected

    def end(self) -> None:
        """Record that a fetch that ``begin`` recorded has ended."""
        with self._lock:
            self._active -= 1
            if not self._active and self._clock() >= self._began_ns + _REPORT_NS:
                self._log("models were fetched")

    def add(self, count: int) -> None:
        """Count fetched bytes."""
        with self._lock:
            self._done += count
            self.total_bytes += count
            if self._clock() >= self._due_ns:
                self._due_ns = self._clock() + _REPORT_NS
                self._log("models are being fetched")

    def _log(self, message: str) -> None:
        passed_s = max(1e-9, (self._clock() - self._began_ns) / 1e9)
        log_event(
            logger,
            logging.INFO,
            message,
            repository=self._repository,
            megabytes=self._done // 10**6,
            of_megabytes=self._expected // 10**6,
            seconds=round(passed_s),
            megabytes_per_s=round(self._done / passed_s / 1e6, 1),
        )


def fetch_object(
    store: Store,
    found: StoredObject,
    file: Path,
    *,
    checks_etags: bool,
    on_bytes: Callable[[int], object],
    wait: Callable[[float], object],
) -> str:
    """Write the content of an object to ``file``, with up to two attempts. Blocks.

    Args:
        store: Store of the object.
        found: The object. Its digest, if it has one, must be that of the content.
        file: Path of a new file. The file is removed after an error.
        checks_etags: Whether the ETag of an object without a digest, if it looks like an MD5 digest, must match.
        on_bytes: Called with the number of bytes of each piece.
        wait: Waits for the given number of seconds.

    Returns:
        The SHA-256 digest of the content.

    Raises:
        StoreError: The object cannot be fetched, or its content is wrong.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _fetch(store, found, file, found.md5 if checks_etags and not found.sha256 else "", on_bytes)
        except StoreError as error:
            file.unlink(missing_ok=True)
            if error.is_final or attempt == _ATTEMPTS - 1:
                raise
        except OSError as error:
            file.unlink(missing_ok=True)
            raise StoreError(f"the cache cannot be written: {error.strerror}", is_final=True) from None
        wait(_WAIT_S)
    raise AssertionError("the last attempt returns or raises")


def _fetch(store: Store, found: StoredObject, file: Path, md5: str, on_bytes: Callable[[int], object]) -> str:
    digest = hashlib.sha256()
    etag = hashlib.md5(usedforsecurity=False) if md5 else None
    count = 0
    with file.open("xb") as stream:
        for piece in store.read(found):
            count += len(piece)
            if count > found.size:
                break
            stream.write(piece)
            digest.update(piece)
            if etag is not None:
                etag.update(piece)
            on_bytes(len(piece))
        stream.flush()
        os.fsync(stream.fileno())  # otherwise a crash could leave a file of the right size with wrong bytes
    if count != found.size:
        raise StoreError(f"expected {found.size} bytes, got {'more' if count > found.size else count}")
    if found.sha256 and digest.hexdigest() != found.sha256:
        raise StoreError(f"expected the SHA-256 digest {found.sha256}, got {digest.hexdigest()}")
    if etag is not None and etag.hexdigest() != md5:
        raise StoreError(
            f"expected the MD5 digest {md5}, its ETag, got {etag.hexdigest()}; if the bucket is encrypted by SSE-KMS "
            "or SSE-C, set --no-store-check-etags"
        )
    return digest.hexdigest()
