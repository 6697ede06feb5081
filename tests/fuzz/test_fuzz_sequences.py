"""Random requests of sequences to models and ensembles, with real runs, beside cached requests and reloads.

Clients send ahead, cancel, set deadlines and send requests that a model rejects. A state counts the requests that it
contains, by their numbers, so that each answer shows which requests its state has seen.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from fakes.encoded import AS_IS, Given
from fuzz.bounds import CASES, LONG_ENOUGH, SEED
from models import members, sequences
from ortserve.batching.response_cache import ResponseCache
from ortserve.config.model import LoadOptions
from ortserve.core.dtypes import DataType
from ortserve.core.request import DecodingPlace, InferRequest, InferResponse
from ortserve.core.tensor import Tensor
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.registry import Registry
from ortserve.service.call import Call, StreamPlace
from ortserve.service.inference import InferenceService
from ortserve.service.recorder import Recorder
from ortserve.telemetry.metrics import Metrics
from servers import LONG_S, add_model

pytestmark = LONG_ENOUGH

STEPS: Final = 300
WORLDS: Final = max(3, CASES // 1000)
WIDTH: Final = STEPS + 1
"""Columns of the input. The first one is the code of the model that rejects the request; the others count requests."""
CODES: Final = {"plain": 1, "a": 2, "b": 3}
STEPS_OF: Final = {
    "chain": [("plain", "x", "p"), ("a", "p", "A q"), ("plain", "q", "r"), ("b", "r", "B")],
    "beside": [("a", "x", "A"), ("b", "x", "B")],
    "outer": [("plain", "x", "p"), ("beside", "p", "A B")],
    "cached": [("plain", "x", "p")],
}
"""For each ensemble: the model of each step, the tensor that it reads, and those that it writes."""
FOLLOWING: Final = {"a": "a", "b": "b", "chain": "ab", "beside": "ab", "outer": "ab"}
"""The models with states that a request reaches."""


@dataclass(eq=False)
class Sent:
    """A request and its outcome: the numbers of the requests in each state, an error, or a cancellation.

    ``code`` is that of the model that rejects it, ``is_bounded`` says whether it has a deadline or a queue timeout. If
    it ``arrives_at_once``, it reaches its model even if it is cancelled soon.
    """

    number: int
    name: str
    sequence: int
    flags: str
    code: int
    is_bounded: bool
    call: Call
    arrives_at_once: bool
    sent_ns: int
    ended_ns: int = 0
    answers: int = 0
    is_cancelled: bool = False
    seen: list[list[int]] = field(default_factory=list)
    echo: np.ndarray | None = None
    error: ServeError | None = None

    def __repr__(self) -> str:
        outcome = self.error or ("cancelled" if self.is_cancelled else self.seen)
        return f"{self.number} {self.name}/{self.sequence} {self.flags!r} code {self.code}: {outcome}"


class World:
    """A server without frontends: two models with states, one without, and ensembles of them."""

    def __init__(self, folder: Path, choices: random.Random, *, is_crowded: bool) -> None:
        """If it ``is_crowded``, its models reject many requests of long sequences."""
        self._random = choices
        self._is_crowded = is_crowded
        self._models = folder / "models"
        self.idle_s = 3 if is_crowded else choices.choice([0.3, 3])
        self.slots = 8 if is_crowded else choices.choice([1, 2, 8])
        self.pauses = choices.choice([0.2, 0.6, 1])
        self.states = {"plain": "none", **{name: choices.choice(["fixed", "growing"]) for name in "ab"}}
        for name, code in CODES.items():
            add_model(self._models, name, sequences.counting, code=code, state=self.states[name], width=WIDTH)
        self._written = 0
        self._configs: dict[str, str] = {}
        for name in "ab":
            oldest = f"strategy: oldest, max_candidates: {self.slots}"
            strategy = oldest if is_crowded else choices.choice([oldest, "strategy: direct"])
            delays_s, limits = ([0.02], [99]) if is_crowded else ([0, 0.002, 0.02], [3, 99])
            initial = ", initial_dims: [0]" if self.states[name] == "growing" else ""
            self._configs[name] = (
                f"batched: true\nmax_rows: {min(4, self.slots)}\nqueue_delay_s: {choices.choice(delays_s)}\n"
                f"row_checks: false\ninstances: {choices.choice([1, 1, 2])}\n{self._limits()}"
                f"sequences: {{{strategy}, max_idle_s: {self.idle_s}, max_sequences: {choices.choice(limits)}, "
                f"states: [{{input: STATE, output: NEXT{initial}}}]}}\n"
            )
        more = choices.choice(["", "response_cache: true\n"])
        self._configs["plain"] = (
            f"queue_delay_s: {choices.choice([0, 0.01])}\npriority_levels: 3\n"
            f"default_priority_level: {choices.choice([1, 3])}\n{more}{self._limits()}"
        )
        for name, steps in STEPS_OF.items():
            made = {"cached": ["p"]}.get(name, ["A", "B"])
            self._configs[name] = members.ensemble_text(
                ["x"], made, [self._step(*step) for step in steps],
                **({"response_cache": "true"} if name == "cached" else {}),
            ) + f"  max_inflight_requests: {choices.choice([0, 1, 2])}\n"  # fmt: skip
            (self._models / name / "1").mkdir(parents=True)
        for name in self._configs:
            self.configure(name)
        options = LoadOptions.model_validate({"warmup_s": 0, "intra_op_threads": 1})
        metrics, clock = Metrics(CollectorRegistry()), time.monotonic_ns
        self.cache = ResponseCache(1_000_000)
        self.registry = Registry([self._models], options, metrics, clock, cache=self.cache)
        self.service = InferenceService(self.registry, Recorder(metrics, clock), clock, max_inflight_bytes=1 << 30)
        self.sent: list[Sent] = []
        self._places: dict[tuple[str, int], StreamPlace] = {}
        self._calls: list[asyncio.Task[None]] = []
        self.reloads: list[tuple[str, int, int]] = []
        """The model of each reload, its begin and its end."""

    def _limits(self) -> str:
        return "max_queue_rows: 2\n" if self._is_crowded else self._random.choice(["", "", "max_queue_rows: 3\n"])

    def _step(self, model: str, read: str, written: str) -> members.Step:
        tensors = written.split()
        if model in STEPS_OF:
            return model, {"x": read}, {tensor: tensor for tensor in tensors}
        outputs = ["SUM", "ECHO"] if model in FOLLOWING else ["ECHO"]
        return model, {"INPUT": read}, dict(zip(outputs, tensors, strict=False))

    def configure(self, name: str) -> None:
        """Write the configuration of a model, different from the last one."""
        self._written += 1
        new = self._models / "new"
        new.write_text(f"{self._configs[name]}\n# {self._written}\n")
        new.replace(self._models / name / "model.yaml")

    def _ask(self) -> None:
        """Send a random request. The ids of one model or ensemble differ from those of others."""
        choose, usual = self._random.choice, 4 if self._is_crowded else 1
        name = choose([*"ab" * usual, *STEPS_OF])
        sequence, code = choose([1, 2, 3]), choose([0] * 20 + [1, 2, 3])
        if self.sent and not choose(range(3)):  # a client that sends ahead
            name, sequence = self.sent[-1].name, self.sent[-1].sequence
        place = choose([DecodingPlace.INLINE, DecodingPlace.INLINE, DecodingPlace.THREAD])
        timeout_ns = choose([None] * 15 * usual + [1_000_000, 10_000_000])
        parameters: dict[str, Any] = {"priority": choose([0, 0, 1, 2, 3, 9])}
        if queue_timeout_us := choose([0] * 20 * usual + [100, 5000]):
            parameters["timeout"] = queue_timeout_us
        flags = choose([""] * 12 * usual + ["S", "E", "SE"])
        if self._random.random() < self._start_share(name, sequence):
            flags = "S"
        call = self.service.receive("grpc", timeout_ns)
        if name in FOLLOWING:
            parameters["sequence_id"] = 10 * list(FOLLOWING).index(name) + sequence
            parameters["sequence_start"], parameters["sequence_end"] = "S" in flags, "E" in flags
            if sequence % 2:  # its requests are in order, because each arrives at once
                place = DecodingPlace.INLINE
            else:
                call.place = self._places[name, sequence] = StreamPlace(self._places.get((name, sequence)))
        number = len(self.sent) + 1
        sent = Sent(
            number, name, sequence, flags, code, timeout_ns is not None or queue_timeout_us > 0, call,
            place is DecodingPlace.INLINE and not call.would_overtake, time.monotonic_ns(),
        )  # fmt: skip
        self.sent.append(sent)
        array = np.zeros((1, WIDTH), np.float32)
        array[0, 0] = code
        array[0, number if name in FOLLOWING else sequence] = 1
        tensor = Tensor("x" if name in STEPS_OF else "INPUT", DataType.FP32, array)
        given = Given(partial(InferRequest, name, "", "", [tensor], [], parameters), place)
        self.service.start(call, given, AS_IS, partial(self._answered, sent), partial(self._failed, sent))

    def _ended(self, sent: Sent) -> None:
        sent.answers += 1
        sent.ended_ns = time.monotonic_ns()
        if sent.call.place is not None:
            sent.call.place.submit()

    def _answered(self, sent: Sent, answer: InferResponse) -> None:
        arrays = {tensor.name: tensor.array[0].copy() for tensor in answer.outputs}
        if sent.name in FOLLOWING:
            names = {"SUM": sent.name} if sent.name in "ab" else {"A": "a", "B": "b"}
            sent.seen = [self._numbers(model, arrays[name]) for name, model in names.items()]
        else:
            (sent.echo,) = arrays.values()
        self._ended(sent)

    def _numbers(self, model: str, state: np.ndarray) -> list[int]:
        """The numbers of the requests in a state, in the order of their runs if that is known."""
        if self.states[model] == "growing":
            return [int(number) for number in state]
        return [number for number in range(1, WIDTH) for _ in range(int(state[number]))]

    def _failed(self, sent: Sent, error: ServeError) -> None:
        sent.error = error
        self._ended(sent)

    def _cancel(self) -> None:
        waiting = [sent for sent in self.sent[-40:] if not sent.answers]
        if waiting:
            sent = self._random.choice(waiting)
            sent.is_cancelled = True
            sent.call.cancel()
            self._ended(sent)

    async def _reload(self, name: str) -> None:
        began_ns = time.monotonic_ns()
        self.reloads.append((name, began_ns, 1 << 62))
        index = len(self.reloads) - 1
        self.configure(name)
        with suppress(ServeError):
            await self.registry.load(name)
        self.reloads[index] = name, began_ns, time.monotonic_ns()

    async def step(self) -> None:
        """One random request, cancellation or reload."""
        draw = self._random
        kind = draw.random()
        if kind < 0.05:
            self._cancel()
        elif kind < 0.06:
            self._calls.append(asyncio.create_task(self._reload(draw.choice([*CODES, *STEPS_OF]))))
        else:
            self._ask()
        if draw.random() < self.pauses:
            await asyncio.sleep(draw.choice([0, 0, 0, 0.001, 0.003, 0.02]))
        if draw.random() < 0.01:
            await asyncio.sleep(0.4)

    def _start_share(self, name: str, sequence: int) -> float:
        """How often the next request of a sequence is a start, besides those at random."""
        last = next((s for s in reversed(self.sent) if (s.name, s.sequence) == (name, sequence)), None)
        if last is None or (last.answers and "E" in last.flags):
            return 0.9
        if last.seen or not last.answers:
            return 0
        return 0.2 if self._is_crowded else 0.5

    async def settle(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self._calls), LONG_S)
        ends_s = time.monotonic() + LONG_S
        while waiting := [sent for sent in self.sent if not sent.answers]:
            assert time.monotonic() < ends_s, waiting
            await asyncio.sleep(0.01)
        while self.registry.is_changing:
            assert time.monotonic() < ends_s
            await asyncio.sleep(0.01)

    def check(self) -> None:
        """Check the outcome of each request."""
        for sent in self.sent:
            assert sent.answers == 1, sent
            assert sent.error is None or sent.error.kind is not ErrorKind.INTERNAL, sent
            if sent.name not in FOLLOWING:
                self._check_plain(sent)
        for name in FOLLOWING:
            for sequence in range(1, 4):
                self._check_sequence([sent for sent in self.sent if (sent.name, sent.sequence) == (name, sequence)])

    def _check_plain(self, sent: Sent) -> None:
        if sent.echo is not None:
            assert sent.code != CODES["plain"]
            assert (sent.echo[0], *np.flatnonzero(sent.echo[1:])) == (sent.code, sent.sequence - 1), sent
        elif not sent.is_cancelled:
            is_full = sent.error is not None and "Exceeds maximum queue size" in sent.error.message
            assert is_full or sent.code == CODES["plain"] or sent.is_bounded, sent

    def _check_sequence(self, history: Sequence[Sent]) -> None:
        since: list[Sent] = []
        is_known = True
        for sent in history:
            if "S" in sent.flags:
                since = []
                # Otherwise a start that was cancelled may have arrived or not.
                is_known = sent.arrives_at_once or bool(sent.seen)
            before, since = since, [*since, sent]
            if not is_known:
                continue
            if sent.seen:
                self._check_seen(sent, before)
            elif sent.error is not None:
                self._check_error(sent, before)

    def _check_seen(self, sent: Sent, before: Sequence[Sent]) -> None:
        assert all(seen == sent.seen[0] for seen in sent.seen), f"the members differ: {sent}"
        rest = set(sent.seen[0]) - {sent.number}
        assert sent.seen[0] == [*sorted(rest), sent.number], f"not once each, in the order of arrival: {sent}"
        assert "S" in sent.flags or (before and "S" in before[0].flags), f"no start: {sent}"
        assert {one.number for one in before if one.seen} <= rest, f"an answered request is missing: {sent}, {before}"
        possible = {one.number for one in before if one.seen or one.is_cancelled or one.is_bounded}
        assert rest <= possible, f"{sent} contains others than {possible}: {before}"
        for index, one in enumerate(before):
            if one.number not in rest and one.arrives_at_once:
                assert not self._ends(one, before[: index + 1]), f"{sent} ran without {one}, {before}"
        ended = [one for one in before if "E" in one.flags]
        is_direct = sent.name in "ab" and sent.arrives_at_once
        assert not any(one.seen or (is_direct and one.ended_ns > sent.sent_ns) for one in ended), (sent, before)

    def _ends(self, sent: Sent, since: Sequence[Sent]) -> bool:
        """Whether the sequence must end with a request that has not run, the last one since the start."""
        if sent.is_cancelled:
            return True
        error = sent.error
        assert error is not None
        if error.kind is ErrorKind.DEADLINE:
            return "ran again" not in error.message and "before the request was decoded" not in error.message
        is_pipelined = any(
            later.sent_ns < earlier.ended_ns for earlier, later in pairwise(since) if later.arrives_at_once
        )
        return error.kind in (ErrorKind.OVERLOADED, ErrorKind.NOT_READY) and is_pipelined

    def _check_error(self, sent: Sent, before: Sequence[Sent]) -> None:
        error = sent.error
        assert error is not None
        text = error.message
        is_rejected = sent.code in [CODES[model] for model in FOLLOWING[sent.name]] or (
            sent.name in ("chain", "outer") and sent.code == CODES["plain"]
        )
        if "must specify the START flag" in text:
            assert self._may_lack_start(sent, before), (sent, before)
        elif "an earlier request of sequence" in text:
            assert any(one.is_cancelled for one in before), (sent, before)
        elif "can become free" in text:
            assert len(FOLLOWING[sent.name]) > 1
        elif error.kind is ErrorKind.OVERLOADED and ("the limit" in text or "Exceeds maximum queue size" in text):
            pass
        elif error.kind in (ErrorKind.DEADLINE, ErrorKind.OVERLOADED) or "timeout" in text:
            same = [one for one in self.sent if (one.name, one.sequence) == (sent.name, sent.sequence)]
            assert any(one.is_bounded for one in same), sent
        else:
            assert is_rejected, sent

    def _may_lack_start(self, sent: Sent, before: Sequence[Sent]) -> bool:
        if not before or "S" not in before[0].flags:
            return True
        is_ensemble = sent.name not in "ab"
        if any("E" in one.flags and (not one.error or one.ended_ns > sent.sent_ns or is_ensemble) for one in before):
            return True
        # A rejection by the model ends no sequence, unless another member has run the request.
        if before[0].error or any(one.is_cancelled or (one.error and is_ensemble) for one in before):
            return True
        if any(one.error and one.error.kind is not ErrorKind.REJECTED_BY_MODEL for one in before):
            return True
        since_ns = before[0].sent_ns
        for earlier, later in pairwise([*before, sent]):
            arrived_ns = later.sent_ns if later.arrives_at_once else later.ended_ns
            if arrived_ns - earlier.ended_ns >= self.idle_s * 0.9e9:
                return True
        return any(name in FOLLOWING[sent.name] and ended >= since_ns and began <= sent.ended_ns
                   for name, began, ended in self.reloads)  # fmt: skip


@pytest.mark.parametrize("number", range(WORLDS))
async def test_states_contain_the_requests_of_their_sequence(tmp_path: Path, number: int) -> None:
    world = World(tmp_path, random.Random(f"{SEED} {number}"), is_crowded=number % 2 == 0)
    registry = world.registry
    try:
        await asyncio.wait_for(registry.load_all(), LONG_S)
        assert all(registry.ready_versions(name) for name in (*CODES, *STEPS_OF))
        for _ in range(STEPS):
            await world.step()
        await world.settle()
        world.check()
        runs = [registry.find(name, "").sequences for name in "ab"]
        for one in runs:
            assert one is not None
            # A state that is a view of outputs would keep those of its whole batch, and change where they are reused.
            states = [state for sequence in one._table.open_sequences() for state in sequence.states]
            assert all(state is one.tensors.initial[0] or state.flags.owndata for state in states)
        for name in (*reversed(STEPS_OF), *CODES):
            await asyncio.wait_for(registry.unload(name), LONG_S)
        await world.settle()
        for one in runs:
            assert one is not None
            reading = one.reading()
            assert (reading.active, reading.waiting, reading.state_bytes, one.waiting_rows) == (0, 0, 0, 0)
            assert not one.kept._requests
        assert world.cache.nbytes == 0
    finally:
        await asyncio.wait_for(registry.close(), LONG_S)
