"""Inference, the same for every protocol: decode a body, start the request, encode and record its answer.

A call that has to wait before its request can be enqueued continues in ``waiting_calls``.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar, cast

from ortserve.clock import Clock
from ortserve.codecs.bounds import INLINE_ELEMENTS, INLINE_OUTPUTS, JSON_GROWTH
from ortserve.core.inflight import CANCELLED, COMPUTED, DONE, FAILED
from ortserve.core.large_memory import LargeMemory
from ortserve.core.request import AnswerEncoder, DecodingPlace, EncodedRequest, InferRequest, JsonRequest
from ortserve.core.timing import Timing
from ortserve.errors import ContentsError, ErrorKind, ModelRejectionError, NotInMemoryError, ServeError, out_of_memory
from ortserve.registry.registry import Registry
from ortserve.registry.rollout import Headers
from ortserve.service.busy_polling import BusyPolling
from ortserve.service.call import (
    Call,
    build_response,
    classifies_long,
    classify_and_encode,
    end_sequence,
    submit,
)
from ortserve.service.codec_threads import CodecThreads
from ortserve.service.decodings import Decodings
from ortserve.service.gate import BodyGate, json_too_large
from ortserve.service.recorder import Recorder, log_fields
from ortserve.service.shared_memory import SharedMemory
from ortserve.service.validation import check_request, long_raw_growth
from ortserve.service.waiting_calls import WaitingCalls
from ortserve.telemetry.logs import log_fault
from ortserve.telemetry.readings import DECODE, ENCODE, NOTHING, LoopActivity
from ortserve.telemetry.tracing import Trace

logger: Final = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_MAX_JSON_BYTES: Final = 32 * 1024 * 1024


class InferenceService:
    """Decodes, validates, runs and encodes requests, and records each exactly once. Loop thread only."""

    def __init__(
        self,
        registry: Registry,
        recorder: Recorder,
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
        """Connect the parts.

        Args:
            registry: Finds models.
            recorder: Records calls that have ended.
            clock: Monotonic nanoseconds.
            max_inflight_bytes: Maximum memory of all bodies and the tensors decoded from them.
            max_json_bytes: Maximum JSON of one body; None for 32 MiB, or less if ``max_inflight_bytes`` is too small to
                decode that much.
            codec_threads: Threads for long decoding and encoding; None for two of its own.
            shared_memory: The regions of clients; None to reject requests that use them.
            activity: Shows the watchdog when the loop decodes and encodes; None without a watchdog.
            polling: Polls while no request is in flight; None if the loop never polls.
            memory: Memory for large bodies; None for a pool of its own.
        """
        self._activity = activity or LoopActivity()
        self._polling = polling
        self._registry = registry
        self.gate: Final = BodyGate(max_inflight_bytes, memory)
        """Reserves the memory of bodies."""
        self.max_json_bytes: Final = max_json_bytes or min(_MAX_JSON_BYTES, max_inflight_bytes // (JSON_GROWTH + 2))
        """Maximum JSON of one request."""
        self._codecs = codec_threads or CodecThreads(2)
        self.decodings: Final = Decodings(self.gate, self._codecs)
        """Decodes requests on threads."""
        regions = shared_memory or SharedMemory(is_allowed=False)
        self._waiting = WaitingCalls(registry, regions, self.gate, self._codecs, self.decodings, clock)
        self.recorder: Final = recorder
        self._clock = clock
        self._settled = self._on_settled  # bound once, not for each call

    def receive(
        self,
        protocol: str,
        timeout_ns: int | None = None,
        trace: Trace | None = None,
        begun_ns: int = 0,
        headers: Headers = (),
    ) -> Call:
        """Begin a call, now that its body is complete.

        Args:
            protocol: See ``Call``.
            timeout_ns: See ``Call``.
            trace: Ends when the call is recorded; None if the call is not sampled.
            begun_ns: When the head was complete; 0 if that is unknown.
            headers: All headers of the call.
        """
        timing = Timing(self._clock())
        timing.begun_ns = begun_ns  # a keyword argument would take longer
        return Call(protocol, timing, timeout_ns, trace, headers)

    def start(
        self,
        call: Call,
        body: EncodedRequest,
        encoder: AnswerEncoder[Answer],
        on_answer: Callable[[Answer], object],
        on_error: Callable[[ServeError], object],
    ) -> None:
        """Decode a body and start its request.

        Exactly one of the callbacks is called, once and on the loop; ``on_error`` possibly before this returns. After
        ``call.cancel()`` neither is called. They must not raise.

        Args:
            call: The result of ``receive``. ``call.cancel()`` ends it without an answer.
            body: Decoded here if that is quick, otherwise on a thread or in another process.
            encoder: Encodes the answer.
            on_answer: Called with the encoded answer after the call was recorded.
            on_error: Called with the error, whose text is for the caller, after the call was recorded.
        """
        call.named_model = body.model_name
        call.encoder = encoder
        call.on_answer = on_answer
        call.on_error = on_error
        call.on_settled = self._settled
        try:
            if body.is_short or (place := body.decoding_place()) is DecodingPlace.INLINE:
                activity = self._activity
                activity.protocol = call.protocol
                activity.step = DECODE
                request = body.read()
                activity.step = NOTHING
                self._start_request(call, request)
            else:
                self._start_after_decoding(call, body, place)
        except Exception as error:  # noqa: BLE001 - every error is reported to the caller
            self._fail(call, error)
            return
        if self._polling is not None:
            self._polling.on_request(call.timing.received_ns)

    async def serve(self, call: Call, body: EncodedRequest, encoder: AnswerEncoder[Answer]) -> Answer:
        """``start`` a call and wait for its answer; the call is cancelled if the task is. Raises ServeError."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.start(call, body, encoder, partial(_set_result, answered), partial(_set_error, answered))
        try:
            return await answered
        finally:
            call.cancel()
            del answered  # a reference cycle: the frames of its error

    def _start_request(self, call: Call, request: InferRequest) -> None:
        call.request = request
        try:
            served = call.served = self._registry.find(request.model_name, request.model_version)
        except NotInMemoryError:
            call.settle_by(self._waiting.run_when_loaded(call, request))
            return
        raw, rollout = request.raw_input, served.rollout
        is_long = raw is not None and long_raw_growth(raw, served.signature) is not None
        must_wait = request.regions is not None or (served.takes_sequences and call.would_overtake)
        if is_long or must_wait or (rollout is not None and rollout.is_canary):
            call.settle_by(self._waiting.run(call, request))
            return
        call.inputs, call.rows = check_request(request, served.signature, served.name)
        submit(call, call, served)

    def _start_after_decoding(self, call: Call, body: EncodedRequest, place: DecodingPlace) -> None:
        """Decode a body on a thread or in another process, then start its request.

        Raises:
            ServeError: too_large, for too much JSON; overloaded, if too little memory is left to decode it.
        """
        if body.json_bytes > self.max_json_bytes:
            raise json_too_large(body.json_bytes, self.max_json_bytes)
        json_bytes = 0
        decode: Callable[[], asyncio.Future[InferRequest]]
        if place is DecodingPlace.PROCESS:
            json_bytes = body.json_bytes
            decode = partial(self._codecs.read_json, cast("JsonRequest", body), call)
        else:
            decode = partial(self._codecs.run, body.read, call)
        decoding = self.decodings.begin(
            decode, call, body.growth_bytes, json_bytes=json_bytes, body_bytes=body.body_bytes
        )
        call.settle_by(self._waiting.run_after_decoding(call, decoding)).add_done_callback(decoding.release)

    def _on_settled(self, call: Call) -> None:
        """Answer a call that has outputs, failed or was cancelled."""
        if call.state == CANCELLED:
            call.on_answer = call.on_error = None
            self.recorder.cancelled(call)
            self._note_unanswered()
            return
        activity = self._activity
        activity.protocol = call.protocol
        if call.request is not None:
            activity.model = call.request.model_name
            activity.request_id = call.request.id
        activity.step = ENCODE
        try:
            # No variable refers to the outputs here, so that the frame of a failure does not keep their memory leased.
            answer = self._encode(call)
        except Exception as error:  # noqa: BLE001 - every error is reported to the caller
            self._note_unanswered()
            # Without its frames, which hold the outputs if encoding failed.
            self._fail(call, error.with_traceback(None))
            return
        if call.encoding is None:
            self._answer(call, answer)
        activity.step = NOTHING

    def _encode(self, call: Call) -> Any:
        """Encode the answer of a call. Returns None, with ``call.encoding`` set, if a thread encodes it.

        Raises:
            Exception: The error of the call, or of the encoding.
        """
        outputs = call.take_outputs()
        request, served, encoder = call.request, call.served, call.encoder
        assert request is not None, "it has outputs"
        assert served is not None
        assert encoder is not None
        outputs = served.cut_back(outputs, call.inputs)
        rollout = served.rollout
        if rollout is not None:
            rollout.observe(request, call.headers, outputs, call.timing)
        response = call.response
        if response is None:
            if request.outputs and classifies_long(request, served, outputs):
                work = partial(classify_and_encode, request, served, outputs, encoder, self.gate.memory)
                self._encode_on_thread(call, work)
                return None
            response = build_response(request, served, outputs)
        elements = 0
        for array in outputs:
            elements += array.size
        may_be_long = elements > INLINE_ELEMENTS or served.signature.has_text_outputs
        if len(outputs) > INLINE_OUTPUTS or (may_be_long and encoder.is_long(request, response)):
            self._encode_on_thread(call, partial(encoder.encode, request, response, self.gate.memory))
            return None
        return encoder.encode(request, response)

    def _encode_on_thread(self, call: Call, work: Callable[[], Any]) -> None:
        call.on_settled = self._settled  # it may still be cancelled
        call.encoding = self._codecs.run(work)
        call.encoding.add_done_callback(partial(self._on_encoded, call))

    def _on_encoded(self, call: Call, encoding: "asyncio.Future[Any]") -> None:
        error = encoding.exception()
        if call.state == CANCELLED:
            return
        if error is None:
            self._answer(call, encoding.result())
        else:
            self._note_unanswered()
            self._fail(call, error.with_traceback(None))

    def _answer(self, call: Call, answer: Any) -> None:
        call.state = DONE
        self.recorder.answered(call)
        self._activity.step = NOTHING
        if self._polling is not None:
            self._polling.on_end(call.timing.done_ns)
        on_answer, call.on_answer, call.on_error = call.on_answer, None, None
        assert on_answer is not None
        on_answer(answer)

    def _note_unanswered(self) -> None:
        """Note that a call has ended without an answer."""
        self._activity.step = NOTHING
        if self._polling is not None:
            self._polling.on_end(self._clock())

    def _fail(self, call: Call, error: BaseException) -> None:
        """Record a call that failed, and report the error to its caller."""
        self._activity.step = NOTHING
        if call.state == COMPUTED:
            end_sequence(call)
        call.state = FAILED
        call.on_settled = None
        if isinstance(error, ContentsError):  # the tensors could not be decoded; an unknown model takes precedence
            call.named_model = error.model
            try:
                call.served = self._registry.find(error.model, error.model_version)
            except ServeError as missing:
                error = missing
        if isinstance(error, MemoryError):
            error = out_of_memory("a request")
        elif not isinstance(error, ServeError):
            log_fault(logger, "a request failed unexpectedly", error, **log_fields(call))
            error = ServeError(ErrorKind.INTERNAL, "internal error")
        elif isinstance(error, ModelRejectionError) and call.served is not None:
            call.served.rejections.note(error, self._clock())
        self.recorder.failed(call, error.kind)
        on_error, call.on_answer, call.on_error = call.on_error, None, None
        assert on_error is not None
        on_error(call.error_for_caller(error))


def _set_result(answered: "asyncio.Future[Answer]", answer: Answer) -> None:
    if not answered.done():
        answered.set_result(answer)


def _set_error(answered: "asyncio.Future[Any]", error: ServeError) -> None:
    if not answered.done():
        answered.set_exception(error)
