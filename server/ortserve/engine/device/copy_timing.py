"""How long copies take: events around them, which cost more than others, so that few batches have them."""

from functools import partial

from ortserve.engine.device.counts import DeviceCounts
from ortserve.engine.device.failures import give_back
from ortserve.engine.device.lane import Lane


class CopyTiming:
    """Events around the copies of one buffer set."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._device = lane.device
        self._events: list[int] = []
        for _ in range(4):
            self._events.append(self._device.make_event(is_timed=True))

    def begin_inward(self) -> None:
        self._device.record(self._events[0], self._lane.inward)

    def end_inward(self) -> None:
        self._device.record(self._events[1], self._lane.inward)

    def begin_outward(self) -> None:
        self._device.record(self._events[2], self._lane.outward)

    def end_outward(self) -> None:
        self._device.record(self._events[3], self._lane.outward)

    def count(self, counts: DeviceCounts, bytes_in: int, bytes_out: int) -> None:
        """Add what the copies of a batch took that has landed, and how much they copied."""
        counts.timed_in_ns += self._device.elapsed_ns(self._events[0], self._events[1])
        counts.timed_in_bytes += bytes_in
        counts.timed_out_ns += self._device.elapsed_ns(self._events[2], self._events[3])
        counts.timed_out_bytes += bytes_out

    def close(self) -> None:
        give_back(*[partial(self._device.destroy_event, event) for event in self._events])
