"""One request of an ensemble: order of steps, failures, cancellation, deadlines and memory, with fake members."""

import asyncio
import gc
import weakref
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from fakes.served import FakeVersion
from ortserve.batching.cached_runs import CachedRuns
from ortserve.batching.response_cache import ResponseCache
from ortserve.config.model import LoadOptions, make_model_options
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import NO_SCHEDULING, InflightRequest, Scheduling, Terms
from ortserve.core.request import RequestedOutput
from ortserve.core.sequence import SequencePart
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import is_absent
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.ensemble.interface import Member, resolve_signature
from ortserve.registry.ensemble.plan import make_plan
from ortserve.registry.ensemble.served_ensemble import ServedEnsemble
from ortserve.registry.ensemble.turns import SequenceTurns
from ortserve.registry.repository.configuration import Configuration
from ortserve.telemetry.readings import CacheCounts
from ortserve.telemetry.series import ModelMetrics

X = np.array([[1, 2]], np.float32)
Steps = Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]]


class FakeMember(FakeVersion):
    """Stores its requests until the test settles them."""

    is_busy = False

    def __init__(
        self,
        name: str,
        inputs: Sequence[str] = ("a",),
        outputs: Sequence[str] = ("b",),
        *,
        takes_sequences: bool = False,
    ) -> None:
        signature = ModelSignature(
            tuple(TensorSpec(each, DataType.FP32, (-1, 2)) for each in inputs),
            tuple(TensorSpec(each, DataType.FP32, (-1, 2)) for each in outputs),
        )
        super().__init__(name, signature, takes_sequences=takes_sequences)
        self.requests: list[InflightRequest] = []
        self.parts: list[SequencePart] = []
        self.ended: list[int | str] = []
        self.asked: list[tuple[int, int | None, int, int | None]] = []
        self.rejection: Exception | None = None
        self.has_pipelined = False

    def terms(
        self,
        received_ns: int,
        timeout_ns: int | None = None,
        scheduling: Scheduling = NO_SCHEDULING,
        outputs: Sequence[RequestedOutput] = (),
    ) -> Terms:
        self.asked.append((received_ns, timeout_ns, scheduling.priority, scheduling.queue_timeout_ns))
        return Terms()

    def submit(self, request: InflightRequest, terms: Terms) -> None:
        if self.rejection is not None:
            raise self.rejection
        self.requests.append(request)

    def submit_part(self, request: InflightRequest, terms: Terms, part: SequencePart) -> None:
        self.parts.append(part)
        self.submit(request, terms)

    def end_sequence(self, sequence_id: int | str, computed_ns: int | None = None) -> None:
        self.ended.append(sequence_id)

    def is_pipelined(self, sequence_id: int | str) -> bool:
        return self.has_pipelined

    def answer(self, *outputs: np.ndarray) -> None:
        request = self.requests.pop(0)
        timing = request.timing
        timing.queued_ns, timing.taken_ns, timing.staged_ns, timing.computed_ns = 1, 2, 4, 8
        request.complete(outputs)


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1000

    def __call__(self) -> int:
        return self.now_ns


def serve(
    members: Mapping[str, FakeMember],
    outputs: Sequence[str],
    steps: Steps,
    clock: Clock,
    turns: SequenceTurns | None = None,
    most: int = 0,
    cached: CachedRuns | None = None,
) -> ServedEnsemble:
    given: dict[str, Any] = {
        "inputs": {"x": {}},
        "outputs": {name: {} for name in outputs},
        "ensemble": {"steps": [{"model": model, "inputs": read, "outputs": made} for model, read, made in steps]},
    }
    given["ensemble"]["max_inflight_requests"] = most
    configuration = Configuration(make_model_options(given, LoadOptions(), "e"))
    plan = make_plan("e", configuration.options)
    chosen = tuple(members[step.model] for step in plan.steps)
    signature = resolve_signature("e", configuration.options, plan, [Member(m.name, m.signature, None) for m in chosen])
    return ServedEnsemble(
        signature,
        plan,
        chosen,
        ModelMetrics("e", "1"),
        clock,
        configuration=configuration,
        output_labels={},
        cached=cached,
        turns=turns or SequenceTurns(),
    )


def submit(
    served: ServedEnsemble,
    clock: Clock,
    *,
    timeout_ns: int | None = None,
    priority: int = 0,
    queue_timeout_ns: int | None = None,
    outputs: Sequence[str] = (),
) -> InflightRequest:
    request = InflightRequest(Timing(clock()), (X,), len(X))
    wanted = [RequestedOutput(name) for name in outputs]
    terms = served.terms(clock(), timeout_ns, Scheduling(priority, queue_timeout_ns), wanted)
    served.submit(request, terms)
    return request


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def members() -> dict[str, FakeMember]:
    return {
        "l": FakeMember("l"),
        "r": FakeMember("r"),
        "join": FakeMember("join", ("a", "b"), ("c",)),
    }


