"""The repository calls of REST: index, load, unload."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ortserve.codecs.json_text import LoadParameter
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.http.answers import body_too_large
from ortserve.frontends.http.body import read_body
from ortserve.frontends.http.json_body import caller_left, read_json_object, read_parameters
from ortserve.frontends.http.management_documents import (
    IndexEntryDocument,
    IndexRequestDocument,
    UnloadRequestDocument,
    request_body,
)
from ortserve.frontends.http.path_parameters import ModelName
from ortserve.service.gate import Hold
from ortserve.service.repository import RepositoryService


def repository_routes(
    repository: RepositoryService,
    hold: Callable[[int], Hold],
    read_load: Callable[[bytes | memoryview], Awaitable[dict[str, LoadParameter]]],
    *,
    max_body_bytes: int,
) -> APIRouter:
    """Routes of what lies in the repositories and what is served of it.

    Args:
        repository: Does what is asked.
        hold: Lets the body of a load in, by its bytes; raises ServeError: overloaded.
        read_load: Reads that body off the event loop; raises ServeError: invalid_input, overloaded.
        max_body_bytes: Of a load.
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
            body = await read_body(request.receive, held, max_bytes=max_body_bytes)
            if body is None:
                raise caller_left()
            await repository.load(model, await read_load(body))
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


def _nothing() -> Response:
    return Response(media_type="application/json")  # an empty body: clients take no other status than 200 for success
