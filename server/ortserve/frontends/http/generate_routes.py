"""``POST /v2/models/{model}[/versions/{version}]/generate`` and ``…/generate_stream``, through FastAPI."""

from typing import Any, Final

from fastapi import APIRouter, Request, Response

from ortserve.codecs.generate import GenerateEncoder, GenerateRequest
from ortserve.frontends.http.documents import GenerateResponseDocument, ModelName, ModelVersion
from ortserve.frontends.http.infer_exchange import InferEndpoint
from ortserve.frontends.http.json_calls import receive
from ortserve.service.models import ModelService

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream; charset=utf-8"

_REQUEST: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "description": "Inputs of the model by name: a number, string or boolean, or an array of them; a flat array is "
        "one row, or a column if the rows of the input have one element. Beside them "
        "`id`, `priority`, `timeout` and parameters of other names, which have no effect; sampling parameters are "
        "rejected. Inputs and parameters may also be in the object `parameters`.",
        "content": {_JSON: {"schema": {"type": "object", "additionalProperties": True}, "example": {"text": "hello"}}},
    }
}

_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
}


def generate_routes(endpoint: InferEndpoint, models: ModelService) -> APIRouter:
    """Create the four routes. They read the body as bytes and ignore its Content-Type."""
    router = APIRouter(prefix="/v2/models/{model}", tags=["inference"])

    async def answer(request: Request, model: str, version: str, *, is_stream: bool) -> Response:
        """Answer one request. Raises ServeError: The request failed."""
        async with receive(endpoint, request, "generate_stream" if is_stream else "generate", version) as received:
            with received.counting():
                # The inputs of the model decide how the body is decoded.
                await models.prepare(model, version, received.complete_ns, received.given.timeout_ns)
            call = received.begin()
            content = await endpoint.service.serve(
                call,
                GenerateRequest(
                    received.body,
                    model,
                    version,
                    lambda: models.model_metadata(model, version).inputs,
                    is_stream=is_stream,
                ),
                GenerateEncoder(is_stream=is_stream),
            )
        return Response(content, media_type=_EVENTS if is_stream else _JSON, headers=received.headers(call.timing))

    @router.post("/generate", openapi_extra=_REQUEST, response_model=GenerateResponseDocument)
    async def generate(model: ModelName, request: Request) -> Response:
        """Run the default version of the model like a function: one JSON object in, one out."""
        return await answer(request, model, "", is_stream=False)

    @router.post("/versions/{version}/generate", openapi_extra=_REQUEST, response_model=GenerateResponseDocument)
    async def generate_version(model: ModelName, version: ModelVersion, request: Request) -> Response:
        """Run this version of the model like a function: one JSON object in, one out."""
        return await answer(request, model, version, is_stream=False)

    @router.post("/generate_stream", openapi_extra=_REQUEST, response_class=Response, responses=_STREAM)
    async def generate_stream(model: ModelName, request: Request) -> Response:
        """As `generate`, but the answer is a stream of one server-sent event, because an ONNX model answers once."""
        return await answer(request, model, "", is_stream=True)

    @router.post(
        "/versions/{version}/generate_stream", openapi_extra=_REQUEST, response_class=Response, responses=_STREAM
    )
    async def generate_stream_version(model: ModelName, version: ModelVersion, request: Request) -> Response:
        """As `generate`, but the answer is a stream of one server-sent event, because an ONNX model answers once."""
        return await answer(request, model, version, is_stream=True)

    return router
