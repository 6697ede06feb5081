"""Every call belongs to a group that is the same on both protocols; spellings of paths; groups that need no key."""

import re
import sys
from typing import Any, Final

import pytest
from fastapi.routing import APIRoute
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from ortserve.frontends.access import GRPC_GROUPS, http_group, is_unambiguous, unguarded_groups
from ortserve.frontends.grpc.calls import answering
from ortserve.frontends.grpc.router import Router
from ortserve.frontends.http.console_routes import console_routes
from ortserve.frontends.http.control_app import add_routes, make_control_app
from ortserve.frontends.http.embeddings_routes import embeddings_routes
from ortserve.frontends.http.generate_routes import generate_routes
from ortserve.service.access import Group

HEALTH: Final = ("/v2/health/live", "/v2/health/ready", "/v2/models/{model}/ready")
CONTROL: Final = (
    "/v2/repository/models/{model}/load",
    "/v2/repository/models/{model}/unload",
    "/v2/repository/{repository}/models/{model}/load",
    "/v2/repository/{repository}/models/{model}/unload",
    "/v2/logging",
    "/v2/trace/setting",
    "/v2/models/{model}/trace/setting",
    "/v2/models/{model}/profile",
    "/v2/models/{model}/promote",
    "/v2/models/{model}/rollback",
)
READ_OR_CONTROL: Final = ("/v2/models/{model}/labels", "/v2/models/{model}/rollout")
"""Reading and changing need keys of different groups."""
PAGE: Final = ("/", "/console/{path}")
INFER: Final = ("/v2/models/{model}/generate", "/v2/models/{model}/generate_stream", "/v1/embeddings")


def expected_group(template: str, method: str) -> Group | None:
    """The expected group of a route by its template and a method, computed independently of the server."""
    plain = template.replace("/versions/{version}", "")
    if plain in HEALTH or plain in PAGE:
        return None
    if plain in INFER:
        return Group.INFER
    if plain in CONTROL or "sharedmemory" in plain:
        return Group.CONTROL
    if plain in READ_OR_CONTROL and method not in ("GET", "HEAD"):
        return Group.CONTROL
    return Group.METADATA


async def answer_nothing(_: Request) -> Response:
    return Response()


def all_routes() -> list[Route]:
    """The routes that FastAPI serves; no service is called here."""
    nothing: Any = None

    class Nothing:
        def __getattr__(self, _: str) -> Any:
            return self

    services: Any = Nothing()
    app = make_control_app(nothing, services, nothing, nothing, nothing, title="t")
    add_routes(app, generate_routes(nothing, nothing))
    add_routes(app, embeddings_routes(nothing, nothing, nothing))
    add_routes(app, console_routes(nothing, nothing, nothing))
    return [
        Route(route.path.replace("{path:path}", "{path}"), answer_nothing, methods=list(route.methods or ()))
        for route in app.routes
        if isinstance(route, APIRoute)
    ]


ROUTES: Final = all_routes()
GENERATE_ROUTES: Final = [route for route in ROUTES if route.path.endswith("/generate")]


def test_every_route_is_in_the_group_of_its_path() -> None:
    assert len(ROUTES) > 40
    for route in ROUTES:
        path = re.sub(r"\{version\}", "1", route.path)
        path = re.sub(r"\{\w+\}", "x", path)
        for method in route.methods or ():
            assert http_group(method, path) is expected_group(route.path, method), (method, route.path)


WORDS: Final = """
v1 embeddings v2 health live ready models m 1 versions infer generate generate_stream config stats batching repository
index load unload logging trace setting systemsharedmemory cudasharedmemory region r register unregister status docs
openapi.json redoc .. %2e%2e Load console js main.js stream server
"""
SEGMENTS: Final = st.builds(
    str.__add__, st.sampled_from(["", " ", *WORDS.split()]), st.sampled_from(["", "", "\n", "\r", "\x85", "\u2028"])
)


@given(st.lists(SEGMENTS, max_size=8), st.sampled_from(["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"]))
def test_path_has_the_group_of_its_route(segments: list[str], method: str) -> None:
    path = "/" + "/".join(segments)
    scope = {"type": "http", "path": path, "method": method, "root_path": "", "headers": []}
    taken = next((route for route in ROUTES if route.matches(scope)[0] is Match.FULL), None)
    if taken is not None and is_unambiguous(path):  # other paths are rejected
        assert http_group(method, path) is expected_group(taken.path, method)


