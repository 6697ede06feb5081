"""How many bytes of a device this process has taken, by whom and what for; and whether there is room for more."""

import threading
from collections.abc import Callable, Mapping

from ortserve.engine.device.protocol import MemoryInfo
from ortserve.errors import ErrorKind, ServeError


class Ledger:
    """The accounts of one device. From any thread.

    Buffers are known to the byte. What a session takes (weights, workspace, graphs) is what the device had less of
    afterwards, which is right to within what other processes and models did meanwhile.
    """

    def __init__(self, device: str, memory: Callable[[], MemoryInfo]) -> None:
        """``memory`` asks the device."""
        self._device = device
        self._memory = memory
        self._lock = threading.Lock()
        self._accounts: dict[str, dict[str, int]] = {}

    def check_room(self, owner: str, needs: Mapping[str, int]) -> None:
        """See that there is room for what somebody is about to take.

        Args:
            owner: Who it is.
            needs: Bytes, by what for.

        Raises:
            ServeError: overloaded, saying how much is missing.
        """
        free_bytes = self._memory().free_bytes
        needed = sum(needs.values())
        if needed > free_bytes:
            told = ", ".join(f"{what} {format_bytes(nbytes)}" for what, nbytes in needs.items())
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"'{owner}' needs at least {format_bytes(needed)} on {self._device} ({told}), but "
                f"{format_bytes(free_bytes)} are free: {format_bytes(needed - free_bytes)} too few",
            )

    def enter(self, owner: str, what: str, nbytes: int) -> None:
        """Note that somebody has so many bytes for something; 0 that he has none any more."""
        with self._lock:
            account = self._accounts.setdefault(owner, {})
            account[what] = nbytes
            if not nbytes:
                del account[what]
            if not account:
                del self._accounts[owner]

    def close(self, owner: str) -> None:
        """Note that somebody has nothing any more."""
        with self._lock:
            self._accounts.pop(owner, None)

    def accounts(self) -> dict[str, dict[str, int]]:
        """Bytes by owner and what for, as they stand."""
        with self._lock:
            return {owner: dict(account) for owner, account in self._accounts.items()}


def format_bytes(nbytes: int) -> str:
    """For people: ``1.5 MiB``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
