"""Numbers of the event loop, as its watchdog and its busy polling hand them over at a scrape, and their families."""

from collections.abc import Iterator
from dataclasses import dataclass

from ortserve.telemetry.declarations import BUSY_POLL_SECONDS, BUSY_POLLS, LOOP_STALL_SECONDS, LOOP_STALLS
from ortserve.telemetry.families import Family


@dataclass(frozen=True, slots=True)
class StallReading:
    """Stalls that the watchdog has seen, and nanoseconds of them in all, the stall that lasts included."""

    stalls: int = 0
    stalled_ns: int = 0


@dataclass(frozen=True, slots=True)
class PollReading:
    """Nanoseconds of busy polling, and how often a request ended it (hit) or did not come in time (miss)."""

    polled_ns: int = 0
    hits: int = 0
    misses: int = 0


def loop_families(stalls: StallReading, polls: PollReading) -> Iterator[Family]:
    """The families of the event loop."""
    yield Family(LOOP_STALLS, {(): stalls.stalls})
    yield Family(LOOP_STALL_SECONDS, {(): stalls.stalled_ns / 1e9})
    yield Family(BUSY_POLL_SECONDS, {(): polls.polled_ns / 1e9})
    yield Family(BUSY_POLLS, {("hit",): polls.hits, ("miss",): polls.misses})
