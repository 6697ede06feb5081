"""When a rollout ends by itself: a decision from figures and rules. Pure."""

from dataclasses import dataclass
from typing import Literal

from ortserve.config.rollout import RolloutRules


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a candidate so far. Times are seconds, None while there are too few.

    Attributes:
        requests: To the candidate, answered or failed.
        failed: Of these, those that failed and that ``stable`` answered.
        rejected: Requests that the candidate did not accept, because it was busy or not ready.
        shed: Requests of a shadow that were not sent, because the server had other work.
        compared: Requests whose outputs were compared.
        disagreed: Of these, those that differed by more than the tolerance.
        stable_requests: Requests whose times ``stable_p99_s`` is of.
        stable_p99_s: 99th percentile of the times of ``stable``.
        candidate_p99_s: The same of the candidate.
        candidate_requests: Requests whose times ``candidate_p99_s`` is of.
    """

    requests: int = 0
    failed: int = 0
    rejected: int = 0
    shed: int = 0
    compared: int = 0
    disagreed: int = 0
    stable_requests: int = 0
    stable_p99_s: float | None = None
    candidate_p99_s: float | None = None
    candidate_requests: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """The end of a rollout, and the figures that led to it in words."""

    result: Literal["promoted", "rolled_back"]
    reason: str


def decide(rules: RolloutRules, seen: Figures) -> Decision | None:
    """Judge a candidate. None to go on."""
    if reason := _excess(rules, seen):
        return Decision("rolled_back", reason)
    if rules.promote_after is None or seen.requests < max(rules.promote_after, rules.min_requests):
        return None
    if rules.max_disagreement is not None and seen.compared < rules.min_requests:
        return None
    ratio = None if rules.max_p99_ratio is None else _p99_ratio(rules, seen)
    if rules.max_p99_ratio is not None and ratio is None:
        return None
    return Decision("promoted", f"{seen.requests} requests kept the rules: {_summary(seen)}")


def _excess(rules: RolloutRules, seen: Figures) -> str:
    """The first rule that is broken, in words; empty if all are kept."""
    for what, bound, count, of in (
        ("max_error_rate", rules.max_error_rate, seen.failed, seen.requests),
        ("max_disagreement", rules.max_disagreement, seen.disagreed, seen.compared),
    ):
        if bound is not None and count > bound * max(of, rules.min_requests):
            return f"{what}: expected at most {bound:g}, got {count} of {of} requests"
    ratio = _p99_ratio(rules, seen)
    if rules.max_p99_ratio is not None and ratio is not None and ratio > rules.max_p99_ratio:
        return f"max_p99_ratio: expected at most {rules.max_p99_ratio:g}, got {ratio:.3g} ({_summary(seen)})"
    return ""


def _p99_ratio(rules: RolloutRules, seen: Figures) -> float | None:
    """None while there are too few times."""
    if min(seen.candidate_requests, seen.stable_requests) < rules.min_requests:
        return None
    if not seen.stable_p99_s or seen.candidate_p99_s is None:
        return None
    return seen.candidate_p99_s / seen.stable_p99_s


def _summary(seen: Figures) -> str:
    parts = [f"{seen.failed} failed", f"{seen.disagreed} of {seen.compared} disagreed"]
    if seen.stable_p99_s is not None and seen.candidate_p99_s is not None:
        parts.append(f"p99 {seen.candidate_p99_s * 1e3:.3g} ms, stable {seen.stable_p99_s * 1e3:.3g} ms")
    return ", ".join(parts)
