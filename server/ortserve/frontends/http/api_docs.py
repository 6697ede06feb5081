"""The page ``/docs``: Swagger UI from an installed package, so that the page needs no network.

The page of FastAPI loads Swagger UI from a CDN and starts it with an inline script.
"""

from functools import cache
from importlib.resources import files
from typing import Final

from fastapi import APIRouter, Request, Response

from ortserve.frontends.http.responses import unknown_path
from ortserve.frontends.http.static_files import StaticFile

# React sets styles of elements, which the policy counts as inline. Scripts may come from this server only.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_PACKAGE: Final = "fastapi_swagger"
_FILES: Final = ("swagger-ui.css", "swagger-ui-bundle.js")
_PAGE: Final = b"""<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <title>API documentation</title>
    <link rel="icon" href="data:,">
    <link rel="stylesheet" href="docs/swagger-ui.css">
    <link rel="stylesheet" href="docs/contrast.css">
    <script src="docs/swagger-ui-bundle.js" defer></script>
    <script src="docs/start.js" defer></script>
  </head>
  <body><div id="swagger-ui"></div></body>
</html>
"""
_START: Final = b"""const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow);
follow();
SwaggerUIBundle({ url: "openapi.json", dom_id: "#swagger-ui", validatorUrl: null });
"""
_CONTRAST: Final = b"""/* Swagger UI writes white on light colors, and grey on grey. */
.swagger-ui .opblock .opblock-summary-method { color: #000; text-shadow: none; }
:root:not(.dark-mode) .swagger-ui .info .title small pre.version { color: #000; }
:root:not(.dark-mode) .swagger-ui .info a .url { color: #0b57b0; }
:root:not(.dark-mode) .swagger-ui .json-schema-2020-12-expand-deep-button { color: #555; }
"""


def docs_routes() -> APIRouter:
    """Create the routes of the page and its files. The files of the package are read at their first request."""
    router = APIRouter(include_in_schema=False)
    page = StaticFile("docs.html", _PAGE, _POLICY)
    own = {name: StaticFile(name, text, _POLICY) for name, text in (("start.js", _START), ("contrast.css", _CONTRAST))}

    @router.get("/docs")
    async def docs(request: Request) -> Response:
        return page.answer(request)

    @router.get("/docs/{name}")
    async def file(name: str, request: Request) -> Response:
        if name in own:
            return own[name].answer(request)
        if name not in _FILES:
            raise unknown_path(request.scope["path"])
        return _packaged(name).answer(request)

    return router


@cache
def _packaged(name: str) -> StaticFile:
    return StaticFile(name, (files(_PACKAGE) / "resources" / name).read_bytes(), _POLICY)
