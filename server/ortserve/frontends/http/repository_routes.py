"""The repository calls of REST: index, load, unload."""

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.http.answers import body_too_large
from ortserve.frontends.http.json_body import read_json_object, read_large_parameters, read_parameters
from ortserve.frontends.http.management_documents import (
    IndexEntryDocument,
    IndexRequestDocument,
    UnloadRequestDocument,
    request_body,
)
from ortserve.frontends.http.path_parameters import ModelName
from ortserve.service.gate import Hold
from ortserve.service.repository import LoadParameter, RepositoryService


def repository_routes(repository: RepositoryService, hold: Callable[[int], Hold], *, max_body_bytes: int) -> APIRouter:
    """Routes of what lies in the repositories and what is served of it.

    ``hold`` lets the body of a load in, by its bytes; raises ServeError: overloaded.
    """
    router = APIRouter(prefix="/v2/repository", tags=["repository"])

    @router.post("/index", response_model=list[IndexEntryDocument], openapi_extra=request_body(IndexRequestDocument))
    async def index(request: Request) -> JSONResponse:
        """The versions that the server knows, and the models that lie in its repositories."""
        document = await read_json_object(request)
        only_ready = document.get("ready", False)
        if not isinstance(only_ready, bool):
            raise invalid_input(f"Invalid value for 'ready': expected a boolean, got {only_ready!r:.100}")
        entries = await repository.index(only_ready=only_ready)
        return JSONResponse([{key: value for key, value in asdict(entry).items() if value} for entry in entries])

    @router.post("/models/{model}/load")
    async def load(model: ModelName, request: Request) -> Response:
        """Load a model, or load it anew if it has changed; answered when it serves.

        The body may be empty, or have `parameters`: `config`, a Triton model configuration as JSON in a text, which
        takes the place of the model's own until the next load; and files in base64 by `file:` and their path in the
        model's folder, such as `file:1/model.onnx`, which need a `config`, if only `{}`.
        """
        announced = int(request.headers.get("content-length", 0))  # the HTTP parser took it for a number already
        if announced > max_body_bytes:
            raise body_too_large(announced, max_body_bytes)
        with hold(announced) as held:
            parameters = await read_large_parameters(request, held, max_body_bytes=max_body_bytes)
            await repository.load(model, await asyncio.to_thread(_decoded, parameters))
        return _nothing()

    @router.post("/models/{model}/unload", openapi_extra=request_body(UnloadRequestDocument))
    async def unload(model: ModelName, request: Request) -> Response:
        """Unload a model; answered when its last request is."""
        await repository.unload(model, await read_parameters(request))
        return _nothing()

    @router.post("/{repository}/index", include_in_schema=False)
    @router.post("/{repository}/models/{model}/load", include_in_schema=False)
    @router.post("/{repository}/models/{model}/unload", include_in_schema=False)
    async def named_repository() -> Response:
        raise ServeError(ErrorKind.UNSUPPORTED, "'repository_name' specification is not supported")

    return router


def _decoded(parameters: Mapping[str, Any]) -> dict[str, LoadParameter]:
    """Files are base64 in JSON. Raises ServeError: invalid_input, for what is not."""
    decoded: dict[str, LoadParameter] = {}
    for name, value in parameters.items():
        if name.startswith("file:"):
            try:
                value = base64.b64decode("".join(value.split()), validate=True)  # some tools break it into lines
            except (AttributeError, ValueError, binascii.Error):
                raise invalid_input(f"parameter '{name}': expected a file's bytes in base64") from None
        elif not isinstance(value, str | bool | int):
            raise invalid_input(f"parameter '{name}': expected a text, number or boolean, got {type(value).__name__}")
        decoded[name] = value
    return decoded


def _nothing() -> Response:
    return Response(media_type="application/json")  # an empty body: clients take no other status than 200 for success
