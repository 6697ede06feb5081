"""``POST /v2/models/{model}[/versions/{version}]/generate`` and ``…/generate_stream``, through FastAPI."""

import asyncio
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from ortserve.clock import Clock
from ortserve.codecs.generate import GenerateEncoder, GenerateRequest
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.http.announcement import Announcement, read_announcement
from ortserve.frontends.http.answers import body_too_large
from ortserve.frontends.http.body import read_body
from ortserve.frontends.http.connection import connection_of
from ortserve.frontends.http.encodings import UnknownEncodingError
from ortserve.frontends.http.path_parameters import ModelName, ModelVersion
from ortserve.frontends.load_reports import LoadReports
from ortserve.frontends.trace_headers import HttpTraces
from ortserve.service.inference import InferenceService
from ortserve.service.models import ModelService
from ortserve.telemetry.tracing import Trace

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream; charset=utf-8"

_LEFT: Final = 499  # sent to nobody

_REQUEST: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "description": "Inputs of the model by name: a number, string or boolean, or an array of them; beside them "
        "`id`, `priority`, `timeout` and parameters of any other name, which an ONNX model has no use for.",
        "content": {_JSON: {"schema": {"type": "object"}, "example": {"text": "hello"}}},
    }
}


def make_generate_router(
    inference: InferenceService,
    models: ModelService,
    *,
    max_body_bytes: int,
    clock: Clock,
    traces: HttpTraces | None = None,
    load_reports: LoadReports | None = None,
) -> APIRouter:
    """The four routes. The body is read as bytes, whatever its Content-Type says."""
    router = APIRouter(prefix="/v2/models/{model}", tags=["inference"])
    route = GenerateRoute(
        inference, models, max_body_bytes=max_body_bytes, clock=clock, traces=traces, load_reports=load_reports
    )

    @router.post("/generate", openapi_extra=_REQUEST)
    async def generate(model: ModelName, request: Request) -> Response:
        """Run the model's highest ready version like a function: one JSON object in, one out."""
        return await route.answer(request, model, "", is_stream=False)

    @router.post("/versions/{version}/generate", openapi_extra=_REQUEST)
    async def generate_version(model: ModelName, version: ModelVersion, request: Request) -> Response:
        """Run this version of the model like a function: one JSON object in, one out."""
        return await route.answer(request, model, version, is_stream=False)

    @router.post("/generate_stream", openapi_extra=_REQUEST)
    async def generate_stream(model: ModelName, request: Request) -> Response:
        """The same, answered as server-sent events: one, because an ONNX model answers once."""
        return await route.answer(request, model, "", is_stream=True)

    @router.post("/versions/{version}/generate_stream", openapi_extra=_REQUEST)
    async def generate_stream_version(model: ModelName, version: ModelVersion, request: Request) -> Response:
        """The same, answered as server-sent events: one, because an ONNX model answers once."""
        return await route.answer(request, model, version, is_stream=True)

    return router


class GenerateRoute:
    """Reads the body, hands it to the service and makes the response. Loop thread only."""

    def __init__(
        self,
        inference: InferenceService,
        models: ModelService,
        *,
        max_body_bytes: int,
        clock: Clock,
        traces: HttpTraces | None = None,
        load_reports: LoadReports | None = None,
    ) -> None:
        self._inference = inference
        self._models = models
        self._max_body_bytes = max_body_bytes
        self._clock = clock
        self._traces = traces
        self._load_reports = load_reports

    async def answer(self, request: Request, model: str, version: str, *, is_stream: bool) -> Response:
        """Answer one request.

        Raises:
            ServeError: Whatever went wrong, before the answer began.
        """
        received_ns = self._clock()
        connection = connection_of(request.scope)
        connection.answering = asyncio.current_task()
        try:
            return await self._run(request, model, version, received_ns, is_stream=is_stream)
        except asyncio.CancelledError:
            if not connection.has_left:
                raise
            return Response(status_code=_LEFT)
        finally:
            connection.answering = None

    async def _run(self, request: Request, model: str, version: str, received_ns: int, *, is_stream: bool) -> Response:
        inference = self._inference
        trace: Trace | None = None
        if self._traces is not None:
            scope, route = request.scope, "generate_stream" if is_stream else "generate"
            trace = self._traces.begin(route, version, scope["raw_path"], scope["headers"])
        try:
            announced = self._announced(request)
            hold = inference.hold(announced.body_size)
        except ServeError as error:
            inference.count_refused_body("http", error.kind, received_ns, trace)
            raise
        with hold:
            try:
                body = await read_body(request.receive, hold, max_bytes=self._max_body_bytes)
            except ServeError as error:
                inference.count_refused_body("http", error.kind, received_ns, trace)
                raise
            if body is None:
                return Response(status_code=_LEFT)
            call = inference.receive("http", announced.timeout_ns, trace, received_ns)
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
        if reports is not None and (report := reports.header(announced.load_format)) is not None:
            name, value = report
            headers[name.decode()] = value.decode()
        return Response(content, media_type=_EVENTS if is_stream else _JSON, headers=headers)

    def _announced(self, request: Request) -> Announcement:
        """Raises ServeError: too_large; invalid_input for a compressed body, which only infer takes."""
        try:
            announced = read_announcement(request.scope["headers"])
        except UnknownEncodingError as error:
            raise ServeError(ErrorKind.INVALID_INPUT, error.message) from None
        if announced.encoding is not None:
            raise invalid_input(
                f"Content-Encoding '{announced.encoding.value}' is not supported for generate: expected identity"
            )
        if announced.body_size > self._max_body_bytes:
            raise body_too_large(announced.body_size, self._max_body_bytes)
        return announced
