"""Admission of request bodies: checks the key and the size, and limits the memory of all bodies of the server."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Protocol

from ortserve.core.large_memory import LargeMemory
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.access import Guard, RefusedKeyError
from ortserve.telemetry.tracing import Trace


class BodyHead(Protocol):
    """The head of a request, as far as admission reads it."""

    def credentials(self) -> Sequence[str | bytes]:
        """All values of the header ``authorization``."""
        ...

    def body_bytes(self) -> int:
        """The announced length of the body, 0 if there is none. Raises ServeError for headers that are invalid."""
        ...


class BodyAdmission:
    """Admits the bodies of one kind of request before their bytes are stored. Loop thread only."""

    def __init__(
        self,
        protocol: str,
        gate: "BodyGate",
        count_rejected: Callable[[str, ErrorKind, int, Trace | None], None] | None,
        *,
        max_body_bytes: int,
        guard: Guard | None = None,
    ) -> None:
        """Configure the admission.

        Args:
            protocol: Protocol for ``count_rejected``.
            gate: Reserves the memory of bodies.
            count_rejected: Counts a rejected request by protocol and kind, with the time when its head was complete and
                its trace. None if such requests are not counted.
            max_body_bytes: Maximum size of one body.
            guard: Checks the key of the caller; None if the requests need none.
        """
        self.max_body_bytes: Final = max_body_bytes
        self._protocol: Final = protocol
        self._gate: Final = gate
        self._count_rejected: Final = count_rejected
        self._guard: Final = guard

    def admit(
        self, head: BodyHead | None, received_ns: int, trace: Trace | None, body_bytes: int | None = None
    ) -> "Hold":
        """Check the key, the headers, the size and the memory, in this order.

        Args:
            head: Head of the request; None if its key and its headers are checked already, and ``body_bytes`` is given.
            received_ns: When the head was complete (monotonic).
            trace: Trace of the request, which ends if the request is rejected.
            body_bytes: The actual size of a body that has arrived already. The headers of ``head`` are valid then, but
                may announce the length of another body.

        Returns:
            The memory that is reserved for the body.

        Raises:
            ServeError: The request is rejected and counted.
        """
        try:
            size = body_bytes
            if head is not None:
                refusal = None if self._guard is None else self._guard.refusal(head.credentials())
                if refusal is not None:
                    raise refusal
                if size is None:
                    size = head.body_bytes()
            assert size is not None, "without a head the size is given"
            if size > self.max_body_bytes:
                raise body_too_large(size, self.max_body_bytes)
            return self._gate.hold(size)
        except ServeError as error:
            self.count(error, received_ns, trace)
            raise

    def count(self, error: ServeError, received_ns: int, trace: Trace | None) -> None:
        """Count a request that is rejected before its body is complete. The guard has counted a missing key."""
        if self._count_rejected is not None and not isinstance(error, RefusedKeyError):
            self._count_rejected(self._protocol, error.kind, received_ns, trace)


def body_too_large(size: int, max_body_bytes: int) -> ServeError:
    return ServeError(
        ErrorKind.TOO_LARGE,
        f"request body is larger than max_body_bytes: expected at most {max_body_bytes} bytes, got {size} or more",
    )


class BodyGate:
    """Limits the bytes of request bodies that the server holds at one time. Loop thread only.

    Attributes:
        memory: Memory for large bodies.
    """

    def __init__(self, max_bytes: int, memory: LargeMemory | None = None) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.memory = memory or LargeMemory()

    def hold(self, size: int) -> "Hold":
        """Reserve ``size`` bytes for a body, until the end of a ``with`` block or until the release.

        Raises:
            ServeError: overloaded. If no other bytes are reserved, a body of any size is admitted.
        """
        hold = Hold(self)
        hold.grow(size)
        return hold


class Hold:
    """The bytes that are reserved for one body."""

    __slots__ = ("_gate", "_size")

    def __init__(self, gate: BodyGate) -> None:
        self._gate = gate
        self._size = 0

    @property
    def size(self) -> int:
        """Reserved bytes."""
        return self._size

    @property
    def memory(self) -> LargeMemory:
        """Memory for the body, if it is large."""
        return self._gate.memory

    def grow(self, size: int) -> None:
        """Reserve ``size`` bytes more, for a body of unknown length.

        Raises:
            ServeError: overloaded; earlier reservations remain.
        """
        gate = self._gate
        others = gate.held_bytes - self._size
        if others and gate.held_bytes + size > gate.max_bytes:
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"max_inflight_bytes: the server holds {gate.held_bytes} of at most {gate.max_bytes} bytes of "
                f"requests, got {size} more",
                retry_after_s=1,
            )
        gate.held_bytes += size
        self._size += size

    def count(self, size: int) -> None:
        """Set the reservation to ``size`` bytes without a check, for bytes that are in memory already."""
        self._gate.held_bytes += size - self._size
        self._size = size

    def resize(self, size: int) -> None:
        """Set the reservation to ``size`` bytes.

        Raises:
            ServeError: overloaded; the earlier reservation remains.
        """
        if size > self._size:
            self.grow(size - self._size)
        else:
            self.shrink(self._size - size)

    def shrink(self, size: int) -> None:
        """Release ``size`` bytes, or all if fewer are reserved."""
        size = min(size, self._size)
        self._gate.held_bytes -= size
        self._size -= size

    def release(self) -> None:
        """Release all bytes; a second time does nothing."""
        self._gate.held_bytes -= self._size
        self._size = 0

    def __enter__(self) -> "Hold":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
