"""What the runs of one instance on a device were, in numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class DeviceCounts:
    """Counted by the instance's threads, each field by one of them; any thread may read.

    Attributes:
        replayed: Batches computed by the replay of a graph.
        bound: Batches run on bound buffers without one.
        plain: Batches run neither way, by why.
        captured: Graphs that were captured and are replayed, one for each size and buffer set.
        not_captured: Sizes that were to be replayed and are not, by why; counted while the instance is prepared.
        copied_in_bytes: To the device.
        copied_out_bytes: From the device.
        timed_in_ns: Time of the copies to the device of those batches that were timed.
        timed_in_bytes: Bytes of these copies.
        timed_out_ns: The same from the device.
        timed_out_bytes: The same from the device.
    """

    replayed: int = 0
    bound: int = 0
    plain: dict[str, int] = field(default_factory=dict)
    captured: int = 0
    not_captured: dict[str, int] = field(default_factory=dict)
    copied_in_bytes: int = 0
    copied_out_bytes: int = 0
    timed_in_ns: int = 0
    timed_in_bytes: int = 0
    timed_out_ns: int = 0
    timed_out_bytes: int = 0

    def count_plain(self, reason: str) -> None:
        self.plain[reason] = self.plain.get(reason, 0) + 1

    def count_not_captured(self, reason: str, sizes: int = 1) -> None:
        self.not_captured[reason] = self.not_captured.get(reason, 0) + sizes


def sum_counts(counts: "list[DeviceCounts]") -> DeviceCounts:
    """Those of several instances together."""
    total = DeviceCounts()
    for one in counts:
        for name in DeviceCounts.__slots__:
            value = getattr(one, name)
            if isinstance(value, Mapping):
                known = getattr(total, name)
                for reason, count in list(value.items()):
                    known[reason] = known.get(reason, 0) + count
            else:
                setattr(total, name, getattr(total, name) + value)
    return total
