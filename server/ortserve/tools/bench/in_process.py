"""Targets in the generator's process: ``session.run``, runs on bound memory, and requests through the batcher."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import onnxruntime as ort

from ortserve.clock import monotonic_ns
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import NO_TERMS, InflightRequest
from ortserve.core.tensor import is_absent
from ortserve.core.timing import Timing
from ortserve.engine.ort_errors import ORT_ERRORS
from ortserve.engine.process_limits import cpu_budget
from ortserve.engine.provider_options import GPU_PROVIDERS
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.load.assembly import Assembly
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.repository.configuration import Configuration
from ortserve.registry.served_model import ServedModel
from ortserve.telemetry.series import ModelMetrics
from ortserve.tools.bench.outcomes import Ticket
from ortserve.tools.bench.target import ModelPlan, Target
from ortserve.tools.opening import naming_failures, open_model

Caller = Callable[[int], Callable[[], list[np.ndarray]]]
"""Makes run ``number`` and blocks until it ends. The returned function reads the outputs, for runs that are checked."""


class BareRuns:
    """Blocking runs of one session. The threads of ``run_threads`` make them, several at a time."""

    def __init__(self, plan: ModelPlan) -> None:
        self._model: Final = open_model(plan.subject, provider=plan.provider, threads=plan.threads)
        self._inputs = [self._model.for_model(arrays) for arrays in plan.inputs]
        self._is_bound = plan.way == "bound"
        signature = self._model.signature
        unbound = {DataType.BYTES, DataType.BF16} & {one.datatype for one in (*signature.inputs, *signature.outputs)}
        is_repeated = len({one.name for one in signature.outputs}) < len(signature.outputs)
        # A run appends to a sequence that is bound.
        if self._is_bound and (unbound or signature.has_sequences or is_repeated):
            kinds = "strings, BF16, sequences and outputs that are declared twice"
            raise invalid_input(f"{plan.subject.path}: {kinds} cannot be bound, so measure it without --way bound")

    def caller(self) -> Caller:
        """A function for one thread that makes runs. It raises ServeError as ``naming_failures``."""
        runner, inputs = self._model.runner(), self._inputs
        run = self._bound() if self._is_bound else lambda n: partial(list, runner.run(inputs[n % len(inputs)]))

        def call(number: int) -> Callable[[], list[np.ndarray]]:
            try:
                return run(number)
            except ORT_ERRORS:  # a block around each run would take time that is measured
                with naming_failures(self._model.subject.path):
                    raise

        return call

    def _bound(self) -> Caller:
        """Runs whose inputs and outputs stay on the device of the session."""
        session, choice, signature = self._model.session, self._model.choice, self._model.signature
        device, index = ("cuda", choice.device_id) if choice.name in GPU_PROVIDERS else ("cpu", 0)
        bindings = []
        for arrays in self._inputs:
            binding = session.io_binding()
            for spec, array in zip(signature.inputs, arrays, strict=True):
                if not is_absent(array):
                    binding.bind_ortvalue_input(spec.name, ort.OrtValue.ortvalue_from_numpy(array, device, index))
            for spec in signature.outputs:
                binding.bind_output(spec.name, device, index)
            session.run_with_iobinding(binding)
            # From now on, outputs are written to the memory that the first run allocated.
            for spec, value in zip(signature.outputs, binding.get_outputs(), strict=True):
                binding.bind_ortvalue_output(spec.name, value)
            bindings.append(binding)

        def run(number: int) -> Callable[[], list[np.ndarray]]:
            binding = bindings[number % len(bindings)]
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()
            return lambda: [np.array(array) for array in binding.copy_outputs_to_cpu()]

        return run


class BatcherTarget(Target):
    """A model that is loaded and batched as in the server. Requests enter the batcher directly, without a protocol."""

    def __init__(self, plan: ModelPlan) -> None:
        self._plan = plan
        self._served: ServedModel | None = None
        self._under_way: dict[int, tuple[Ticket, InflightRequest]] = {}

    async def open(self, count: int) -> None:
        if self._served is None:
            plan, subject = self._plan, self._plan.subject
            chosen = {"execution_providers": plan.provider and [plan.provider], "intra_op_threads": plan.threads}
            options = subject.options.model_copy(update={name: value for name, value in chosen.items() if value})
            load = partial(load_model, subject.path, subject.name, options, subject.folder)
            loaded = await asyncio.to_thread(load)
            assembly = Assembly(asyncio.get_running_loop(), monotonic_ns, processors=cpu_budget())
            self._served = assembly.serve(loaded, Configuration(options), ModelMetrics(subject.name, "1"))

    def send(self, ticket: Ticket) -> None:
        assert self._served is not None
        plan = self._plan
        request = InflightRequest(Timing(monotonic_ns()), plan.inputs[ticket.request], plan.rows)
        request.on_settled = partial(self._settled, ticket)
        self._under_way[ticket.number] = ticket, request
        try:
            self._served.submit(request, NO_TERMS)
        except ServeError as error:
            self._under_way.pop(ticket.number, None)
            # Deferred: a caller sends its next request on a failure, so failing here would recurse without end.
            asyncio.get_running_loop().call_soon(
                self.sink.failed, ticket, monotonic_ns(), error.kind.value, error.message
            )

    def _settled(self, ticket: Ticket, request: InflightRequest) -> None:
        done_ns = request.timing.done_ns = monotonic_ns()
        if self._under_way.pop(ticket.number, None) is None:
            return
        assert self._served is not None
        try:
            outputs = self._served.cut_back(request.take_outputs(), request.inputs)
        except ServeError as error:
            self.sink.failed(ticket, done_ns, error.kind.value, error.message)
            return
        body = [np.array(output) for output in outputs] if ticket.wants_body else None
        nbytes = sum(output.nbytes for output in outputs)
        self.sink.answered(ticket, done_ns, nbytes, request.timing.server_timing(), body)

    def batches(self) -> dict[int, int]:
        assert self._served is not None
        return {rows: series.count for rows, series in self._served.metrics.batches.items()}

    def expire(self, sent_before_ns: int) -> None:
        for number, (ticket, request) in list(self._under_way.items()):
            if ticket.sent_ns < sent_before_ns:
                del self._under_way[number]
                request.cancel()
                self.sink.failed(ticket, monotonic_ns(), "timeout", "no answer in time")

    async def close(self) -> None:
        if self._served is not None:
            await self._served.close()
