"""The accounts of a device's memory."""

import pytest

from ortserve.device.accounting import Ledger, format_bytes
from ortserve.device.protocol import MemoryInfo
from ortserve.errors import ErrorKind, ServeError


def test_allocation_without_room_is_rejected_with_the_missing_bytes() -> None:
    ledger = Ledger("cuda:1", lambda: MemoryInfo(3 * 2**20, 2**30))
    ledger.check_room("m/1", {"weights": 2**20, "buffers": 2 * 2**20})
    with pytest.raises(ServeError) as refused:
        ledger.check_room("m/1", {"weights": 3 * 2**20, "buffers": 2**19})
    assert refused.value.kind is ErrorKind.OVERLOADED
    assert refused.value.message == (
        "'m/1' needs at least 3.5 MiB on cuda:1 (weights 3.0 MiB, buffers 512.0 KiB), but 3.0 MiB are free: "
        "512.0 KiB too few"
    )


def test_accounts_list_bytes_by_owner_and_purpose() -> None:
    ledger = Ledger("cuda:0", lambda: MemoryInfo(0, 0))
    a, b = ledger.open("a"), ledger.open("b")
    a.set_bytes("buffers", 10)
    a.set_bytes("session", 20)
    b.set_bytes("buffers", 5)
    a.set_bytes("session", 25)
    assert ledger.totals() == {"a": {"buffers": 10, "session": 25}, "b": {"buffers": 5}}
    b.set_bytes("buffers", 0)
    a.close()
    assert ledger.totals() == {}


def test_two_accounts_of_an_owner_are_summed_until_one_closes() -> None:
    ledger = Ledger("cuda:0", lambda: MemoryInfo(0, 0))
    old, new = ledger.open("m/1"), ledger.open("m/1")
    old.set_bytes("buffers", 10)
    new.set_bytes("buffers", 12)
    assert ledger.totals() == {"m/1": {"buffers": 22}}
    old.close()
    assert ledger.totals() == {"m/1": {"buffers": 12}}


def test_host_memory_has_separate_accounts() -> None:
    ledger = Ledger("cuda:0", lambda: MemoryInfo(0, 0))
    one, two = ledger.open("m/1"), ledger.open("m/1")
    one.set_bytes("buffers", 10)
    one.set_pinned("staging", 3)
    two.add_pinned("answers", 5)
    two.add_pinned("answers", 5)
    two.set_pinned("staging", 4)
    assert ledger.totals() == {"m/1": {"buffers": 10}}
    assert ledger.pinned() == {"m/1": {"staging": 7, "answers": 10}}
    two.close()
    one.set_pinned("staging", 0)
    assert ledger.pinned() == {}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (5 * 2**40, "5120.0 GiB")],
)
def test_bytes_are_formatted_in_the_largest_unit(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text