DIAMOND: Steps = [
    ("l", {"a": "x"}, {"b": "p"}),
    ("r", {"a": "x"}, {"b": "q"}),
    ("join", {"a": "p", "b": "q"}, {"c": "y"}),
]


def test_independent_steps_run_side_by_side_and_pass_tensors_without_copies(
    members: dict[str, FakeMember], clock: Clock
) -> None:
    served = serve(members, ["y"], DIAMOND, clock)
    request = submit(served, clock)
    assert all(np.shares_memory(members[name].requests[0].inputs[0], X) for name in ("l", "r"))
    p, q, y = X + 1, X + 2, X + 3
    members["r"].answer(q)
    assert not members["join"].requests
    members["l"].answer(p)
    given = members["join"].requests[0].inputs
    assert given[0] is p
    assert given[1] is q
    members["join"].answer(y)
    assert request.take_outputs()[0] is y
    assert [sum(series.counts) for series in members["join"].metrics.answered.values()] == [1]


def test_only_steps_with_sequences_get_the_part_of_a_sequence(clock: Clock) -> None:
    plain, follows = FakeMember("plain"), FakeMember("follows", takes_sequences=True)
    steps: Steps = [("plain", {"a": "x"}, {"b": "p"}), ("follows", {"a": "p"}, {"b": "y"})]
    served = serve({"plain": plain, "follows": follows}, ["y"], steps, clock)
    assert served.takes_sequences
    part = SequencePart(5, is_start=True)
    request = InflightRequest(Timing(clock()), (X,), len(X))
    served.submit_part(request, served.terms(clock()), part)
    plain.answer(X)
    assert (plain.parts, follows.parts) == ([], [part])


def test_steps_with_sequences_run_for_each_request_of_a_sequence(clock: Clock) -> None:
    members = {name: FakeMember(name, takes_sequences=name != "plain") for name in ("plain", "one", "other")}
    steps: Steps = [(name, {"a": "x"}, {"b": name}) for name in members]
    served = serve(members, list(members), steps, clock)
    for part in (SequencePart(5, is_start=True), SequencePart(0)):
        request = InflightRequest(Timing(clock()), (X,), len(X))
        served.submit_part(request, served.terms(clock(), outputs=[RequestedOutput("one")]), part)
        assert not members["plain"].requests
        assert [len(members[name].requests) for name in ("one", "other")] == ([1, 1] if part.id else [1, 0])
        for member in members.values():
            if member.requests:
                assert not request.is_settled, "an error of any step must reach the caller"
                member.answer(X)
        assert [array is X for array in request.take_outputs()] == [False, True, False]
    assert members["other"].parts == [SequencePart(5, is_start=True)]


class SequenceStage:
    """An ensemble of a plain step and a step with sequences; the test answers their requests."""

    def __init__(self, clock: Clock) -> None:
        self.plain, self.follows = FakeMember("plain"), FakeMember("follows", takes_sequences=True)
        self.clock = clock
        self.turns = SequenceTurns()
        self.served = self.load()

    def load(self) -> ServedEnsemble:
        steps: Steps = [("plain", {"a": "x"}, {"b": "p"}), ("follows", {"a": "p"}, {"b": "y"})]
        return serve({"plain": self.plain, "follows": self.follows}, ["y"], steps, self.clock, self.turns)

    def submit(
        self, value: float, sequence_id: int | str = 5, timeout_ns: int | None = None, is_start: bool = False
    ) -> InflightRequest:
        request = InflightRequest(Timing(self.clock()), (np.full((1, 2), value, np.float32),), 1)
        terms = self.served.terms(self.clock(), timeout_ns)
        self.served.submit_part(request, terms, SequencePart(sequence_id, is_start))
        return request

    async def answer(self) -> None:
        """Answer each pending request of a step, the last one first, as batches of other shapes may do."""
        for member in (self.plain, self.follows):
            for request in member.requests[::-1]:
                member.requests.remove(request)
                timing = request.timing
                timing.queued_ns = timing.taken_ns = timing.staged_ns = timing.computed_ns = self.clock()
                request.complete(request.inputs)
        await asyncio.sleep(0)


