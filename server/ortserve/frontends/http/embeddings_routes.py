"""``POST /v1/embeddings``, the call of OpenAI's API, through FastAPI.

The texts of a call are rows of one or more requests. A model without a batch axis, such as a tokenizer that takes one
text, gets a request for each text; texts of all callers share the batches of the other steps of its ensemble.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from ortserve.codecs.bounds import INLINE_BINARY_BYTES, TEXT_BYTES
from ortserve.codecs.embeddings import (
    EmbeddingsRequest,
    TextsRequest,
    VectorEncoder,
    embeddings_answer,
    find_text_input,
    find_vector_output,
)
from ortserve.core.encoded import JsonRequest
from ortserve.core.request import InferRequest
from ortserve.core.timing import Timing
from ortserve.frontends.http.json_calls import JsonCall, JsonCalls
from ortserve.service.codec_threads import decoded_in, hold_until_decoded
from ortserve.service.gate import json_too_large

_JSON: Final = "application/json"

_ROWS: Final = 64
"""Maximum number of texts in a request to a model with a batch axis."""
_AT_ONCE: Final = 64
"""Maximum number of requests of a call that are queued or run at one time, so that it does not fill the queue."""
_PIECE_BYTES: Final = 256 * 1024
"""Minimum size of the pieces of a long answer."""
_PER_TURN: Final = 8
"""Number of requests that begin in one turn of the event loop, in about 0.5 ms."""

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


def embeddings_routes(embeddings: "Embeddings") -> APIRouter:
    """Create the route. It reads the body as bytes and ignores its Content-Type."""
    router = APIRouter(prefix="/v1", tags=["inference"])

    @router.post("/embeddings", openapi_extra=_REQUEST)
    async def create_embeddings(request: Request) -> Response:
        """Return the vectors of texts, as OpenAI's API does; the model or ensemble takes texts."""
        return await embeddings.answer(request)

    return router


class Embeddings:
    """Answers the call. Loop thread only."""

    def __init__(self, calls: JsonCalls, read_json: Callable[[JsonRequest], "asyncio.Future[InferRequest]"]) -> None:
        """``read_json`` decodes a long call in another process."""
        self._calls = calls
        self._read_json = read_json

    async def answer(self, request: Request) -> Response:
        """Answer one request. Raises ServeError: The call, or a request of some of its texts, failed."""
        models = self._calls.models
        async with self._calls.receive(request, "embeddings") as received:
            with received.counting():
                decoded = await self._decode(received)
                name = decoded.model_name
                await models.prepare(name, "")
                metadata = models.model_metadata(name, "")
                text_input = find_text_input(name, metadata.inputs)
                output = find_vector_output(name, metadata.outputs)
            texts: list[str] = decoded.inputs[0].array.tolist()
            has_rows = text_input.batch_axis is not None and output.batch_axis == 0
            step = min(_ROWS, metadata.max_rows) if has_rows else 1
            firsts = range(0, len(texts), step)
            requests = [TextsRequest(name, text_input, output.name, texts[first : first + step]) for first in firsts]
            encoders = [VectorEncoder(first, min(step, len(texts) - first), decoded.parameters) for first in firsts]
            entries, timing = await self._run(received, requests, encoders)
        parts, headers = embeddings_answer(name, entries), received.headers(timing)
        if sum(map(len, parts)) <= INLINE_BINARY_BYTES:
            return Response(b"".join(parts), media_type=_JSON, headers=headers)
        return StreamingResponse(_in_turns(parts), media_type=_JSON, headers=headers)

    async def _decode(self, received: JsonCall) -> InferRequest:
        """Decode a call, a long one in another process. Raises ServeError: invalid_input, too_large, overloaded."""
        body, hold, inference = EmbeddingsRequest(received.body), received.hold, self._calls.inference
        if body.is_short:
            return body.read()
        if body.json_bytes > inference.max_json_bytes:
            raise json_too_large(body.json_bytes, inference.max_json_bytes)
        hold.grow(body.growth_bytes)
        decoding = self._read_json(body)
        try:
            decoded = await decoded_in(decoding, received.left_ns)
        finally:
            hold_until_decoded(decoding, inference.gate, hold.size)
        hold.set_unchecked(len(received.body) + TEXT_BYTES * decoded.inputs[0].array.size)
        received.body = b""  # the texts are as long together
        return decoded

    async def _run(
        self, received: JsonCall, requests: list[TextsRequest], encoders: list[VectorEncoder]
    ) -> tuple[list[bytes], Timing]:
        """Run the requests of a call.

        Returns:
            Their encoded vectors in the order of the texts, and the times of the request that was answered last.

        Raises:
            ServeError: The error of the first request that failed; the others are cancelled.
        """
        entries = [b""] * len(requests)
        answered: list[Timing] = []
        slots = asyncio.Semaphore(_AT_ONCE)

        async def run(index: int) -> None:
            call = received.begin()
            entries[index] = await self._calls.inference.serve(call, requests[index], encoders[index])
            answered[:] = [call.timing]
            slots.release()

        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(requests)):
                    await slots.acquire()
                    if index % _PER_TURN == _PER_TURN - 1:
                        await asyncio.sleep(0)
                    group.create_task(run(index))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return entries, answered[0]


async def _in_turns(parts: list[bytes]) -> AsyncIterator[bytes]:
    """Join parts to pieces of at least ``_PIECE_BYTES``, except the last one: joining all would block the loop."""
    piece = bytearray()
    for part in parts:
        piece += part
        if len(piece) >= _PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)
