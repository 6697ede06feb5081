"""``POST /v2/models/{model}[/versions/{version}]/generate`` and ``…/generate_stream``, through FastAPI."""

from typing import Any, Final

from fastapi import APIRouter, Request, Response

from ortserve.clock import Clock
from ortserve.codecs.generate import GenerateEncoder, GenerateRequest
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.http.asgi_exchange import exchange_of
from ortserve.frontends.http.documents import ModelName, ModelVersion
from ortserve.frontends.http.request_body import read_body
from ortserve.frontends.http.request_head import Header, InferHeaders, UnknownEncodingError, read_infer_headers
from ortserve.frontends.load_reports import LoadReports
from ortserve.frontends.trace_headers import HttpTraces
from ortserve.service.gate import BodyAdmission
from ortserve.service.inference import InferenceService
from ortserve.service.models import ModelService
from ortserve.telemetry.tracing import Trace

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream; charset=utf-8"

_REQUEST: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "description": "Inputs of the model by name: a number, string or boolean, or an array of them; beside them "
        "`id`, `priority`, `timeout` and parameters of other names, which have no effect; sampling parameters are "
        "rejected.",
        "content": {_JSON: {"schema": {"type": "object"}, "example": {"text": "hello"}}},
    }
}

_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
}


def generate_routes(generation: "Generation") -> APIRouter:
    """Create the four routes. They read the body as bytes and ignore its Content-Type."""
    router = APIRouter(prefix="/v2/models/{model}", tags=["inference"])

    @router.post("/generate", openapi_extra=_REQUEST)
    async def generate(model: ModelName, request: Request) -> Response:
        """Run the default version of the model like a function: one JSON object in, one out."""
        return await generation.answer(request, model, "", is_stream=False)

    @router.post("/versions/{version}/generate", openapi_extra=_REQUEST)
    async def generate_version(model: ModelName, version: ModelVersion, request: Request) -> Response:
        """Run this version of the model like a function: one JSON object in, one out."""
        return await generation.answer(request, model, version, is_stream=False)

    @router.post("/generate_stream", openapi_extra=_REQUEST, response_class=Response, responses=_STREAM)
    async def generate_stream(model: ModelName, request: Request) -> Response:
        """As `generate`, but the answer is a stream of one server-sent event, because an ONNX model answers once."""
        return await generation.answer(request, model, "", is_stream=True)

    @router.post(
        "/versions/{version}/generate_stream", openapi_extra=_REQUEST, response_class=Response, responses=_STREAM
    )
    async def generate_stream_version(model: ModelName, version: ModelVersion, request: Request) -> Response:
        """As `generate`, but the answer is a stream of one server-sent event, because an ONNX model answers once."""
        return await generation.answer(request, model, version, is_stream=True)

    return router


def _read_headers(headers: list[Header]) -> InferHeaders:
    """Parse the headers of a generate request. Raises ServeError: invalid_input, also for a compressed body."""
    try:
        read = read_infer_headers(headers)
    except UnknownEncodingError as error:
        raise invalid_input(error.message) from None
    if read.encoding is not None:
        raise invalid_input(
            f"Content-Encoding '{read.encoding.value}' is not supported for generate: expected identity"
        )
    return read


class Generation:
    """Receives requests, runs them and creates the responses. Loop thread only."""

    def __init__(
        self,
        inference: InferenceService,
        models: ModelService,
        admission: BodyAdmission,
        *,
        clock: Clock,
        traces: HttpTraces | None = None,
        load_reports: LoadReports | None = None,
    ) -> None:
        self._inference = inference
        self._models = models
        self._admission = admission
        self._clock = clock
        self._traces = traces
        self._load_reports = load_reports

    async def answer(self, request: Request, model: str, version: str, *, is_stream: bool) -> Response:
        """Answer one request. The current task is cancelled if the caller leaves.

        Raises:
            ServeError: The request failed.
        """
        received_ns = self._clock()
        exchange_of(request.scope).cancel_with_caller()
        inference, admission, scope = self._inference, self._admission, request.scope
        trace: Trace | None = None
        if self._traces is not None:
            route = "generate_stream" if is_stream else "generate"
            trace = self._traces.begin(route, version, scope["raw_path"], scope["headers"])
        try:
            given = _read_headers(scope["headers"])
            hold = admission.reserve(given.body_bytes)
        except ServeError as error:
            admission.count(error, received_ns, trace)
            raise
        with hold:
            try:
                body = await read_body(request.receive, hold, max_bytes=admission.max_body_bytes)
                await self._models.prepare(model, version)  # the inputs of the model decide how the body is decoded
            except ServeError as error:
                if error.kind is not ErrorKind.CANCELLED:  # the caller left before its request was complete
                    admission.count(error, received_ns, trace)
                raise
            call = inference.receive("http", given.timeout_ns, trace, received_ns, scope["headers"])
            content = await inference.serve(
                call,
                GenerateRequest(
                    body,
                    model,
                    version,
                    lambda: self._models.model_metadata(model, version).inputs,
                    is_stream=is_stream,
                ),
                GenerateEncoder(is_stream=is_stream),
            )
        headers = {"server-timing": call.timing.server_timing().decode()}
        reports = self._load_reports
        if reports is not None and (chosen := given.load_format or reports.default) is not None:
            name, value = reports.header(chosen)
            headers[name.decode()] = value.decode()
        return Response(content, media_type=_EVENTS if is_stream else _JSON, headers=headers)
