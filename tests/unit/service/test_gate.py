"""The limit on the bytes of all request bodies."""

import pytest

from ortserve.errors import ErrorKind, ServeError
from ortserve.service.gate import BodyGate, Reservation


def test_bytes_are_reserved_during_the_block() -> None:
    gate = BodyGate(100)
    with Reservation(gate, 60):
        with Reservation(gate, 40):
            assert gate.held_bytes == 100
        assert gate.held_bytes == 60
    assert gate.held_bytes == 0


def test_rejected_reservation_reserves_no_bytes() -> None:
    gate = BodyGate(100)
    with Reservation(gate, 60):
        with pytest.raises(ServeError, match="max_inflight_bytes") as caught:
            Reservation(gate, 41)
        assert caught.value.kind is ErrorKind.OVERLOADED
        assert caught.value.retry_after_s == 1
        assert gate.held_bytes == 60
        with Reservation(gate, 40):
            assert gate.held_bytes == 100


def test_server_that_holds_nothing_admits_any_body() -> None:
    gate = BodyGate(100)
    with Reservation(gate, 1000):
        assert gate.held_bytes == 1000
        with pytest.raises(ServeError):
            Reservation(gate, 1)
    with Reservation(gate, 1):
        assert gate.held_bytes == 1


def test_reservation_grows_up_to_the_limit() -> None:
    gate = BodyGate(100)
    with Reservation(gate, 0) as body:
        body.grow(500)  # it is the only body
        body.grow(500)
        assert gate.held_bytes == 1000
    with Reservation(gate, 50), Reservation(gate, 10) as body:
        body.grow(40)
        with pytest.raises(ServeError):
            body.grow(1)
        assert gate.held_bytes == 100, "what was held still is"
    assert gate.held_bytes == 0


def test_bytes_are_released_when_the_block_fails() -> None:
    gate = BodyGate(100)
    with pytest.raises(ZeroDivisionError), Reservation(gate, 60):
        raise ZeroDivisionError
    assert gate.held_bytes == 0


def test_hold_is_resized_up_to_the_limit_and_counted_beyond_it() -> None:
    gate = BodyGate(100)
    with Reservation(gate, 50), Reservation(gate, 0) as body:
        body.resize(50)
        body.resize(20)
        assert gate.held_bytes == 70
        with pytest.raises(ServeError, match="max_inflight_bytes"):
            body.resize(51)
        assert gate.held_bytes == 70
        body.set_unchecked(80)  # the bytes are in memory already, so no limit applies
        assert gate.held_bytes == 130
        body.shrink(10)
        assert gate.held_bytes == 120
        body.shrink(1000)
        assert gate.held_bytes == 50
    assert gate.held_bytes == 0


def test_no_bytes_are_reserved_although_more_than_the_limit_is_held() -> None:
    gate = BodyGate(100)
    with Reservation(gate, 0) as body:
        body.set_unchecked(200)
        with Reservation(gate, 0) as other:
            with pytest.raises(ServeError, match="got 1 more"):
                other.grow(1)
            assert gate.held_bytes == 200


def test_reservation_up_to_twice_the_limit_is_rejected_beyond_it() -> None:
    gate = BodyGate(100)
    with Reservation(gate, 0) as body:
        body.set_up_to_twice(300)  # it is the only body
        body.set_up_to_twice(90)
        with Reservation(gate, 10) as other:
            other.set_up_to_twice(110)
            with pytest.raises(ServeError, match="holds 200 of at most 100 bytes of requests, got 1 more"):
                other.set_up_to_twice(111)
            assert gate.held_bytes == 200
