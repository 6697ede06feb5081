"""``/v1/embeddings`` and ``/v1/models``, the calls of OpenAI's API, through FastAPI.

The texts of a call are the rows of one or more requests, which run as others do and share batches with them. A model
without a batch axis gets a request for each text.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Final, TypeAlias

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ortserve.codecs.embeddings import (
    EmbeddingsRequest,
    TextsRequest,
    VectorEncoder,
    check_size,
    embeddings_answer,
    find_text_input,
    find_vector_output,
)
from ortserve.core.inflight import InflightRequest
from ortserve.core.request import InferRequest, JsonRequest
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.http.documents import (
    EmbeddingsDocument,
    ModelName,
    OpenAiErrorDocument,
    OpenAiModelDocument,
    OpenAiModelsDocument,
)
from ortserve.frontends.http.infer_exchange import InferEndpoint
from ortserve.frontends.http.json_calls import JsonCall, receive
from ortserve.service.call import Call
from ortserve.service.gate import json_too_large
from ortserve.service.inference import InferenceService
from ortserve.service.models import ModelMetadata, ModelService

_JSON: Final = "application/json"
_ERRORS: Final[dict[str, Any]] = {"model": OpenAiErrorDocument}

_ROWS: Final = 64
"""Maximum number of texts in a request to a model with a batch axis."""
_ROWS_AT_ONCE: Final = 128
"""Maximum number of texts of a call that are queued or run at one time."""
_QUEUE_PARTS: Final = 8
"""A call also uses at most this part of the rows that may wait for the model, for the sake of other callers."""
_PER_TURN: Final = 8
"""Number of requests that begin in one turn of the event loop, in about 0.5 ms."""
_PIECE_BYTES: Final = 256 * 1024
"""Approximate size of the pieces in which a long answer is sent."""

ReadJson: TypeAlias = Callable[[JsonRequest, InflightRequest], "asyncio.Future[InferRequest]"]

_REQUEST: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            _JSON: {
                "schema": {
                    "type": "object",
                    "required": ["model", "input"],
                    "properties": {
                        "model": {"type": "string"},
                        "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
                        "encoding_format": {"enum": ["float", "base64"]},
                        "dimensions": {"type": "integer", "description": "Must be the size of the model's vectors"},
                        "user": {"type": "string", "description": "Has no effect"},
                    },
                },
                "example": {"model": "minilm", "input": ["two words", "three more words"]},
            }
        },
    }
}


def embeddings_routes(endpoint: InferEndpoint, models: ModelService, read_json: ReadJson) -> APIRouter:
    """Create the routes. They read the body as bytes and ignore its Content-Type.

    ``read_json`` decodes a long call in another process, unless it is settled before a thread is free.
    """
    embeddings = _Embeddings(endpoint, models, read_json)
    router = APIRouter(prefix="/v1", responses=dict.fromkeys(("4XX", "5XX"), _ERRORS))

    @router.post("/embeddings", tags=["inference"], openapi_extra=_REQUEST, response_model=EmbeddingsDocument)
    async def create_embeddings(request: Request) -> Response:
        """Return the vectors of texts, as OpenAI's API does; the model or ensemble takes texts."""
        return await embeddings.answer(request)

    @router.get("/models", tags=["models"], response_model=OpenAiModelsDocument)
    async def embeddings_models() -> JSONResponse:
        """List the models in memory that return embeddings, as OpenAI's API does."""
        return JSONResponse({"object": "list", "data": [model async for model in embeddings.list_models()]})

    @router.get("/models/{model}", tags=["models"], response_model=OpenAiModelDocument)
    async def embeddings_model(model: ModelName) -> JSONResponse:
        """Describe a model that returns embeddings, as OpenAI's API does."""
        return JSONResponse(await embeddings.describe_model(model))

    return router