async def test_requests_of_a_sequence_do_not_overtake_each_other(clock: Clock) -> None:
    stage = SequenceStage(clock)
    ended: list[float] = []
    for value, sequence_id in ((1, 5), (2, 5), (3, 5), (10, "other")):
        stage.submit(value, sequence_id).on_settled = lambda request: ended.append(request.take_outputs()[0][0, 0])
    assert len(stage.plain.requests) == 2
    closing = asyncio.create_task(stage.served.close())
    clock.now_ns = 5000
    for _ in range(3):
        await stage.answer()
    assert ended == [1, 10, 2, 3]
    await asyncio.wait_for(closing, 1)


async def test_requests_of_a_sequence_do_not_overtake_those_of_the_load_before(clock: Clock) -> None:
    stage = SequenceStage(clock)
    replaced = stage.served
    ended: list[float] = []
    requests = [stage.submit(1), stage.submit(2)]
    stage.served = stage.load()
    closing = asyncio.create_task(replaced.close())
    requests += [stage.submit(3), stage.submit(4)]
    for request in requests:
        request.on_settled = lambda one: ended.append(one.take_outputs()[0][0, 0])
    for _ in range(3):
        await stage.answer()
    assert ended == [1, 2, 3]
    await asyncio.wait_for(closing, 1)
    await stage.answer()
    assert ended == [1, 2, 3, 4]
    await asyncio.wait_for(stage.served.close(), 1)


async def test_a_cancelled_request_cancels_those_of_the_next_load_behind_it(clock: Clock) -> None:
    stage = SequenceStage(clock)
    replaced = stage.served
    stage.submit(1)
    second = stage.submit(2)
    stage.served = stage.load()
    third = stage.submit(3)
    second.cancel()
    assert third.is_settled
    await stage.answer()
    for served in (replaced, stage.served):
        await asyncio.wait_for(served.close(), 1)


async def test_the_wait_for_earlier_requests_counts_as_queue(clock: Clock) -> None:
    stage = SequenceStage(clock)
    stage.submit(1)
    second = stage.submit(2)
    clock.now_ns = 5000
    await stage.answer()
    await stage.answer()
    assert second.timing.phases_ns()[:2] == (0, 4000)


async def test_metrics_count_the_requests_that_wait_for_earlier_ones(clock: Clock) -> None:
    stage = SequenceStage(clock)
    stage.submit(1)
    assert waiting(stage.served) == (0, 0)
    requests = [stage.submit(value) for value in (2, 3, 4)]
    assert waiting(stage.served) == (3, 3)
    requests[1].cancel()
    assert waiting(stage.served) == (2, 2), "the fourth depends on the third, and has left"
    for _ in range(4):
        await stage.answer()
    assert waiting(stage.served) == (0, 0)
    await asyncio.wait_for(stage.served.close(), 1)


def waiting(served: ServedEnsemble) -> tuple[int, int]:
    """The rows and the requests that wait in the ensemble, as metrics show them."""
    numbers = served.metrics.batching.read()
    assert served.queued_rows == numbers.queue_rows
    return numbers.queue_rows, numbers.queue_requests


async def test_requests_behind_a_cancelled_one_of_their_sequence_are_cancelled(clock: Clock) -> None:
    stage = SequenceStage(clock)
    first, second, third = (stage.submit(value) for value in (1, 2, 3))
    second.cancel()
    with pytest.raises(ServeError, match="an earlier request of sequence 5 was cancelled") as error:
        third.take_outputs()
    assert error.value.kind is ErrorKind.CANCELLED
    fourth, fifth = stage.submit(4), stage.submit(5)
    fourth.cancel()
    assert fifth.is_settled
    stage.plain.requests.pop().fail(ServeError(ErrorKind.INTERNAL, "no"))
    assert first.is_settled
    sixth = stage.submit(6)
    assert stage.follows.ended == []
    await asyncio.sleep(0)
    assert stage.follows.ended == [5], "the sequence ends when the turn of the second comes"
    await asyncio.sleep(0)
    seventh = stage.submit(7)
    stage.plain.answer(X)
    stage.follows.answer(X * 6)
    assert sixth.take_outputs()[0][0, 0] == 6
    seventh.cancel()  # it is next, but has not started
    await asyncio.sleep(0)
    assert stage.follows.ended == [5, 5]
    await asyncio.wait_for(stage.served.close(), 1)


