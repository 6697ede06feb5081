"""REST calls that manage the server: the model repository, log and trace settings, and shared memory.

Bodies are read as bytes, because clients send any content type, or no content type. A successful call without a
document returns status 200 and an empty body, because clients accept no other status.
"""

import asyncio
from base64 import b64decode
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from typing import Any, Final

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ortserve.codecs.json_text import LoadParameter, parameters_of
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.http.asgi_exchange import exchange_of
from ortserve.frontends.http.documents import (
    CudaRegistrationDocument,
    IndexEntryDocument,
    IndexRequestDocument,
    LoadRequestDocument,
    LogSettingsDocument,
    ModelName,
    ModelVersion,
    ProfileRequestDocument,
    RegionName,
    RegistrationDocument,
    TraceSettingsDocument,
    UnloadRequestDocument,
    request_body,
)
from ortserve.frontends.http.request_body import check_uncompressed, read_body, read_json_object
from ortserve.service.gate import BodyAdmission
from ortserve.service.management import LogSettings
from ortserve.service.profiling import ProfilingService
from ortserve.service.repository import IndexEntry, RepositoryService
from ortserve.service.shared_memory import CudaRegionStatus, RegionStatus, SharedMemory
from ortserve.service.trace_settings import TraceSettings

_PER_TURN: Final = 250
"""Number of regions that are encoded in one turn of the event loop, in about 1 ms: a server may have thousands."""

_LOG_SETTINGS_BODY: Final = request_body(LogSettingsDocument, is_partial=True)
# Triton's clients send numbers as texts and texts as numbers, so a schema would allow anything.
_TRACE_SETTINGS_BODY: Final = {
    "requestBody": {
        "content": {
            "application/json": {
                "schema": {"type": "object", "additionalProperties": True},
                "example": {"trace_level": ["OFF"]},
            }
        }
    }
}
_REGISTRATION_BODY: Final = request_body(RegistrationDocument)
_CUDA_REGISTRATION_BODY: Final = request_body(CudaRegistrationDocument)
_PROFILE_BODY: Final = request_body(ProfileRequestDocument)


def repository_routes(
    repository: RepositoryService,
    admission: BodyAdmission,
    read_load: Callable[[bytes | memoryview], Awaitable[dict[str, LoadParameter]]],
) -> APIRouter:
    """Create the routes for the models in the repositories.

    Args:
        repository: Executes the calls.
        admission: Admits the bodies of load calls.
        read_load: Decodes the body of a load call off the event loop. Raises ServeError: invalid_input, overloaded.
    """
    router = APIRouter(prefix="/v2/repository", tags=["repository"])

    @router.post("/index", response_model=list[IndexEntryDocument], openapi_extra=request_body(IndexRequestDocument))
    async def index(request: Request) -> Response:
        """The known versions, and the models in the repositories."""
        only_ready = (await read_json_object(request)).get("ready")
        if not isinstance(only_ready, bool | None):
            raise invalid_input(f"Invalid value for 'ready': expected a boolean, got {only_ready!r:.100}")
        document = [_index_entry(entry) async for entry in repository.index(only_ready=bool(only_ready))]
        return Response(orjson.dumps(document), media_type="application/json")

    @router.post("/models/{model}/load", openapi_extra=request_body(LoadRequestDocument), response_class=Response)
    async def load(model: ModelName, request: Request) -> Response:
        """Load a model, or reload it if it has changed. The response is sent when the model serves.

        The body may be empty, or have `parameters`. `config` is a Triton model configuration, as a text of JSON, which
        replaces the configuration of the model until the next load. Other parameters are files in base64; their name
        is `file:` and a path in the model's folder, such as `file:1/model.onnx`. Files need a `config`, which may be
        `{}`.
        """
        check_uncompressed(request)
        # The HTTP parser has checked that the length is a number.
        announced_bytes = int(request.headers.get("content-length", 0))
        with admission.reserve(announced_bytes) as held:
            body = await read_body(request.receive, held, max_bytes=admission.max_body_bytes)
            await repository.load(model, await read_load(body))
        return _nothing()

    @router.post("/models/{model}/unload", openapi_extra=request_body(UnloadRequestDocument), response_class=Response)
    async def unload(model: ModelName, request: Request) -> Response:
        """Unload a model. The response is sent after the response to the last request of the model."""
        await repository.unload(model, parameters_of(await read_json_object(request)))
        return _nothing()

    @router.post("/{repository}/index", include_in_schema=False)
    @router.post("/{repository}/models/{model}/load", include_in_schema=False)
    @router.post("/{repository}/models/{model}/unload", include_in_schema=False)
    async def named_repository() -> Response:
        raise ServeError(ErrorKind.UNSUPPORTED, "'repository_name' specification is not supported")

    return router


