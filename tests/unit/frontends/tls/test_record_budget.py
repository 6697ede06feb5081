"""The budget of bytes without data, by numbers alone; real sessions are in ``test_transport``."""

import pytest

from fakes.clock import FakeClock
from ortserve.frontends.tls.record_budget import RecordBudget

KEY_UPDATE = 27
RECORD = 5 + 16 * 1024 + 17
SECOND_NS = 1_000_000_000


def spend(account: RecordBudget, came: int) -> int:
    """Bytes without data until the peer is cut off, ``came`` at a time."""
    spent = came
    while not account.is_exceeded(came, data=0, records=0):
        spent += came
        assert spent < 10_000_000
    return spent


def test_48_kib_without_data_are_tolerated_and_32_more_each_second() -> None:
    clock = FakeClock()
    account = RecordBudget("TLSv1.3", clock)
    assert spend(account, KEY_UPDATE) == pytest.approx(48 * 1024, rel=0.02)
    clock.advance(SECOND_NS // 2)
    assert spend(account, KEY_UPDATE) == pytest.approx(16 * 1024, rel=0.02)
    clock.advance(100 * SECOND_NS)
    assert spend(account, KEY_UPDATE) == pytest.approx(32 * 1024, rel=0.02)


def test_refill_can_be_disabled() -> None:
    clock = FakeClock()
    account = RecordBudget("TLSv1.3", clock)
    spend(account, KEY_UPDATE)
    clock.advance(100 * SECOND_NS)
    account.skip_refill()
    assert spend(account, KEY_UPDATE) == KEY_UPDATE


@pytest.mark.parametrize(("version", "head"), [("TLSv1.3", 22), ("TLSv1.2", 29), ("TLSv1.2", 21)])
def test_records_of_one_byte_stay_within_the_allowance(version: str, head: int) -> None:
    account = RecordBudget(version, FakeClock())
    assert not any(account.is_exceeded(head + 1, data=1, records=1) for _ in range(100_000))


def test_partial_records_are_accounted_with_their_rest() -> None:
    account = RecordBudget("TLSv1.3", FakeClock())
    for _ in range(1000):
        assert not account.is_exceeded(RECORD - 1, data=0, records=0)
        assert not account.is_exceeded(1, data=RECORD - 22, records=1)


@pytest.mark.parametrize("records", [1, 4, 100])
def test_data_records_earn_no_allowance(records: int) -> None:
    account = RecordBudget("TLSv1.3", FakeClock())
    came = KEY_UPDATE + records * 23
    assert any(account.is_exceeded(came, data=records, records=records) for _ in range(2_500))
