"""Ensembles whose members have sequences, with the real rules of sequences and without models, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.clock import FakeClock
from fakes.loop import VirtualTimeLoop, run_virtual
from fakes.served import FakeVersion
from ortserve.batching.direct_sequences import DirectRuns
from ortserve.batching.oldest_sequences import OldestRuns
from ortserve.batching.sequence_admission import SequenceLimits
from ortserve.batching.sequence_table import SequenceTable, Strategy
from ortserve.batching.sequences import SequenceRuns
from ortserve.config.model import LoadOptions, make_model_options
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import CANCELLED, COMPUTED, NO_SCHEDULING, RUNNING, InflightRequest, Scheduling, Terms
from ortserve.core.request import RequestedOutput
from ortserve.core.sequence import START, ControlTensor, SequencePart, SequenceTensors, StateTensor
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.ensemble.interface import Member, resolve_signature
from ortserve.registry.ensemble.plan import make_plan
from ortserve.registry.ensemble.served_ensemble import ServedEnsemble
from ortserve.registry.ensemble.turns import SequenceTurns
from ortserve.registry.repository.configuration import Configuration
from ortserve.registry.served_version import ServedVersion
from ortserve.telemetry.series import ModelMetrics

MS = 1_000_000
IDLE_MS = 500
Steps = Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]]
STEPS: Mapping[str, Steps] = {
    "chain": [("a", {"x": "x"}, {"y": "a"}), ("last", {"x": "a"}, {"y": "p"}), ("b", {"x": "p"}, {"y": "b"})],
    "reverse": [("b", {"x": "x"}, {"y": "b"}), ("last", {"x": "b"}, {"y": "p"}), ("a", {"x": "p"}, {"y": "a"})],
    "beside": [("a", {"x": "x"}, {"y": "a"}), ("last", {"x": "x"}, {"y": "p"}), ("b", {"x": "p"}, {"y": "b"})],
    "nested": [("last", {"x": "x"}, {"y": "p"}), ("chain", {"x": "p"}, {"a": "a", "b": "b"})],
    "first": [("a", {"x": "x"}, {"y": "a"}), ("last", {"x": "a"}, {"y": "b"})],
    "behind": [("first", {"x": "x"}, {"a": "a", "b": "p"}), ("b", {"x": "p"}, {"y": "b"})],
}
"""Ensembles of ``a`` and ``b``, which have sequences, and ``last``, which has none. Both outputs are sums of values."""


def one(value: int, dtype: Any = np.int64) -> np.ndarray:
    return np.full((1, 1), value, dtype)


TENSORS = SequenceTensors(
    (ControlTensor(START, DataType.INT32, one(0), one(1)),), (one(0),), (StateTensor("STATE", "NEXT", 1, (1, -1)),), 1
)
"""Inputs: the client's, START and the state. Outputs: the sum, and the same as the next state."""


class Model(FakeVersion):
    """A model whose runs wait in ``queue`` until the test answers them.

    With sequences, the output is the sum of the values of the sequence. Without, it is the last value of such a sum, as
    every value in a test is a power of two that is larger than those before.
    """

    def __init__(
        self, name: str, loop: VirtualTimeLoop, clock: FakeClock, slots: int = 0, strategy: str = "oldest"
    ) -> None:
        """Without ``slots``, the model has no sequences."""
        self.queue: list[InflightRequest] = []
        self.table = SequenceTable(slots, IDLE_MS * MS)
        runs = None
        if slots:
            limits = SequenceLimits(1000, 100_000, 1000, 1_000_000)

            def make_strategy(runs: SequenceRuns) -> Strategy:
                if strategy == "oldest":
                    return OldestRuns(runs, self.enqueue)
                return DirectRuns(runs, 1, slots, self.enqueue, lambda rows: rows, lambda _: None, loop, clock)

            runs = SequenceRuns(name, TENSORS, self.table, limits, make_strategy, loop, clock)
        x, y = (TensorSpec(tensor, DataType.INT64, (-1, 1)) for tensor in "xy")
        super().__init__(name, ModelSignature((x,), (y,)), runs)
        self.clock = clock

    def enqueue(self, request: InflightRequest, *_: object) -> None:
        request.state = 1  # queued
        request.timing.queued_ns = self.clock()
        self.queue.append(request)
        request.withdraw = self.queue.remove

    def take(self, index: int = 0) -> InflightRequest:
        """Start a run."""
        run = self.queue.pop(index)
        run.state = RUNNING
        run.withdraw = None
        run.timing.taken_ns = run.timing.staged_ns = self.clock()
        return run

    def finish(self, run: InflightRequest) -> None:
        run.timing.computed_ns = self.clock()
        if self.sequences is None:
            run.complete((one(1 << int(run.inputs[0][0, 0]).bit_length() - 1),))
        else:
            given, start, state = run.inputs
            run.complete((given + state * (1 - start),) * 2)

    @property
    def is_busy(self) -> bool:
        return bool(self.queue)

    def terms(
        self,
        received_ns: int,
        timeout_ns: int | None = None,
        scheduling: Scheduling = NO_SCHEDULING,
        outputs: Sequence[RequestedOutput] = (),
    ) -> Terms:
        return Terms(0, None if timeout_ns is None else received_ns + timeout_ns)

    def submit(self, request: InflightRequest, terms: Terms) -> None:
        self.enqueue(request)

    def submit_part(self, request: InflightRequest, terms: Terms, part: SequencePart) -> None:
        assert self.sequences is not None
        self.sequences.submit(request, terms, part)