@pytest.mark.parametrize(
    ("step", "kind", "is_followed", "ends"),
    [
        ("plain", None, False, True),
        ("plain", ErrorKind.DEADLINE, False, True),
        ("plain", ErrorKind.OVERLOADED, False, False),
        ("plain", ErrorKind.OVERLOADED, True, True),
        ("plain", ErrorKind.INTERNAL, True, False),
        ("follows", None, True, False),
        ("follows", ErrorKind.INTERNAL, True, False),
        ("after", None, True, False),
        ("after", ErrorKind.OVERLOADED, False, True),
        ("after", ErrorKind.INTERNAL, False, True),
    ],
)
async def test_a_sequence_ends_with_a_request_that_its_model_lacks_or_that_cannot_be_sent_again(
    clock: Clock, step: str, kind: ErrorKind | None, is_followed: bool, ends: bool
) -> None:
    members = {name: FakeMember(name, takes_sequences=name == "follows") for name in ("plain", "follows", "after")}
    steps: Steps = [
        ("plain", {"a": "x"}, {"b": "p"}),
        ("follows", {"a": "p"}, {"b": "q"}),
        ("after", {"a": "q"}, {"b": "y"}),
    ]
    served = serve(members, ["y"], steps, clock)
    requests = [InflightRequest(Timing(clock()), (X,), 1) for _ in range(1 + is_followed)]
    for request in requests:
        served.submit_part(request, served.terms(clock()), SequencePart(5))
    for name, member in members.items():
        if name == step:
            break
        member.answer(X)
    if kind is None:
        requests[0].cancel()
    else:
        members[step].requests[0].fail(ServeError(kind, "no"))
    assert requests[0].is_settled
    assert members["follows"].ended == [5] * ends


async def test_the_last_request_ends_no_sequence_that_begins_after_it(clock: Clock) -> None:
    """Another sequence with the id may have begun in the member when a later step of the last request fails."""
    members = {name: FakeMember(name, takes_sequences=name == "follows") for name in ("follows", "after")}
    steps: Steps = [("follows", {"a": "x"}, {"b": "q"}), ("after", {"a": "q"}, {"b": "y"})]
    served = serve(members, ["y"], steps, clock)
    for is_end in (True, False):
        request = InflightRequest(Timing(clock()), (X,), 1)
        served.submit_part(request, served.terms(clock()), SequencePart(5, is_end=is_end))
        members["follows"].answer(X)
        members["after"].requests.pop().fail(ServeError(ErrorKind.INTERNAL, "no"))
        assert request.is_settled
        assert members["follows"].ended == [5] * (not is_end)


async def test_a_first_step_that_is_rejected_after_its_deadline_ends_the_sequence(clock: Clock) -> None:
    stage = SequenceStage(clock)
    stage.plain.rejection = ServeError(ErrorKind.DEADLINE, "late")
    with pytest.raises(ServeError, match="late"):
        stage.submit(1)
    assert stage.follows.ended == [5]


async def test_a_request_that_its_model_rejects_at_once_can_be_sent_again(clock: Clock) -> None:
    stage = SequenceStage(clock)
    stage.follows.rejection = ServeError(ErrorKind.OVERLOADED, "full")
    request = stage.submit(1)
    stage.plain.answer(X)
    with pytest.raises(ServeError, match="full"):
        request.take_outputs()
    assert stage.follows.ended == []


