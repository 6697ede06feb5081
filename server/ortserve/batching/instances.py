"""Lends the instances of a model to its runs."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from ortserve.core.batch import Runner

_STAGING_GAIN: Final = 0.1
"""Weight of an observation in the mean staging time."""
_MAX_DELAY_NS: Final = 1_000_000_000
"""An instance whose run exceeds its prediction by more takes no second batch, which might wait for as long."""
_LEND_MARGIN_NS: Final = 100_000
"""Additional lead time of a second batch beyond its predicted staging time: about the delay of timers and threads."""


class Instances:
    """Lends each instance to one run at a time, or to two if it stages one while it computes the other.

    The second run is chosen late, so that its rows are staged just before the predicted end of the first. Loop thread
    only.
    """

    def __init__(self, runners: Sequence[Runner], depth: int = 1) -> None:
        """Take over ``runners``, at least one, each of which takes ``depth`` batches at a time."""
        self.count = len(runners)
        self.free = list(runners)
        """Instances that may be lent now; the last one is lent next."""
        self.lends_ahead: Final = depth > 1
        self._depth = depth
        self._busy_until_ns: dict[Runner, float] = {}
        self._in_flight: dict[Runner, deque[float]] = {}
        """Predicted times of the runs of each instance, in order, if instances take several."""
        self._ended_ns: dict[Runner, int] = {}
        self._lost: set[Runner] = set()
        self._staging_ns = 0.0

    @property
    def are_busy(self) -> bool:
        """Whether any instance runs."""
        return bool(self._busy_until_ns)

    def lend_next(self, predicted_ns: float, now_ns: int) -> float:
        """Lend the last free instance to a run. ``predicted_ns`` is 0 if its time is unknown.

        Returns:
            When the run begins: now, or at the predicted end of the run before it.
        """
        runner = self.free.pop()
        begins_ns = float(now_ns)
        if self.lends_ahead:
            self._in_flight.setdefault(runner, deque()).append(predicted_ns)
            begins_ns = max(begins_ns, self._busy_until_ns.get(runner, 0.0))
        self._busy_until_ns[runner] = begins_ns + predicted_ns
        return begins_ns

    def give_back(self, runner: Runner, taken_ns: int, now_ns: int) -> int:
        """End the run that was chosen at ``taken_ns``. Returns when it began: then, or when the run before it ended."""
        if not self.lends_ahead:
            del self._busy_until_ns[runner]
            if runner not in self._lost:
                self.free.append(runner)
            return taken_ns
        began_ns = max(taken_ns, self._ended_ns.get(runner, 0))
        self._ended_ns[runner] = now_ns
        in_flight = self._in_flight[runner]
        in_flight.popleft()  # for some microseconds that of the other run, if a plain run overtook a bound one's copies
        if in_flight:
            self._busy_until_ns[runner] = now_ns + in_flight[0]
            return began_ns  # not free yet: ``free_ahead`` frees it shortly before the end of its other run
        del self._busy_until_ns[runner]
        if runner not in self.free and runner not in self._lost:
            self.free.append(runner)
        return began_ns

    def observe_staging(self, staging_ns: int) -> None:
        """Learn the staging time of a batch: from the time it is chosen until its rows are staged."""
        self._staging_ns += _STAGING_GAIN * (staging_ns - self._staging_ns)

    def ahead_due_ns(self, now_ns: int) -> int | None:
        """When the first instance may take a second batch, while no instance is free; None if no instance may."""
        dues = [self._busy_until_ns[runner] for runner in self._can_take_second(now_ns)]
        return int(min(dues) - 1.5 * self._staging_ns - _LEND_MARGIN_NS) if dues else None

    def free_ahead(self, now_ns: int) -> None:
        """Free the instance of ``ahead_due_ns`` for a second batch."""
        self.free.append(min(self._can_take_second(now_ns), key=self._busy_until_ns.__getitem__))

    def withdraw_ahead(self, now_ns: int) -> None:
        """Lend no second batch to instances freed by ``free_ahead`` whose run has exceeded its prediction since."""
        least_ns = now_ns - _MAX_DELAY_NS
        late = [runner for runner in self.free if self._busy_until_ns.get(runner, math.inf) <= least_ns]
        for runner in late:
            self.free.remove(runner)

    def retire(self, runner: Runner) -> None:
        """Stop lending an instance, because its device is lost."""
        if runner not in self._lost:
            self._lost.add(runner)
            self.count -= 1
        if runner in self.free:
            self.free.remove(runner)

    def abandon(self, runner: Runner) -> None:
        """Stop lending an instance, and stop waiting for it, because its run does not end."""
        self.retire(runner)
        self._busy_until_ns.pop(runner, None)
        self._in_flight.pop(runner, None)

    def busy_ns(self, now_ns: int) -> float:
        """The predicted time until an instance is idle; 0 only if one is.

        A run that exceeds its prediction may end at any moment, but does not count as an idle instance.
        """
        if self.free and (not self.lends_ahead or any(not self._in_flight.get(runner) for runner in self.free)):
            return 0.0
        return max(1.0, min(self._busy_until_ns.values(), default=now_ns) - now_ns)

    def _can_take_second(self, now_ns: int) -> list[Runner]:
        least_ns = now_ns - _MAX_DELAY_NS
        return [
            runner
            for runner, in_flight in self._in_flight.items()
            if 0 < len(in_flight) < self._depth
            and runner not in self.free
            and runner not in self._lost
            and self._busy_until_ns[runner] > least_ns
        ]