class Stage:
    """The models and ensembles of ``STEPS``. ``load`` loads the ensembles again, for example after a model was."""

    def __init__(
        self,
        loop: VirtualTimeLoop,
        clock: FakeClock,
        slots: tuple[int, int] = (8, 8),
        strategy: str = "oldest",
        most: int = 0,
    ) -> None:
        """``most`` is ``max_inflight_requests`` of the ensembles."""
        self.clock = clock
        self.most = most
        self.sent = 0
        self.models: dict[str, Model] = {"last": Model("last", loop, clock)}
        for name, count in zip("ab", slots, strict=True):
            self.models[name] = Model(name, loop, clock, count, strategy)
        self.turns = {name: SequenceTurns() for name in STEPS}
        self.ensembles: dict[str, ServedEnsemble] = {}
        self.load()

    def load(self) -> list[ServedEnsemble]:
        """Load the ensembles again. Returns the replaced ones."""
        replaced = list(self.ensembles.values())
        for name in STEPS:
            self.ensembles[name] = self._load(name)
        return replaced

    def _load(self, name: str) -> ServedEnsemble:
        given: dict[str, Any] = {
            "inputs": {"x": {}},
            "outputs": {"a": {}, "b": {}},
            "ensemble": {
                "steps": [{"model": model, "inputs": read, "outputs": made} for model, read, made in STEPS[name]],
                "max_inflight_requests": self.most,
            },
        }
        configuration = Configuration(make_model_options(given, LoadOptions(), name))
        plan = make_plan(name, configuration.options)
        members = tuple([self.models.get(step.model) or self.ensembles[step.model] for step in plan.steps])
        described = [Member(member.name, member.signature, None) for member in members]
        return ServedEnsemble(
            resolve_signature(name, configuration.options, plan, described),
            plan,
            members,
            ModelMetrics(name, "1"),
            self.clock,
            configuration=configuration,
            output_labels={},
            turns=self.turns[name],
        )

    def submit(self, name: str, sequence_id: int, flags: str = "", timeout_ms: int | None = None) -> InflightRequest:
        """Send the next power of two. ``flags`` contains S for the start and E for the end."""
        self.sent += 1
        request = InflightRequest(Timing(self.clock()), (one(1 << self.sent - 1),), 1)
        served: ServedVersion = self.models.get(name) or self.ensembles[name]
        terms = served.terms(self.clock(), None if timeout_ms is None else timeout_ms * MS)
        served.submit_part(request, terms, SequencePart(sequence_id, "S" in flags, "E" in flags))
        return request

    async def answer(self, *names: str) -> None:
        """Run the next request of each model, one after the other."""
        for name in names:
            self.models[name].finish(self.models[name].take())
            await asyncio.sleep(0)

    async def wait(self, times: float) -> None:
        """Wait for so many idle times."""
        await asyncio.sleep(times * IDLE_MS / 1000)


def sums(request: InflightRequest) -> list[int]:
    return [int(output[0, 0]) for output in request.take_outputs()]


def virtual(slots: tuple[int, int]) -> Callable[[Callable[[Stage], Awaitable[None]]], Callable[[], None]]:
    """Run a test of a ``Stage`` with so many slots of ``a`` and ``b`` in virtual time."""

    def decorate(test: Callable[[Stage], Awaitable[None]]) -> Callable[[], None]:
        async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
            await test(Stage(loop, clock, slots))

        def run() -> None:
            run_virtual(main)

        return run

    return decorate


