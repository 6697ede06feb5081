"""The treatment of each request in a rollout: selected, copied, shed, compared, counted."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest

from fakes.clock import FakeClock
from ortserve.config.model import ModelOptions
from ortserve.config.rollout import make_rollout_options
from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import InflightRequest, Terms
from ortserve.core.request import InferRequest
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import Tensor
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.rollout import live
from ortserve.service.rollout.decision import Decision
from ortserve.service.rollout.live import MAX_COMPARED_INLINE, MAX_COPIED_BYTES, MAX_COPIES, LiveRollout

SIGNATURE = ModelSignature((TensorSpec("x", DataType.FP32, (-1, -1)),), (TensorSpec("y", DataType.FP32, (-1, -1)),), "")


class Version:
    """A version whose requests the test settles."""

    name = "m"
    signature = SIGNATURE
    options = ModelOptions()

    def __init__(self) -> None:
        self.queued_rows = 0
        self.submitted: list[InflightRequest] = []
        self.problem: ServeError | None = None

    def terms(self, received_ns: int, **_: Any) -> Terms:
        return Terms()

    def submit(self, request: InflightRequest, terms: Terms) -> None:
        if self.problem is not None:
            raise self.problem
        self.submitted.append(request)

    def cut_back(self, outputs: Arrays, inputs: Arrays) -> Arrays:
        return outputs


class Trial:
    """A rollout of model ``m`` between two versions. Time stands still."""

    def __init__(self, draw: float = 0.0, **options: Any) -> None:
        self.versions = {"stable": Version(), "2": Version()}
        self.decisions: list[Decision] = []
        self.drawn = draw
        self.threads = ThreadPoolExecutor(1)
        self.rollout = LiveRollout(
            "m",
            make_rollout_options({"candidate": 2, "share": 0.5, **options}),
            lambda _, version: self.versions[version],  # type: ignore[arg-type, return-value]
            FakeClock(),
            self.threads,
            lambda _, decision: self.decisions.append(decision),
            lambda: self.drawn,
        )

    @property
    def candidate(self) -> Version:
        return self.versions["2"]

    async def answer(self, value: float = 1.0, *, columns: int = 4, version: str = "", run_ns: int = 1_000_000) -> None:
        """Answer a request by ``stable`` with its input."""
        array = np.full((1, columns), value, np.float32)
        self.rollout.observe(request_of(array, version), (), (array,), timing_of(run_ns))
        await asyncio.sleep(0)

    async def settle(self, number: int, value: float) -> None:
        run = self.candidate.submitted[number]
        run.timing.taken_ns, run.timing.computed_ns, run.timing.batch_rows = 1, 2_000_001, 1
        run.complete((np.full_like(run.inputs[0], value),))
        await asyncio.sleep(0)

    def counts(self) -> Mapping[str, int]:
        return {str(outcome): count for outcome, count in self.rollout.outcomes.items() if count}


def request_of(array: np.ndarray, version: str = "", **parameters: str) -> InferRequest:
    return InferRequest("m", version, "", [Tensor("x", DataType.FP32, array)], (), parameters)


def timing_of(run_ns: int) -> Timing:
    """The timing of a request that was answered by a run, or without time by the response cache."""
    return Timing(1, queued_ns=1, taken_ns=1, staged_ns=1, computed_ns=1 + run_ns, batch_rows=1 if run_ns else 0)


async def test_copy_is_compared_with_the_tolerance() -> None:
    trial = Trial(tolerance={"relative": 0.1})
    for number, value in enumerate((1.0, 1.05, 1.2)):
        await trial.answer()
        await trial.settle(number, value)
    assert trial.counts() == {"agreed": 2, "disagreed": 1}
    assert trial.rollout.worst["relative"] == pytest.approx(0.2)
    figures = trial.rollout.figures()
    assert (figures.requests, figures.compared, figures.stable_requests) == (3, 3, 3)
    assert figures.stable_p99_s == pytest.approx(0.001, rel=0.1)
    assert figures.candidate_p99_s == pytest.approx(0.002, rel=0.1)


async def test_large_outputs_are_compared_by_a_thread() -> None:
    trial = Trial()
    may_compare = Event()
    trial.threads.submit(may_compare.wait, 30)
    await trial.answer(columns=MAX_COMPARED_INLINE)
    await trial.settle(0, 1.0)
    assert trial.counts() == {}
    may_compare.set()
    trial.threads.shutdown()  # returns after the comparison
    for _ in range(3):  # from the thread to the loop, and to the rollout
        await asyncio.sleep(0)
    assert trial.counts() == {"agreed": 1}


async def test_copies_are_bounded_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial()
    for _ in range(MAX_COPIES + 3):
        await trial.answer()
    assert (len(trial.candidate.submitted), trial.counts()) == (MAX_COPIES, {"shed": 3})
    await trial.settle(0, 1.0)
    await trial.answer()
    assert len(trial.candidate.submitted) == MAX_COPIES + 1
    assert MAX_COPIED_BYTES == 64 * 1024 * 1024
    monkeypatch.setattr(live, "MAX_COPIED_BYTES", 63)
    small = Trial()
    await small.answer(columns=8)  # 32 bytes of input and as many of output
    await small.answer(columns=7)
    assert (len(small.candidate.submitted), small.counts()) == (1, {"shed": 1})
    await small.settle(0, 1.0)
    await small.answer(columns=7)
    assert (len(small.candidate.submitted), small.counts()) == (2, {"shed": 1, "agreed": 1})


async def test_copy_is_shed_while_requests_wait_and_counts_as_no_request() -> None:
    trial = Trial()
    for waiting in trial.versions.values():
        waiting.queued_rows = 1
        await trial.answer()
        waiting.queued_rows = 0
    for kind in (ErrorKind.OVERLOADED, ErrorKind.DEADLINE, ErrorKind.NOT_READY):
        trial.candidate.problem = ServeError(kind, "busy")
        await trial.answer()
    del trial.versions["2"]
    assert (trial.counts(), trial.rollout.figures().requests) == ({"shed": 5}, 0)


async def test_answers_from_the_response_cache_are_shed_and_have_no_times() -> None:
    shadow = Trial()
    await shadow.answer(run_ns=0)
    assert (len(shadow.candidate.submitted), shadow.counts()) == (0, {"shed": 1})
    await shadow.answer()
    shadow.candidate.submitted[0].complete((np.ones((1, 4), np.float32),))  # from the candidate's cache
    await asyncio.sleep(0)
    assert shadow.counts() == {"shed": 1, "agreed": 1}
    canary = Trial(mode="canary")
    await canary.answer(run_ns=0)
    canary.rollout.candidate_answered(timing_of(0))
    assert canary.counts() == {"answered": 1}
    for figures in (shadow.rollout.figures(), canary.rollout.figures()):
        assert (figures.stable_requests, figures.candidate_requests) == (0, 0)
        assert (figures.stable_p99_s, figures.candidate_p99_s) == (None, None)


async def test_copy_that_fails_counts_as_failed_and_ends_the_rollout_by_rule() -> None:
    trial = Trial(rules={"min_requests": 2, "max_error_rate": 0.5})
    await trial.answer()
    trial.candidate.submitted[0].fail(ServeError(ErrorKind.INTERNAL, "the run failed"))
    trial.candidate.problem = ServeError(ErrorKind.INVALID_INPUT, "another input")
    assert trial.decisions == []
    await trial.answer()
    (decision,) = trial.decisions
    assert decision == Decision("rolled_back", "max_error_rate: expected at most 0.5, got 2 of 2 requests")
    await trial.answer()
    assert trial.counts() == {"failed": 2}


async def test_copies_that_end_after_the_decision_decide_nothing_more() -> None:
    trial = Trial(rules={"min_requests": 1, "max_error_rate": 0})
    for _ in range(3):
        await trial.answer()
    for run in trial.candidate.submitted:
        run.fail(ServeError(ErrorKind.INTERNAL, "the run failed"))
    assert len(trial.decisions) == 1
    assert trial.counts() == {"failed": 3}


async def test_only_the_share_of_requests_for_stable_is_copied() -> None:
    trial = Trial(draw=0.5)
    await trial.answer()
    trial.drawn = 0.49
    for version in ("", "stable"):
        await trial.answer(version=version)
    for version in ("1", "canary"):
        await trial.answer(version=version)
    assert len(trial.candidate.submitted) == 2


async def test_sticky_header_takes_one_side_on_both_protocols_and_the_parameter_has_precedence() -> None:
    trial = Trial(mode="canary", sticky="user", sticky_header="X-User")
    request = request_of(np.zeros((1, 4), np.float32))
    users = [f"{name} {number}" for name in ("user", "José") for number in range(40)]
    trial.drawn = 0.99  # a request without a value stays with stable
    by_http = [trial.rollout.candidate_for(request, [(b"a", b"b"), (b"x-user", user.encode())]) for user in users]
    by_grpc = [trial.rollout.candidate_for(request, (("a", "b"), ("x-user", user))) for user in users]
    by_parameter = [
        trial.rollout.candidate_for(request_of(np.zeros((1, 4), np.float32), user=user), [(b"x-user", b"same")])
        for user in users
    ]
    assert by_http == by_grpc == by_parameter
    assert set(by_http) == {"", "2"}
    assert trial.rollout.candidate_for(request, [(b"a", b"user 1")]) == ""


async def test_canary_takes_the_share_and_no_other_request() -> None:
    trial = Trial(mode="canary", sticky="user")
    array = np.zeros((1, 4), np.float32)
    assert trial.rollout.candidate_for(request_of(array), ()) == "2"
    assert trial.rollout.candidate_for(request_of(array, "1"), ()) == ""
    trial.drawn = 0.5
    assert trial.rollout.candidate_for(request_of(array, "stable"), ()) == ""
    chosen = {trial.rollout.candidate_for(request_of(array, user=str(number)), ()) for number in range(20)}
    assert chosen == {"", "2"}
    trial.rollout.candidate_failed(ServeError(ErrorKind.OVERLOADED, "busy"))
    trial.rollout.candidate_failed(ServeError(ErrorKind.REJECTED_BY_MODEL, "bad"))
    trial.rollout.candidate_answered(timing_of(1000))
    await trial.answer()
    assert trial.counts() == {"answered": 1, "failed": 1, "rejected": 1}
    assert trial.candidate.submitted == []
    assert trial.rollout.figures().stable_requests == 1


@pytest.mark.parametrize("rejected", [0, 1])
async def test_candidate_is_promoted_after_the_number_of_requests_that_it_answered(rejected: int) -> None:
    trial = Trial(mode="canary", rules={"min_requests": 1, "promote_after": 21})
    for number in range(21):
        assert trial.decisions == [], number
        trial.rollout.candidate_answered(timing_of(1000))
        for _ in range(rejected):
            trial.rollout.candidate_failed(ServeError(ErrorKind.OVERLOADED, "busy"))
    (decision,) = trial.decisions
    assert (decision.result, decision.reason.startswith("21 requests kept the rules")) == ("promoted", True)
