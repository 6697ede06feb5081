"""The body of a request that comes piece by piece: what is kept of it, counted, and no more of it than is allowed."""

import contextlib

from ortserve.frontends.http.answers import body_too_large
from ortserve.frontends.large_body import EARNEST_BYTES, LargeBody, begin_large
from ortserve.service.gate import Hold


class IncomingBody:
    """Of one request, for the lane and for ASGI. Loop thread only."""

    __slots__ = ("_announced_bytes", "_hold", "_large", "_max_bytes", "_parts", "_size")

    def __init__(self, hold: Hold, *, max_bytes: int, announced_bytes: int = 0) -> None:
        """Keep nothing yet.

        Args:
            hold: Holds the announced bytes.
            max_bytes: The option ``max_body_bytes``.
            announced_bytes: 0 where nothing was said, as of a body in chunks, and where none of it is to be placed.
        """
        self._hold = hold
        self._max_bytes = max_bytes
        self._announced_bytes = announced_bytes
        self._size = 0
        self._parts: list[bytes] = []
        self._large: LargeBody | None = None

    def keep(self, part: bytes) -> None:
        """Keep what came.

        Raises:
            ServeError: too_large, before more than the limit is kept; overloaded.
        """
        self.count(len(part))
        if self._large is not None:
            self._large.put(part)
            return
        self._parts.append(part)
        if self._announced_bytes == 0 and self._size >= EARNEST_BYTES:
            self._begin_open()

    def count(self, nbytes: int) -> None:
        """So much more of it came, to where ``place_rest`` said.

        Raises:
            ServeError: As ``keep``.
        """
        size = self._size + nbytes
        if size > self._max_bytes:
            raise body_too_large(size, self._max_bytes)
        if size > self._hold.size:
            self._hold.resize(size)
        self._size = size

    def settle(self) -> None:
        """The rest is yet to come: hold what is there. Who announced it could keep others out by that."""
        if self._hold.size > self._size:
            self._hold.count(self._size)

    def place_rest(self) -> LargeBody | None:
        """Where the rest is to be received, behind what came; None where it is to come as parts, or is coming so."""
        if self._large is not None:
            return None
        self._large = begin_large(self._announced_bytes, self._parts, self._size, self._hold.memory)
        if self._large is not None:
            self._parts = []
        return self._large

    def _begin_open(self) -> None:
        """Put together what came in many parts, whose end is not known; joined at the end it took the loop long."""
        with contextlib.suppress(MemoryError):
            self._large = LargeBody(self._max_bytes, self._hold.memory)
            for part in self._parts:
                self._large.put(part)
            self._parts = []

    def take(self) -> bytes | memoryview:
        """All of it, now that it is whole."""
        if self._large is not None:
            return self._large.content()
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def drop(self) -> None:
        """Keep nothing of it, whatever still comes."""
        self._parts = []
        if self._large is not None:
            self._large.drop()