def settings_routes(logs: LogSettings, traces: TraceSettings) -> APIRouter:
    """Create the routes for settings that clients may change while the server runs."""
    router = APIRouter(prefix="/v2", tags=["settings"])

    @router.get("/logging", response_model=LogSettingsDocument)
    async def log_settings() -> JSONResponse:
        """The log settings."""
        return JSONResponse(logs.read())

    @router.post("/logging", response_model=LogSettingsDocument, openapi_extra=_LOG_SETTINGS_BODY)
    async def change_log_settings(request: Request) -> JSONResponse:
        """Change log settings; missing keys keep their values."""
        return JSONResponse(logs.update(await read_json_object(request)))

    @router.get("/trace/setting", response_model=TraceSettingsDocument)
    async def trace_settings() -> JSONResponse:
        """The server's trace settings."""
        return JSONResponse(traces.read())

    @router.post("/trace/setting", response_model=TraceSettingsDocument, openapi_extra=_TRACE_SETTINGS_BODY)
    async def change_trace_settings(request: Request) -> JSONResponse:
        """Change the server's trace settings; null restores the initial value."""
        return JSONResponse(traces.update(await read_json_object(request)))

    @router.get("/models/{model}/trace/setting", response_model=TraceSettingsDocument)
    async def model_trace_settings(model: ModelName) -> JSONResponse:
        """The trace settings of a model."""
        return JSONResponse(traces.read(model))

    @router.post(
        "/models/{model}/trace/setting", response_model=TraceSettingsDocument, openapi_extra=_TRACE_SETTINGS_BODY
    )
    async def change_model_trace_settings(model: ModelName, request: Request) -> JSONResponse:
        """Change the trace settings of a model; null restores the value of the server."""
        return JSONResponse(traces.update(await read_json_object(request), model))

    return router


def profile_routes(profiling: ProfilingService) -> APIRouter:
    """Create the routes that profile serving models."""
    router = APIRouter(prefix="/v2/models/{model}", tags=["operation"])

    async def answer(model: str, version: str, request: Request) -> Response:
        exchange_of(request.scope).cancel_with_caller()
        document = await read_json_object(request)
        requests, timeout_s = _unsigned(document, "requests", 100), document.get("timeout_s")
        timeout_s = 30 if timeout_s is None else timeout_s
        if type(timeout_s) not in (int, float):
            raise invalid_input(f"Unable to parse 'timeout_s': expected a number, got {timeout_s!r:.100}")
        profile = await profiling.profile(model, version, requests=requests, timeout_s=timeout_s)
        head = {field.name: getattr(profile, field.name) for field in fields(profile) if field.name != "trace"}
        content = b"".join((orjson.dumps(head)[:-1], b',"trace":', profile.trace, b"}"))
        return Response(content, media_type="application/json")

    @router.post("/profile", openapi_extra=_PROFILE_BODY, response_model=dict[str, Any])
    async def profile(model: ModelName, request: Request) -> Response:
        """Profile copies of the next batches of the model, if the operator allows it. The response follows their runs.

        `trace` is a trace of ONNX Runtime for Perfetto and `ortserve profile`.
        """
        return await answer(model, "", request)

    @router.post("/versions/{version}/profile", openapi_extra=_PROFILE_BODY, response_model=dict[str, Any])
    async def profile_version(model: ModelName, version: ModelVersion, request: Request) -> Response:
        """Profile copies of the next batches of this version of the model."""
        return await answer(model, version, request)

    return router


