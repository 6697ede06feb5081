"""REST calls about the server and its models: health, metadata, configuration, batching and statistics.

The metrics port also answers health probes that cannot use the HTTP port, because it expects a client certificate, or
because callers occupy all of its connections.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, Final, Literal

import orjson
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from ortserve.codecs.model_config import config_json
from ortserve.core.signature import TensorSpec
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.http.documents import (
    BatchingDocument,
    LiveDocument,
    ModelMetadataDocument,
    ModelName,
    ModelReadyDocument,
    ModelVersion,
    ReadyDocument,
    StatisticsDocument,
)
from ortserve.frontends.http.responses import JSON_TYPE, HttpResponse, failure
from ortserve.service.management import ModelStatistics, StatisticsService
from ortserve.service.models import ModelService, ServerMetadata

_LOOP_TIMEOUT_S: Final = 10.0
"""Time for which another thread waits for the event loop. Probes wait less."""

Probe = Literal["live", "ready"]


def answer_health(models: ModelService, probe: Probe) -> HttpResponse:
    """Answer a probe on the event loop: whether the process works, or whether it should receive requests."""
    if models.is_exiting or models.lost:
        return failure(ServeError(ErrorKind.NOT_READY, "Server exiting" if models.is_exiting else models.lost))
    if probe == "live":
        return HttpResponse(200, b'{"live":true}', (JSON_TYPE,))
    if models.is_ready():
        return HttpResponse(200, b'{"ready":true}', (JSON_TYPE,))
    return HttpResponse(400, b'{"ready":false}', (JSON_TYPE,))


class HealthFromThreads:
    """Answers probes on other threads. It asks the event loop, so a server with a blocked loop is not live."""

    def __init__(self, models: ModelService, loop: asyncio.AbstractEventLoop) -> None:
        self._models = models
        self._loop = loop

    def answer(self, path: str) -> HttpResponse | None:
        """Return the answer for the path of a probe, with any query; None for any other path.

        Any thread except that of the event loop.
        """
        probe: Probe
        match path.partition("?")[0]:
            case "/v2/health/live":
                probe = "live"
            case "/v2/health/ready":
                probe = "ready"
            case _:
                return None
        future: Future[HttpResponse] = Future()
        self._loop.call_soon_threadsafe(lambda: future.set_result(answer_health(self._models, probe)))
        try:
            return future.result(_LOOP_TIMEOUT_S)
        except TimeoutError:
            text = f"the event loop did not answer within {_LOOP_TIMEOUT_S:g} s"
            return failure(ServeError(ErrorKind.NOT_READY, text))


def as_response(response: HttpResponse) -> Response:
    """Convert a response into one of FastAPI."""
    headers = {name.decode(): value.decode() for name, value in response.headers}
    return Response(response.body, response.status, headers)


def health_routes(models: ModelService) -> APIRouter:
    """Create the routes for probes."""
    router = APIRouter(prefix="/v2", tags=["health"])

    @router.get("/health/live", response_model=LiveDocument)
    async def live() -> Response:
        """Whether the process works: it is not shutting down and has lost no device."""
        return as_response(answer_health(models, "live"))

    @router.get("/health/ready", response_model=ReadyDocument, responses={400: {"model": ReadyDocument}})
    async def ready() -> Response:
        """Whether the server accepts requests."""
        return as_response(answer_health(models, "ready"))

    @router.get("/models/{model}/ready", response_model=ModelReadyDocument)
    async def any_version_ready(model: ModelName) -> JSONResponse:
        """Whether some version of the model is ready."""
        return _model_ready(models, model, "")

    @router.get("/models/{model}/versions/{version}/ready", response_model=ModelReadyDocument)
    async def version_ready(model: ModelName, version: ModelVersion) -> JSONResponse:
        """Whether this version of the model is ready."""
        return _model_ready(models, model, version)

    return router


def model_routes(models: ModelService) -> APIRouter:
    """Create the routes for metadata, configuration and batching."""
    router = APIRouter(prefix="/v2")

    @router.get("/models/{model}/config", tags=["configuration"], response_model=dict[str, Any])
    async def model_config(model: ModelName) -> Response:
        """The effective configuration of the model, derived values included."""
        return await _config(models, model, "")

    @router.get("/models/{model}/versions/{version}/config", tags=["configuration"], response_model=dict[str, Any])
    async def version_config(model: ModelName, version: ModelVersion) -> Response:
        """The effective configuration of this version of the model, derived values included."""
        return await _config(models, model, version)

    @router.get("", tags=["metadata"], response_model=ServerMetadata)
    async def server_metadata() -> JSONResponse:
        """The server's name, version and protocol extensions."""
        return JSONResponse(asdict(models.server_metadata()))

    @router.get("/models/{model}", tags=["metadata"], response_model=ModelMetadataDocument)
    async def model_metadata(model: ModelName) -> JSONResponse:
        """Inputs, outputs and properties of the model."""
        await models.prepare(model, "")
        return _metadata(models, model, "")

    @router.get("/models/{model}/versions/{version}", tags=["metadata"], response_model=ModelMetadataDocument)
    async def version_metadata(model: ModelName, version: ModelVersion) -> JSONResponse:
        """Inputs, outputs and properties of this version of the model."""
        await models.prepare(model, version)
        return _metadata(models, model, version)

    @router.get("/models/{model}/batching", tags=["metadata", "operation"], response_model=BatchingDocument)
    async def batching(model: ModelName) -> JSONResponse:
        """Learned latencies of the batcher, and the number of its decisions, for this model."""
        await models.prepare(model, "")
        return JSONResponse(asdict(models.batching(model, "")))

    @router.get(
        "/models/{model}/versions/{version}/batching", tags=["metadata", "operation"], response_model=BatchingDocument
    )
    async def version_batching(model: ModelName, version: ModelVersion) -> JSONResponse:
        """Learned latencies of the batcher, and the number of its decisions, for this version of the model."""
        await models.prepare(model, version)
        return JSONResponse(asdict(models.batching(model, version)))

    return router


