"""The ledger of the host's memory, with a process whose memory the test sets."""

import threading
import time

import pytest

from ortserve.engine.process_memory import HeldMemory
from ortserve.registry.residency.ledger import HostLedger, LoadCost, expect_cost


class Process:
    """A process with settable memory, and a count of the releases of free memory."""

    def __init__(self) -> None:
        self.private = 1_000
        self.mapped = 100

    def read(self) -> HeldMemory:
        return HeldMemory(self.private, self.mapped)


def open_ledger() -> tuple[Process, HostLedger]:
    process = Process()
    return process, HostLedger(process.read, lambda: None)


def test_load_alone_is_measured_exactly() -> None:
    process, ledger = open_ledger()
    account = ledger.reserve(500, 2)
    assert (account.entries(), account.measured_bytes, ledger.total_bytes) == ({"expected": 500}, None, 500)
    process.private += 7  # growth before the load
    ledger.begin(account)
    process.private += 300
    process.mapped += 20
    ledger.note_open(account)
    process.private += 350
    ledger.end(account)
    process.private += 9  # growth after the load
    assert account.entries() == {"sessions": 600, "runs": 50, "mapped": 20}
    assert ledger.total_bytes == account.nbytes == account.measured_bytes == 650
    ledger.release(account)
    assert ledger.total_bytes == 0


def test_loads_side_by_side_share_the_growth_by_their_expected_sizes() -> None:
    process, ledger = open_ledger()
    small, large = ledger.reserve(100, 1), ledger.reserve(300, 1)
    ledger.begin(small)
    process.private += 40  # only the small model's
    ledger.begin(large)
    process.private += 400
    ledger.end(small)
    process.private += 60  # only the large model's
    ledger.end(large)
    assert (small.nbytes, large.nbytes) == (140, 360)


def test_memory_freed_meanwhile_is_not_taken_from_a_load() -> None:
    """The growth of the load is not lost until then either."""
    process, ledger = open_ledger()
    leaving, coming = ledger.reserve(100, 1), ledger.reserve(100, 1)
    ledger.begin(leaving)
    process.private += 100
    ledger.end(leaving)
    leaving.is_leaving = True
    assert (ledger.total_bytes, ledger.staying_bytes) == (200, 100)
    ledger.begin(coming)
    process.private += 100
    ledger.note_open(coming)
    process.private += 50
    process.private -= 100
    ledger.release(leaving)
    process.private += 10
    ledger.end(coming)
    assert coming.entries() == {"sessions": 100, "runs": 60}


@pytest.mark.parametrize("is_begun", [False, True], ids=["begins", "ends"])
def test_load_that_begins_or_ends_while_a_version_is_freed_is_measured_exactly(is_begun: bool) -> None:
    process, ledger = open_ledger()
    leaving, coming = ledger.reserve(100, 1), ledger.reserve(100, 1)
    ledger.begin(leaving)
    process.private += 100
    ledger.end(leaving)
    is_freed, may_return = threading.Event(), threading.Event()

    def free() -> None:
        process.private -= 100
        is_freed.set()
        assert may_return.wait(5)

    def load() -> None:
        if not is_begun:
            ledger.begin(coming)
            process.private += 150
        ledger.end(coming)

    if is_begun:
        ledger.begin(coming)
        process.private += 150
    freeing, loading = threading.Thread(target=ledger.release, args=(leaving, free)), threading.Thread(target=load)
    freeing.start()
    assert is_freed.wait(5)
    loading.start()
    loading.join(0.1)
    assert loading.is_alive(), "the load waits"
    may_return.set()
    freeing.join(5)
    loading.join(5)
    assert coming.measured_bytes == 150


def test_memory_of_an_account_that_is_closed_twice_is_subtracted_once() -> None:
    process, ledger = open_ledger()
    failed, coming = ledger.reserve(100, 1), ledger.reserve(100, 1)
    ledger.begin(failed)
    process.private += 100
    ledger.end(failed)
    ledger.begin(coming)
    process.private += 50
    process.private -= 100
    ledger.release(failed)
    ledger.release(failed)
    ledger.end(coming)
    assert coming.measured_bytes == 50


def test_version_that_is_never_freed_delays_only_the_loads_of_its_first_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ortserve.registry.residency.ledger._MAX_FREEING_NS", 200_000_000)
    process, ledger = open_ledger()
    stuck = ledger.reserve(100, 1)
    never = threading.Event()
    freeing = threading.Thread(target=ledger.release, args=(stuck, never.wait))
    freeing.start()
    begun_ns = []
    for _ in range(3):
        coming = ledger.reserve(100, 1)
        ledger.begin(coming)
        begun_ns.append(time.monotonic_ns())
        process.private += 150
        ledger.end(coming)
        assert coming.measured_bytes == 150
    never.set()
    freeing.join(5)
    assert begun_ns[2] - begun_ns[0] < 600_000_000, "fewer than four waits"


def test_growth_that_is_negative_counts_as_none() -> None:
    process, ledger = open_ledger()
    account = ledger.reserve(100, 1)
    ledger.begin(account)
    process.private -= 50
    ledger.end(account)
    assert (account.nbytes, account.entries()) == (0, {})


def test_earlier_load_predicts_the_next_one() -> None:
    first = expect_cost(100_000_000, 2, [], None)
    assert (first.is_measured, first.nbytes > 200_000_000, first.load_ns > 10**9) == (False, True, True)
    assert expect_cost(100_000_000, 2, [], LoadCost(7, 8)) == LoadCost(7, 8, is_measured=True)