def shared_memory_routes(regions: SharedMemory) -> APIRouter:
    """Create the routes for shared memory of the system and of GPUs."""
    system = _region_routes("system", regions, RegionStatus, list[RegionStatus], "of system memory")
    cuda = _region_routes("cuda", regions, CudaRegionStatus, list[CudaRegionStatus], "on GPUs")

    @system.post("/region/{region}/register", openapi_extra=_REGISTRATION_BODY, response_class=Response)
    async def register(region: RegionName, request: Request) -> Response:
        """Register a shared memory object for requests, if the operator allows it."""
        document = await read_json_object(request)
        offset, byte_size = _unsigned(document, "offset", 0), _unsigned(document, "byte_size", None)
        regions.register(region, _key(document), offset, byte_size)
        return _nothing()

    @cuda.post("/region/{region}/register", openapi_extra=_CUDA_REGISTRATION_BODY, response_class=Response)
    async def register_cuda(region: RegionName, request: Request) -> Response:
        """Register memory of another process on a GPU for requests, if the operator allows it and a GPU is present."""
        document = await read_json_object(request)
        device_id, byte_size = _unsigned(document, "device_id", None), _unsigned(document, "byte_size", None)
        await regions.register_cuda(region, _handle(document), device_id, byte_size)
        return _nothing()

    return APIRouter(routes=[*system.routes, *cuda.routes])


def _region_routes(
    memory: str, regions: SharedMemory, kind: type[RegionStatus | CudaRegionStatus], document: Any, where: str
) -> APIRouter:
    """Create the routes that both kinds of regions have. ``where`` follows "regions" in their descriptions."""
    router = APIRouter(prefix=f"/v2/{memory}sharedmemory", tags=["shared memory"])

    @router.get("/status", response_model=document, description=f"All regions {where}.")
    async def status_of_all() -> Response:
        return await _regions(regions.status(kind, ""))

    @router.get(
        "/region/{region}/status", response_model=document, description=f"One of the regions {where}, in a list."
    )
    async def status(region: RegionName) -> Response:
        return await _regions(regions.status(kind, region))

    @router.post("/region/{region}/unregister", response_class=Response)
    async def unregister(region: RegionName) -> Response:
        """Unregister a region; a region that is not registered is no error."""
        regions.unregister(kind, region)
        return _nothing()

    @router.post("/unregister", response_class=Response, description=f"Unregister all regions {where}.")
    async def unregister_all() -> Response:
        regions.unregister(kind, "")
        return _nothing()

    return router


def _index_entry(entry: IndexEntry) -> dict[str, str]:
    known = {"name": entry.name, "version": entry.version, "state": entry.state, "reason": entry.reason}
    return {key: value for key, value in known.items() if value}


def _nothing() -> Response:
    return Response(media_type="application/json")


async def _regions(regions: Sequence[RegionStatus | CudaRegionStatus]) -> Response:
    parts: list[bytes] = []
    for begin in range(0, len(regions), _PER_TURN):
        if begin:
            await asyncio.sleep(0)
        parts.append(orjson.dumps(regions[begin : begin + _PER_TURN])[1:-1])
    return Response(b"[%b]" % b",".join(parts), media_type="application/json")


def _handle(document: dict[str, Any]) -> bytes:
    given = document.get("raw_handle")
    text = given.get("b64") if isinstance(given, dict) else None
    if not isinstance(text, str):
        raise invalid_input(f"Unable to parse 'raw_handle': expected an object with a string 'b64', got {given!r:.100}")
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise invalid_input(f"Unable to parse 'raw_handle': expected base64 in 'b64': {error}") from None


def _key(document: dict[str, Any]) -> str:
    key = document.get("key")
    if type(key) is not str:
        raise invalid_input(f"Unable to parse 'key': expected a string, got {key!r:.100}")
    return key


def _unsigned(document: dict[str, Any], name: str, default: int | None) -> int:
    value = document.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 0:
        raise invalid_input(f"Unable to parse '{name}': expected an unsigned integer, got {value!r:.100}")
    return value
