"""How long callers have taken nothing of what is sent to them. Pure; asked now and then, and nobody pays between."""

from collections.abc import Mapping


class SendWaits:
    """Of one connection and its streams, by their ids; 0 is the connection."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_ns = int(timeout_s * 1e9)
        self._waits: dict[int, tuple[int, int]] = {}

    def late(self, now_ns: int, taken: Mapping[int, int]) -> list[int]:
        """Say who has taken nothing for the whole time.

        Args:
            now_ns: Monotonic.
            taken: Of all that have something to take now, a number that is larger than it was before when they took
                some; where it is smaller, it counts from there.
        """
        before, self._waits = self._waits, {}
        late: list[int] = []
        for key, bytes_taken in taken.items():
            was, since_ns = before.get(key, (-1, now_ns))
            if bytes_taken > was:
                since_ns = now_ns
            self._waits[key] = bytes_taken, since_ns
            if now_ns - since_ns >= self._timeout_ns:
                late.append(key)
        return late
