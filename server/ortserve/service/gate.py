"""How many bytes of request bodies the server holds at one time, and the memory for large ones."""

from types import TracebackType

from ortserve.core.large_memory import LargeMemory
from ortserve.errors import ErrorKind, ServeError


class BodyGate:
    """Counts bodies in and out, and refuses what would be too much before it is read. Loop thread only.

    Attributes:
        memory: For large bodies.
    """

    def __init__(self, max_bytes: int, memory: LargeMemory | None = None) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.memory = memory or LargeMemory()

    def hold(self, size: int) -> "Hold":
        """Let a body of ``size`` bytes in, for as long as a ``with`` block lasts, or until its release.

        Raises:
            ServeError: overloaded. A server that holds nothing lets anything in.
        """
        hold = Hold(self)
        hold.grow(size)
        return hold


class Hold:
    """One body's bytes."""

    __slots__ = ("_gate", "_size")

    def __init__(self, gate: BodyGate) -> None:
        self._gate = gate
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes that are held."""
        return self._size

    @property
    def memory(self) -> LargeMemory:
        """For the body, if it is large."""
        return self._gate.memory

    def grow(self, size: int) -> None:
        """Let ``size`` bytes more in, of a body whose length was not announced.

        Raises:
            ServeError: overloaded; what was held before still is.
        """
        gate = self._gate
        others = gate.held_bytes - self._size
        if others and gate.held_bytes + size > gate.max_bytes:
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"max_inflight_bytes: the server holds {gate.held_bytes} bytes of requests and may hold "
                f"{gate.max_bytes}, got {size} more",
                retry_after_s=1,
            )
        gate.held_bytes += size
        self._size += size

    def count(self, size: int) -> None:
        """Hold ``size`` bytes from now on, for they are there already, whatever others hold."""
        self._gate.held_bytes += size - self._size
        self._size = size

    def resize(self, size: int) -> None:
        """Hold ``size`` bytes from now on.

        Raises:
            ServeError: overloaded; what was held before still is.
        """
        if size > self._size:
            self.grow(size - self._size)
        else:
            self.shrink(self._size - size)

    def shrink(self, size: int) -> None:
        """Let go of ``size`` bytes, at most all."""
        size = min(size, self._size)
        self._gate.held_bytes -= size
        self._size -= size

    def release(self) -> None:
        """Let go of the body; a second time does nothing."""
        self._gate.held_bytes -= self._size
        self._size = 0

    def __enter__(self) -> "Hold":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
