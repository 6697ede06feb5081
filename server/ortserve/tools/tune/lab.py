"""Runs configurations of a model, each in its own process, under loads through the server's batcher."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from ortserve.core.agreement import AgreementMeter, ErrorBound
from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.tensor import Tensor, as_numbers
from ortserve.engine.provider_options import CPU
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.load.interface import resolve_interface
from ortserve.tools.bench.generator import LoadPart
from ortserve.tools.bench.generators import Generators, Seen
from ortserve.tools.bench.outcomes import join
from ortserve.tools.bench.prepare import as_clients_see, as_clients_send, bare_run, difference, repeated
from ortserve.tools.bench.target import ModelPlan
from ortserve.tools.inputs import choose_inputs, take_inputs
from ortserve.tools.opening import open_model
from ortserve.tools.subject import Subject
from ortserve.tools.tune.loads import Offer, Reading, read
from ortserve.tools.tune.sides import Goal
from ortserve.tools.tune.space import Changes, apply_changes

_WARMUP_S: Final = 0.1
"""Warm-up before each load, at its first rate. The process slept while the other one was measured."""
_PROBE_S: Final = 0.5
_CALLERS: Final = 8
_TIMEOUT_S: Final = 10.0
_RAMP_TIMEOUT_S: Final = 1.0
"""Requests of a ramp time out after three times the latency bound, but not before this. They are long past the bound
then."""
_OVERLOAD: Final = {"timeout", ErrorKind.OVERLOADED.value, ErrorKind.DEADLINE.value}
"""Kinds of failures under too high a rate."""
_LOOK_EVERY: Final = 7
"""One in this many answers is checked."""
_OPEN_LIMIT_S: Final = 600.0
_GPU_BOUND: Final = ErrorBound("relative", 1e-2)
"""GPUs may compute with fewer bits than the datatype has."""
_HOPELESS: Final = 30
"""A ramp ends early if this many requests in a row were late."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests and their expected outputs.

    Attributes:
        arrays: The inputs of each request.
        expected: The expected outputs of each request by name, from bare runs of the model.
        datatypes: Datatypes of the outputs by name, in the order of answers.
        origin: A description of the inputs.
        is_batched: Whether requests share batches.
        has_convolutions: Whether the model has convolutions.
        is_on_gpu: Whether another execution provider than the CPU's computed the expected outputs.
        rows: Rows of a request.
    """

    arrays: tuple[Arrays, ...]
    expected: tuple[Mapping[str, np.ndarray], ...]
    datatypes: Mapping[str, DataType]
    origin: str
    is_batched: bool
    has_convolutions: bool
    is_on_gpu: bool
    rows: int


def prepare_requests(subject: Subject, file: Path | None, rows: int) -> Requests:
    """Make requests and compute their expected outputs. Use ``call_in_child``, so that the session is freed.

    Raises:
        ServeError: The model cannot be opened or run, or the inputs do not fit it.
    """
    model = open_model(subject, settings={"spinning": False})
    interface = resolve_interface(subject.options, model.signature)
    inputs = choose_inputs(model, file)
    rows = rows if model.signature.is_batched else 1
    arrays = take_inputs(inputs, rows)
    outputs, right, source = repeated(partial(bare_run, model), arrays, "bare runs")
    if not right:
        raise invalid_input(f"{subject.path}: trials cannot be compared with {source}; give random operators a seed")
    answers = [as_clients_see(interface, one) for one in right]
    names = dict.fromkeys(subject.options.served_outputs or [spec.name for spec in interface.client.outputs])
    return Requests(
        arrays=tuple(as_clients_send(model, interface, one) for one in arrays[: len(outputs)]),
        expected=tuple({name: answer[name].array for name in names} for answer in answers),
        datatypes={name: answers[0][name].datatype for name in names},
        origin=inputs.origin,
        is_batched=model.signature.is_batched,
        has_convolutions=any(node.op in ("Conv", "ConvTranspose") for node in model.graph.graph.nodes),
        is_on_gpu=model.choice.name != CPU,
        rows=rows,
    )


@dataclass(frozen=True, slots=True)
class ProcessLab:
    """Opens configurations in processes of their own. The output of libraries goes to anonymous files.

    ``bound`` limits the errors of outputs; None means the tolerances of their datatypes. ``variants`` has the files of
    other versions by number.
    """

    subject: Subject
    requests: Requests
    goal: Goal
    bound: ErrorBound | None
    variants: Mapping[int, Path] = field(default_factory=dict)

    def open(self, changes: Changes, version: int | None = None) -> "ModelProcess":
        """As ``Lab.open``."""
        subject = replace(self.subject, options=apply_changes(self.subject.options, changes))
        if version is not None:
            subject = replace(subject, path=self.variants[version], version=version)
        bound = self.bound or (_GPU_BOUND if self.requests.is_on_gpu else None)
        return ModelProcess(subject, self.requests, self.goal, bound, checks=version is None)


class ModelProcess:
    """A configuration of a model in a process of its own. Implements ``Contender``."""

    def __init__(
        self, subject: Subject, requests: Requests, goal: Goal, bound: ErrorBound | None, *, checks: bool
    ) -> None:
        """Open the model and send requests for half a second. ``checks`` is whether too large errors are failures.

        Raises:
            ServeError: The model cannot be opened or run, or its outputs are wrong.
        """
        self._requests = requests
        self._goal = goal
        self._bound = bound
        self._checks = checks
        self._meter: Final = AgreementMeter(list(requests.datatypes))
        self._plan: Final = ModelPlan(subject, "batcher", None, None, requests.arrays, requests.rows)
        with ExitStack() as opening:  # closes everything if an error occurs
            self._errors: Final = os.memfd_create("errors")
            opening.callback(os.close, self._errors)
            self._generators: Final = opening.enter_context(
                Generators(1, errors=self._errors, open_limit_s=_OPEN_LIMIT_S)
            )
            seen = self._run(_CALLERS, None, _PROBE_S)
            answers = sum(chunk.answers for chunk in seen.chunks)
            self.probed_per_s = answers / _PROBE_S or 1 / _TIMEOUT_S
            if problem := self._check(seen):
                raise ServeError(ErrorKind.INTERNAL, problem)
            self._opened: Final = opening.pop_all()

    def measure(self, offer: Offer, seed: int) -> Reading:
        """As ``Contender.measure``."""
        before = np.arange(0, _WARMUP_S, 1 / offer.low)
        times = np.concatenate([before, _WARMUP_S + offer.times_s(seed)])
        seen = self._run(None, np.asarray(times * 1e9, np.int64), offer.seconds, is_ramp=offer.high > offer.low)
        outcomes, finished = join(seen.chunks), seen.finished[0]
        reading = read(
            offer,
            (outcomes.due_ns - finished.begin_ns) / 1e9,
            (outcomes.done_ns - outcomes.due_ns) / 1e9,
            outcomes.is_answered,
            slo_s=self._goal.slo_s,
            percentile=self._goal.percentile,
            cpu_s=finished.cpu_ns / 1e9,
            memory_nbytes=psutil.Process(self._generators.pids[0]).memory_info().rss,
        )
        problem = self._check(seen)
        return replace(reading, problem=problem, error=self._meter.result().error("relative"))

    def close(self) -> None:
        """As ``Contender.close``."""
        self._opened.close()

    def _run(self, callers: int | None, times_ns: np.ndarray | None, seconds: float, *, is_ramp: bool = False) -> Seen:
        slo_s = self._goal.slo_s or _TIMEOUT_S
        timeout_s = max(_RAMP_TIMEOUT_S, 3 * slo_s) if is_ramp else max(_TIMEOUT_S, 2 * slo_s)
        part = LoadPart(
            key=0,
            plan=self._plan,
            callers=callers,
            times_ns=times_ns,
            warmup_s=_WARMUP_S,
            seconds=seconds,
            timeout_s=timeout_s,
            look_every=_LOOK_EVERY,
        )
        wants_more = self._wants_more if is_ramp else lambda seen, elapsed_s: True
        try:
            seen = self._generators.offer([part], wants_more)
        except ServeError as error:
            said = os.pread(self._errors, 2000, max(0, os.fstat(self._errors).st_size - 2000)).decode(errors="replace")
            last = (said.strip().splitlines() or [""])[-1][:300]
            is_dead = error.message.startswith("a generator ended")
            raise ServeError(
                error.kind, f"its process ended: {last or 'without a message'}" if is_dead else error.message
            ) from None
        if seen.is_interrupted:
            raise KeyboardInterrupt
        return seen

    def _wants_more(self, seen: Seen, elapsed_s: float) -> bool:
        """Whether a ramp should continue, because some of its last requests were in time."""
        if not seen.chunks or self._goal.slo_s is None:
            return True
        outcomes = join(seen.chunks[-1:])
        is_late = (outcomes.done_ns - outcomes.due_ns > self._goal.slo_s * 1e9) | ~outcomes.is_answered
        return len(is_late) < _HOPELESS or not bool(is_late[-_HOPELESS:].all())

    def _check(self, seen: Seen) -> str:
        """The first wrong output, or the first failure that overload does not explain; empty if there is neither."""
        requests = self._requests
        for chunk in seen.chunks:
            for kind in chunk.failures.keys() - _OVERLOAD:
                return f"{kind}: {chunk.examples[kind]}"
        for number, body in (one for chunk in seen.chunks for one in chunk.bodies):
            expected = requests.expected[number % len(requests.expected)]
            assert isinstance(body, list)
            got: list[np.ndarray] = body
            if len(got) != len(expected):
                return f"wrong outputs: expected {len(expected)}, got {len(got)}"
            datatypes = list(requests.datatypes.values())
            right, found = (
                [as_numbers(array, datatype) for array, datatype in zip(arrays, datatypes, strict=True)]
                for arrays in (expected.values(), got)
            )
            self._meter.add(right, found, requests.rows)
            if not self._checks:
                continue
            if self._bound is not None:
                problem = self._bound.excess(self._meter.result())
            else:
                problem = difference(self._tensors(list(expected.values())), self._tensors(got))
            if problem:
                return f"wrong outputs: {problem}"
        return ""

    def _tensors(self, arrays: Sequence[np.ndarray]) -> dict[str, Tensor]:
        pairs = zip(self._requests.datatypes.items(), arrays, strict=False)
        return {name: Tensor(name, datatype, array) for (name, datatype), array in pairs}
