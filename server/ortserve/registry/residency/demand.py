"""Loads models on demand: one load serves all requests for a model, and each request waits for a limited time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from ortserve.clock import Clock
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.residency.ledger import LoadCost
from ortserve.telemetry.readings import ResidencyCounts

MAX_WAITING: Final = 4096
"""Maximum number of requests that wait for one model. The memory of their bodies has a limit of its own."""
_MIN_RETRY_S: Final = 1.0


class Demand:
    """One load that requests wait for."""

    def __init__(self, task: "asyncio.Task[None]", ready_ns: int, *, is_measured: bool) -> None:
        self.task: Final = task
        self.ready_ns: Final = ready_ns
        """Expected end of the load (monotonic)."""
        self.is_measured: Final = is_measured
        """Whether ``ready_ns`` is based on the measured time of an earlier load."""
        self.waiting = 0


class Demands:
    """Runs the loads that requests wait for, one per model at a time. Loop thread only.

    A load continues when no request waits any more, because the next request needs the model.
    """

    def __init__(
        self,
        clock: Clock,
        counts: ResidencyCounts,
        *,
        load: Callable[[str], Coroutine[Any, Any, None]],
        start: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        expect: Callable[[str], LoadCost],
        wait_s: float,
    ) -> None:
        """``start`` runs a load in a task that ends with the registry. A request waits at most ``wait_s``."""
        self._clock = clock
        self._counts = counts
        self._load = load
        self._start = start
        self._expect = expect
        self._wait_ns: Final = round(wait_s * 1e9)
        self._demands: dict[str, Demand] = {}

    def join(self, name: str) -> Demand:
        """Return the load of a model that is under way, or begin one."""
        demand = self._demands.get(name)
        if demand is None:
            cost = self._expect(name)
            ready_ns = self._clock() + cost.load_ns
            demand = Demand(self._start(self._load(name)), ready_ns, is_measured=cost.is_measured)
            self._demands[name] = demand
            demand.task.add_done_callback(lambda _: self._demands.pop(name))
        return demand

    async def wait(self, name: str, received_ns: int, timeout_ns: int | None) -> None:
        """Wait until a model is loaded, at most until the deadline of the request, which came at ``received_ns``.

        Raises:
            ServeError: not_ready, if the model cannot be loaded in time, with the time after which to retry;
                overloaded, if too many requests wait; or the error of the load.
        """
        demand = self.join(name)
        counts, now_ns = self._counts, self._clock()
        by_ns = received_ns + (self._wait_ns if timeout_ns is None else min(timeout_ns, self._wait_ns))
        if demand.waiting >= MAX_WAITING:
            counts.requests[name, "refused"] += 1
            raise ServeError(
                ErrorKind.OVERLOADED, f"{MAX_WAITING} requests, the maximum, already wait for '{name}'", retry_after_s=1
            )
        if by_ns <= now_ns or (demand.is_measured and demand.ready_ns > by_ns):
            counts.requests[name, "late"] += 1
            raise self._late(name, demand, now_ns)
        demand.waiting += 1
        try:
            # A request that is cancelled does not cancel the load.
            await asyncio.wait({demand.task}, timeout=(by_ns - now_ns) / 1e9)
        finally:
            demand.waiting -= 1
            counts.waited_ns += self._clock() - now_ns
        if not demand.task.done():
            counts.requests[name, "late"] += 1
            raise self._late(name, demand, self._clock())
        if demand.task.cancelled():
            counts.requests[name, "failed"] += 1
            raise ServeError(ErrorKind.NOT_READY, f"the load of '{name}' was cancelled", retry_after_s=1)
        error = demand.task.exception()
        counts.requests[name, "loaded" if error is None else "failed"] += 1
        if isinstance(error, ServeError):  # a new error for each caller, because each adds its own traceback
            raise ServeError(error.kind, error.message, retry_after_s=error.retry_after_s)
        if error is not None:
            raise error

    def _late(self, name: str, demand: Demand, now_ns: int) -> ServeError:
        left_s = max(_MIN_RETRY_S, (demand.ready_ns - now_ns) / 1e9)
        text = (
            f"'{name}' is loaded on demand, which takes longer than the request may wait: about {left_s:.0f} s from now"
        )
        return ServeError(ErrorKind.NOT_READY, text, retry_after_s=left_s)
