"""The configuration calls of REST."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from ortserve.codecs.model_config import config_json
from ortserve.frontends.http.path_parameters import ModelName, ModelVersion
from ortserve.service.models import ModelService


def configuration_routes(models: ModelService) -> APIRouter:
    """Routes of how models are configured, in the words of Triton's ``ModelConfig``."""
    router = APIRouter(prefix="/v2/models/{model}", tags=["configuration"])

    @router.get("/config")
    async def model_config(model: ModelName) -> JSONResponse:
        """The configuration that the model really has, what was derived for it included."""
        return JSONResponse(config_json(models.model_config(model, "")))

    @router.get("/versions/{version}/config")
    async def version_config(model: ModelName, version: ModelVersion) -> JSONResponse:
        """The configuration that this version of the model really has, what was derived for it included."""
        return JSONResponse(config_json(models.model_config(model, version)))

    return router