def statistics_routes(statistics: StatisticsService) -> APIRouter:
    """Create the routes for statistics. Include them before ``/models/{model}``, which also matches ``stats``."""
    router = APIRouter(prefix="/v2/models", tags=["statistics"])

    @router.get("/stats", response_model=StatisticsDocument)
    async def all_statistics() -> Response:
        """Statistics of each serving version since it was loaded."""
        return await _statistics(statistics.statistics())

    @router.get("/{model}/stats", response_model=StatisticsDocument)
    async def model_statistics(model: ModelName) -> Response:
        """Statistics of the serving versions of the model since they were loaded."""
        return await _statistics(statistics.statistics(model))

    @router.get("/{model}/versions/{version}/stats", response_model=StatisticsDocument)
    async def version_statistics(model: ModelName, version: ModelVersion) -> Response:
        """Statistics of this version of the model since it was loaded."""
        return await _statistics(statistics.statistics(model, version))

    return router


def _model_ready(models: ModelService, name: str, version: str) -> JSONResponse:
    if models.is_model_ready(name, version):
        return JSONResponse({"name": name, "ready": True})
    if not models.is_known(name):
        raise ServeError(ErrorKind.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
    return JSONResponse({"error": "Model version not ready"}, status_code=400)


async def _config(models: ModelService, name: str, version: str) -> Response:
    await models.prepare(name, version)
    config = await models.model_config(name, version)
    # On a thread, because encoding thousands of tensors takes 50 ms.
    content = await asyncio.to_thread(lambda: orjson.dumps(config_json(config)))
    return Response(content, media_type="application/json")


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


async def _statistics(found: AsyncIterator[ModelStatistics]) -> Response:
    # Each is encoded in the turn of the event loop in which it is read: all together would take 80 ms for 1,000 models.
    entries = [orjson.dumps(_version_statistics(one)) async for one in found]
    return Response(b'{"model_stats":[%b]}' % b",".join(entries), media_type="application/json")


def _version_statistics(one: ModelStatistics) -> dict[str, Any]:
    numbers = one.version
    return {
        "name": numbers.name,
        "version": numbers.version,
        "last_inference": one.last_inference_ms,
        "inference_count": numbers.inference_count,
        "execution_count": numbers.execution_count,
        # orjson writes records as objects, and the fields of these have the names of the protocol.
        "inference_stats": numbers.inference,
        "response_stats": {},
        "batch_stats": numbers.batches,
        "memory_usage": [],
    }
