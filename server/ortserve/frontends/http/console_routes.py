"""The console: its page and files, and the data for its scripts.

The files are the same on every server and hold no data of the server, so they need no key; a browser could not send a
key with the address of a page. All data need a key of the group ``metadata``, as ``/v2`` does.
"""

import asyncio
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ortserve.frontends.http.asgi_exchange import exchange_of
from ortserve.frontends.http.documents import ModelName
from ortserve.frontends.http.responses import unknown_path
from ortserve.frontends.http.static_files import StaticFile
from ortserve.service.model_details import ModelDetails
from ortserve.service.observation import Observation, Viewer
from ortserve.service.server_details import ServerDetails

_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
)
_PAGE: Final = "index.html"


def encode_event(name: str, document: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event (HTML, section 9.2). orjson writes no line breaks."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS))


class EventStream(Response):
    """The response that sends the events of one viewer, until the viewer is closed or the caller leaves."""

    def __init__(self, observation: Observation, viewer: Viewer) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no", "x-content-type-options": "nosniff"},
        )
        del self.headers["content-length"]
        self._observation = observation
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as ASGI defines it."""
        exchange_of(scope).cancel_with_caller()
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while scope["method"] != "HEAD" and (event := await self._viewer.next()) is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._observation.leave(self._viewer)


def console_routes(observation: Observation, models: ModelDetails, server: ServerDetails) -> APIRouter:
    """Create the routes of the page, its files, and its data."""
    router = _page_routes()

    @router.get("/v2/console/stream")
    async def stream(request: Request, model: str = "", version: str = "") -> Response:
        watched = (model, version) if model else None
        # HEAD runs as GET, and its stream would never end.
        exchange = exchange_of(request.scope)
        viewer = await observation.view(watched)
        if not exchange.has_response_body:
            observation.leave(viewer)
        return EventStream(observation, viewer)

    @router.get("/v2/console/models/{model}")
    async def unnumbered(model: ModelName) -> JSONResponse:
        return _json(models.describe(model, ""))

    @router.get("/v2/console/models/{model}/versions/{version}")
    async def version(model: ModelName, version: str) -> JSONResponse:
        return _json(models.describe(model, version))

    @router.get("/v2/console/server")
    async def server_details() -> JSONResponse:
        devices = await asyncio.to_thread(server.devices)
        return _json(server.describe() | {"devices": devices})

    return router


def _page_routes() -> APIRouter:
    root = files("ortserve.frontends.console")
    scripts = [script for script in (root / "js").iterdir() if script.name.endswith(".js")]
    paths = {_PAGE: root / _PAGE, "console.css": root / "console.css", **{f"js/{one.name}": one for one in scripts}}
    known = {path: StaticFile(path, file.read_bytes(), _POLICY) for path, file in paths.items()}
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page(request: Request) -> Response:
        return known[_PAGE].answer(request)

    @router.get("/console/{path:path}")
    async def file(path: str, request: Request) -> Response:
        found = known.get(path)
        if found is None:
            raise unknown_path(request.scope["path"])
        return found.answer(request)

    return router


def _json(document: dict[str, Any]) -> JSONResponse:
    return JSONResponse(document, headers={"cache-control": "no-store"})