@virtual(slots=(8, 1))
async def test_a_sequence_does_not_expire_while_its_request_is_in_another_step(stage: Stage) -> None:
    other = stage.submit("b", 9, "S")
    await stage.answer("b")
    first = stage.submit("chain", 1, "S")
    await stage.answer("a", "last")
    for _ in range(3):  # the first request waits for the slot of b, and a is idle
        await stage.wait(0.9)
        stage.submit("b", 9)
        await stage.answer("b")
    stage.submit("b", 9, "E")
    await stage.answer("b")
    await stage.answer("b")
    assert sums(first) == [2, 2]
    assert other.is_settled
    await stage.wait(0.9)
    second = stage.submit("nested", 1)
    await stage.wait(1.2)  # both are idle: the request is in the step before a
    await stage.answer("last", "a")
    await stage.wait(1.2)
    await stage.answer("last", "b")
    assert [output - 2 for output in sums(second)] == [64, 64]
    await stage.wait(1.2)
    with pytest.raises(ServeError, match="to model 'a' must specify the START flag"):
        stage.submit("chain", 1)


@virtual(slots=(1, 1))
async def test_requests_that_wait_for_slots_of_each_other_do_not_wait_forever(stage: Stage) -> None:
    requests = [stage.submit("chain", 1, "S"), stage.submit("reverse", 2, "S")]
    await stage.answer("a", "last", "b", "last")
    assert not stage.models["a"].queue
    assert not stage.models["b"].queue
    await stage.wait(2.5)
    (failed,) = [request for request in requests if request.is_settled]
    with pytest.raises(
        ServeError, match=r"in ensemble '(chain|reverse)', no slot of model '[ab]' can become free"
    ) as error:
        failed.take_outputs()
    assert error.value.kind is ErrorKind.NOT_READY
    await stage.answer("b" if failed is requests[1] else "a")
    requests.remove(failed)
    assert len(set(sums(requests[0]))) == 1


@virtual(slots=(1, 1))
async def test_a_sequence_whose_slot_others_want_does_not_expire_in_a_slow_step(stage: Stage) -> None:
    first, second = stage.submit("chain", 1, "S"), stage.submit("chain", 2, "S")
    await stage.answer("a")
    await stage.wait(5)
    await stage.answer("last", "b")
    assert sums(first) == [1, 1]
    assert not second.is_settled
    stage.submit("chain", 1, "E")
    await stage.answer("a", "a", "last", "last", "b", "b")
    assert sums(second) == [2, 2]


@virtual(slots=(1, 1))
async def test_requests_wait_for_a_slot_that_a_client_uses(stage: Stage) -> None:
    """All slots of ``a`` wait for ``b``, but not in a deadlock."""
    stage.submit("b", 9, "S")
    await stage.answer("b")
    requests = [stage.submit("chain", number, "S") for number in (1, 2)]
    continuing = stage.submit("reverse", 3, "S")
    await stage.answer("a", "last")
    for _ in range(6):
        await stage.wait(0.9)
        stage.submit("b", 9)
        await stage.answer("b")
    assert not any(request.is_settled for request in (*requests, continuing))


@virtual(slots=(8, 8))
async def test_a_sequence_ends_in_all_members_with_a_request_that_fails_between_them(stage: Stage) -> None:
    stage.submit("chain", 1, "S")
    await stage.answer("a", "last", "b")
    failed = stage.submit("chain", 1)
    await stage.answer("a")
    stage.models["last"].take().fail(ServeError(ErrorKind.INTERNAL, "no"))
    with pytest.raises(ServeError, match="no"):
        failed.take_outputs()
    assert [len(stage.models[name].table) for name in "ab"] == [0, 0]


@pytest.mark.parametrize("ensemble", ["chain", "beside"])
@pytest.mark.parametrize("flags", ["", "E"])
def test_a_sequence_ends_in_all_members_with_a_request_that_only_one_of_them_has_run(ensemble: str, flags: str) -> None:
    @virtual(slots=(8, 8))
    async def test(stage: Stage) -> None:
        stage.submit(ensemble, 1, "S")
        await stage.answer("a", "last", "b")
        failed = stage.submit(ensemble, 1, flags)
        await stage.answer("a", "last")
        stage.models["b"].take().fail(ServeError(ErrorKind.INTERNAL, "no"))
        with pytest.raises(ServeError, match="no"):
            failed.take_outputs()
        assert [len(stage.models[name].table) for name in "ab"] == [0, 0]

    test()


@pytest.mark.parametrize(("model", "left"), [("a", [1, 1]), ("last", [0, 0])])
def test_a_sequence_ends_behind_a_nested_ensemble_that_fails_after_a_member_has_run(
    model: str, left: list[int]
) -> None:
    @virtual(slots=(8, 8))
    async def test(stage: Stage) -> None:
        stage.submit("behind", 1, "S")
        await stage.answer("a", "last", "b")
        failed = stage.submit("behind", 1)
        if model == "last":
            await stage.answer("a")
        stage.models[model].take().fail(ServeError(ErrorKind.INTERNAL, "no"))
        with pytest.raises(ServeError, match="no"):
            failed.take_outputs()
        assert [len(stage.models[name].table) for name in "ab"] == left

    test()


