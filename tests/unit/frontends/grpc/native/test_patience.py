"""A bucket of tokens."""

from ortserve.frontends.grpc.native.patience import Patience

S = 10**9


def spend(patience: Patience, now_ns: int) -> int:
    count = 0
    while not patience.is_lost(now_ns):
        count += 1
    return count


def test_burst_is_borne_and_then_so_many_a_second() -> None:
    patience = Patience(0)
    assert spend(patience, 0) == 2000
    assert spend(patience, S) == 1000
    assert spend(patience, S) == 0
    assert spend(patience, 100 * S) == 2000


def test_what_was_earned_is_borne_beside_that_up_to_a_burst() -> None:
    patience = Patience(0)
    assert spend(patience, 0) == 2000
    assert not patience.is_lost(0, 3)
    assert spend(patience, 0) == 2
    assert not patience.is_lost(0, 1_000_000)
    assert spend(patience, 0) == 1999
