"""Calls that have to wait before their request can be enqueued, each in a task.

They wait for their body to be decoded on a thread, for their model to be loaded, for earlier calls of their stream, for
copies from and to shared memory, or for the candidate of a rollout. ``inference`` enqueues all other requests itself.
"""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Final

from ortserve.clock import Clock
from ortserve.core.batch import Arrays
from ortserve.core.request import InferRequest
from ortserve.errors import NotInMemoryError
from ortserve.registry.registry import Registry
from ortserve.registry.rollout import Rollout
from ortserve.registry.served_version import ServedVersion
from ortserve.service.call import Call, build_response, classifies_long, end_sequence, submit
from ortserve.service.codec_threads import CodecThreads
from ortserve.service.decodings import Decoding, Decodings
from ortserve.service.gate import BodyGate
from ortserve.service.region_transfer import RegionTransfer
from ortserve.service.shared_memory import SharedMemory
from ortserve.service.validation import check_request, long_raw_growth, read_raw_input, read_scheduling


class WaitingCalls:
    """Runs requests that wait. Each method returns the outputs, with which the call is then settled.

    All methods raise ServeError: the error for the caller. Loop thread only.
    """

    def __init__(
        self,
        registry: Registry,
        shared_memory: SharedMemory,
        gate: BodyGate,
        codecs: CodecThreads,
        decodings: Decodings,
        clock: Clock,
    ) -> None:
        """``decodings`` reserves memory in ``gate`` for what the threads of ``codecs`` decode."""
        self._registry: Final = registry
        self._shared_memory: Final = shared_memory
        self._gate: Final = gate
        self._codecs: Final = codecs
        self._decodings: Final = decodings
        self._clock: Final = clock

    async def run_after_decoding(self, call: Call, decoding: Decoding) -> Arrays:
        """Run a request that a thread or another process decodes."""
        request = call.request = await decoding.result(call.left_ns(self._clock()))
        run = self.run
        try:
            call.served = self._registry.find(request.model_name, request.model_version)
        except NotInMemoryError:
            run = self.run_when_loaded
        return await run(call, request)

    async def run_when_loaded(self, call: Call, request: InferRequest) -> Arrays:
        """Run a request whose model may have to be loaded first, before its regions are leased."""
        await self._find(call, request)
        return await self.run(call, request)

    async def run(self, call: Call, request: InferRequest) -> Arrays:
        """Run a decoded request whose model is in memory."""
        if request.regions is None:
            return await self._run_whole(call, request, None)
        with RegionTransfer(self._shared_memory, request.regions, self._gate) as transfer:
            whole = replace(request, inputs=[*request.inputs, *await transfer.read_inputs(request.model_name)])
            return await self._run_whole(call, whole, transfer)

    async def _run_whole(self, call: Call, request: InferRequest, transfer: RegionTransfer | None) -> Arrays:
        """Run a request with all its inputs; ``transfer`` writes the outputs that belong in regions."""
        served = await self._find(call, request)
        if served.takes_sequences and call.place is not None and call.would_overtake:
            await call.place.wait()
            served = await self._find(call, request)
        raw = request.raw_input
        growth_bytes = None if raw is None else long_raw_growth(raw, served.signature)
        if growth_bytes is not None:
            # The call refers to it, too, so that the rollout copies the decoded request.
            request = call.request = await self._decode_raw(call, request, served, growth_bytes)
            served = await self._find(call, request)
        rollout = served.rollout
        if rollout is not None and rollout.is_canary and (candidate := rollout.candidate_for(request, call.headers)):
            return await self._try_candidate(candidate, rollout, call, request, transfer)
        outputs = await _run_on(served, call, request)
        if transfer is not None:
            try:
                await self._respond(call, request, transfer, outputs)
            except Exception:
                end_sequence(call)
                raise
        return outputs

    async def _find(self, call: Call, request: InferRequest) -> ServedVersion:
        """Find the version that answers a request. Its model is loaded first if it is not in memory.

        Called again after each wait: another version may have become ready, or the model may have left memory.
        """
        queue_timeout_ns = read_scheduling(request.parameters).queue_timeout_ns
        limits = [limit for limit in (call.timeout_ns, queue_timeout_ns) if limit is not None]
        served = call.served = await self._registry.wait_for(
            request.model_name, request.model_version, call.timing.received_ns, min(limits) if limits else None
        )
        return served

    async def _decode_raw(
        self, call: Call, request: InferRequest, served: ServedVersion, growth_bytes: int
    ) -> InferRequest:
        """Decode the only input of a raw request on a thread, which takes ``growth_bytes`` of memory."""
        decode = partial(self._codecs.run, partial(_with_raw_input, request, served), call)
        decoding = self._decodings.begin(decode, call, growth_bytes, body_bytes=len(request.raw_input or b""))
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(decoding.release)
        return await decoding.result(call.left_ns(self._clock()))

    async def _try_candidate(
        self, candidate: str, rollout: Rollout, call: Call, request: InferRequest, transfer: RegionTransfer | None
    ) -> Arrays:
        """Run a request on the candidate of a rollout or, if that fails, on the version that the request names.

        The response is a part of the run. It fails, for example, for an output that is larger than the shared memory
        that the caller prepared.
        """
        try:
            outputs = await _run_on(self._registry.find_or_begin(request.model_name, candidate), call, request)
            await self._respond(call, request, transfer, outputs)
        except Exception as error:  # noqa: BLE001 - a failure of a candidate never reaches the caller
            failure = error.with_traceback(None)
        else:
            rollout.candidate_answered(call.timing)
            return outputs
        call.timing.taken_ns = 0  # no run of the version has started
        call.timing.is_cached = False
        served = await self._find(call, request)
        outputs = await _run_on(served, call, request)
        await self._respond(call, request, transfer, outputs)
        rollout.candidate_failed(failure)  # not reached by a request that fails on both versions
        return outputs

    async def _respond(
        self, call: Call, request: InferRequest, transfer: RegionTransfer | None, outputs: Arrays
    ) -> None:
        """Build the response from the outputs of the version that ran, and write those that belong in regions."""
        served = call.served
        assert served is not None, "it has run"
        shown = served.cut_back(outputs, call.inputs)
        build = partial(build_response, request, served, shown)
        call.response = await self._codecs.run(build) if classifies_long(request, served, shown) else build()
        if transfer is not None:
            await transfer.write_outputs(call.response.outputs)


async def _run_on(served: ServedVersion, call: Call, request: InferRequest) -> Arrays:
    """Run a request on a version, which then answers the call."""
    inputs, rows = check_request(request, served.signature, served.name)
    run = call.child(inputs, rows)
    submit(run, call, served)
    outputs = await run
    call.served, call.inputs, call.rows = served, run.inputs, rows
    return outputs


def _with_raw_input(request: InferRequest, served: ServedVersion) -> InferRequest:
    """Decode the only input of a raw request."""
    assert request.raw_input is not None
    tensor = read_raw_input(request.raw_input, served.signature, served.name)
    return replace(request, inputs=[tensor], raw_input=None)
