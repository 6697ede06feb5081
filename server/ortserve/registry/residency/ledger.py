"""The ledger of the host's memory: what each load took of the process, measured while it was under way.

ONNX Runtime does not say what a session holds: its optimizer removes weights and adds others, kernels keep packed
copies, and the arena grows with the runs. The ledger therefore reads the process's private memory at the begin and the
end of each load. What the process grew by in between belongs to the loads that were under way, in proportion to the
sizes that they were expected to have; a load alone is measured exactly.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ortserve.engine.process_memory import HeldMemory, give_back_freed, read_held_memory

SESSIONS: Final = "sessions"
RUNS: Final = "runs"
MAPPED: Final = "mapped"
EXPECTED: Final = "expected"
"""The kinds of ``HostAccount.entries``."""


class HostAccount:
    """The host memory of one load of a version. Its figures are those expected until it has ended."""

    def __init__(self, expected_bytes: int, instances: int) -> None:
        """Open before the load begins.

        Args:
            expected_bytes: What the version will hold, at least 1.
            instances: Sessions of the version.
        """
        self._expected: Final = max(1, expected_bytes)
        self._instances: Final = instances
        self._grown = 0.0
        self._mapped = 0.0
        self._opened: float | None = None
        self._measured: Mapping[str, int] | None = None
        self.is_leaving = False
        """Whether its version is being drained, so that the memory will be free."""

    @property
    def nbytes(self) -> int:
        """The private memory: measured, or until then expected."""
        return self._expected if self._measured is None else self._measured[SESSIONS] + self._measured[RUNS]

    @property
    def measured_bytes(self) -> int | None:
        """As ``nbytes``; None until the load has ended."""
        return None if self._measured is None else self.nbytes

    def entries(self) -> dict[str, int]:
        """Bytes by kind, without zeros.

        ``sessions``: growth until the first session was open, times the number of sessions. ``runs``: the rest of the
        growth, mostly ONNX Runtime's arena and buffers. ``mapped``: pages of mapped files, no part of ``nbytes``.
        ``expected``: instead of all these while the version loads.
        """
        found = self._measured if self._measured is not None else {EXPECTED: self._expected}
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}

    def _finish(self) -> None:
        total = max(0, round(self._grown))
        opened = total if self._opened is None else max(0, round(self._opened)) * self._instances
        sessions = min(total, opened)
        self._measured = {SESSIONS: sessions, RUNS: total - sessions, MAPPED: max(0, round(self._mapped))}


class HostLedger:
    """The accounts of all loads that hold memory. Any thread.

    ``begin``, ``note_open``, ``end`` and ``release`` take milliseconds, and wait for each other; the rest does not.
    """

    def __init__(
        self, read: Callable[[], HeldMemory] = read_held_memory, give_back: Callable[[], None] = give_back_freed
    ) -> None:
        """``read`` reads the memory of the process; ``give_back`` returns what is free to the kernel first."""
        self._read: Final = read
        self._give_back: Final = give_back
        self._lock: Final = threading.Lock()
        self._accounts: set[HostAccount] = set()
        self._loading: list[HostAccount] = []
        self._last = HeldMemory(0, 0)

    @property
    def total_bytes(self) -> int:
        """Private memory of all accounts, those of loads under way as expected."""
        return sum(account.nbytes for account in list(self._accounts))

    @property
    def staying_bytes(self) -> int:
        """As ``total_bytes``, without versions that are being drained."""
        return sum(account.nbytes for account in list(self._accounts) if not account.is_leaving)

    def reserve(self, expected_bytes: int, instances: int) -> HostAccount:
        """Open the account of a load that will begin. ``release`` ends it."""
        account = HostAccount(expected_bytes, instances)
        self._accounts.add(account)
        return account

    def begin(self, account: HostAccount) -> None:
        """Begin to measure a load."""
        with self._lock:
            self._divide_growth()
            self._loading.append(account)

    def note_open(self, account: HostAccount) -> None:
        """Note that the first session of a load is open; once more if it was opened again."""
        with self._lock:
            if account in self._loading:
                self._divide_growth()
                account._opened = account._grown

    def end(self, account: HostAccount) -> None:
        """End the measurement: the version is warm, or its load has failed and freed everything."""
        with self._lock:
            self._divide_growth()
            self._loading.remove(account)
            account._finish()

    def release(self, account: HostAccount) -> None:
        """Close an account, whose version was freed. What the process shrank by is no load's."""
        self._accounts.discard(account)
        freed = account._measured or {SESSIONS: 0, RUNS: 0, MAPPED: 0}
        with self._lock:
            self._last = HeldMemory(
                self._last.private - freed[SESSIONS] - freed[RUNS], self._last.mapped - freed[MAPPED]
            )
            self._divide_growth()

    def _divide_growth(self) -> None:
        self._give_back()
        now = self._read()
        expected = sum(account._expected for account in self._loading)
        for account in self._loading:
            share = account._expected / expected
            account._grown += (now.private - self._last.private) * share
            account._mapped += (now.mapped - self._last.mapped) * share
        self._last = now


@dataclass(frozen=True, slots=True)
class LoadCost:
    """What an earlier load of a version took.

    Attributes:
        nbytes: Private memory of the host.
        load_ns: From its begin until it was warm.
        on_devices: Memory by device.
        is_measured: Whether it is known, not estimated.
    """

    nbytes: int
    load_ns: int
    on_devices: Mapping[str, int] = field(default_factory=dict)
    is_measured: bool = True


_BASE_BYTES: Final = 512 * 1024
"""Of a session without weights, its worker and the server's own objects: the measured growth by a tiny model."""
_OPENING_BYTES_PER_S: Final = 100_000_000
"""At which models with large weights open on one processor, analysis and warm-up included; slow on purpose."""


def expect_cost(file_bytes: int, instances: int, devices: Sequence[str], known: LoadCost | None) -> LoadCost:
    """What a load will take: what the last load of the version took, or an estimate from the sizes of its files.

    Args:
        file_bytes: The model's file and those with its weights.
        instances: Sessions, each of which holds the weights.
        devices: Of each instance; empty for instances on the host.
        known: Of the last load; None without one.
    """
    if known is not None:
        return known
    nbytes = (file_bytes + _BASE_BYTES) * instances
    on_devices = {device: file_bytes * count for device, count in Counter(devices).items()}
    return LoadCost(nbytes, nbytes * 1_000_000_000 // _OPENING_BYTES_PER_S, on_devices, is_measured=False)
