"""Everything of REST but inference itself: health, metadata, the documentation page and OpenAPI."""

import re
from collections.abc import Awaitable, Callable, Container
from dataclasses import asdict
from functools import lru_cache
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from ortserve.codecs.json_text import LoadParameter
from ortserve.core.signature import TensorSpec
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.access import http_group
from ortserve.frontends.http.answers import Answer, failure
from ortserve.frontends.http.configuration_routes import configuration_routes
from ortserve.frontends.http.documents import (
    BatchingDocument,
    ErrorDocument,
    InferRequestDocument,
    InferResponseDocument,
    ModelMetadataDocument,
    ServerMetadataDocument,
)
from ortserve.frontends.http.health import answer_health
from ortserve.frontends.http.path_parameters import ModelName, ModelVersion
from ortserve.frontends.http.repository_routes import repository_routes
from ortserve.frontends.http.settings_routes import settings_routes
from ortserve.frontends.http.shared_memory_routes import shared_memory_routes
from ortserve.frontends.http.statistics_routes import statistics_routes
from ortserve.service.access import Group
from ortserve.service.gate import Hold
from ortserve.service.management import Management
from ortserve.service.models import ModelService
from ortserve.service.shared_memory import SharedMemory


def make_control_app(
    models: ModelService,
    management: Management,
    shared_memory: SharedMemory,
    hold: Callable[[int], Hold],
    read_load: Callable[[bytes | memoryview], Awaitable[dict[str, LoadParameter]]],
    *,
    title: str,
    version: str,
    max_body_bytes: int,
    guarded: Container[Group | None] = (),
) -> FastAPI:
    """The FastAPI application; its OpenAPI document also describes the infer routes, which are served beside it.

    ``hold`` lets bodies that may be large in, by their bytes; ``read_load`` reads that of a load. ``guarded`` are the
    groups whose operations the document says to need a key; ``RestApp`` asks for it.
    """
    app = FastAPI(
        title=title,
        version=version,
        description="ONNX models over the Open Inference Protocol v2.",
        responses={"4XX": {"model": ErrorDocument}, "5XX": {"model": ErrorDocument}},
        redirect_slashes=False,
    )
    app.include_router(_health_routes(models))
    app.include_router(statistics_routes(management.statistics))
    app.include_router(configuration_routes(models))
    app.include_router(repository_routes(management.repository, hold, read_load, max_body_bytes=max_body_bytes))
    app.include_router(settings_routes(management.logs, management.traces))
    app.include_router(_metadata_routes(models))
    app.include_router(shared_memory_routes(shared_memory))
    app.add_exception_handler(ServeError, _answer_serve_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_malformed_path)
    app.add_exception_handler(Exception, _answer_fault)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            documented = APIRouter()
            documented.include_router(_documented_infer_routes(), responses=app.router.responses)
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=[*app.routes, *documented.routes],
            )
            app.openapi_schema = _with_keys(_without_422(document), guarded)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document
    return app


def _without_422(document: dict[str, Any]) -> dict[str, Any]:
    """Take out FastAPI's own validation error, which is never answered here."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for schema in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(schema, None)
    return document


def _with_keys(document: dict[str, Any], guarded: Container[Group | None]) -> dict[str, Any]:
    """Say which operations need a key."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            group = http_group(method.upper(), path)
            if group in guarded:
                operation["security"] = [{group: []}]
                schemes = document["components"].setdefault("securitySchemes", {})
                schemes[group] = {"type": "http", "scheme": "bearer", "description": f"A key of the group {group}."}
    return document


def _health_routes(models: ModelService) -> APIRouter:
    router = APIRouter(prefix="/v2", tags=["health"])

    @router.get("/health/live")
    async def live() -> Response:
        """Whether the process is of use: not once it was told to stop, nor once a device is lost."""
        return _as_response(answer_health(models, "live"))

    @router.get("/health/ready")
    async def ready() -> Response:
        """Whether the server should be sent requests."""
        return _as_response(answer_health(models, "ready"))

    @router.get("/models/{model}/ready")
    async def any_version_ready(model: ModelName) -> JSONResponse:
        """Whether some version of the model is ready."""
        return _model_ready(models, model, "")

    @router.get("/models/{model}/versions/{version}/ready")
    async def version_ready(model: ModelName, version: ModelVersion) -> JSONResponse:
        """Whether this version of the model is ready."""
        return _model_ready(models, model, version)

    return router


