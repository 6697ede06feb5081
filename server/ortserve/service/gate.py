"""Admission of request bodies: checks their size, and limits the memory of all bodies of the server."""

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from ortserve.codecs.bounds import INLINE_TEXTS, TEXT_BYTES
from ortserve.core.dtypes import DataType
from ortserve.core.large_memory import LargeMemory
from ortserve.core.tensor import Tensor
from ortserve.errors import ErrorKind, ServeError
from ortserve.telemetry.tracing import Trace


class BodyAdmission:
    """Admits the bodies of one protocol by their size, before their bytes are stored. Loop thread only.

    The key and the headers of the request were checked before.
    """

    def __init__(
        self,
        protocol: str,
        gate: "BodyGate",
        count_rejected: Callable[[str, ErrorKind, int, Trace | None], None],
        *,
        max_body_bytes: int,
    ) -> None:
        """Configure the admission.

        Args:
            protocol: Protocol for ``count_rejected``.
            gate: Reserves the memory of bodies.
            count_rejected: Counts a rejected request by protocol and kind, with the time when its head was complete
                and its trace.
            max_body_bytes: Maximum size of one body.
        """
        self.max_body_bytes: Final = max_body_bytes
        self._protocol: Final = protocol
        self._gate: Final = gate
        self._count_rejected: Final = count_rejected

    def reserve(self, size: int) -> "Reservation":
        """Reserve memory for a body of ``size`` bytes. Raises ServeError: too_large, overloaded."""
        if size > self.max_body_bytes:
            raise body_too_large(size, self.max_body_bytes)
        return Reservation(self._gate, size)

    def admit(self, size: int, received_ns: int, trace: Trace | None) -> "Reservation":
        """``reserve`` memory for the body of a request of a model, and ``count`` the request if it is rejected."""
        try:
            return self.reserve(size)
        except ServeError as error:
            self.count(error.kind, received_ns, trace)
            raise

    def count(self, kind: ErrorKind, received_ns: int, trace: Trace | None) -> None:
        """Count a request that ends before its body is complete, and end its trace.

        Args:
            kind: Why it is rejected; cancelled if its caller left.
            received_ns: When its head was complete (monotonic).
            trace: Its trace; None if it is not sampled.
        """
        self._count_rejected(self._protocol, kind, received_ns, trace)


def body_too_large(size: int, max_body_bytes: int) -> ServeError:
    return ServeError(
        ErrorKind.TOO_LARGE,
        f"request body is larger than max_body_bytes: expected at most {max_body_bytes} bytes, got {size} or more",
    )


def json_too_large(size: int, max_json_bytes: int) -> ServeError:
    text = f"max_json_bytes: expected at most {max_json_bytes} bytes of JSON, got {size}; binary tensors may be larger"
    return ServeError(ErrorKind.TOO_LARGE, text)


def memory_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the memory of decoded tensors, in steps that release the interpreter lock if they hold many texts.

    One character beyond Latin-1 makes a ``str`` twice as large as an ASCII text, and one emoji four times.
    """
    total = 0
    for tensor in tensors:
        array = tensor.array
        total += array.nbytes
        if tensor.datatype is DataType.BYTES:
            total += array.size * TEXT_BYTES
            for begin in range(0, array.size, INLINE_TEXTS):
                if begin:
                    time.sleep(0)
                total += sum(map(sys.getsizeof, array.reshape(-1)[begin : begin + INLINE_TEXTS].tolist()))
    return total


class BodyGate:
    """Limits the bytes of request bodies that the server holds at one time. Loop thread only.

    Attributes:
        memory: Memory for large bodies.
    """

    def __init__(self, max_bytes: int, memory: LargeMemory | None = None) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.memory = memory or LargeMemory()

    def no_room(self, size: int) -> ServeError:
        """Return the error for ``size`` bytes more than fit."""
        return ServeError(
            ErrorKind.OVERLOADED,
            f"max_inflight_bytes: the server holds {self.held_bytes} of at most {self.max_bytes} bytes of "
            f"requests, got {size} more",
            retry_after_s=1,
        )


class Reservation:
    """The bytes that are reserved for one body, until the end of a ``with`` block or until ``release``."""

    __slots__ = ("_gate", "_size")

    def __init__(self, gate: BodyGate, size: int) -> None:
        """Reserve ``size`` bytes.

        Raises:
            ServeError: overloaded. If no other bytes are reserved, a body of any size is admitted. 0 bytes always are.
        """
        self._gate = gate
        self._size = 0
        self.grow(size)

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
        if size and others and gate.held_bytes + size > gate.max_bytes:
            raise gate.no_room(size)
        gate.held_bytes += size
        self._size += size

    def set_up_to_twice(self, size: int) -> None:
        """Set the reservation to ``size`` bytes, while the sum of all is at most twice the limit.

        Raises:
            ServeError: overloaded; the earlier reservation remains. The only body may have any size.
        """
        gate, more = self._gate, size - self._size
        if more > 0 and gate.held_bytes > self._size and gate.held_bytes + more > 2 * gate.max_bytes:
            raise gate.no_room(more)
        self.set_unchecked(size)

    def set_unchecked(self, size: int) -> None:
        """Set the reservation to ``size`` bytes beyond any limit, for bytes that are in memory already."""
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

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
