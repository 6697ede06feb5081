"""Room that is given again by halves."""

from ortserve.frontends.grpc.native.windows import ReceiveWindow


def test_no_more_may_come_than_there_is_room_for() -> None:
    window = ReceiveWindow(100)
    assert window.take(100)
    assert not window.take(1)


def test_room_is_given_again_from_half_of_the_window_on_and_all_at_once() -> None:
    window = ReceiveWindow(100)
    window.take(49)
    assert window.credit() == 0
    window.take(1)
    assert window.credit() == 50
    assert window.credit() == 0
    assert window.take(100)
    assert window.credit() == 100