def _metadata_routes(models: ModelService) -> APIRouter:
    router = APIRouter(prefix="/v2", tags=["metadata"])

    @router.get("", response_model=ServerMetadataDocument)
    async def server_metadata() -> JSONResponse:
        """The server's name, version and protocol extensions."""
        metadata = models.server_metadata()
        return JSONResponse(
            {"name": metadata.name, "version": metadata.version, "extensions": list(metadata.extensions)}
        )

    @router.get("/models/{model}", response_model=ModelMetadataDocument)
    async def model_metadata(model: ModelName) -> JSONResponse:
        """What the model takes and gives, and how it is run."""
        return _metadata(models, model, "")

    @router.get("/models/{model}/versions/{version}", response_model=ModelMetadataDocument)
    async def version_metadata(model: ModelName, version: ModelVersion) -> JSONResponse:
        """What this version of the model takes and gives, and how it is run."""
        return _metadata(models, model, version)

    @router.get("/models/{model}/batching", tags=["operation"], response_model=BatchingDocument)
    async def batching(model: ModelName) -> JSONResponse:
        """What the batcher has learned of this model and how often it took each decision."""
        return JSONResponse(asdict(models.batching(model, "")))

    @router.get("/models/{model}/versions/{version}/batching", tags=["operation"], response_model=BatchingDocument)
    async def version_batching(model: ModelName, version: ModelVersion) -> JSONResponse:
        """What the batcher has learned of this version of the model and how often it took each decision."""
        return JSONResponse(asdict(models.batching(model, version)))

    return router


def _documented_infer_routes() -> APIRouter:
    """Routes that exist for the OpenAPI document only: ``InferRoute`` answers before FastAPI sees the request."""
    router = APIRouter(prefix="/v2/models/{model}", tags=["inference"])
    request_body = Body(
        description="JSON, or JSON followed by binary tensors; then the header Inference-Header-Content-Length holds "
        "the length of the JSON part in bytes. At 0 the body is one row of the model's only input, and nothing else. "
        "It may be compressed as its Content-Encoding says: gzip or deflate."
    )

    @router.post("/infer", response_model=InferResponseDocument)
    async def infer(model: ModelName, request: Annotated[InferRequestDocument, request_body]) -> Response:
        """Run the model's highest ready version."""
        raise AssertionError("documented only")

    @router.post("/versions/{version}/infer", response_model=InferResponseDocument)
    async def infer_version(
        model: ModelName, version: ModelVersion, request: Annotated[InferRequestDocument, request_body]
    ) -> Response:
        """Run this version of the model."""
        raise AssertionError("documented only")

    return router


def _as_response(answer: Answer) -> Response:
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    return Response(answer.body, answer.status, headers)


def _model_ready(models: ModelService, name: str, version: str) -> JSONResponse:
    if models.is_model_ready(name, version):
        return JSONResponse({"name": name, "ready": True})
    if not models.is_known(name):
        raise ServeError(ErrorKind.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
    return JSONResponse({"error": "Model version not ready"}, status_code=400)


def _metadata(models: ModelService, name: str, version: str) -> JSONResponse:
    metadata = models.model_metadata(name, version)
    return JSONResponse(
        {
            "name": metadata.name,
            "versions": list(metadata.versions),
            "platform": metadata.platform,
            "inputs": [_tensor(spec) for spec in metadata.inputs],
            "outputs": [_tensor(spec) for spec in metadata.outputs],
            "properties": dict(metadata.properties),
        }
    )


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype.value, "shape": list(spec.shape)}


async def _answer_serve_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ServeError)
    status, body, headers = failure(error)
    return Response(body, status, {name.decode(): value.decode() for name, value in headers})


async def _answer_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    headers = error.headers
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette tells those of the first route of the path only.
        path = request.scope["path"]
        matching = [route for route in iter_route_contexts(request.app.routes) if _is_of(path, route.path or "")]
        allowed = {method for route in matching for method in route.methods or ()}
        allowed |= {"HEAD"} if "GET" in allowed else set()
        headers = {"Allow": ", ".join(sorted(allowed))}
    return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=headers)


@lru_cache(maxsize=256)
def _pattern(template: str) -> re.Pattern[str]:
    return compile_path(template)[0]


def _is_of(path: str, template: str) -> bool:
    return _pattern(template).match(path) is not None


async def _answer_fault(_: Request, __: Exception) -> Response:
    # Starlette raises it again, for who logs it.
    return _as_response(failure(ServeError(ErrorKind.INTERNAL, "internal error")))


async def _answer_malformed_path(_: Request, __: Exception) -> JSONResponse:
    # Only versions are validated here, and a path with another version than a number names nothing.
    return JSONResponse({"error": "Not Found"}, status_code=404)
