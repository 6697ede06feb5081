"""The instances of one model: which are free, and until when the others are busy."""

from collections.abc import Sequence

from ortserve.batching.latency import known_ns
from ortserve.core.batch import Runner


class Instances:
    """Lends each instance to one run at a time. Loop thread only."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        """``runners`` are at least one, and nobody else's."""
        self.count = len(runners)
        self.free = list(runners)
        """Those that no run holds; the last is lent next."""
        self._busy_until_ns: dict[Runner, float] = {}

    @property
    def are_busy(self) -> bool:
        """Whether any of them runs."""
        return bool(self._busy_until_ns)

    def lend(self, predicted_ns: float | None, now_ns: int) -> Runner:
        """Take a free one for a run that is predicted to last so long from now on."""
        runner = self.free.pop()
        self._busy_until_ns[runner] = now_ns + known_ns(predicted_ns)
        return runner

    def give_back(self, runner: Runner) -> None:
        """Its run is over."""
        del self._busy_until_ns[runner]
        self.free.append(runner)

    def busy_ns(self, now_ns: int) -> float:
        """Until the first is free, as predicted; 0 only where one is.

        A run that lasts longer than predicted may end at any moment, but is not to be taken for an idle instance.
        """
        return 0.0 if self.free else max(1.0, min(self._busy_until_ns.values()) - now_ns)
