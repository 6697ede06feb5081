"""The rooms import each other in one direction only, and each library has its door."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "server" / "ortserve"

# A room may import rooms of lower levels; rooms of one level do not import each other.
LEVELS = (
    ("errors", "clock"),
    ("core", "listening", "model_file"),
    ("telemetry", "config"),
    ("_pb",),
    ("codecs", "batching", "engine", "rows"),
    ("registry",),
    ("service",),
    ("frontends", "example"),
    ("app",),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

# Library: the rooms that may import it. The scripts that make the example models run offline, never in the server.
DOORS = {
    "onnxruntime": {"engine", "app", "example"},
    "cupy": {"engine"},
    "pynvml": {"engine"},
    "prometheus_client": {"telemetry", "app"},
    "opentelemetry": {"telemetry"},
    "grpc": {"frontends"},
    "hpack": {"frontends"},
    "cryptography": {"frontends"},
    "starlette": {"frontends"},
    "fastapi": {"frontends"},
    "uvicorn": {"frontends"},
    "uvloop": {"app"},
    "orjson": {"codecs", "frontends"},
    "google": {"_pb", "codecs", "frontends"},
    "pydantic": {"config", "frontends", "cli"},  # cli: flags are made from the declarations of the options
    "pydantic_settings": {"config"},
    "yaml": {"config"},
    "onnx": {"example"},
    "sklearn": {"example"},
    "torch": {"example"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(module: Path) -> Iterator[str]:
    """Full names of what a module imports, wherever in it."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the room"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_room_has_a_level() -> None:
    rooms = {room_of(module) for module in modules()} - {"__init__", "__main__"}
    assert rooms == set(LEVEL)


@pytest.mark.parametrize("module", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(module: Path) -> None:
    room = room_of(module)
    if room in ("__init__", "__main__"):
        return
    for name in imports(module):
        library, _, rest = name.partition(".")
        if library == "ortserve":
            other = rest.split(".")[0]
            if other not in (room, "__version__"):
                assert LEVEL[other] < LEVEL[room], f"{room} imports {name}"
        elif library in DOORS:
            assert room in DOORS[library], f"{room} imports {name}, whose door is {DOORS[library]}"


def test_one_module_alone_knows_cupy() -> None:
    importing = {
        str(module.relative_to(PACKAGE))
        for module in modules()
        if any(name.split(".")[0] == "cupy" for name in imports(module))
    }
    assert importing == {"engine/device/cuda.py"}


def test_core_needs_numpy_and_the_standard_library_only() -> None:
    for module in (PACKAGE / "core").glob("*.py"):
        libraries = {name.split(".")[0] for name in imports(module)}
        assert libraries <= sys.stdlib_module_names | {"numpy", "ortserve"}, module.name
