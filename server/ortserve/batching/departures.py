"""Who leaves the queue without an answer: those whose callers left, and those who cannot be answered in time any more.

Pure functions of who waits, what was learned and the time; the batcher acts by them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ortserve.batching.latency import MIN_OBSERVATIONS, LatencyModel, known_ns
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.riders import Rider

TIMEOUT_PASSED: Final = "its timeout passed in the queue"
DEADLINE_PASSED: Final = "its deadline came too near for an answer in the queue"
"""What is left of it then is what writing answers takes, or nothing."""
OUT_OF_REACH: Final = "its deadline can no longer be met, after a wait in the queue"
GIVEN_UP: Final = f"{OUT_OF_REACH}, but at the cost of others"
PASSED_IN_SEARCH: Final = "its deadline came too near for an answer while its batch ran again"


@dataclass(frozen=True, slots=True)
class Departure:
    """A rider that does not ride. ``why`` is what its caller is told, None where the caller has left already."""

    rider: Rider
    why: str | None


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a look through everybody who waits has found: who is too late, and the next moment at which somebody is."""

    departures: Sequence[Departure]
    next_ns: float


def turn_away(riders: Iterable[Rider], policy: BatchPolicy, latency: LatencyModel, now_ns: int) -> list[Departure]:
    """Say who of those who might ride now does not.

    Args:
        riders: Of one shape class in the order of going. No more are looked at than make a full batch.
        policy: How many rows that is.
        latency: Of batches of this class.
        now_ns: Monotonic.
    """
    departures: list[Departure] = []
    rows = 0
    for rider in riders:
        if rider.promise.done():
            departures.append(Departure(rider, None))
            continue
        if rider.finish_by_ns is not None or rider.start_by_ns is not None:
            why = _passed(rider, now_ns) or _out_of_reach(rider, policy, latency, now_ns)
            if why is not None:
                departures.append(Departure(rider, why))
                continue
        rows += rider.rows
        if rows >= policy.max_rows:
            break
    return departures


def sweep(riders: Iterable[Rider], now_ns: int) -> Sweep:
    """Find those whose deadline or timeout has passed, wherever they stand, and when the next one's will."""
    departures: list[Departure] = []
    next_ns = math.inf
    for rider in riders:
        by_ns = rider.expires_ns
        if by_ns is None:
            continue
        if by_ns < now_ns:
            departures.append(Departure(rider, None if rider.promise.done() else _passed(rider, now_ns)))
        elif by_ns < next_ns:
            next_ns = float(by_ns)
    return Sweep(departures, next_ns)


def leave_search(riders: Iterable[Rider], now_ns: int) -> list[Departure]:
    """Say who of a failed batch does not run again. Its runs have begun, so that only the deadlines count."""
    return [
        Departure(rider, None if rider.promise.done() else PASSED_IN_SEARCH)
        for rider in riders
        if rider.promise.done() or (rider.finish_by_ns is not None and rider.finish_by_ns < now_ns)
    ]


def _passed(rider: Rider, now_ns: int) -> str | None:
    if rider.start_by_ns is not None and rider.start_by_ns < now_ns:
        return TIMEOUT_PASSED
    if rider.finish_by_ns is not None and rider.finish_by_ns < now_ns:
        return DEADLINE_PASSED
    return None


def _out_of_reach(rider: Rider, policy: BatchPolicy, latency: LatencyModel, now_ns: int) -> str | None:
    by_ns = rider.finish_by_ns
    if by_ns is None or latency.observations < MIN_OBSERVATIONS:
        return None
    least_ns = known_ns(latency.predict_ns(policy.bucket_for(rider.rows)))
    # Only where the wait has made it late: whom admission let in although the prediction was against it, because nobody
    # else was there, shall run, or a wrong prediction would never be put right.
    return OUT_OF_REACH if by_ns - now_ns < least_ns <= by_ns - rider.timing.queued_ns else None
