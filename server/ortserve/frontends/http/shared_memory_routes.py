"""The shared memory calls of REST. Bodies are read as bytes: clients send every content type, or none."""

from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, Field

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.service.shared_memory import RegionStatus, SharedMemory

RegionName = Annotated[str, Path(description="Name that requests use", examples=["input_data"])]

_MAX_BODY_BYTES: Final = 64 * 1024
"""Of a call here; a region's bytes are not in it."""


class RegistrationDocument(BaseModel):
    key: str = Field(description="Name of the shared memory object, as shm_open takes it", examples=["/input_data"])
    offset: int = Field(0, ge=0, description="Where in the object the region begins")
    byte_size: int = Field(ge=0, description="Size of the region")


class RegionDocument(BaseModel):
    name: str
    key: str
    offset: int
    byte_size: int


class CudaRegionDocument(BaseModel):
    name: str
    device_id: int
    byte_size: int


_REGISTRATION: Final = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": RegistrationDocument.model_json_schema()}},
    }
}


def shared_memory_routes(regions: SharedMemory) -> APIRouter:
    """Routes for both kinds of shared memory. Success is 200 with nothing in it: clients accept no other status."""
    router = APIRouter(prefix="/v2", tags=["shared memory"])
    router.include_router(_system_routes(regions), prefix="/systemsharedmemory")
    router.include_router(_cuda_routes(regions), prefix="/cudasharedmemory")
    return router


def _system_routes(regions: SharedMemory) -> APIRouter:
    router = APIRouter()

    @router.get("/status", response_model=list[RegionDocument])
    async def status_of_all() -> Response:
        """All registered regions."""
        return _answer(regions.status(""))

    @router.get("/region/{region}/status", response_model=list[RegionDocument])
    async def status(region: RegionName) -> Response:
        """One registered region, as a list of one."""
        return _answer(regions.status(region))

    @router.post("/region/{region}/register", openapi_extra=_REGISTRATION, response_class=Response)
    async def register(region: RegionName, request: Request) -> Response:
        """Let requests use a shared memory object, where the operator allows it."""
        document = await _read_object(request)
        offset, byte_size = _unsigned(document, "offset", 0), _unsigned(document, "byte_size", None)
        regions.register(region, _key(document), offset, byte_size)
        return Response()

    @router.post("/region/{region}/unregister", response_class=Response)
    async def unregister(region: RegionName) -> Response:
        """Forget a region; one that is not registered is no error."""
        regions.unregister(region)
        return Response()

    @router.post("/unregister", response_class=Response)
    async def unregister_all() -> Response:
        """Forget all regions."""
        regions.unregister("")
        return Response()

    return router


def _cuda_routes(regions: SharedMemory) -> APIRouter:
    router = APIRouter()

    @router.get("/status", response_model=list[CudaRegionDocument])
    async def cuda_status_of_all() -> Response:
        """All registered regions on GPUs: none."""
        regions.cuda_status("")
        return _answer([])

    @router.get("/region/{region}/status", response_model=list[CudaRegionDocument])
    async def cuda_status(region: RegionName) -> Response:
        """One registered region on a GPU."""
        regions.cuda_status(region)
        return _answer([])

    @router.post("/region/{region}/register", response_class=Response)
    async def register_cuda(region: RegionName) -> Response:
        """Refused: regions on GPUs are not supported."""
        regions.register_cuda(region)
        return Response()

    @router.post("/region/{region}/unregister", response_class=Response)
    async def unregister_cuda(region: RegionName) -> Response:
        """Forget a region on a GPU; one that is not registered is no error."""
        regions.unregister_cuda(region)
        return Response()

    @router.post("/unregister", response_class=Response)
    async def unregister_all_cuda() -> Response:
        """Forget all regions on GPUs."""
        regions.unregister_cuda("")
        return Response()

    return router


def _answer(regions: list[RegionStatus]) -> Response:
    return Response(orjson.dumps(regions), media_type="application/json")


async def _read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object; an empty body is an empty one. Raises ServeError: too_large, invalid_input."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise ServeError(
                ErrorKind.TOO_LARGE, f"expected at most {_MAX_BODY_BYTES} bytes in a shared memory call, got more"
            )
    try:
        document = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise invalid_input(f"failed to parse the request JSON buffer: {error.msg} at {error.pos}") from None
    if type(document) is not dict:
        raise invalid_input(f"failed to parse the request JSON buffer: expected an object, got {document!r:.100}")
    return document


def _key(document: dict[str, Any]) -> str:
    key = document.get("key")
    if type(key) is not str:
        raise invalid_input(f"Unable to parse 'key': expected a string, got {key!r:.100}")
    return key


def _unsigned(document: dict[str, Any], name: str, default: int | None) -> int:
    value = document.get(name, default)
    if type(value) is not int or value < 0:
        raise invalid_input(f"Unable to parse '{name}': expected an unsigned integer, got {value!r:.100}")
    return value
