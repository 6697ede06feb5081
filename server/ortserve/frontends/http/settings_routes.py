"""The trace and log settings of REST."""

from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from ortserve.frontends.http.json_body import read_json_object
from ortserve.frontends.http.management_documents import LogSettingsDocument, TraceSettingsDocument, request_body
from ortserve.frontends.http.path_parameters import ModelName
from ortserve.service.log_settings import LogSettings
from ortserve.service.trace_settings import TraceSettings

_LOG_BODY: Final = request_body(LogSettingsDocument, is_partial=True)
# Numbers may be texts and texts numbers, as Triton's clients have it; a schema would only say "anything".
_TRACE_BODY: Final = {
    "requestBody": {
        "content": {"application/json": {"schema": {"type": "object"}, "example": {"trace_level": ["OFF"]}}}
    }
}


def settings_routes(logs: LogSettings, traces: TraceSettings) -> APIRouter:
    """Routes of what clients may change while the server runs."""
    router = APIRouter(prefix="/v2", tags=["settings"])

    @router.get("/logging", response_model=LogSettingsDocument)
    async def log_settings() -> JSONResponse:
        """Which lines are logged."""
        return JSONResponse(logs.read())

    @router.post("/logging", response_model=LogSettingsDocument, openapi_extra=_LOG_BODY)
    async def change_log_settings(request: Request) -> JSONResponse:
        """Change which lines are logged; keys that are not there stay as they are."""
        return JSONResponse(logs.update(await read_json_object(request)))

    @router.get("/trace/setting", response_model=TraceSettingsDocument)
    async def trace_settings() -> JSONResponse:
        """The server's trace settings."""
        return JSONResponse(traces.read())

    @router.post(
        "/trace/setting",
        response_model=TraceSettingsDocument,
        openapi_extra=_TRACE_BODY,
    )
    async def change_trace_settings(request: Request) -> JSONResponse:
        """Change the server's trace settings; null takes one back to what it began with."""
        return JSONResponse(traces.update(await read_json_object(request)))

    @router.get("/models/{model}/trace/setting", response_model=TraceSettingsDocument)
    async def model_trace_settings(model: ModelName) -> JSONResponse:
        """The trace settings of a model."""
        return JSONResponse(traces.read(model))

    @router.post(
        "/models/{model}/trace/setting",
        response_model=TraceSettingsDocument,
        openapi_extra=_TRACE_BODY,
    )
    async def change_model_trace_settings(model: ModelName, request: Request) -> JSONResponse:
        """Change the trace settings of a model; null takes one back to the server's."""
        return JSONResponse(traces.update(await read_json_object(request), model))

    return router
