"""One inference call: the in-flight request with its protocol and its callbacks, its submission, and its response."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.inflight import NO_SCHEDULING, InflightRequest
from ortserve.core.large_memory import LargeMemory
from ortserve.core.request import AnswerEncoder, InferRequest, InferResponse
from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import Tensor, why_not_stacked
from ortserve.core.timing import Timing
from ortserve.errors import ContentsError, ErrorKind, SequenceError, ServeError, of_request
from ortserve.registry.rollout import Headers
from ortserve.registry.served_version import ServedVersion
from ortserve.service.classification import classify, is_short
from ortserve.service.validation import read_scheduling, read_sequence_part
from ortserve.telemetry.tracing import Trace

Answer = TypeVar("Answer")

_NO_REGIONS: Final = ()


class StreamPlace:
    """The place of a call in its stream, so that the requests of a sequence run in their order. Loop thread only."""

    __slots__ = ("_following", "_is_submitted", "_turn")

    def __init__(self, earlier: "StreamPlace | None") -> None:
        """``earlier`` is the place of the call before it; None for the first one."""
        self._turn = asyncio.Event()
        self._is_submitted = False
        self._following: StreamPlace | None = None
        if earlier is None or (earlier.is_reached and earlier._is_submitted):
            self._turn.set()
        else:
            earlier._following = self

    @property
    def is_reached(self) -> bool:
        """Whether all calls before it were submitted, or have ended."""
        return self._turn.is_set()

    async def wait(self) -> None:
        """Wait until the place is reached."""
        await self._turn.wait()

    def submit(self) -> None:
        """Note that the call was submitted, or has ended."""
        self._is_submitted = True
        place = self
        while place.is_reached and place._is_submitted and place._following is not None:
            place = place._following
            place._turn.set()


class Call(InflightRequest):
    """A call from the moment its body is complete. The service fills in the rest step by step.

    Attributes:
        protocol: ``http`` or ``grpc``, for metrics.
        timeout_ns: How long the caller waits for the answer; None if it did not say.
        trace: The trace of the call; None if it is not sampled.
        request: The decoded body; None until it is decoded.
        served: The version that answers; None until it is found.
        response: The answer before it is encoded, if a task built it; otherwise None.
        headers: All headers of the call, for ``Rollout``.
        named_model: Name of the model in the path; empty if only the body names it, until that is decoded or fails.
        place: The place of the call in its stream; None outside of streams.
        encoder: Encodes the answer.
        encoding: The encoded answer while a thread works on it; otherwise None.
        on_answer: Called once with the encoded answer.
        on_error: Called once with the error instead. Neither is called for a call that was cancelled. Both are None
            from then on: they may refer to the call, and such a cycle would leave its memory to the garbage collector.
    """

    def __init__(
        self,
        protocol: str,
        timing: Timing,
        timeout_ns: int | None,
        trace: Trace | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(timing)
        self.protocol: Final = protocol
        self.timeout_ns: Final = timeout_ns
        self.trace: Final = trace
        self.headers: Final = headers
        self.named_model = ""
        self.place: StreamPlace | None = None
        self.request: InferRequest | None = None
        self.served: ServedVersion | None = None
        self.response: InferResponse | None = None
        self.encoder: AnswerEncoder[Any] | None = None
        self.encoding: asyncio.Future[Any] | None = None
        self.on_answer: Callable[[Any], object] | None = None
        self.on_error: Callable[[ServeError], object] | None = None

    @property
    def would_overtake(self) -> bool:
        """Whether a previous call of the stream is still being decoded, or waits for its model or shared memory."""
        return self.place is not None and not self.place.is_reached

    @property
    def model_name(self) -> str:
        """Name of the model that the caller asked for, whether it exists or not; empty while it is unknown."""
        return self.request.model_name if self.request is not None else self.named_model

    def left_ns(self, now_ns: int) -> int | None:
        """Time until the deadline of the call; None without one."""
        return None if self.timeout_ns is None else self.timing.received_ns + self.timeout_ns - now_ns

    def error_for_caller(self, error: ServeError) -> ServeError:
        """A copy of the error. Once the model is known, the text begins with the id of the request."""
        request, served = self.request, self.served
        if isinstance(error, SequenceError):
            version = "" if served is None else served.version
            return ServeError(error.kind, error.message, retry_after_s=error.retry_after_s, version=version)
        if isinstance(error, ContentsError) and served is not None:
            return of_request(error, error.request_id, served.version)
        if request is not None and served is not None:
            return of_request(error, request.id, served.version)
        return ServeError(error.kind, error.message, retry_after_s=error.retry_after_s, version=error.version)


def submit(run: InflightRequest, call: Call, served: ServedVersion) -> None:
    """Submit the run that answers a call: the call itself, or a child of it if the call waits for the run in a task.

    Raises:
        ServeError: The version rejects it; invalid_input, for parameters that are malformed.
    """
    request = call.request
    assert request is not None, "it is decoded"
    parameters, takes_sequences = request.parameters, served.takes_sequences
    scheduling = read_scheduling(parameters) if parameters else NO_SCHEDULING
    # Read for any model: a value of the wrong type is an error on both protocols.
    part = read_sequence_part(parameters, call.protocol) if parameters or takes_sequences else None
    terms = served.terms(call.timing.received_ns, call.timeout_ns, scheduling, request.outputs)
    if part is None or not takes_sequences:
        served.submit(run, terms)
    else:
        served.submit_part(run, terms, part)
    if call.place is not None:
        call.place.submit()


def end_sequence(call: Call) -> None:
    """End the sequence of a call that fails after its run. Sent again, its request would be in the state twice."""
    request, served = call.request, call.served
    if request is None or served is None or not served.takes_sequences:
        return
    part = read_sequence_part(request.parameters, call.protocol)
    if part.id and not part.is_end:
        served.end_sequence(part.id, call.timing.computed_ns)


def build_response(request: InferRequest, served: ServedVersion, outputs: Arrays) -> InferResponse:
    """Choose the requested outputs and classify those for which classes are requested. Any thread.

    Args:
        request: A request that is valid for the model.
        served: The version that ran.
        outputs: Its outputs in the order of the signature, as clients see them.

    Raises:
        ServeError: unsupported, for an output that is a sequence of tensors of different shapes; invalid_input, for an
            output that is too large to classify.
    """
    signature = served.signature
    if request.outputs:
        tensors = []
        for output in request.outputs:
            index = signature.output_index[output.name]
            spec = signature.outputs[index]
            tensor = Tensor(spec.name, spec.datatype, outputs[index])
            tensors.append(_classified(tensor, spec, output.classes, served) if output.classes else tensor)
    else:
        tensors = [
            Tensor(spec.name, spec.datatype, array) for spec, array in zip(signature.outputs, outputs, strict=True)
        ]
    if signature.has_sequences:
        for tensor in tensors:
            _check_stacked(tensor.name, tensor.array, served)
    in_regions = request.regions.outputs if request.regions is not None else _NO_REGIONS
    return InferResponse(served.name, served.version, request.id, tensors, in_regions)


def classifies_long(request: InferRequest, served: ServedVersion, outputs: Arrays) -> bool:
    """Whether ``build_response`` takes too long for the event loop because it classifies outputs."""
    for output in request.outputs:
        if output.classes:
            index = served.signature.output_index[output.name]
            has_rows = served.signature.outputs[index].batch_axis == 0
            if not is_short(outputs[index], output.classes, is_batched=has_rows):
                return True
    return False


def classify_and_encode(
    request: InferRequest, served: ServedVersion, outputs: Arrays, encoder: AnswerEncoder[Answer], memory: LargeMemory
) -> Answer:
    """Build and encode the response, for a thread. Raises the errors of ``build_response`` and of the encoder."""
    return encoder.encode(request, build_response(request, served, outputs), memory)


def _classified(tensor: Tensor, spec: TensorSpec, classes: int, served: ServedVersion) -> Tensor:
    if spec.is_sequence:
        _check_stacked(spec.name, tensor.array, served)
    return classify(tensor, classes, served.output_labels.get(spec.name, ()), is_batched=spec.batch_axis == 0)


def _check_stacked(name: str, array: np.ndarray, served: ServedVersion) -> None:
    """Raises ServeError: unsupported, if an output is a sequence of tensors of different shapes."""
    if why := why_not_stacked(array):
        raise ServeError(
            ErrorKind.UNSUPPORTED,
            f"inference output '{name}' of model '{served.name}' is a sequence that cannot be returned as one tensor: "
            f"{why}; other outputs can be requested by name",
        )
