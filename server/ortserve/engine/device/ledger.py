"""How many bytes of a device this process has taken, by whom and what for; and whether there is room for more.

Beside it, and never counted with it, the host's memory that is pinned for copies to and from the device.
"""

import threading
from collections.abc import Callable, Iterable, Mapping

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
        self._accounts: list[Account] = []

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

    def open(self, owner: str) -> "Account":
        """A new account. Two may be of the same name, as while a version is loaded again."""
        account = Account(self, owner)
        with self._lock:
            self._accounts.append(account)
        return account

    def close(self, account: "Account") -> None:
        """Forget an account, whose owner has nothing any more."""
        with self._lock:
            self._accounts.remove(account)

    def totals(self) -> dict[str, dict[str, int]]:
        """Bytes of the device by owner and what for, as they stand; nothing of those who have none."""
        return _totals((account.owner, account.entries()) for account in self._all())

    def pinned(self) -> dict[str, dict[str, int]]:
        """The same of the host's pinned memory."""
        return _totals((account.owner, account.pinned()) for account in self._all())

    def _all(self) -> list["Account"]:
        with self._lock:
            return list(self._accounts)


class Account:
    """What one instance has of a device's memory, and of the host's beside it. One thread enters, any may read."""

    def __init__(self, ledger: Ledger, owner: str) -> None:
        self.owner = owner
        self._ledger = ledger
        self._entries: dict[str, int] = {}
        self._pinned: dict[str, int] = {}

    def check_room(self, needs: Mapping[str, int]) -> None:
        """As the ledger's, for this owner."""
        self._ledger.check_room(self.owner, needs)

    def enter(self, what: str, nbytes: int) -> None:
        """Note how many bytes of the device it has for something."""
        self._entries[what] = nbytes

    def enter_pinned(self, what: str, nbytes: int) -> None:
        """Note how many bytes of the host's pinned memory it has for something."""
        self._pinned[what] = nbytes

    def add_pinned(self, what: str, nbytes: int) -> None:
        """Note that it has so many bytes more of that."""
        self._pinned[what] = self._pinned.get(what, 0) + nbytes

    def entries(self) -> dict[str, int]:
        """Bytes of the device by what for, where there are any."""
        return {what: nbytes for what, nbytes in list(self._entries.items()) if nbytes}

    def pinned(self) -> dict[str, int]:
        """The same of the host's pinned memory."""
        return {what: nbytes for what, nbytes in list(self._pinned.items()) if nbytes}

    def close(self) -> None:
        """Note that it has nothing any more."""
        self._ledger.close(self)


def _totals(entries: Iterable[tuple[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {}
    for owner, account in entries:
        for what, nbytes in account.items():
            total = totals.setdefault(owner, {})
            total[what] = total.get(what, 0) + nbytes
    return totals


def format_bytes(nbytes: int) -> str:
    """For people: ``1.5 MiB``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
