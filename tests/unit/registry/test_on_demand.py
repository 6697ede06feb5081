"""Requests that wait for the load of their model, in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.clock import FakeClock
from fakes.loop import VirtualTimeLoop, run_virtual
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.on_demand import MAX_WAITING, LoadsOnDemand
from ortserve.registry.repository.source import ModelSource
from ortserve.registry.residency.ledger import LoadCost
from ortserve.telemetry.readings import ResidencyCounts

S = 1_000_000_000


class Loads(LoadsOnDemand):
    """Loads that take two seconds."""

    def __init__(self, clock: FakeClock, *, is_measured: bool = True, error: ServeError | None = None) -> None:
        unused: Any = None
        room: Any = SimpleNamespace(expect=lambda source: LoadCost(1, 2 * S, is_measured=is_measured))
        self.counts = ResidencyCounts()
        super().__init__(
            unused,
            unused,
            unused,
            room,
            {"m": ModelSource("m")},
            unused,
            clock,
            self.counts,
            start=asyncio.ensure_future,
            wait_s=30,
            follows_changes=False,
        )
        self.began: list[str] = []
        self._error = error

    async def _load(self, name: str) -> None:
        self.began.append(name)
        await asyncio.sleep(2)
        if self._error is not None:
            raise self._error


def run(main: Callable[[FakeClock], Coroutine[Any, Any, None]]) -> None:
    async def with_clock(_: VirtualTimeLoop, clock: FakeClock) -> None:
        await main(clock)

    run_virtual(with_clock)


def test_requests_share_a_load_which_outlives_them() -> None:
    async def main(clock: FakeClock) -> None:
        loads = Loads(clock)
        began_ns = clock()
        waits = [asyncio.ensure_future(loads.wait("m", clock(), None)) for _ in range(3)]
        await asyncio.sleep(1)
        waits[0].cancel()
        await asyncio.wait(waits)
        assert (loads.began, clock() - began_ns) == (["m"], 2 * S)
        assert loads.counts.requests == {("m", "loaded"): 2}
        await loads.wait("m", clock(), None)
        assert loads.began == ["m", "m"]

    run(main)


@pytest.mark.parametrize(
    ("is_measured", "timeout_s", "waited_s", "retry_s"),
    [(True, 1.0, 0, 2), (False, 1.0, 1, 1), (False, 1.9, 1.9, 1), (True, 0.0, 0, 2)],
)
def test_request_is_rejected_at_its_deadline_or_at_once_if_the_load_is_known_to_be_longer(
    is_measured: bool, timeout_s: float, waited_s: float, retry_s: float
) -> None:
    async def main(clock: FakeClock) -> None:
        loads = Loads(clock, is_measured=is_measured)
        began_ns = clock()
        with pytest.raises(ServeError, match="'m' is loaded on demand, which takes longer") as caught:
            await loads.wait("m", clock(), round(timeout_s * S))
        assert clock() - began_ns == pytest.approx(waited_s * S, abs=1000)
        assert caught.value.kind is ErrorKind.NOT_READY
        assert caught.value.retry_after_s == pytest.approx(retry_s)
        await asyncio.sleep(2)
        assert (loads.began, loads.counts.requests) == (["m"], {("m", "late"): 1})

    run(main)


def test_error_of_the_load_is_that_of_each_request() -> None:
    async def main(clock: FakeClock) -> None:
        loads = Loads(clock, error=ServeError(ErrorKind.NOT_READY, "no room", retry_after_s=7))
        outcomes = await asyncio.gather(*(loads.wait("m", clock(), None) for _ in range(2)), return_exceptions=True)
        assert [(str(error), getattr(error, "retry_after_s", 0)) for error in outcomes] == [("no room", 7)] * 2
        assert outcomes[0] is not outcomes[1]

    run(main)


def test_number_of_waiting_requests_is_limited() -> None:
    async def main(clock: FakeClock) -> None:
        loads = Loads(clock)
        loads.join("m").waiting = MAX_WAITING - 1
        last = asyncio.ensure_future(loads.wait("m", clock(), None))
        await asyncio.sleep(0)
        with pytest.raises(ServeError, match=f"{MAX_WAITING} requests, the maximum, already wait for 'm'") as caught:
            await loads.wait("m", clock(), None)
        assert caught.value.kind is ErrorKind.OVERLOADED
        last.cancel()
        await asyncio.wait([last])
        await loads.wait("m", clock(), None)  # in the place of the one that left

    run(main)
