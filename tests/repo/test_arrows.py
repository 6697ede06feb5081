"""Packages import each other in one direction only, and one package may import each library."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "server" / "ortserve"

# A room may import rooms of lower levels; rooms of one level do not import each other.
LEVELS = (
    ("errors", "clock", "paths"),
    ("core", "listening", "model_file"),
    ("telemetry", "config"),
    ("_pb", "rows"),
    ("codecs", "batching", "engine"),
    ("device",),
    ("registry",),
    ("service",),
    ("frontends", "example", "tools"),
    ("app",),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

# Library: the rooms that may import it. The scripts that make the example models run offline, never in the server.
DOORS = {
    "onnxruntime": {"engine", "device", "app", "example", "tools"},
    "cupy": {"device"},
    "pynvml": {"device", "tools"},
    "prometheus_client": {"telemetry", "app"},
    "opentelemetry": {"telemetry"},
    "grpc": {"frontends", "tools"},
    "hpack": {"frontends", "tools"},
    "cryptography": {"frontends", "tools"},
    "starlette": {"frontends"},
    "fastapi": {"frontends"},
    "uvicorn": {"frontends"},
    "httptools": {"frontends", "tools"},
    "uvloop": {"app", "tools"},
    "orjson": {"codecs", "frontends", "tools"},
    "google": {"_pb", "codecs", "frontends", "tools"},
    "huggingface_hub": {"registry"},
    "obstore": {"registry"},
    # Cli: flags are generated from the declarations of the options.
    "pydantic": {"config", "frontends", "cli", "tools"},
    "pydantic_settings": {"config"},
    "yaml": {"config"},
    "onnx": {"example", "tools"},
    "onnx_ir": {"tools"},
    "onnxscript": {"tools"},
    "onnxslim": {"tools"},
    "optuna": {"tools"},
    "ruamel": {"tools"},
    "jinja2": {"tools"},
    "matplotlib": {"tools"},
    "psutil": {"tools"},
    "rich": {"tools"},
    "squarify": {"tools"},
    "sklearn": {"example"},
    "torch": {"example"},
}


@cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


def room_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(module: Path) -> tuple[str, ...]:
    """Full names of all imports in a module, including those inside functions."""
    return tuple(_imports(module))


def _imports(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the room"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_package_has_a_level() -> None:
    rooms = {room_of(module) for module in modules()} - {"__init__", "__main__"}
    assert rooms == set(LEVEL)


def test_imports_point_downwards() -> None:
    assert [f"{name_of(module)} imports {name}" for module in modules() for name in upward_imports(module)] == []


def upward_imports(module: Path) -> Iterator[str]:
    room = room_of(module)
    if room in ("__init__", "__main__"):
        return
    for name in imports(module):
        library, _, rest = name.partition(".")
        if library == "ortserve":
            other = rest.split(".")[0]
            if other not in (room, "__version__") and LEVEL[other] >= LEVEL[room]:
                yield name
        elif library in DOORS and room not in DOORS[library]:
            yield f"{name}, whose door is {DOORS[library]}"


def name_of(module: Path) -> str:
    parts = ("ortserve", *module.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


@cache
def names() -> frozenset[str]:
    """Names of all modules and packages."""
    return frozenset(map(name_of, modules()))


@cache
def exported(package: str) -> set[str]:
    """The names in a package's ``__all__``, read without importing it."""
    path = PACKAGE.joinpath(*package.split(".")[1:]) / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return set(ast.literal_eval(value))
    return set()


def test_modules_import_only_what_another_package_exports() -> None:
    assert [f"{name_of(module)} imports {name}" for module in modules() for name in private_imports(module)] == []


def private_imports(module: Path) -> Iterator[str]:
    importer = name_of(module)
    for name in imports(module):
        parts = name.split(".")
        for depth in range(2, len(parts)):
            package = ".".join(parts[:depth])
            is_outside = package not in (importer, "ortserve._pb") and not importer.startswith(f"{package}.")
            if is_outside and f"{package}.{parts[depth]}" in names() and parts[depth] not in exported(package):
                yield f"{parts[depth]}, which {package} does not export"


def test_packages_export_only_what_another_package_imports() -> None:
    packages = {name_of(path) for path in modules() if path.name == "__init__.py"} - {"ortserve", "ortserve.rows"}
    assert [f"{package}.{name}" for package in packages for name in exported_in_vain(package)] == []


def exported_in_vain(package: str) -> set[str]:
    submodules = {name.removeprefix(f"{package}.") for name in names()}
    outside = [path for path in modules() if not f"{name_of(path)}.".startswith(f"{package}.")]
    used = {f"{name}." for path in outside for name in imports(path) if name.startswith(f"{package}.")}
    return {
        name
        for name in exported(package) & submodules
        if not any(imported.startswith(f"{package}.{name}.") for imported in used)
    }


def test_modules_have_no_import_cycles() -> None:
    """Imports inside functions count as well."""
    known = names()

    def imported_modules(path: Path) -> set[str]:
        return {
            name if name in known else name.rpartition(".")[0] for name in imports(path) if name.startswith("ortserve.")
        } & known - {name_of(path)}

    TopologicalSorter({name_of(path): imported_modules(path) for path in modules()}).prepare()


def test_only_one_module_imports_cupy() -> None:
    importing = {
        str(module.relative_to(PACKAGE))
        for module in modules()
        if any(name.split(".")[0] == "cupy" for name in imports(module))
    }
    assert importing == {"device/cuda.py"}


def test_core_needs_numpy_and_the_standard_library_only() -> None:
    for module in (PACKAGE / "core").glob("*.py"):
        libraries = {name.split(".")[0] for name in imports(module)}
        assert libraries <= sys.stdlib_module_names | {"numpy", "ortserve"}, module.name
