"""The shared memory calls of REST. Bodies are read as bytes: clients send every content type, or none."""

from base64 import b64decode
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, Field

from ortserve.errors import invalid_input
from ortserve.frontends.http.json_body import read_json_object
from ortserve.service.shared_memory import CudaRegionStatus, RegionStatus, SharedMemory

RegionName = Annotated[str, Path(description="Name that requests use", examples=["input_data"])]


class RegistrationDocument(BaseModel):
    key: str = Field(description="Name of the shared memory object, as shm_open takes it", examples=["/input_data"])
    offset: int = Field(0, ge=0, description="Where in the object the region begins")
    byte_size: int = Field(ge=0, description="Size of the region")


class RegionDocument(BaseModel):
    name: str
    key: str
    offset: int
    byte_size: int


class CudaHandleDocument(BaseModel):
    b64: str = Field(description="The 64 bytes of a cudaIpcMemHandle_t, in base64")


class CudaRegistrationDocument(BaseModel):
    raw_handle: CudaHandleDocument
    device_id: int = Field(ge=0, description="Of the GPU, as the server counts them")
    byte_size: int = Field(ge=0, description="Size of the region, from the beginning of the allocation")


class CudaRegionDocument(BaseModel):
    name: str
    device_id: int
    byte_size: int


def _body(document: type[BaseModel]) -> dict[str, Any]:
    schema = document.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


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

    @router.post("/region/{region}/register", openapi_extra=_body(RegistrationDocument), response_class=Response)
    async def register(region: RegionName, request: Request) -> Response:
        """Let requests use a shared memory object, where the operator allows it."""
        document = await read_json_object(request)
        offset, byte_size = _unsigned(document, "offset", 0), _unsigned(document, "byte_size", None)
        regions.register(region, _key(document), offset, byte_size)
        return _nothing()

    @router.post("/region/{region}/unregister", response_class=Response)
    async def unregister(region: RegionName) -> Response:
        """Forget a region; one that is not registered is no error."""
        regions.unregister(region)
        return _nothing()

    @router.post("/unregister", response_class=Response)
    async def unregister_all() -> Response:
        """Forget all regions."""
        regions.unregister("")
        return _nothing()

    return router


def _cuda_routes(regions: SharedMemory) -> APIRouter:
    router = APIRouter()

    @router.get("/status", response_model=list[CudaRegionDocument])
    async def cuda_status_of_all() -> Response:
        """All registered regions on GPUs."""
        return _answer(regions.cuda_status(""))

    @router.get("/region/{region}/status", response_model=list[CudaRegionDocument])
    async def cuda_status(region: RegionName) -> Response:
        """One registered region on a GPU, as a list of one."""
        return _answer(regions.cuda_status(region))

    @router.post("/region/{region}/register", openapi_extra=_body(CudaRegistrationDocument), response_class=Response)
    async def register_cuda(region: RegionName, request: Request) -> Response:
        """Let requests use another process's memory on a GPU, where the operator allows it and there is one."""
        document = await read_json_object(request)
        device_id, byte_size = _unsigned(document, "device_id", None), _unsigned(document, "byte_size", None)
        await regions.register_cuda(region, _handle(document), device_id, byte_size)
        return _nothing()

    @router.post("/region/{region}/unregister", response_class=Response)
    async def unregister_cuda(region: RegionName) -> Response:
        """Forget a region on a GPU; one that is not registered is no error."""
        regions.unregister_cuda(region)
        return _nothing()

    @router.post("/unregister", response_class=Response)
    async def unregister_all_cuda() -> Response:
        """Forget all regions on GPUs."""
        regions.unregister_cuda("")
        return _nothing()

    return router


def _nothing() -> Response:
    return Response(media_type="application/json")


def _answer(regions: Sequence[RegionStatus | CudaRegionStatus]) -> Response:
    return Response(orjson.dumps(regions), media_type="application/json")


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
    value = document.get(name, default)
    if type(value) is not int or value < 0:
        raise invalid_input(f"Unable to parse '{name}': expected an unsigned integer, got {value!r:.100}")
    return value
