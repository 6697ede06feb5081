"""To which group each call belongs, on both protocols. None is open to everybody: probes bring no keys."""

from collections.abc import Mapping
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
"""Every call that there is; the router refuses to begin with another."""


def is_plain(path: str) -> bool:
    """Whether a decoded path is what it seems; to others ``http_group`` has no answer.

    A route's pattern ends with ``$``, which takes a line feed at the end for none, so that another route might answer.
    """
    return not path.endswith("\n")


def http_group(method: str, path: str) -> Group | None:
    """The group of a request by its path as the routes see it: decoded, and without a slash at its end.

    What no route answers is told so to holders of a key: of ``metadata`` for who only reads, else of ``control``.
    """
    match path.split("/")[1:]:
        case (
            ["v2", "health", "live" | "ready"]
            | ["v2", "models", _, "ready"]
            | ["v2", "models", _, "versions", _, "ready"]
        ):
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
    return Group.METADATA if method in ("GET", "HEAD") else Group.CONTROL
