"""The figures of a rollout's candidate, and the decision by its rules when the rollout ends. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from ortserve.config.rollout import Measure, RolloutRules
from ortserve.core.agreement import AgreementMeter
from ortserve.core.batch import Arrays
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import as_numbers

MEASURES: Final[tuple[str, ...]] = get_args(Measure)

_CLASSES_PER_OCTAVE: Final = 8
_CLASSES: Final = 35 * _CLASSES_PER_OCTAVE
"""Number of classes, up to 2^35 ns or half a minute. Longer times count in the last class."""


def errors_of(
    stable: Arrays, signature: ModelSignature, candidate: Arrays, candidate_signature: ModelSignature, rows: int
) -> dict[str, float]:
    """The worst error of any output by measure; infinite if the candidate lacks an output or has another datatype.

    Args:
        stable: Outputs of ``stable`` in the order of ``signature``, as clients see them.
        signature: Signature of ``stable``.
        candidate: Outputs of the candidate in the order of ``candidate_signature``, as clients see them.
        candidate_signature: Signature of the candidate.
        rows: Rows of the request.
    """
    pairs = []
    for spec, expected in zip(signature.outputs, stable, strict=True):
        index = candidate_signature.output_index.get(spec.name)
        if index is None or candidate_signature.outputs[index].datatype is not spec.datatype:
            return dict.fromkeys(MEASURES, math.inf)
        pairs.append((as_numbers(expected, spec.datatype), as_numbers(candidate[index], spec.datatype)))
    meter = AgreementMeter([spec.name for spec in signature.outputs])
    meter.add([expected for expected, _ in pairs], [found for _, found in pairs], rows)
    result = meter.result()
    return {measure: result.error(measure) for measure in MEASURES}


def disagrees(errors: Mapping[str, float], tolerance: Mapping[Measure, float]) -> bool:
    """Whether a request differs by more than its model tolerates."""
    return any(errors[measure] > most for measure, most in tolerance.items())


class Latencies:
    """Times of many requests in little memory, and their percentiles with an error of at most 9 %.

    Times are counted in classes, each 9 % longer than the one before.
    """

    def __init__(self) -> None:
        self._counts = [0] * _CLASSES
        self.count = 0

    def add(self, ns: int) -> None:
        self._counts[min(_CLASSES - 1, int(math.log2(max(1, ns)) * _CLASSES_PER_OCTAVE))] += 1
        self.count += 1

    def p99_s(self) -> float | None:
        """The time within which 99 % of the requests ended, in seconds; None without any."""
        left = math.ceil(self.count * 99 / 100)
        if not left:
            return None
        for number, count in enumerate(self._counts):
            left -= count
            if left <= 0:
                return float(2.0 ** ((number + 1) / _CLASSES_PER_OCTAVE) / 1e9)
        raise AssertionError


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a candidate so far. Times are seconds, None while there are too few.

    Attributes:
        requests: Requests that the candidate answered or failed.
        failed: Requests that the candidate failed and ``stable`` answered.
        rejected: Requests that the candidate did not accept, because it was busy or not ready.
        shed: Requests that a shadow did not copy to the candidate, or whose copies were rejected, because the server
            had other work.
        compared: Requests whose outputs were compared.
        disagreed: Compared requests whose outputs differed by more than the tolerance.
        stable_requests: Number of times in ``stable_p99_s``.
        stable_p99_s: 99th percentile of the times of ``stable``.
        candidate_p99_s: 99th percentile of the times of the candidate.
        candidate_requests: Number of times in ``candidate_p99_s``.
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
    """Judge a candidate. Returns None to continue the rollout."""
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
    """The first violated rule, in words; empty if the candidate satisfies all."""
    for what, bound, count, of in (
        ("max_error_rate", rules.max_error_rate, seen.failed, seen.requests),
        ("max_disagreement", rules.max_disagreement, seen.disagreed, seen.compared),
    ):
        # Not ``count > bound * number``: 0.29 * 100 is less than 29.
        if bound is not None and count / max(of, rules.min_requests) > bound:
            return f"{what}: expected at most {bound:g}, got {count} of {of} requests"
    ratio = _p99_ratio(rules, seen)
    if rules.max_p99_ratio is not None and ratio is not None and ratio > rules.max_p99_ratio:
        return f"max_p99_ratio: expected at most {rules.max_p99_ratio:g}, got {ratio:.3g} ({_summary(seen)})"
    return ""


def _p99_ratio(rules: RolloutRules, seen: Figures) -> float | None:
    """The p99 of the candidate divided by that of ``stable``; None while there are too few times."""
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
