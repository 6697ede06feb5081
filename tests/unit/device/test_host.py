"""The device of host memory gives the guarantees of a real one, and no others."""

from collections.abc import Callable

import numpy as np
import pytest

from fakes.host_device import HostDevice, Pace

Make = Callable[[], HostDevice]


def copied(device: HostDevice, value: int, *, waits: bool) -> int:
    """Copy a number in on one stream and out on another, which optionally waits for the first."""
    copy_in, copy_out = device.make_stream(), device.make_stream()
    arrived, done = device.make_event(), device.make_event()
    address = device.allocate(8)
    source, target = np.array([value]), np.array([0])
    device.copy_in(address, source, copy_in)
    device.record(arrived, copy_in)
    if waits:
        device.make_wait(copy_out, arrived)
    device.copy_out(target, address, copy_out)
    device.record(done, copy_out)
    device.wait(done)
    return int(target[0])


@pytest.mark.parametrize("pace", Pace)
def test_stream_that_waits_for_an_event_sees_the_work_before_it(pace: Pace) -> None:
    for seed in range(20):
        assert copied(HostDevice(pace=pace, seed=seed), 7, waits=True) == 7


def test_missing_wait_is_detected() -> None:
    assert copied(HostDevice(pace=Pace.LATE), 7, waits=False) == 0
    assert {copied(HostDevice(pace=Pace.ANY, seed=seed), 7, waits=False) for seed in range(20)} == {0, 7}


def test_memory_overwritten_before_its_copy_is_detected() -> None:
    device = HostDevice(pace=Pace.LATE)
    stream, done = device.make_stream(), device.make_event()
    address, source, target = device.allocate(8), np.array([7]), np.array([0])
    device.copy_in(address, source, stream)
    source[0] = 8
    device.copy_out(target, address, stream)
    device.record(done, stream)
    device.wait(done)
    assert target[0] == 8


def test_event_represents_the_work_enqueued_before_its_recording() -> None:
    device = HostDevice(pace=Pace.LATE)
    first, second = device.make_stream(), device.make_stream()
    event, done = device.make_event(), device.make_event()
    address = device.allocate(8)
    seven, eight, target = np.array([7]), np.array([8]), np.array([0])
    device.copy_in(address, seven, first)
    device.record(event, first)
    device.make_wait(second, event)
    device.copy_in(address, eight, first)
    device.record(event, first)  # moves the event, but not the earlier wait
    device.copy_out(target, address, second)
    device.record(done, second)
    device.wait(done)
    assert target[0] == 7


def test_memory_that_was_not_allocated_cannot_be_copied_to() -> None:
    device = HostDevice()
    address = device.allocate(8)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.copy_in(address, np.zeros(2), device.make_stream())
    device.free(address)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.copy_in(address, np.zeros(1), device.make_stream())


def test_allocation_past_the_device_memory_fails() -> None:
    device = HostDevice(total_bytes=100)
    device.allocate(60)
    assert device.memory().free_bytes == 40
    with pytest.raises(RuntimeError, match="out of memory"):
        device.allocate(60)
