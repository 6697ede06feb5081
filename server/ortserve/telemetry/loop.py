"""Numbers of the event loop, as its watchdog hands them over at a scrape, and their families."""

from collections.abc import Iterator
from dataclasses import dataclass

from ortserve.telemetry.declarations import LOOP_STALL_SECONDS, LOOP_STALLS
from ortserve.telemetry.families import Family


@dataclass(frozen=True, slots=True)
class StallReading:
    """Stalls that the watchdog has seen, and nanoseconds of them in all, the stall that lasts included."""

    stalls: int = 0
    stalled_ns: int = 0


def loop_families(stalls: StallReading) -> Iterator[Family]:
    """The families of the event loop."""
    yield Family(LOOP_STALLS, {(): stalls.stalls})
    yield Family(LOOP_STALL_SECONDS, {(): stalls.stalled_ns / 1e9})
