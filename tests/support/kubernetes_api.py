"""A stand-in for Kubernetes' API that a real ``kubectl`` talks to, because tests have no cluster.

A passing test shows that ``kubectl`` accepts a command as written and that the command has its effect on objects; that
namespaces, names, labels, containers, ports and fields exist and match each other in the order of application; and that
the volumes of pods exist. Commands in pods and their ports are real processes (``kubelet``). Tests do not cover what
only a cluster has: scheduling, networking, admission, containers and the actions of operators.
"""

import asyncio
import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import kubernetes_validate.utils
from aiohttp import web

from certificates import HOST, Secret
from kubelet import EXEC, PORT_FORWARD, Kubelet
from kubernetes_objects import (
    KIND,
    KINDS,
    Document,
    Key,
    Kind,
    Objects,
    RefusedError,
    is_selected,
    merge,
    strategic_merge,
)
from kubernetes_protobuf import MEDIA_TYPE, read_protobuf
from servers import LONG_S

PATHS: Final = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<subresource>[^/]+))?"
)
MERGES: Final = {"application/merge-patch+json": merge, "application/strategic-merge-patch+json": strategic_merge}


class KubernetesApi:
    """Answers requests on one event loop."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet
        self._objects = Objects()
        self._change = asyncio.Event()
        self._described = discovery()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        try:
            if request.path in self._described:
                return web.json_response(self._described[request.path])
            return await self._answer_resource(request)
        except RefusedError as refused:
            return web.json_response(refused.status, status=refused.code)

    async def _answer_resource(self, request: web.Request) -> web.StreamResponse:
        key, subresource = parse(request.path)
        match request.method, subresource:
            case "GET", "" | "status" if key.name:
                return web.json_response(self._objects.get(key))
            case "GET", "" if "watch" in request.query:
                return await self._watch(request, key)
            case "GET", "":
                return web.json_response(self._list(request, key))
            case "GET", "log":
                is_previous = request.query.get("previous") == "true"
                pod = self._objects.get(key)
                container = request.query.get("container", pod["spec"]["containers"][0]["name"])
                return web.Response(text=self._kubelet.log(pod, container, is_previous=is_previous))
            case "GET", "exec":
                return await self._stream(request, key, EXEC)
            case "GET", "portforward":
                return await self._stream(request, key, PORT_FORWARD)
            case "GET" | "PATCH", "scale":
                return await self._scale(request, key)
            case "POST", "":
                is_protobuf = request.content_type == MEDIA_TYPE
                document = read_protobuf(await request.read()) if is_protobuf else await request.json()
                return self._changed(self._objects.create(replace(key, name=document["metadata"]["name"]), document))
            case "PATCH", "" | "status":
                return self._changed(self._objects.replace(key, await patched(request, key, self._objects.get(key))))
            case "DELETE", "":
                return self._changed(self._objects.delete(key))
        raise RefusedError(405, "MethodNotAllowed", f"{request.method} {request.path}: not known to the stand-in")

    def _changed(self, document: Document) -> web.Response:
        self._change.set()
        self._change = asyncio.Event()
        return web.json_response(document)

    def _list(self, request: web.Request, key: Key) -> Document:
        listed: Document = {"kind": f"{key.kind.name}List", "apiVersion": key.kind.api_version}
        listed["metadata"] = {"resourceVersion": str(self._objects.version)}
        listed["items"] = list(self._selected(request, key).values())
        return listed

    def _selected(self, request: web.Request, key: Key) -> dict[str, Document]:
        """The requested objects, by uid."""
        labels, fields = (request.query.get(f"{what}Selector", "") for what in ("label", "field"))
        found = self._objects.all(key.kind, key.namespace)
        return {document["metadata"]["uid"]: document for document in found if is_selected(document, labels, fields)}

    async def _watch(self, request: web.Request, key: Key) -> web.StreamResponse:
        """Send changes after the version that the client knows, until the client disconnects."""
        if "sendInitialEvents" in request.query:
            # Some servers reject this. Newer clients then list first, as older ones do.
            raise RefusedError(422, "Invalid", "sendInitialEvents is forbidden for watch")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        since, known = int(request.query.get("resourceVersion") or 0), self._selected(request, key)
        known = {uid: kept for uid, kept in known.items() if int(kept["metadata"]["resourceVersion"]) <= since}
        while True:
            change, present = self._change, self._selected(request, key)
            events = [("DELETED", kept) for uid, kept in known.items() if uid not in present]
            events += [("ADDED", kept) for uid, kept in present.items() if uid not in known]
            events += [("MODIFIED", kept) for uid, kept in present.items() if kept != known.get(uid, kept)]
            for kind, document in events:
                await response.write(json.dumps({"type": kind, "object": document}).encode() + b"\n")
            known = present
            await change.wait()

    async def _scale(self, request: web.Request, key: Key) -> web.Response:
        deployment = self._objects.get(key)
        if request.method == "PATCH":
            scale = await patched(request, key, scale_of(deployment))
            deployment["spec"]["replicas"] = scale["spec"]["replicas"]
            self._changed(deployment := self._objects.replace(key, deployment))
        return web.json_response(scale_of(deployment))

    async def _stream(self, request: web.Request, key: Key, protocol: str) -> web.WebSocketResponse:
        pod = self._objects.get(key)
        if pod["status"]["phase"] != "Running":
            raise RefusedError(400, "BadRequest", f"pod is not running: {pod['status']}")
        socket = web.WebSocketResponse(protocols=(protocol,), compress=False)
        await socket.prepare(request)
        if protocol == PORT_FORWARD:
            await self._kubelet.forward_ports(socket)
        else:

            def read(kind: str, name: str) -> Document:
                return self._objects.get(Key(KIND[kind], key.namespace, name))

            await self._kubelet.execute(socket, pod, request.query.getall("command"), read)
        await socket.close()
        return socket


def parse(path: str) -> tuple[Key, str]:
    """The object that a path names, or with an empty name all objects, and the subresource."""
    found = PATHS.fullmatch(path)
    if found:
        group, version, namespace, plural, name, subresource = (part or "" for part in found.groups())
        for kind in KINDS:
            if (kind.group, kind.version, kind.plural) == (group, version, plural):
                return Key(kind, namespace, name), subresource
    raise RefusedError(404, "NotFound", "the server could not find the requested resource")


async def patched(request: web.Request, key: Key, document: Document) -> Document:
    """Returns the object with the request's patch applied.

    As in Kubernetes, custom kinds accept no strategic patches.
    """
    way = request.content_type
    if way not in MERGES or (key.kind.is_custom and MERGES[way] is strategic_merge):
        raise RefusedError(415, "UnsupportedMediaType", f"{way}: not known for {key.kind.name}")
    merged: Document = MERGES[way](document, await request.json())
    return merged


def scale_of(deployment: Document) -> Document:
    metadata = {name: deployment["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion")}
    replicas = {"replicas": deployment["spec"].get("replicas", 1)}
    return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": replicas, "status": replicas}


def discovery() -> dict[str, Document]:
    """The answers that ``kubectl`` requests first, by path: the kinds, and the support for field validation."""
    version = kubernetes_validate.utils.latest_version()
    groups = [
        {"name": group, "versions": versions, "preferredVersion": versions[0]}
        for group in dict.fromkeys(kind.group for kind in KINDS if kind.group)
        if (versions := [{"groupVersion": name, "version": name.split("/")[1]} for name in api_versions(group)])
    ]
    described: dict[str, Document] = {
        "/version": dict(zip(("major", "minor"), version.split("."), strict=False)) | {"gitVersion": f"v{version}"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }
    schemas = {}
    for api_version in dict.fromkeys(kind.api_version for kind in KINDS):
        root = f"apis/{api_version}" if "/" in api_version else f"api/{api_version}"
        kinds = [kind for kind in KINDS if kind.api_version == api_version]
        listed = [resource for kind in kinds for resource in resources(kind)]
        described[f"/{root}"] = {"kind": "APIResourceList", "groupVersion": api_version, "resources": listed}
        paths = {f"/{kind.plural}": checked(kind) for kind in kinds}
        described[f"/openapi/v3/{root}"] = {"openapi": "3.0.0", "paths": paths}
        schemas[root] = {"serverRelativeURL": f"/openapi/v3/{root}"}
    return described | {"/openapi/v3": {"paths": schemas}}


def api_versions(group: str) -> list[str]:
    return list(dict.fromkeys(kind.api_version for kind in KINDS if kind.group == group))


def resources(kind: Kind) -> Iterator[Document]:
    resource = {"name": kind.plural, "singularName": kind.name.lower(), "namespaced": kind.is_namespaced}
    yield resource | {"kind": kind.name, "verbs": ["create", "delete", "get", "list", "patch", "watch"]}
    if kind == KIND["Deployment"]:
        scale = {"group": "autoscaling", "version": "v1", "kind": "Scale", "verbs": ["get", "patch"]}
        yield resource | scale | {"name": f"{kind.plural}/scale"}
    if kind == KIND["Pod"]:
        yield resource | {"name": f"{kind.plural}/status", "kind": kind.name, "verbs": ["patch"]}


def checked(kind: Kind) -> Document:
    """The OpenAPI entry whose parameter tells ``kubectl`` to leave field validation to the server."""
    names = {"group": kind.group, "version": kind.version, "kind": kind.name}
    parameters = [{"name": "fieldValidation", "in": "query"}]
    return {"patch": {"parameters": parameters, "x-kubernetes-group-version-kind": names}}


@contextmanager
def serving_api(folder: Path, kubelet: Kubelet) -> Iterator[Path]:
    """Serve an empty cluster. Yields the file for ``KUBECONFIG``, which contains the client's certificate."""
    secret = Secret(folder)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="kubernetes-api")
    thread.start()
    try:
        runner = asyncio.run_coroutine_threadsafe(_listen(secret, kubelet), loop).result(LONG_S)
        try:
            yield write_kubeconfig(secret, runner.addresses[0][1])
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(LONG_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LONG_S)
        loop.close()


async def _listen(secret: Secret, kubelet: Kubelet) -> web.AppRunner:
    """Listen. Clients need the cluster's certificate, because they can run commands."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=secret.ca)
    context.load_cert_chain(secret.cert, secret.key)
    context.verify_mode = ssl.CERT_REQUIRED
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", KubernetesApi(kubelet).answer)
    # A watch ends when its client disconnects, so that the shutdown does not wait for it.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0, ssl_context=context).start()
    return runner


def write_kubeconfig(secret: Secret, port: int) -> Path:
    cert, key = secret.client_files()
    cluster = {"server": f"https://{HOST}:{port}", "certificate-authority": str(secret.ca)}
    config = {
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"client-certificate": str(cert), "client-key": str(key)}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    file = secret.folder / "kubeconfig"
    file.write_text(json.dumps(config))
    return file