class _Embeddings:
    """Answers the calls. Loop thread only."""

    def __init__(self, endpoint: InferEndpoint, models: ModelService, read_json: ReadJson) -> None:
        self._endpoint = endpoint
        self._models = models
        self._read_json = read_json

    async def answer(self, request: Request) -> Response:
        """Answer one request. Raises ServeError: The call, or a request of some of its texts, failed."""
        models = self._models
        async with receive(self._endpoint, request, "embeddings") as received:
            with received.counting():
                decoded = await self._decode(received)
                name, parameters = decoded.model_name, decoded.parameters
                await models.prepare(name, "", received.complete_ns, received.given.timeout_ns)
                metadata = models.model_metadata(name, "")
                text_input = find_text_input(name, metadata.inputs)
                output = find_vector_output(name, metadata.outputs)
                check_size(name, output.shape[-1] if output.shape else -1, parameters)
            texts: list[str] = decoded.inputs[0].array.tolist()
            rows_at_once = max(1, min(_ROWS_AT_ONCE, metadata.max_queue_rows // _QUEUE_PARTS))
            has_rows = text_input.batch_axis is not None and output.batch_axis == 0
            step = min(_ROWS, metadata.max_rows, rows_at_once) if has_rows else 1
            firsts = range(0, len(texts), step)

            def create(index: int) -> tuple[TextsRequest, VectorEncoder]:
                part = texts[firsts[index] : firsts[index] + step]
                encoder = VectorEncoder(firsts[index], len(part), parameters)
                return TextsRequest(name, text_input, output.name, part), encoder

            running = _Running(self._endpoint.service, received, create, len(firsts), rows_at_once // step)
            entries = await running.run()
        return LongResponse(embeddings_answer(name, entries), received.headers(running.timing))

    async def list_models(self) -> AsyncIterator[dict[str, str | int]]:
        """Describe the models in memory that return embeddings, sorted by name."""
        async for metadata in self._models.serving():
            if _why_not(metadata) is None:
                yield self._describe(metadata)

    async def describe_model(self, name: str) -> dict[str, str | int]:
        """Describe a model. Raises ServeError: not_found, also if it returns no embeddings; not_ready."""
        await self._models.prepare(name, "")
        metadata = self._models.model_metadata(name, "")
        error = _why_not(metadata)
        if error is not None:
            raise ServeError(ErrorKind.NOT_FOUND, error.message)
        return self._describe(metadata)

    def _describe(self, metadata: ModelMetadata) -> dict[str, str | int]:
        models, name = self._models, metadata.name
        owner = models.server_metadata().name
        return {"id": name, "object": "model", "created": models.ready_since_s(name), "owned_by": owner}

    async def _decode(self, received: JsonCall) -> InferRequest:
        """Decode a call, a long one in another process. Raises ServeError: invalid_input, too_large, overloaded."""
        body, inference = EmbeddingsRequest(received.body), self._endpoint.service
        if body.is_short:
            return body.read()
        if body.json_bytes > inference.max_json_bytes:
            raise json_too_large(body.json_bytes, inference.max_json_bytes)
        waiting = InflightRequest(Timing(received.complete_ns))
        decode = partial(self._read_json, body, waiting)
        decoding = inference.decodings.begin(decode, waiting, body.growth_bytes, json_bytes=body.json_bytes)
        try:
            decoded = await decoding.result(received.left_ns)
            received.reservation.set_unchecked(decoding.reservation.size)
        finally:
            waiting.cancel()  # otherwise a thread would still decode it
            decoding.release()
            del decoding  # a reference cycle: the frames of its error
        received.body = b""
        return decoded


def _why_not(metadata: ModelMetadata) -> ServeError | None:
    """Return why a model returns no embeddings; None if it does."""
    try:
        find_text_input(metadata.name, metadata.inputs)
        find_vector_output(metadata.name, metadata.outputs)
    except ServeError as error:
        return error
    return None


class _Running:
    """The requests of a call, of which some run at a time. Loop thread only."""

    def __init__(
        self,
        inference: InferenceService,
        received: JsonCall,
        create: Callable[[int], tuple[TextsRequest, VectorEncoder]],
        count: int,
        at_once: int,
    ) -> None:
        """Store the parameters. ``create`` returns one of ``count`` requests by index, when it begins: creating all in
        one turn would take milliseconds.
        """
        self._inference = inference
        self._received = received
        self._create = create
        self._count = count
        self._at_once = at_once
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._begun = 0
        self._calls: dict[int, Call] = {}
        """The requests that run, by index."""
        self._entries: list[list[bytes | memoryview]] = [[]] * count
        self.timing = Timing(received.complete_ns)
        """The times of the request that was answered last."""

    async def run(self) -> list[bytes | memoryview]:
        """Run all requests. Returns the encoded vectors in the order of the texts.

        Raises:
            ServeError: The error of the first request that failed; the others are cancelled.
        """
        self._begin()
        ended = self._ended
        try:
            await ended
        finally:
            for call in self._calls.values():
                call.cancel()
            self._calls.clear()
            self._begun = self._count
            if not ended.cancelled():
                ended.exception()  # also if the task was cancelled, which does not retrieve it
            del ended, self._ended  # a reference cycle: the frames of its error
        return list(chain.from_iterable(self._entries))

    def _begin(self) -> None:
        """Begin some requests; the next turn of the loop begins more."""
        for _ in range(_PER_TURN):
            index = self._begun
            if index == self._count or len(self._calls) >= self._at_once:
                return
            self._begun += 1
            call = self._calls[index] = self._received.begin()
            on_answer, on_error = partial(self._on_answer, index), partial(self._on_error, index)
            self._inference.start(call, *self._create(index), on_answer, on_error)
        self._loop.call_soon(self._begin)

    def _on_answer(self, index: int, entries: list[bytes | memoryview]) -> None:
        self.timing = self._calls.pop(index).timing
        self._entries[index] = entries
        if self._begun < self._count:
            self._begin()
        elif not self._calls and not self._ended.done():
            self._ended.set_result(None)

    def _on_error(self, index: int, error: ServeError) -> None:
        del self._calls[index]
        self._begun = self._count
        if not self._ended.done():
            self._ended.set_exception(error)


class LongResponse(Response):
    """A JSON document of any size, of which about ``_PIECE_BYTES`` are written, and freed, in a turn of the event loop.

    Starlette's ``StreamingResponse`` writes all pieces in one turn while the caller reads as fast.
    """

    def __init__(self, parts: Iterable[bytes | memoryview], headers: dict[str, str]) -> None:
        """``parts`` are the document, in order."""
        self._parts = deque(parts)
        sized = headers | {"content-length": str(sum(map(len, self._parts)))}
        super().__init__(headers=sized, media_type=_JSON)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body"})

    def _pieces(self) -> Iterator[bytes]:
        """Join and divide the parts: a long copy would block the event loop."""
        joined: list[bytes | memoryview] = []
        size = 0
        while self._parts:
            part = self._parts.popleft()
            for start in range(0, len(part), _PIECE_BYTES):
                joined.append(part if len(part) <= _PIECE_BYTES else memoryview(part)[start : start + _PIECE_BYTES])
                size += len(joined[-1])
                if size >= _PIECE_BYTES:
                    yield b"".join(joined)
                    joined, size = [], 0
        if joined:
            yield b"".join(joined)