def test_only_line_feeds_change_the_route_of_a_path() -> None:
    """Therefore ``is_unambiguous`` does not need to exclude other characters."""
    scope = {"type": "http", "method": "POST", "root_path": "", "headers": []}
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        path = f"/v2/models/m/generate{character}"
        if is_unambiguous(path) and not character.isalnum():
            assert not any(route.matches(scope | {"path": path})[0] is Match.FULL for route in GENERATE_ROUTES), code


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_only_health_and_the_files_of_the_page_are_open(method: str) -> None:
    for path in ("/", "/console/js/main.js"):
        assert http_group(method, path) is (None if method == "GET" else Group.CONTROL)
    for path in ("/v2/console/stream", "/v2/console/server", "//", "/x"):
        assert http_group(method, path) is (Group.METADATA if method == "GET" else Group.CONTROL)
    assert http_group(method, "/v2") is not None
    assert http_group(method, "/v2/health") is not None
    assert http_group(method, "/v2/health/live/x") is not None


def test_equivalent_calls_share_a_group_on_both_protocols() -> None:
    service = "/inference.GRPCInferenceService/"
    same = {
        "ModelInfer": ("POST", "/v2/models/m/infer"),
        "ServerLive": ("GET", "/v2/health/live"),
        "ServerReady": ("GET", "/v2/health/ready"),
        "ModelReady": ("GET", "/v2/models/m/ready"),
        "ServerMetadata": ("GET", "/v2"),
        "ModelMetadata": ("GET", "/v2/models/m"),
        "ModelConfig": ("GET", "/v2/models/m/config"),
        "ModelStatistics": ("GET", "/v2/models/stats"),
        "RepositoryIndex": ("POST", "/v2/repository/index"),
        "RepositoryModelLoad": ("POST", "/v2/repository/models/m/load"),
        "RepositoryModelUnload": ("POST", "/v2/repository/models/m/unload"),
        "SystemSharedMemoryStatus": ("GET", "/v2/systemsharedmemory/status"),
        "SystemSharedMemoryRegister": ("POST", "/v2/systemsharedmemory/region/r/register"),
        "SystemSharedMemoryUnregister": ("POST", "/v2/systemsharedmemory/unregister"),
        "CudaSharedMemoryStatus": ("GET", "/v2/cudasharedmemory/status"),
        "CudaSharedMemoryRegister": ("POST", "/v2/cudasharedmemory/region/r/register"),
        "CudaSharedMemoryUnregister": ("POST", "/v2/cudasharedmemory/unregister"),
        "TraceSetting": ("POST", "/v2/trace/setting"),
        "LogSettings": ("POST", "/v2/logging"),
    }
    for name, (method, path) in same.items():
        assert GRPC_GROUPS[service + name] is http_group(method, path), name
    alone = {"ModelStreamInfer"}
    assert {path.removeprefix(service) for path in GRPC_GROUPS if path.startswith(service)} == same.keys() | alone


def test_call_without_a_group_stops_the_start() -> None:
    class Unheard:
        service = "inference.GRPCInferenceService"

        def handlers(self) -> Any:
            return {"ModelForget": answering(Message, lambda _: None)}  # type: ignore[arg-type,return-value]

    with pytest.raises(ValueError, match="no group for /inference"):
        Router([Unheard()])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST"])
def test_nothing_is_open_on_the_loopback_address(host: str) -> None:
    assert unguarded_groups(host, (), loads_models=True, shares_memory=True) == ()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0", "server.example.com"])
def test_all_groups_without_keys_are_open_elsewhere(host: str) -> None:
    groups = unguarded_groups(host, (), loads_models=False, shares_memory=False)
    assert groups == ("infer", "metadata", "control (log settings, labels)", "metrics")


def test_groups_with_keys_are_not_open() -> None:
    assert unguarded_groups("::", (Group.INFER, Group.METADATA), loads_models=True, shares_memory=True) == (
        "control (log settings, labels, loading models, shared memory)",
        "metrics",
    )
    assert unguarded_groups("::", tuple(Group), loads_models=True, shares_memory=True) == ()


def test_profiling_without_a_key_is_open() -> None:
    (control, *_) = unguarded_groups("::", (Group.INFER,), loads_models=False, shares_memory=False, profiles=True)[1:]
    assert control == "control (log settings, labels, profiling)"