@virtual(slots=(8, 8))
async def test_a_last_request_that_fails_ends_no_sequence_that_a_client_has_begun_meanwhile(stage: Stage) -> None:
    stage.submit("chain", 1, "S")
    await stage.answer("a", "last", "b")
    stage.submit("chain", 1, "E")
    await stage.answer("a", "last")
    last = stage.models["b"].take()
    await stage.wait(0.1)
    stage.submit("b", 1, "S")
    await stage.answer("b")
    last.fail(ServeError(ErrorKind.INTERNAL, "no"))
    following = stage.submit("b", 1)
    await stage.answer("b")
    assert sums(following) == [12]


@virtual(slots=(8, 8))
async def test_a_start_that_fails_before_its_members_ends_the_sequence_that_it_would_begin_anew(stage: Stage) -> None:
    stage.submit("nested", 1, "S")
    await stage.answer("last", "a", "last", "b")
    failed = stage.submit("nested", 1, "S")
    behind = stage.submit("nested", 1)
    stage.models["last"].take().fail(ServeError(ErrorKind.INVALID_INPUT, "no"))
    with pytest.raises(ServeError, match="no"):
        failed.take_outputs()
    await asyncio.sleep(0)
    await stage.answer("last")
    with pytest.raises(ServeError, match="must specify the START flag"):
        behind.take_outputs()


@pytest.mark.parametrize("is_begun_anew", [False, True])
def test_a_start_that_is_late_before_it_begins_ends_the_sequence_that_it_would_begin_anew(is_begun_anew: bool) -> None:
    async def test(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        stage = Stage(loop, clock, most=1)
        stage.submit("beside", 1, "S")
        await stage.answer("a", "last", "b")
        for number in (2, 3):  # the second one waits for the step "last", and no further request begins meanwhile
            stage.submit("beside", number, "S")
        late = stage.submit("beside", 1, "SE", timeout_ms=100)
        await stage.wait(0.01)
        if is_begun_anew:  # by a request to the member itself, after the late one
            stage.submit("a", 1, "S")
        await stage.wait(0.5)
        with pytest.raises(ServeError, match="because of max_inflight_requests"):
            late.take_outputs()
        assert [stage.models[name].table.find(1) is not None for name in "ab"] == [is_begun_anew, False]

    run_virtual(test)


@virtual(slots=(8, 8))
async def test_a_request_whose_turn_has_come_runs_past_its_deadline(stage: Stage) -> None:
    """The wait for earlier requests ends at the deadline. A run continues, as in a model with sequences."""
    stage.submit("chain", 1, "S")
    second = stage.submit("chain", 1, timeout_ms=200)
    await stage.answer("a", "last", "b")
    run = stage.models["a"].take()
    await stage.wait(1)
    assert not second.is_settled
    stage.models["a"].finish(run)
    await stage.answer("last", "b")
    assert sums(second) == [3, 3]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"), st.integers(0, 7), st.sampled_from(["", "", "", "", "S", "S", "E", "SE"]), st.booleans()
        ),
        st.tuples(st.sampled_from(["take", "finish", "finish", "fail"]), st.integers(0, 7), st.just(""), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(""), st.booleans()),
        st.tuples(st.just("wait"), st.sampled_from([0, 0, 1, 200, 400]), st.just(""), st.booleans()),
        st.tuples(st.just("load"), st.integers(0, 3), st.just(""), st.booleans()),
    ),
    min_size=5,
    max_size=100,
)


class Sent:
    """A request of the random test, and what is known about it."""

    def __init__(self, request: InflightRequest, value: int, flags: str, now_ns: int) -> None:
        self.request = request
        self.value = value
        self.flags = flags
        self.sent_ns = now_ns
        self.settled_ns = 0
        self.answers = 0
        self.sums: list[int] = []
        self.error: BaseException | None = None

    @property
    def is_answered(self) -> bool:
        return bool(self.sums)


