"""The way of one inference request, the same for every protocol."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar, cast

import numpy as np

from ortserve.clock import Clock
from ortserve.codecs.bounds import INLINE_ELEMENTS, JSON_GROWTH, TEXT_BYTES
from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.encoded import AnswerEncoder, EncodedRequest, JsonRequest, Reading
from ortserve.core.large_memory import LargeMemory
from ortserve.core.promise import Outputs
from ortserve.core.request import InferRequest, InferResponse, RequestedOutput
from ortserve.core.tensor import Tensor, why_not_stacked
from ortserve.core.terms import Terms
from ortserve.core.timing import Timing
from ortserve.errors import ContentsError, ErrorKind, ModelRejectionError, ServeError, of_request, out_of_memory
from ortserve.registry.registry import Registry
from ortserve.registry.served import ServedModel
from ortserve.service.accounts import Accounts, named
from ortserve.service.busy_polling import BusyPolling
from ortserve.service.call import Call
from ortserve.service.classification import classify, is_short
from ortserve.service.codec_threads import CodecThreads
from ortserve.service.gate import BodyGate, Hold
from ortserve.service.parameters import read_scheduling
from ortserve.service.raw_input import is_long_text, read_raw_input
from ortserve.service.region_transfer import RegionTransfer
from ortserve.service.shared_memory import SharedMemory
from ortserve.service.validation import check_request
from ortserve.telemetry.logs import log_fault
from ortserve.telemetry.readings import DECODE, ENCODE, NOTHING, LoopActivity
from ortserve.telemetry.tracing import Trace

logger: Final = logging.getLogger(__name__)

Answer = TypeVar("Answer")


_TAKEN: Final[Any] = None

_MAX_JSON_BYTES: Final = 32 * 1024 * 1024


@dataclass(slots=True, init=False)
class Pending:
    """A request on its way through its model.

    Attributes:
        request: None while it is being read on a thread or in another process.
        served: The version that answers it; None as long as the request is.
        inputs: In the signature's order.
        rows: Length of the batch axis, 1 for a model without one.
        outputs: Done when there is something to ``finish``, ``classified`` included.
        leave_queue: From the submission.
        classified: By name, what is answered in the place of the outputs that the caller wants classified, if any.
        encoding: Of the answer, while a thread encodes it and after that; else None.
    """

    call: Call
    request: InferRequest | None
    served: ServedModel | None
    inputs: Arrays
    rows: int
    outputs: Outputs
    leave_queue: Callable[[], object]
    classified: Mapping[str, Tensor] | None
    encoding: "asyncio.Future[Any] | None"

    def __init__(
        self,
        call: Call,
        request: InferRequest | None,
        served: ServedModel | None,
        inputs: Arrays,
        rows: int,
        outputs: Outputs,
        leave_queue: Callable[[], object],
        classified: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.call = call
        self.request = request
        self.served = served
        self.inputs = inputs
        self.rows = rows
        self.outputs = outputs
        self.leave_queue = leave_queue
        self.classified = classified
        self.encoding = None

    def take(self) -> Arrays:
        """The outputs, once: they are leased for as long as anything holds them, and frames that failed live long.

        Raises:
            asyncio.CancelledError: The caller left.
        """
        outputs, self.outputs, self.leave_queue = self.outputs, _TAKEN, _TAKEN
        if outputs is _TAKEN:
            raise asyncio.CancelledError
        return outputs.result()

    def leave(self) -> None:
        """Stop waiting: the place in the queue is free, and ``outputs`` are cancelled. Nothing, once they are taken."""
        leave_queue, self.outputs, self.leave_queue = self.leave_queue, _TAKEN, _TAKEN
        if leave_queue is not _TAKEN:
            leave_queue()


class InferenceService:
    """Reads, checks, runs and encodes requests, and counts each exactly once. Loop thread only."""

    def __init__(
        self,
        registry: Registry,
        accounts: Accounts,
        clock: Clock,
        *,
        max_inflight_bytes: int,
        max_json_bytes: int | None = None,
        codec_threads: CodecThreads | None = None,
        shared_memory: SharedMemory | None = None,
        activity: LoopActivity | None = None,
        polling: BusyPolling | None = None,
        memory: LargeMemory | None = None,
    ) -> None:
        """Take over nothing.

        Args:
            registry: Where models are found.
            accounts: Where requests are counted.
            clock: Monotonic nanoseconds.
            max_inflight_bytes: Memory that bodies, and what is made of them, may take together.
            max_json_bytes: Of one body; None for 32 MiB, or as many as ``max_inflight_bytes`` has room to read.
            codec_threads: For long reading and writing; None for two threads.
            shared_memory: None to reject requests that use it.
            activity: Shows when the loop decodes and encodes; None where nothing watches the loop.
            polling: Learns when requests are in flight; None where the loop never polls.
            memory: For large bodies; None for some of its own.
        """
        self._activity = activity or LoopActivity()
        self._polling = polling
        self._registry = registry
        self._shared_memory = shared_memory or SharedMemory(is_allowed=False)
        self._gate = BodyGate(max_inflight_bytes, memory)
        self.max_json_bytes: Final = max_json_bytes or min(_MAX_JSON_BYTES, max_inflight_bytes // (JSON_GROWTH + 2))
        """Of one request."""
        self._codecs = codec_threads or CodecThreads(2)
        self._accounts = accounts
        self._clock = clock

    def hold(self, size: int) -> Hold:
        """Let a body of ``size`` bytes in, for as long as a ``with`` block lasts.

        Raises:
            ServeError: overloaded, when the server holds too many bytes already.
        """
        return self._gate.hold(size)

    def receive(
        self, protocol: str, timeout_ns: int | None = None, trace: Trace | None = None, begun_ns: int = 0
    ) -> Call:
        """Begin a call, now that its body is complete.

        Args:
            protocol: As in ``Call``.
            timeout_ns: As in ``Call``.
            trace: Ends when the call is counted; None where it is not sampled.
            begun_ns: When its head was there, 0 where that is not known.
        """
        timing = Timing(self._clock())
        timing.begun_ns = begun_ns  # a keyword would cost more
        return Call(protocol, timing, timeout_ns, trace)

    def begin(self, call: Call, encoded: EncodedRequest) -> Pending:
        """Read and check a call's request and put it into its model's queue.

        What would take long to read is read on a thread or in another process first.

        Args:
            call: From ``receive``.
            encoded: The request's bytes.

        Returns:
            What to wait for and to ``finish``, also when it was left.

        Raises:
            ServeError: Whatever went wrong, with its kind and a text for the caller; the call is counted.
        """
        request: InferRequest | None = None
        served: ServedModel | None = None
        activity = self._activity
        try:
            if not encoded.is_short:
                reading = encoded.reading()
                if reading is not Reading.INLINE:
                    return self._queued(self._begin_elsewhere(call, encoded, reading))
            activity.protocol = call.protocol
            activity.step = DECODE
            request = encoded.read()
            activity.step = NOTHING
            served = self._registry.find(request.model_name, request.model_version)
            raw = request.raw_input
            if request.regions is not None or (raw is not None and is_long_text(raw, served.signature)):
                pending = Pending(call, request, served, (), 1, _TAKEN, _TAKEN)
                return self._queued(_as_task(pending, self._run_in_steps(pending, request)))
            inputs, rows = check_request(request, served.signature, served.name)
            submission = served.submit(inputs, rows, call.timing, _terms(call, request, served))
            outputs, leave = submission.outputs, submission.leave
            to_classify = [output for output in request.outputs if output.classes]
            if not to_classify:
                if self._polling is not None:
                    self._polling.on_request(call.timing.received_ns)
                return Pending(call, request, served, inputs, rows, outputs, leave)
            classified: dict[str, Tensor] = {}
            classifying = asyncio.create_task(_classify(to_classify, served, inputs, outputs, classified))
            # A task that is cancelled before its first step cancels nothing of what it would have waited for.
            classifying.add_done_callback(lambda _: leave())
            return self._queued(
                Pending(call, request, served, inputs, rows, classifying, classifying.cancel, classified)
            )
        except ContentsError as error:
            raise self._unread(call, error) from error
        except Exception as error:
            raise self._failed(call, request, served, error) from error

    def finish(self, pending: Pending, encoder: AnswerEncoder[Answer]) -> Answer | None:
        """Encode the outputs of a model and count the call. Called when ``pending.outputs`` is done.

        Args:
            pending: From ``begin``.
            encoder: Makes the answer's bytes, unless something failed.

        Returns:
            None where a thread encodes the answer, which would take the event loop long. ``finish`` is to be called
            once more, when ``pending.encoding`` is done.

        Raises:
            ServeError: Whatever went wrong, with its kind and a text for the caller.
            asyncio.CancelledError: The caller left.
        """
        call = pending.call
        request = pending.request
        activity = self._activity
        activity.protocol = call.protocol
        if request is not None:
            activity.model = request.model_name
            activity.request_id = request.id
        activity.step = ENCODE
        try:
            # The outputs are not named here, so that the frame of a failure does not keep their memory leased.
            answer: Answer | None = self._encode(pending, encoder)
            if answer is None:
                activity.step = NOTHING
                return None
        except asyncio.CancelledError:
            self._accounts.left(call, request, pending.served)
            self._ended()
            raise
        except ContentsError as error:
            self._ended()
            raise self._unread(call, error) from error.with_traceback(None)
        except Exception as error:  # noqa: BLE001 - it is said to the caller, and logged where it is a fault of ours
            self._ended()
            # Without its frames, which hold the outputs where encoding failed.
            raise self._failed(call, request, pending.served, error) from error.with_traceback(None)
        assert request is not None
        assert pending.served is not None
        activity.step = NOTHING
        self._accounts.answered(call, request, pending.served, pending.rows)
        if self._polling is not None:
            self._polling.on_end(call.timing.done_ns)
        return answer

    async def serve(self, call: Call, encoded: EncodedRequest, encoder: AnswerEncoder[Answer]) -> Answer:
        """``begin``, wait and ``finish``, for frontends that have a task for each request."""
        pending = self.begin(call, encoded)
        await self._until_done(pending)
        answer = self.finish(pending, encoder)
        if answer is None:
            await self._until_done(pending)
            answer = self.finish(pending, encoder)
            assert answer is not None
        return answer

    async def _until_done(self, pending: Pending) -> None:
        """Wait until ``finish`` may be called.

        Raises:
            asyncio.CancelledError: The caller left; the call is counted.
        """
        try:
            if pending.encoding is None:
                await pending.outputs
            else:
                await asyncio.wait((pending.encoding,))
        except asyncio.CancelledError:
            pending.leave()
            self._accounts.left(pending.call, pending.request, pending.served)
            self._ended()
            raise
        except Exception:  # noqa: BLE001, S110 - ``finish`` raises it once more, and counts it
            pass

    def _encode(self, pending: Pending, encoder: AnswerEncoder[Answer]) -> Answer | None:
        """The answer; None where a thread begins to encode it."""
        request, served = pending.request, pending.served
        if pending.encoding is not None:
            answer: Answer = pending.encoding.result()
            return answer
        outputs = pending.take()
        assert request is not None, "it has outputs"
        assert served is not None
        outputs = served.cut_back(outputs, pending.inputs)
        response = _response(pending, request, served, outputs)
        for array in outputs:
            if array.size > INLINE_ELEMENTS:
                if encoder.is_long(request, response):
                    pending.encoding = self._codecs.run(partial(encoder.encode, request, response, self._gate.memory))
                    return None
                break
        return encoder.encode(request, response)

    def _queued(self, pending: Pending) -> Pending:
        if self._polling is not None:
            self._polling.on_request(pending.call.timing.received_ns)
        return pending

    def _ended(self) -> None:
        """A call that was queued ended without an answer."""
        self._activity.step = NOTHING
        if self._polling is not None:
            self._polling.on_end(self._clock())

    def _begin_elsewhere(self, call: Call, encoded: EncodedRequest, reading: Reading) -> Pending:
        """``begin``, where reading takes long: all that is missing of the result comes with the outputs.

        Raises:
            ServeError: too_large, for too much JSON; overloaded, where there is no memory to read it.
        """
        if encoded.json_bytes > self.max_json_bytes:
            raise ServeError(
                ErrorKind.TOO_LARGE,
                f"max_json_bytes: expected at most {self.max_json_bytes} bytes of JSON, got {encoded.json_bytes}; "
                "binary tensors may be larger",
            )
        hold = self._gate.hold(encoded.growth_bytes)
        is_json = reading is Reading.PROCESS
        read = self._codecs.read_json(cast("JsonRequest", encoded)) if is_json else self._codecs.read(encoded)
        pending = Pending(call, None, None, (), 1, _TAKEN, _TAKEN)
        pending = _as_task(pending, self._read_and_run(pending, read, hold))
        pending.outputs.add_done_callback(partial(_release_when_read, read, hold))
        return pending

    async def _read_and_run(self, pending: Pending, read: "asyncio.Future[InferRequest]", hold: Hold) -> Arrays:
        """Run a request that is being read; ``hold`` has the memory that reading takes, then that of the tensors."""
        request = await asyncio.shield(read)
        hold.count(sum([_memory_bytes(tensor) for tensor in request.inputs]))
        pending.request = request
        pending.served = self._registry.find(request.model_name, request.model_version)
        return await self._run_in_steps(pending, request)

    async def _run_in_steps(self, pending: Pending, request: InferRequest) -> Arrays:
        """Run a request whose tensors may lie in shared memory, or are still to be made of its bytes."""
        if request.regions is None:
            return await self._run(pending, request, None)
        with RegionTransfer(self._shared_memory, request.regions, self._gate) as transfer:
            whole = replace(request, inputs=[*request.inputs, *await transfer.fetch(request.model_name)])
            return await self._run(pending, whole, transfer)

    async def _run(self, pending: Pending, request: InferRequest, transfer: RegionTransfer | None) -> Arrays:
        """Check and run a request whose inputs are all there; ``transfer`` takes the outputs that lie in regions."""
        call = pending.call
        # Again: meanwhile another version may have taken over from the one that was found first.
        served = pending.served = self._registry.find(request.model_name, request.model_version)
        if request.raw_input is not None and is_long_text(request.raw_input, served.signature):
            tensor = await self._codecs.run(partial(read_raw_input, request.raw_input, served.signature, served.name))
            request = replace(request, inputs=[tensor], raw_input=None)
        pending.inputs, pending.rows = check_request(request, served.signature, served.name)
        submission = served.submit(pending.inputs, pending.rows, call.timing, _terms(call, request, served))
        try:
            outputs = await submission.outputs
        except asyncio.CancelledError:
            submission.leave()
            raise
        to_classify = [output for output in request.outputs if output.classes]
        if to_classify:
            classified: dict[str, Tensor] = {}
            await _classify(to_classify, served, pending.inputs, submission.outputs, classified)
            pending.classified = classified
        if transfer is not None:
            shown = served.cut_back(outputs, pending.inputs)
            await transfer.place(_response(pending, request, served, shown).outputs)
        return outputs

    def count_refused_body(self, protocol: str, kind: ErrorKind, received_ns: int, trace: Trace | None = None) -> None:
        """Count a request whose body was refused, such as one that is too large, or whose caller left meanwhile."""
        self._accounts.body_refused(protocol, kind, received_ns, trace)

    def _unread(self, call: Call, error: ContentsError) -> ServeError:
        """Count a call whose tensors could not be read, and say to its caller what comes first."""
        try:
            served = self._registry.find(error.model, error.model_version)
        except ServeError as missing:
            return self._failed(call, None, None, missing)
        return self._failed(call, None, served, of_request(error, error.request_id, served.version))

    def _failed(
        self, call: Call, request: InferRequest | None, served: ServedModel | None, error: Exception
    ) -> ServeError:
        """Count a call that failed, and say it to its caller."""
        self._activity.step = NOTHING
        if isinstance(error, MemoryError):
            error = out_of_memory("a request")
        elif not isinstance(error, ServeError):
            log_fault(logger, "a request failed unexpectedly", error, **named(call, request, served))
            error = ServeError(ErrorKind.INTERNAL, "internal error")
        elif isinstance(error, ModelRejectionError) and served is not None:
            served.rejections.note(error, self._clock())
        self._accounts.failed(call, request, served, error.kind)
        return _for_caller(error, request, served)


def _as_task(pending: Pending, work: Coroutine[Any, Any, Arrays]) -> Pending:
    """Have the outputs of ``pending`` come from a task."""
    task = asyncio.create_task(work)
    pending.outputs, pending.leave_queue = task, task.cancel
    return pending


def _release_when_read(read: "asyncio.Future[InferRequest]", hold: Hold, _: object) -> None:
    """Release memory once no thread uses it: one that reads goes on, whatever becomes of its caller."""
    if not read.done():
        read.add_done_callback(partial(_release_when_read, read, hold))
        return
    hold.release()
    if not read.cancelled():
        read.exception()  # nothing else asks for it where the caller has left


def _memory_bytes(tensor: Tensor) -> int:
    """Memory that a tensor takes; the length of texts is that of the body, which is counted already."""
    return tensor.array.size * TEXT_BYTES if tensor.datatype is DataType.BYTES else tensor.array.nbytes


def _terms(call: Call, request: InferRequest, served: ServedModel) -> Terms:
    """Raises ServeError: invalid_input or unsupported, for parameters that cannot be meant."""
    scheduling = read_scheduling(request.parameters)
    return served.terms(
        call.timing.received_ns,
        timeout_ns=call.timeout_ns,
        priority=scheduling.priority,
        queue_timeout_ns=scheduling.queue_timeout_us * 1000 or None,
    )


async def _classify(
    asked: Sequence[RequestedOutput],
    served: ServedModel,
    inputs: Arrays,
    submitted: Outputs,
    classified: dict[str, Tensor],
) -> Arrays:
    """Wait for the outputs of a request and put those that are ``asked`` for as classes into ``classified``."""
    outputs = await submitted
    signature = served.signature
    shown = served.cut_back(outputs, inputs)
    for output in asked:
        index = signature.output_index[output.name]
        spec = signature.outputs[index]
        if spec.is_sequence:
            _check_stacked(output.name, shown[index], served)
        has_rows = spec.batch_axis == 0
        work = partial(
            classify,
            Tensor(output.name, spec.datatype, shown[index]),
            output.classes,
            served.labels.get(output.name, ()),
            is_batched=has_rows,
        )
        is_inline = is_short(shown[index], output.classes, is_batched=has_rows)
        classified[output.name] = work() if is_inline else await asyncio.to_thread(work)
    return outputs


def _check_stacked(name: str, array: np.ndarray, served: ServedModel) -> None:
    """Raises ServeError: unsupported, where an output is a sequence that makes no tensor."""
    if why := why_not_stacked(array):
        raise ServeError(
            ErrorKind.UNSUPPORTED,
            f"inference output '{name}' of model '{served.name}' is a sequence that makes no tensor: {why}; "
            "other outputs can be requested by name",
        )


def _response(pending: Pending, request: InferRequest, served: ServedModel, outputs: Arrays) -> InferResponse:
    classified = pending.classified
    signature = served.signature
    if request.outputs:
        chosen = [signature.output_index[output.name] for output in request.outputs]
        tensors = [Tensor(signature.outputs[i].name, signature.outputs[i].datatype, outputs[i]) for i in chosen]
        if classified:
            tensors = [classified.get(tensor.name, tensor) for tensor in tensors]
    else:
        tensors = [
            Tensor(spec.name, spec.datatype, array) for spec, array in zip(signature.outputs, outputs, strict=True)
        ]
    if signature.has_sequences:
        for tensor in tensors:
            _check_stacked(tensor.name, tensor.array, served)
    placed = request.regions.outputs if request.regions is not None else ()
    return InferResponse(served.name, served.version, request.id, tensors, placed)


def _for_caller(error: ServeError, request: InferRequest | None, served: ServedModel | None) -> ServeError:
    """A copy of its own for each caller; once its model is known, the text begins with the request's id."""
    if request is not None and served is not None:
        return of_request(error, request.id, served.version)
    return ServeError(error.kind, error.message, retry_after_s=error.retry_after_s, version=error.version)
