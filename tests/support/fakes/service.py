"""Fake services for frontends, with a few models that do not need ONNX Runtime."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest

from interpreted import WHY
from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.core.compiled import IS_COMPILED
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import CANCELLED, DONE
from ortserve.core.request import AnswerEncoder, EncodedRequest, InferRequest, InferResponse
from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import Tensor
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.call import Call
from ortserve.service.gate import BodyAdmission, BodyGate
from ortserve.service.models import ModelMetadata, ServerMetadata
from ortserve.telemetry.tracing import Trace

T = TypeVar("T")


@dataclass
class FakeInferenceService:
    """Doubles every input: numbers by adding, strings by repeating; booleans stay unchanged.

    Output ``k`` is named ``OUT<k>``; the model is ``double`` version 1. A request to ``held`` sets ``held`` and waits
    for ``release``. Any other model name raises its error in ``failures``, or else is not found. The phases of every
    answer took 1, 2, 3, 4 and 5 ms.
    """

    held: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    failures: dict[str, Exception] = field(default_factory=dict)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    received: list[Call] = field(default_factory=list)
    gate: BodyGate = field(default_factory=lambda: BodyGate(10**9))
    refused: list[ErrorKind] = field(default_factory=list)

    def __post_init__(self) -> None:
        if IS_COMPILED:  # a compiled request would be rejected here, because it names no served model
            pytest.skip(WHY)

    @property
    def admission(self) -> BodyAdmission:
        """Admission for gRPC; the transports enforce the limit of a message."""
        return BodyAdmission("grpc", self.gate, self.body_rejected, max_body_bytes=2**31)

    def receive(
        self,
        protocol: str,
        timeout_ns: int | None = None,
        trace: Trace | None = None,
        begun_ns: int = 0,
        headers: Iterable[tuple[Any, Any]] = (),
    ) -> Call:
        assert protocol in ("grpc", "http")
        timing = Timing(0, 1_000_000, 3_000_000, 6_000_000, 10_000_000)
        self.received.append(Call(protocol, timing, timeout_ns, trace, headers))
        return self.received[-1]

    @property
    def recorder(self) -> "FakeInferenceService":
        """The service itself records the kinds of rejected bodies."""
        return self

    def body_rejected(self, protocol: str, kind: ErrorKind, received_ns: int, trace: Trace | None) -> None:
        self.refused.append(kind)

    def start(
        self,
        call: Call,
        body: EncodedRequest,
        encoder: AnswerEncoder[T],
        on_answer: Callable[[T], object],
        on_error: Callable[[ServeError], object],
    ) -> None:
        assert call is self.received[-1]
        request = call.request = body.read()
        name = request.model_name
        if name in self.failures:
            error = self.failures[name]
            on_error(error if isinstance(error, ServeError) else ServeError(ErrorKind.INTERNAL, "internal error"))
            return
        if name not in ("double", "held"):
            on_error(ServeError(ErrorKind.NOT_FOUND, f"Request for unknown model: '{name}' is not found"))
            return

        def settle(_: Call) -> None:
            releasing.cancel()
            if call.state == CANCELLED:
                self.cancelled.set()
            else:
                call.state = DONE
                on_answer(self._answer(call, request, encoder))

        call.on_settled = settle
        if name == "held":
            self.held.set()
        releasing = asyncio.ensure_future(self.release.wait() if name == "held" else asyncio.sleep(0))
        releasing.add_done_callback(lambda _: call.complete(()))

    def _answer(self, call: Call, request: InferRequest, encoder: AnswerEncoder[T]) -> T:
        outputs = [Tensor(f"OUT{k}", tensor.datatype, _doubled(tensor)) for k, tensor in enumerate(request.inputs)]
        if request.outputs:
            by_name = {tensor.name: tensor for tensor in outputs}
            outputs = [by_name[output.name] for output in request.outputs]
        call.timing.done_ns = 15_000_000
        response = InferResponse(request.model_name, request.model_version or "1", request.id, outputs)
        return encoder.encode(request, response)

    async def serve(self, call: Call, body: EncodedRequest, encoder: AnswerEncoder[T]) -> T:
        answered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.start(call, body, encoder, answered.set_result, answered.set_exception)
        try:
            return await answered
        finally:
            call.cancel()


def _doubled(tensor: Tensor) -> np.ndarray:
    if tensor.datatype in (DataType.BOOL, DataType.BF16):
        return tensor.array
    doubled: np.ndarray = tensor.array + tensor.array
    return doubled


@dataclass
class FakeModelService:
    """Knows the model ``double`` in version 1."""

    ready: bool = True
    news: asyncio.Event = field(default_factory=asyncio.Event)
    fault: Exception | None = None

    async def prepare(self, name: str, version: str) -> None:
        pass

    def is_live(self) -> bool:
        return True

    def is_ready(self) -> bool:
        return self.ready

    def readiness_change(self) -> asyncio.Event:
        return self.news

    def turn(self, *, ready: bool) -> None:
        """Become ready or not, and notify watchers."""
        self.ready = ready
        self.news.set()
        self.news = asyncio.Event()

    def is_model_ready(self, name: str, version: str) -> bool:
        return name == "double" and version in ("", "1")

    def server_metadata(self) -> ServerMetadata:
        if self.fault is not None:
            raise self.fault
        return ServerMetadata("ortserve", "1.2.3", ("binary_tensor_data", "parameters"))

    async def model_config(self, name: str, version: str) -> ModelConfig:
        return ModelConfig(name=self.model_metadata(name, version).name)

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        if not self.is_model_ready(name, ""):
            raise ServeError(ErrorKind.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        return ModelMetadata(
            name,
            ("1",),
            "onnxruntime_onnx",
            (TensorSpec("IN0", DataType.FP32, (-1, 4)),),
            (TensorSpec("OUT0", DataType.FP32, (-1, 4)),),
            {"batching": "verified"},
            64,
            4096,
        )