def check_history(history: list[Sent], loaded_ns: Sequence[int]) -> None:
    """Check the answers to all requests with one id to one ensemble.

    Args:
        history: The requests in the order in which they were sent.
        loaded_ns: When a model with sequences was loaded again.
    """
    since: list[Sent] = []
    for sent in history:
        if "S" in sent.flags:
            since = []
        before, since = since, [*since, sent]
        has_start = bool(before) and "S" in before[0].flags
        if sent.is_answered:
            assert sent.sums[0] == sent.sums[1], "both members have the same requests"
            known = sum(each.value for each in before if each.is_answered)
            possible = sum(each.value for each in before if each.request.state in (COMPUTED, CANCELLED))
            rest = sent.sums[0] - sent.value
            assert rest & known == known, "no answered request is missing"
            assert rest & ~possible == 0, "no failed request, and none of another sequence, is part of the state"
            assert "S" in sent.flags or has_start
            assert not any("E" in each.flags for each in before)
        elif sent.error is not None and "must specify the START flag" in str(sent.error):
            gaps = [later.sent_ns - earlier.settled_ns for earlier, later in pairwise([*before, sent])]
            assert (
                not has_start
                or any("E" in each.flags or not each.is_answered for each in before)
                or any(gap >= IDLE_MS * MS for gap in gaps)
                or any(before[0].sent_ns <= time_ns for time_ns in loaded_ns)
            ), "an answered sequence goes on"


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(ACTIONS, st.sampled_from(["oldest", "direct"]), st.integers(1, 3), st.integers(1, 3))
def test_members_agree_on_the_requests_of_a_sequence(
    actions: list[Any], strategy: str, slots_a: int, slots_b: int
) -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        stage = Stage(loop, clock, (slots_a, slots_b), strategy)
        histories: list[list[Sent]] = [[] for _ in range(8)]
        requests: list[Sent] = []
        running: list[tuple[Model, InflightRequest]] = []
        models = list(stage.models.values())
        closing: list[asyncio.Task[None]] = []
        loaded_ns: list[int] = []

        def settled(sent: Sent, request: InflightRequest) -> None:
            sent.answers += 1
            sent.settled_ns = clock()
            try:
                sent.sums = sums(request)
            except BaseException as error:
                sent.error = error

        for kind, number, flags, choice in actions:
            if kind == "submit" and len(requests) < 60:
                name = list(STEPS)[number // 2]
                stage.sent += 1
                request = InflightRequest(Timing(clock()), (one(1 << stage.sent - 1),), 1)
                sent = Sent(request, 1 << stage.sent - 1, flags, clock())
                request.on_settled = partial(settled, sent)
                histories[number].append(sent)
                requests.append(sent)
                served = stage.ensembles[name]
                terms = served.terms(clock(), 150 * MS if choice and number % 3 == 0 else None)
                try:
                    served.submit_part(request, terms, SequencePart(number + 1, "S" in flags, "E" in flags))
                except ServeError as error:
                    request.fail(error)
            elif kind == "take":
                model = models[number % len(models)]
                if model.queue:
                    running.append((model, model.take(number // 3 % len(model.queue))))
            elif kind in ("finish", "fail") and running:
                model, run = running.pop(number % len(running))
                if kind == "finish" or choice:
                    model.finish(run)
                else:
                    run.fail(ServeError(ErrorKind.INTERNAL, "no"))
            elif kind == "cancel" and requests:
                requests[number % len(requests)].request.cancel()
            elif kind == "wait":
                await asyncio.sleep(number / 1000)
            elif kind == "load":
                replaced: list[ServedVersion] = []
                if number:
                    name = "ab"[number % 2]
                    replaced.append(stage.models[name])
                    stage.models[name] = Model(name, loop, clock, (slots_a, slots_b)[number % 2], strategy)
                    models.append(stage.models[name])
                    loaded_ns.append(clock())
                replaced += stage.load()
                closing += [asyncio.create_task(served.drain()) for served in replaced]
        closing += [
            asyncio.create_task(served.drain()) for served in (*stage.ensembles.values(), *stage.models.values())
        ]
        for _ in range(10_000):
            if all(task.done() for task in closing):
                break
            await asyncio.sleep(0.01)
            while running:
                model, run = running.pop()
                model.finish(run)
            running += [(model, model.take()) for model in models if model.queue]
        assert all(task.done() for task in closing), "nothing waits forever"
        await asyncio.sleep(1)
        for sent in requests:
            assert sent.request.is_settled
            assert sent.answers == 1
        for history in histories:
            check_history(history, loaded_ns)
        for model in models:
            if model.sequences is not None:
                reading = model.sequences.reading()
                assert (reading.active, reading.waiting, reading.state_bytes) == (0, 0, 0)
                assert model.sequences.waiting_rows == 0
                assert not model.sequences.kept._requests
        for turns in stage.turns.values():
            assert not turns._waiting
            assert not turns._count
            assert not turns._rejected
        for task in closing:
            task.result()

    run_virtual(main)
