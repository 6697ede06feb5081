"""The instances of one model: which are free, and until when the others are busy."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from ortserve.batching.latency import known_ns
from ortserve.core.batch import Runner

_GAIN: Final = 0.1
_MARGIN_NS: Final = 100_000
"""By how much sooner a second batch is lent than it seems to take to stage: about what alarms and threads are late."""


class Instances:
    """Lends each instance to one run at a time, or to two where it stages one while it computes the other.

    The second is chosen late: when its rows will just be staged by the predicted end of the first. Loop thread only.
    """

    def __init__(self, runners: Sequence[Runner], depth: int = 1) -> None:
        """``runners`` are at least one, and nobody else's; ``depth`` is how many batches each takes at a time."""
        self.count = len(runners)
        self.free = list(runners)
        """Those that may be lent now; the last is lent next."""
        self.lends_ahead: Final = depth > 1
        self._depth = depth
        self._busy_until_ns: dict[Runner, float] = {}
        self._in_flight: dict[Runner, deque[float]] = {}
        """How long each run was predicted to last, where instances take several."""
        self._ended_ns: dict[Runner, int] = {}
        self._lost: set[Runner] = set()
        self._staging_ns = 0.0

    @property
    def are_busy(self) -> bool:
        """Whether any of them runs."""
        return bool(self._busy_until_ns)

    def lend(self, predicted_ns: float | None, now_ns: int) -> Runner:
        """Take a free one for a run that is predicted to last so long from now on, or from the end of that before."""
        runner = self.free.pop()
        lasts_ns = known_ns(predicted_ns)
        begins_ns = float(now_ns)
        if self.lends_ahead:
            self._in_flight.setdefault(runner, deque()).append(lasts_ns)
            begins_ns = max(now_ns, self._busy_until_ns.get(runner, 0))
        self._busy_until_ns[runner] = begins_ns + lasts_ns
        return runner

    def give_back(self, runner: Runner, taken_ns: int, now_ns: int) -> int:
        """Its run, chosen at ``taken_ns``, is over. Returns since when the instance had nothing else to do."""
        if not self.lends_ahead:
            del self._busy_until_ns[runner]
            if runner not in self._lost:
                self.free.append(runner)
            return taken_ns
        began_ns = max(taken_ns, self._ended_ns.get(runner, 0))
        self._ended_ns[runner] = now_ns
        in_flight = self._in_flight[runner]
        in_flight.popleft()  # the other one, where a plain run overtook the copies of a bound one: by microseconds
        if in_flight:
            self._busy_until_ns[runner] = now_ns + in_flight[0]
            return began_ns  # not free yet: the next batch is as far from its turn as it was before
        del self._busy_until_ns[runner]
        if runner not in self.free and runner not in self._lost:
            self.free.append(runner)
        return began_ns

    def observe_staging(self, staging_ns: int) -> None:
        """Learn from a batch how long it is from being chosen to its rows being staged."""
        self._staging_ns += _GAIN * (staging_ns - self._staging_ns)

    def ahead_due_ns(self) -> int | None:
        """When the next instance may be lent to a second batch, while none is free; None where none may be."""
        dues = [self._busy_until_ns[runner] for runner in self._waiting_ahead()]
        return int(min(dues) - 1.5 * self._staging_ns - _MARGIN_NS) if dues else None

    def free_ahead(self) -> None:
        """Have the instance be free for which that is due."""
        self.free.append(min(self._waiting_ahead(), key=self._busy_until_ns.__getitem__))

    def retire(self, runner: Runner) -> None:
        """Never lend one again, whose device is lost."""
        if runner not in self._lost:
            self._lost.add(runner)
            self.count -= 1
        if runner in self.free:
            self.free.remove(runner)

    def give_up(self, runner: Runner) -> None:
        """Never lend one again, nor wait for it, whose run does not end."""
        self.retire(runner)
        self._busy_until_ns.pop(runner, None)
        self._in_flight.pop(runner, None)

    def begins_ns(self, runner: Runner, now_ns: int) -> float:
        """When a run begins that one is lent for now: once those before it are predicted to be over."""
        return float(max(now_ns, self._busy_until_ns.get(runner, 0)) if self.lends_ahead else now_ns)

    def busy_ns(self, now_ns: int) -> float:
        """Until the first is idle, as predicted; 0 only where one is.

        A run that lasts longer than predicted may end at any moment, but is not to be taken for an idle instance.
        """
        if self.free and (not self.lends_ahead or any(not self._in_flight.get(runner) for runner in self.free)):
            return 0.0
        return max(1.0, min(self._busy_until_ns.values(), default=now_ns) - now_ns)

    def _waiting_ahead(self) -> list[Runner]:
        return [
            runner
            for runner, in_flight in self._in_flight.items()
            if 0 < len(in_flight) < self._depth and runner not in self.free and runner not in self._lost
        ]
