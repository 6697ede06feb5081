"""Eviction from the queue: which requests can no longer be answered in time, and the reason for their callers.

Pure functions of the queued requests, the latency model and the time. ``scheduler`` removes the requests they find.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ortserve.batching.latency import MIN_OBSERVATIONS, LatencyModel
from ortserve.batching.planner import BatchPolicy
from ortserve.core.inflight import InflightRequest

TIMEOUT_PASSED: Final = "its timeout passed in the queue"
DEADLINE_PASSED: Final = "its deadline came too near for an answer in the queue"
"""The time that is left is what encoding and writing the answer takes, or nothing."""
OUT_OF_REACH: Final = "its deadline can no longer be met, after a wait in the queue"
AT_COST_OF_OTHERS: Final = f"{OUT_OF_REACH}, but at the cost of others"
PASSED_IN_SEARCH: Final = "its deadline came too near for an answer while its batch ran again"


@dataclass(frozen=True, slots=True)
class Eviction:
    """A request that does not run, and the reason for its caller."""

    request: InflightRequest
    reason: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """The requests of a shape class whose time has passed, and when the next one's will."""

    evictions: Sequence[Eviction]
    next_ns: float


def find_unfit(
    requests: Iterable[InflightRequest], policy: BatchPolicy, latency: LatencyModel, now_ns: int
) -> list[Eviction]:
    """Find the requests that could be in the next batch and must not be.

    Args:
        requests: Of one shape class in queue order. The search ends with the requests of a full batch.
        policy: Gives the size of a full batch.
        latency: Of batches of this class.
        now_ns: Monotonic.
    """
    evictions: list[Eviction] = []
    rows = 0
    for request in requests:
        if request.finish_by_ns is not None or request.start_by_ns is not None:
            reason, by_ns = _passed(request, now_ns), request.finish_by_ns
            if reason is None and by_ns is not None and latency.observations >= MIN_OBSERVATIONS:
                least_ns = policy.batch_ns(request.rows, latency)
                # Only if the wait made it late. An idle server admits a request even if the prediction is too long for
                # it; such a request must run, or a wrong prediction would never be corrected.
                if by_ns - now_ns < least_ns <= by_ns - request.timing.queued_ns:
                    reason = OUT_OF_REACH
            if reason is not None:
                evictions.append(Eviction(request, reason))
                continue
        rows += request.rows
        if rows >= policy.max_rows:
            break
    return evictions


def find_expired(requests: Iterable[InflightRequest], now_ns: int) -> Sweep:
    """Find the requests whose deadline or timeout has passed, at any position, and when the next one's will."""
    evictions: list[Eviction] = []
    next_ns = math.inf
    for request in requests:
        by_ns = request.expires_ns
        if by_ns is None:
            continue
        reason = _passed(request, now_ns)
        if reason is not None:
            evictions.append(Eviction(request, reason))
        elif by_ns < next_ns:
            next_ns = float(by_ns)
    return Sweep(evictions, next_ns)


def find_late_in_search(requests: Iterable[InflightRequest], now_ns: int) -> list[InflightRequest]:
    """Find the requests of a failed batch that are late by now. Their runs have begun, so only deadlines count."""
    return [
        request
        for request in requests
        if request.finish_by_ns is not None and request.finish_by_ns < now_ns and not request.is_settled
    ]


def _passed(request: InflightRequest, now_ns: int) -> str | None:
    if request.start_by_ns is not None and request.start_by_ns < now_ns:
        return TIMEOUT_PASSED
    if request.finish_by_ns is not None and request.finish_by_ns < now_ns:
        return DEADLINE_PASSED
    return None
