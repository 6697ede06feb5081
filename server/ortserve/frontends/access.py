"""The access group of each call on both protocols, and the groups that a server serves without keys. Pure.

Calls without a group need no key: probes, and the files of the console page, which hold no data of the server.
"""

import ipaddress
from collections.abc import Container, Mapping
from typing import Final

from ortserve.service.access import Group

_SERVICE: Final = "/inference.GRPCInferenceService/"
_HEALTH: Final = "/grpc.health.v1.Health/"

GRPC_GROUPS: Final[Mapping[str, Group | None]] = {
    **{
        _SERVICE + method: group
        for group, methods in {
            None: ("ServerLive", "ServerReady", "ModelReady"),
            Group.INFER: ("ModelInfer", "ModelStreamInfer"),
            Group.METADATA: ("ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex"),
            Group.CONTROL: (
                "RepositoryModelLoad",
                "RepositoryModelUnload",
                "SystemSharedMemoryStatus",
                "SystemSharedMemoryRegister",
                "SystemSharedMemoryUnregister",
                "CudaSharedMemoryStatus",
                "CudaSharedMemoryRegister",
                "CudaSharedMemoryUnregister",
                "TraceSetting",
                "LogSettings",
            ),
        }.items()
        for method in methods
    },
    _HEALTH + "Check": None,
    _HEALTH + "List": None,
    _HEALTH + "Watch": None,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Group.METADATA,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Group.METADATA,
}
"""The groups of all gRPC calls. The router rejects a handler whose path is missing here."""


def is_unambiguous(path: str) -> bool:
    """Whether ``http_group`` and the router agree on the route of a decoded path.

    The pattern of a route ends with ``$``, which ignores a line feed at the end of the path, so the router could match
    a route that ``http_group`` does not.
    """
    return not path.endswith("\n")


def http_group(method: str, path: str) -> Group | None:
    """Return the group of a request by the path that routes it: decoded, and without a slash at its end.

    Paths without a route belong to ``metadata`` for GET and HEAD, and to ``control`` for other methods. So only callers
    with a key learn that such a path does not exist.
    """
    match path.split("/")[1:]:
        case (
            ["v2", "health", "live" | "ready"]
            | ["v2", "models", _, "ready"]
            | ["v2", "models", _, "versions", _, "ready"]
        ):
            return None
        case [""] | ["console", *_] if method in ("GET", "HEAD"):
            return None
        case ["v2", "models", _, "infer" | "generate" | "generate_stream"] | [
            "v2",
            "models",
            _,
            "versions",
            _,
            "infer" | "generate" | "generate_stream",
        ]:
            return Group.INFER
        case ["v1", "embeddings"]:
            return Group.INFER
        case ["v2", "repository", "index"] | ["v2", "repository", _, "index"]:
            return Group.METADATA
        case ["v2", "repository" | "systemsharedmemory" | "cudasharedmemory" | "logging" | "trace", *_] | [
            "v2",
            "models",
            _,
            "trace",
            "setting",
        ]:
            return Group.CONTROL
        case ["v2", "models", _, "profile"] | ["v2", "models", _, "versions", _, "profile"]:
            return Group.CONTROL
    return Group.METADATA if method in ("GET", "HEAD") else Group.CONTROL


def unguarded_groups(
    host: str, guarded: Container[Group], *, loads_models: bool, shares_memory: bool, profiles: bool = False
) -> tuple[str, ...]:
    """Return the groups that need no key, for the log, if other machines can reach the address; empty on loopback.

    Args:
        host: Address that the server listens on. Names other than ``localhost`` count as reachable.
        guarded: Groups with keys.
        loads_models: Whether callers may load and unload models.
        shares_memory: Whether callers may register shared memory.
        profiles: Whether callers may profile models.
    """
    if is_loopback(host):
        return ()
    control = ["log settings", "labels"]
    if loads_models:
        control.append("loading models")
    if shares_memory:
        control.append("shared memory")
    if profiles:
        control.append("profiling")
    names = {Group.CONTROL: f"{Group.CONTROL} ({', '.join(control)})"}
    return tuple(names.get(group, str(group)) for group in Group if group not in guarded)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address ``host``."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"
