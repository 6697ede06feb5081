"""The FastAPI application: all REST calls except inference, the documentation page, and the OpenAPI document."""

import asyncio
from collections.abc import Awaitable, Callable, Container
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from ortserve import __version__
from ortserve.codecs.json_text import LoadParameter
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.access import http_group
from ortserve.frontends.http.api_docs import docs_routes
from ortserve.frontends.http.documents import (
    ErrorDocument,
    InferRequestDocument,
    InferResponseDocument,
    ModelName,
    ModelVersion,
)
from ortserve.frontends.http.label_routes import label_routes
from ortserve.frontends.http.management_routes import (
    profile_routes,
    repository_routes,
    settings_routes,
    shared_memory_routes,
)
from ortserve.frontends.http.model_routes import as_response, health_routes, model_routes, statistics_routes
from ortserve.frontends.http.responses import failure, unknown_path, wrong_method
from ortserve.service.access import Group
from ortserve.service.gate import BodyAdmission
from ortserve.service.management import Management
from ortserve.service.models import ModelService
from ortserve.service.shared_memory import SharedMemory


def make_control_app(
    models: ModelService,
    management: Management,
    shared_memory: SharedMemory,
    admission: BodyAdmission,
    read_load: Callable[[bytes | memoryview], Awaitable[dict[str, LoadParameter]]],
    *,
    title: str,
    guarded: Container[Group | None] = (),
) -> FastAPI:
    """Create the application. Its OpenAPI document also describes the infer routes, which ``InferExchange`` answers.

    Args:
        models: Answers questions about models.
        management: Answers repository, statistics and settings calls.
        shared_memory: Registers regions.
        admission: Admits the bodies of load calls.
        read_load: Decodes the body of a load call.
        title: Title of the OpenAPI document.
        guarded: Groups whose operations the document marks as needing a key; ``AsgiEndpoint`` checks the key.
    """
    app = FastAPI(
        title=title,
        version=__version__,
        description="ONNX models over the Open Inference Protocol v2.",
        redirect_slashes=False,
        openapi_url=None,  # FastAPI's route would build the document on the event loop
        docs_url=None,  # FastAPI's pages load scripts from a CDN
        redoc_url=None,
    )
    add_routes(app, docs_routes())
    add_routes(app, health_routes(models))
    add_routes(app, statistics_routes(management.statistics))
    add_routes(app, repository_routes(management.repository, admission, read_load))
    add_routes(app, settings_routes(management.logs, management.traces))
    add_routes(app, profile_routes(management.profiling))
    add_routes(app, model_routes(models))
    add_routes(app, label_routes(management.labels, management.rollouts))
    add_routes(app, shared_memory_routes(shared_memory))
    app.add_exception_handler(ServeError, _answer_serve_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_malformed_path)
    app.add_exception_handler(Exception, _answer_fault)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=[*app.routes, *_documented_infer_routes().routes],
            )
            app.openapi_schema = _with_keys(_with_errors(_without_422(document)), guarded)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI documents this way to extend the document

    building = asyncio.Lock()

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi_document() -> Response:
        async with building:  # otherwise each of the first callers would build the document
            return JSONResponse(await asyncio.to_thread(openapi))

    return app


def add_routes(app: FastAPI, router: APIRouter) -> None:
    """Add the routes themselves. ``include_router`` would build each of them again for the first requests."""
    app.router.routes.extend(router.routes)


def _without_422(document: dict[str, Any]) -> dict[str, Any]:
    """Remove the validation error of FastAPI, which this server never sends."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for schema in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(schema, None)
    return document


def _with_errors(document: dict[str, Any]) -> dict[str, Any]:
    """Give all operations the errors of the infer routes. FastAPI would build two validators for each operation."""
    errors = document["paths"]["/v2/models/{model}/infer"]["post"]["responses"]
    for path in document["paths"].values():
        for operation in path.values():
            for status in ("4XX", "5XX"):
                operation["responses"].setdefault(status, errors[status])
    return document


def _with_keys(document: dict[str, Any], guarded: Container[Group | None]) -> dict[str, Any]:
    """Mark the operations that need a key."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            group = http_group(method.upper(), path)
            if group in guarded:
                operation["security"] = [{group: []}]
                schemes = document["components"].setdefault("securitySchemes", {})
                schemes[group] = {"type": "http", "scheme": "bearer", "description": f"A key of the group {group}."}
    return document


def _documented_infer_routes() -> APIRouter:
    """Create the infer routes for the OpenAPI document; no request reaches them."""
    errors: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorDocument}, "5XX": {"model": ErrorDocument}}
    router = APIRouter(prefix="/v2/models/{model}", tags=["inference"], responses=errors)
    request_body = Body(
        description="JSON, or JSON followed by binary tensors; then the header Inference-Header-Content-Length holds "
        "the length of the JSON part in bytes. At 0 the body is one row of the model's only input, and nothing else. "
        "It may be compressed as its Content-Encoding says: gzip or deflate."
    )

    @router.post("/infer", response_model=InferResponseDocument)
    async def infer(model: ModelName, request: Annotated[InferRequestDocument, request_body]) -> Response:
        """Run the version of the model that is labelled `stable`; without that label the highest ready one."""
        raise AssertionError("documented only")

    @router.post("/versions/{version}/infer", response_model=InferResponseDocument)
    async def infer_version(
        model: ModelName, version: ModelVersion, request: Annotated[InferRequestDocument, request_body]
    ) -> Response:
        """Run this version of the model."""
        raise AssertionError("documented only")

    return router


async def _answer_serve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServeError)
    return as_response(failure(error, request.scope["path"]))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette lists only the methods of the first route with this path.
        path = request.scope["path"]
        routes = (route for route in request.app.routes if isinstance(route, APIRoute))
        allowed = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
        allowed |= {"HEAD"} if "GET" in allowed else set()
        return as_response(wrong_method(request.method, ", ".join(sorted(allowed)), path))
    if error.status_code == HTTPStatus.NOT_FOUND:
        return as_response(failure(unknown_path(request.scope["path"]), request.scope["path"]))
    return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=error.headers)


async def _answer_fault(request: Request, _: Exception) -> Response:
    # Starlette raises the exception again, so that ``AsgiExchange`` logs it.
    return as_response(failure(ServeError(ErrorKind.INTERNAL, "internal error"), request.scope["path"]))


async def _answer_malformed_path(request: Request, _: Exception) -> Response:
    # FastAPI validates only versions, and no resource has a malformed version.
    return as_response(failure(unknown_path(request.scope["path"])))