async def test_a_rejected_request_does_not_hold_up_its_sequence(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SequenceStage(clock)
    first, second, third = (stage.submit(value) for value in (1, 2, 3))
    stage.plain.rejection = ServeError(ErrorKind.OVERLOADED, "full")
    await stage.answer()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert first.take_outputs()[0][0, 0] == 1
    for request in (second, third):
        with pytest.raises(ServeError, match="full"):
            request.take_outputs()
    await asyncio.wait_for(stage.served.close(), 1)


async def test_a_sequence_ends_after_the_requests_that_wait_if_one_behind_them_is_rejected(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = SequenceStage(clock)
    requests = [stage.submit(value) for value in (1, 2, 3)]
    monkeypatch.setattr("ortserve.registry.ensemble.turns.MAX_WAITING", 2)
    for _ in range(2):  # the second time, the queue has room
        with pytest.raises(ServeError, match="requests wait for earlier requests of their sequences"):
            stage.submit(4)
        await stage.answer()
    assert stage.follows.ended == []
    await stage.answer()
    assert [request.take_outputs()[0][0, 0] for request in requests] == [1, 2, 3]
    assert stage.follows.ended == [5]
    stage.submit(5)
    await stage.answer()
    assert stage.follows.ended == [5]
    await asyncio.wait_for(stage.served.close(), 1)


@pytest.mark.parametrize("has_pipelined", [True, False])
async def test_a_request_rejected_before_its_model_ends_the_sequence_of_a_client_that_has_sent_ahead(
    clock: Clock, has_pipelined: bool
) -> None:
    stage = SequenceStage(clock)
    stage.follows.has_pipelined = has_pipelined
    stage.plain.rejection = ServeError(ErrorKind.OVERLOADED, "full")
    with pytest.raises(ServeError, match="full"):
        stage.submit(1)
    assert stage.follows.ended == [5] * has_pipelined


async def test_a_request_that_waits_for_an_earlier_one_fails_at_its_deadline(clock: Clock) -> None:
    stage = SequenceStage(clock)
    first = stage.submit(1)
    late = stage.submit(2, timeout_ns=10_000_000)
    with pytest.raises(ServeError, match=r"^in ensemble 'e', Request timeout expired: .* earlier requests") as error:
        async with asyncio.timeout(10):
            await late
    assert error.value.kind is ErrorKind.DEADLINE
    assert not first.is_settled
    assert stage.follows.ended == []
    for _ in range(3):
        await stage.answer()
    assert stage.follows.ended == [5], "the sequence ends where it lacks a request"
    await asyncio.wait_for(stage.served.close(), 1)


async def test_a_start_behind_a_cancelled_request_of_its_sequence_runs(clock: Clock) -> None:
    stage = SequenceStage(clock)
    stage.submit(1)
    second, third = stage.submit(2), stage.submit(3)
    start, fifth = stage.submit(4, is_start=True), stage.submit(5)
    second.cancel()
    assert third.is_settled
    for _ in range(4):
        await stage.answer()
    assert [request.take_outputs()[0][0, 0] for request in (start, fifth)] == [4, 5]
    assert stage.follows.ended == [5]
    await asyncio.wait_for(stage.served.close(), 1)


async def test_a_cancelled_request_with_many_behind_it_holds_no_turn_of_the_loop_for_long(clock: Clock) -> None:
    stage = SequenceStage(clock)
    stage.submit(1)
    second = stage.submit(2)
    behind = [stage.submit(3) for _ in range(100)]
    second.cancel()
    assert 0 < sum(request.is_settled for request in behind) <= 20
    for _ in range(10):
        await asyncio.sleep(0)
    assert all(request.is_settled for request in behind)
    await stage.answer()
    await stage.answer()
    await asyncio.wait_for(stage.served.close(), 1)


async def test_requests_that_cannot_begin_let_the_next_ones_of_their_sequence_run(clock: Clock) -> None:
    """As without memory, which ends a request at any place."""
    stage = SequenceStage(clock)
    stage.submit(1)
    waiting, third = stage.submit(2), stage.submit(3)
    waiting.inputs = ()
    await stage.answer()
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="zip"):
        waiting.take_outputs()
    await stage.answer()
    assert third.take_outputs()[0][0, 0] == 3
    with pytest.raises(ValueError, match="zip"):
        stage.served.submit_part(InflightRequest(Timing(clock())), stage.served.terms(clock()), SequencePart(5))
    last = stage.submit(4)
    await stage.answer()
    assert last.take_outputs()[0][0, 0] == 4
    await asyncio.wait_for(stage.served.close(), 1)


async def test_a_model_learns_that_a_request_has_waited_for_an_earlier_one(clock: Clock) -> None:
    stage = SequenceStage(clock)
    stage.submit(1)
    stage.submit(2)
    await stage.answer()
    stage.plain.rejection = ServeError(ErrorKind.OVERLOADED, "full")
    third = stage.submit(3)
    await stage.answer()
    assert [part.is_ahead for part in stage.follows.parts] == [False, True]
    await asyncio.sleep(0)
    assert third.is_settled
    assert stage.follows.ended == [5], "nothing waits behind it, but more may be on the way"


CHAIN: Steps = [("l", {"a": "x"}, {"b": "p"}), ("r", {"a": "p"}, {"b": "y"})]


async def answer_one(member: FakeMember) -> None:
    """Answer the first request of a member with its input, and let waiting requests continue."""
    member.answer(*member.requests[0].inputs)
    await asyncio.sleep(0)


async def test_a_step_has_at_most_so_many_requests_under_way(members: dict[str, FakeMember], clock: Clock) -> None:
    served = serve(members, ["y"], CHAIN, clock, most=2)
    first, second = members["l"], members["r"]
    answered: list[int] = []
    for number in range(20):
        submit(served, clock).on_settled = lambda _, number=number: answered.append(number)
    most_between = 0
    while len(answered) < 20:
        assert len(first.requests) <= 2
        assert len(second.requests) <= 2
        begun = len(first.asked)
        most_between = max(most_between, begun - len(answered) - len(first.requests) - len(second.requests))
        await answer_one(first if first.requests else second)
    assert answered == list(range(20)), "in the order of arrival"
    assert most_between == 3, "as many as were under way, and one that has not started"
    await asyncio.wait_for(served.close(), 1)


async def test_requests_that_wait_for_a_step_can_be_cancelled_and_rejected(
    members: dict[str, FakeMember], clock: Clock
) -> None:
    served = serve(members, ["y"], CHAIN, clock, most=1)
    first, second = members["l"], members["r"]
    requests = [submit(served, clock)]
    await answer_one(first)
    requests.append(submit(served, clock))
    await answer_one(first)
    requests += [submit(served, clock) for _ in range(4)]
    assert [len(member.asked) for member in (first, second)] == [2, 1], "the second waits between, no other begins"
    assert waiting(served) == (5, 5)
    requests[1].cancel()
    requests[2].cancel()
    await asyncio.sleep(0)
    assert len(first.requests) == 1, "the next request may begin"
    first.rejection = ServeError(ErrorKind.OVERLOADED, "full")
    await answer_one(first)
    await answer_one(second)
    with pytest.raises(ServeError, match="in ensemble 'e', full"):
        requests[4].take_outputs()
    second.rejection = ValueError("odd")
    first.rejection = None
    await answer_one(second)
    requests.append(submit(served, clock))
    await answer_one(first)
    second.rejection = None
    with pytest.raises(ValueError, match="odd"):
        requests[-1].take_outputs()
    requests.append(submit(served, clock))
    await answer_one(first)
    await answer_one(second)
    requests[-1].take_outputs()
    assert waiting(served) == (0, 0)
    await asyncio.wait_for(served.close(), 1)


async def test_the_wait_for_a_step_counts_as_queue_and_is_bounded(
    members: dict[str, FakeMember], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ortserve.registry.ensemble.limits.MAX_WAITING", 1)
    served = serve(members, ["y"], CHAIN, clock, most=1)
    requests = [submit(served, clock) for _ in range(3)]
    with pytest.raises(ServeError, match="1 requests wait for steps with max_inflight_requests 1") as error:
        submit(served, clock)
    assert error.value.kind is ErrorKind.OVERLOADED
    clock.now_ns = 5000
    for member in (members["l"], members["r"]) * 3:
        await answer_one(member)
    waits_ns = [request.timing.taken_ns - request.timing.queued_ns for request in requests]
    assert waits_ns == [2, 4000, 4000], "2: 1 ns in the queue of each member"
    await asyncio.wait_for(served.close(), 1)


async def test_a_model_that_rejects_all_waiting_requests_holds_no_turn_of_the_loop_for_long(
    members: dict[str, FakeMember], clock: Clock
) -> None:
    """As one that has lost its last instance. Each rejected request takes about 0.1 ms, and 16,384 may wait."""
    served = serve(members, ["y"], CHAIN, clock, most=1)
    requests = [submit(served, clock) for _ in range(200)]
    first = members["l"]
    first.rejection = ServeError(ErrorKind.NOT_READY, "no instance left")
    first.answer(*first.requests[0].inputs)
    failed = 0
    while failed < 199:
        await asyncio.sleep(0)
        before, failed = failed, sum(request.is_settled for request in requests)
        assert before < failed <= before + 20
    members["r"].answer(X)
    assert all(request.is_settled for request in requests)
    await asyncio.wait_for(served.close(), 1)


async def test_all_waiting_requests_that_fit_start_soon(members: dict[str, FakeMember], clock: Clock) -> None:
    served = serve(members, ["y"], CHAIN, clock, most=20)
    first = members["l"]
    for _ in range(50):
        submit(served, clock)
    assert len(first.requests) == 20
    for _ in range(20):
        first.answer(X)
    for _ in range(4):
        await asyncio.sleep(0)
    assert len(first.requests) == 20


async def test_requests_that_wait_fail_at_their_deadlines(members: dict[str, FakeMember], clock: Clock) -> None:
    """One request waits to start, one for its second step. The model handles a request that is in a step."""
    served = serve(members, ["y"], CHAIN, clock, most=1)
    first, second = members["l"], members["r"]
    deadline_ns = 100_000_000
    in_step, between = submit(served, clock), submit(served, clock, timeout_ns=deadline_ns)
    await answer_one(first)
    await answer_one(first)
    to_begin = submit(served, clock, timeout_ns=deadline_ns)
    patient = submit(served, clock)
    assert not between.is_settled
    for late in (between, to_begin):
        with pytest.raises(ServeError, match=r"^in ensemble 'e', Request timeout expired: .* max_inflight") as error:
            async with asyncio.timeout(10):
                await late
        assert error.value.kind is ErrorKind.DEADLINE
    assert not in_step.is_settled
    for member in (second, first, second):
        await answer_one(member)
    assert in_step.is_settled
    patient.take_outputs()
    await asyncio.wait_for(served.close(), 1)


async def test_a_step_that_is_under_way_keeps_its_request_past_the_deadline(
    members: dict[str, FakeMember], clock: Clock
) -> None:
    """The member handles the deadline. The request waited before, so that its deadline was watched."""
    served = serve(members, ["y"], CHAIN, clock, most=1)
    submit(served, clock)
    request = submit(served, clock, timeout_ns=100_000_000)
    await answer_one(members["l"])
    await answer_one(members["r"])
    await answer_one(members["l"])
    assert len(members["r"].requests) == 1
    await asyncio.sleep(0.11)  # timers fire in the order of their times, so the deadline's has fired
    await answer_one(members["r"])
    request.take_outputs()
    await asyncio.wait_for(served.close(), 1)


async def test_a_step_with_sequences_has_no_limit(clock: Clock) -> None:
    """One of its requests may wait for the end of another sequence, whose requests pass through the same step."""
    members = {"plain": FakeMember("plain"), "follows": FakeMember("follows", takes_sequences=True)}
    steps: Steps = [("plain", {"a": "x"}, {"b": "p"}), ("follows", {"a": "p"}, {"b": "y"})]
    served = serve(members, ["y"], steps, clock, most=1)
    for number in range(1, 4):
        request = InflightRequest(Timing(clock()), (X,), 1)
        served.submit_part(request, served.terms(clock()), SequencePart(number))
    for _ in range(3):
        await answer_one(members["plain"])
    assert len(members["follows"].requests) == 3


def test_tensors_are_dropped_after_their_last_reader(members: dict[str, FakeMember], clock: Clock) -> None:
    served = serve(members, ["y"], DIAMOND, clock)
    request = submit(served, clock)
    p = X + 1
    seen = weakref.ref(p)
    members["l"].answer(p)
    members["r"].answer(X + 2)
    members["join"].answer(X + 3)
    del p
    gc.collect()
    assert seen() is None
    assert request.is_settled


async def test_a_failed_step_fails_the_request_at_once_and_cancels_the_others(
    members: dict[str, FakeMember], clock: Clock
) -> None:
    served = serve(members, ["y"], DIAMOND, clock)
    request = submit(served, clock)
    other = members["r"].requests[0]
    members["l"].requests[0].timing.taken_ns = 7
    members["l"].requests[0].fail(ServeError(ErrorKind.OVERLOADED, "Exceeds maximum queue size", retry_after_s=1))
    assert other.is_settled
    with pytest.raises(ServeError) as error:
        request.take_outputs()
    assert error.value.message == "in ensemble 'e', Exceeds maximum queue size (model 'l')"
    assert (error.value.kind, error.value.retry_after_s) == (ErrorKind.OVERLOADED, 1)
    assert request.timing.taken_ns == 7, "a run was started, so the request does not count as rejected"
    await asyncio.wait_for(served.close(), 1)


async def test_a_rejected_first_step_rejects_the_request(members: dict[str, FakeMember], clock: Clock) -> None:
    served = serve(members, ["y"], DIAMOND, clock)
    members["r"].rejection = ServeError(ErrorKind.OVERLOADED, "model 'r' is full")
    with pytest.raises(ServeError, match=r"^in ensemble 'e', model 'r' is full$"):
        submit(served, clock)
    assert members["l"].requests[0].is_settled
    await asyncio.wait_for(served.close(), 1)


def test_a_rejected_later_step_fails_the_request(members: dict[str, FakeMember], clock: Clock) -> None:
    served = serve(members, ["y"], DIAMOND, clock)
    members["join"].rejection = ServeError(ErrorKind.DEADLINE, "Request timeout expired")
    request = submit(served, clock)
    members["l"].answer(X)
    members["r"].answer(X)
    with pytest.raises(ServeError) as error:
        request.take_outputs()
    assert error.value.kind is ErrorKind.DEADLINE


async def test_no_step_starts_after_a_cancellation(members: dict[str, FakeMember], clock: Clock) -> None:
    served = serve(members, ["y"], DIAMOND, clock)
    request = submit(served, clock)
    running = members["l"].requests[0]
    request.cancel()
    assert running.is_settled
    members["l"].answer(X)  # the batch has already run
    members["r"].answer(X)
    assert not members["join"].requests
    await asyncio.wait_for(served.close(), 1)


def test_each_step_has_the_rest_of_the_deadline_and_the_requests_parameters(
    members: dict[str, FakeMember], clock: Clock
) -> None:
    served = serve(members, ["y"], DIAMOND, clock)
    submit(served, clock, timeout_ns=500, priority=2, queue_timeout_ns=70)
    assert members["l"].asked == [(1000, 500, 2, 70)]
    clock.now_ns = 1300
    members["l"].answer(X)
    members["r"].answer(X)
    assert members["join"].asked == [(1300, 200, 2, 70)]


def test_only_needed_steps_run(members: dict[str, FakeMember], clock: Clock) -> None:
    served = serve(members, ["y", "p"], DIAMOND, clock)
    request = submit(served, clock, outputs=["p"])
    assert not members["r"].requests
    p = X + 1
    members["l"].answer(p)
    outputs = request.take_outputs()
    assert outputs[served.signature.output_index["p"]] is p


async def test_members_stay_open_until_the_ensemble_is_closed(members: dict[str, FakeMember], clock: Clock) -> None:
    served = serve(members, ["y"], DIAMOND, clock)
    request = submit(served, clock)
    closing = [asyncio.create_task(member.close()) for member in members.values()]
    ending = asyncio.create_task(served.close())
    await asyncio.sleep(0)
    assert not any(task.done() for task in (*closing, ending))
    members["l"].answer(X)
    members["r"].answer(X)
    members["join"].answer(X)
    await asyncio.wait_for(asyncio.gather(*closing, ending), 1)
    assert request.is_settled
    with pytest.raises(ServeError) as error:
        submit(served, clock)
    assert error.value.kind is ErrorKind.NOT_READY


async def test_a_cached_answer_has_the_requested_outputs_and_ends_with_its_load(
    members: dict[str, FakeMember], clock: Clock
) -> None:
    steps: Steps = [("l", {"a": "x"}, {"b": "p"}), ("r", {"a": "x"}, {"b": "q"})]
    cache = ResponseCache(1 << 20)
    cached = CachedRuns(cache, CacheCounts(), asyncio.get_running_loop(), clock)
    served = serve(members, ["p", "q"], steps, clock, cached=cached)
    for outputs, steps_run in ((["p"], "l"), (["p"], ""), (["q", "p"], "lr"), ([], "")):
        request = submit(served, clock, outputs=outputs)
        for name in ("l", "r"):
            assert bool(members[name].requests) == (name in steps_run)
            if members[name].requests:
                members[name].answer(X + (name == "r"))
        answers = [array.tolist() for array in await request if not is_absent(array)]
        assert answers == [X.tolist(), (X + 1).tolist()][: len(outputs) or 2]
    assert cache.reading().hits == 2
    late = InflightRequest(Timing(clock()), (X + 5,), len(X))
    served.submit(late, served.terms(clock()))
    closing = asyncio.create_task(served.close())
    await asyncio.sleep(0)
    for name in ("l", "r"):
        members[name].answer(X)
    await late
    await asyncio.wait_for(closing, 1)
    assert cache.reading().entries == 0


@pytest.mark.parametrize("asked", [(1, None), (0, 1)], ids=["priority", "queue timeout"])
async def test_a_request_that_may_be_more_urgent_in_a_member_waits_for_no_equal_one(
    clock: Clock, asked: tuple[int, int | None]
) -> None:
    member = FakeMember("m")
    cached = CachedRuns(ResponseCache(1 << 20), CacheCounts(), asyncio.get_running_loop(), clock)
    served = serve({"m": member}, ["y"], [("m", {"a": "x"}, {"b": "y"})], clock, cached=cached)
    submit(served, clock)
    submit(served, clock, priority=asked[0], queue_timeout_ns=asked[1])
    submit(served, clock)
    assert [terms[2:] for terms in member.asked] == [(0, None), asked]


def test_lists_of_the_same_outputs_share_a_route_and_few_are_remembered(clock: Clock) -> None:
    names = list("abcdef")
    member = FakeMember("m", outputs=names)
    served = serve({"m": member}, names, [("m", {"a": "x"}, {name: name for name in names})], clock)
    arrays = {name: X + index for index, name in enumerate(names)}
    for wanted in permutations(names, 4):
        request = submit(served, clock, outputs=wanted)
        member.answer(*arrays.values())
        outputs = dict(zip(names, request.take_outputs(), strict=True))
        assert all((outputs[name] is arrays[name]) is (name in wanted) for name in names)
    assert len(served._routes) == 256
    for _ in range(2):
        submit(served, clock, outputs=("f", "f", "a"))
    assert served._routes[("f", "f", "a"), False] is served._routes[("a", "f"), False]


async def test_step_that_fails_unexpectedly_makes_room_for_one_other(clock: Clock) -> None:
    member = FakeMember("m")
    served = serve({"m": member}, ["y"], [("m", {"a": "x"}, {"b": "y"})], clock, most=1)
    member.rejection = MemoryError()
    with pytest.raises(MemoryError):
        submit(served, clock)
    member.rejection = None
    for _ in range(3):
        submit(served, clock)
    assert len(member.requests) == 1
