"""The statistics calls of REST."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from ortserve.frontends.http.management_documents import StatisticsDocument
from ortserve.frontends.http.path_parameters import ModelName, ModelVersion
from ortserve.service.statistics import ModelStatistics, StatisticsService
from ortserve.telemetry.statistics import Duration


def statistics_routes(statistics: StatisticsService) -> APIRouter:
    """Routes of models' numbers; include them before those with a model's name alone, which ``stats`` would be."""
    router = APIRouter(prefix="/v2/models", tags=["statistics"])

    @router.get("/stats", response_model=StatisticsDocument)
    async def all_statistics() -> JSONResponse:
        """The numbers of every version that serves, since it was loaded."""
        return _answer(statistics.statistics())

    @router.get("/{model}/stats", response_model=StatisticsDocument)
    async def model_statistics(model: ModelName) -> JSONResponse:
        """The numbers of the model's versions that serve, since they were loaded."""
        return _answer(statistics.statistics(model))

    @router.get("/{model}/versions/{version}/stats", response_model=StatisticsDocument)
    async def version_statistics(model: ModelName, version: ModelVersion) -> JSONResponse:
        """The numbers of this version of the model, since it was loaded."""
        return _answer(statistics.statistics(model, version))

    return router


def _answer(found: list[ModelStatistics]) -> JSONResponse:
    return JSONResponse({"model_stats": [_model(one) for one in found]})


def _model(one: ModelStatistics) -> dict[str, Any]:
    numbers = one.version
    parts = numbers.inference
    return {
        "name": numbers.name,
        "version": numbers.version,
        "last_inference": one.last_inference_ms,
        "inference_count": numbers.inference_count,
        "execution_count": numbers.execution_count,
        "inference_stats": {
            "success": _duration(parts.success),
            "fail": _duration(parts.fail),
            "queue": _duration(parts.queue),
            "compute_input": _duration(parts.compute_input),
            "compute_infer": _duration(parts.compute_infer),
            "compute_output": _duration(parts.compute_output),
            # There is no cache, but clients end themselves over a missing key.
            "cache_hit": _duration(Duration()),
            "cache_miss": _duration(Duration()),
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": batch.batch_size,
                "compute_input": _duration(batch.compute_input),
                "compute_infer": _duration(batch.compute_infer),
                "compute_output": _duration(batch.compute_output),
            }
            for batch in numbers.batches
        ],
        "memory_usage": [],
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
