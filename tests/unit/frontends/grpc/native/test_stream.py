"""Streams: receive windows."""

from ortserve.frontends.grpc.native.stream import ReceiveWindow


def test_data_past_the_window_is_an_error() -> None:
    window = ReceiveWindow(100)
    assert window.take(100)
    assert not window.take(1)


def test_window_is_refilled_once_half_is_used() -> None:
    window = ReceiveWindow(100)
    window.take(49)
    assert window.credit() == 0
    window.take(1)
    assert window.credit() == 50
    assert window.credit() == 0
    assert window.take(100)
    assert window.credit() == 100
