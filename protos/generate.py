"""Make the Python messages of ``server/ortserve/_pb`` from the protos beside this file.

    python protos/generate.py            write them
    python protos/generate.py --check    exit 1 when the committed ones differ

Needs grpcio-tools. Its version fixes the oldest protobuf runtime that can load the result; where that moves, move the
bound in ``pyproject.toml`` too.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Final

from grpc_tools import protoc

PROTOS: Final = Path(__file__).resolve().parent
GENERATED: Final = PROTOS.parent / "server" / "ortserve" / "_pb"
PACKAGE: Final = "ortserve._pb"

_DEFAULT_POOL: Final = "from google.protobuf import descriptor_pool as _descriptor_pool\n"
_OWN_POOL: Final = f"from {PACKAGE} import private_pool as _descriptor_pool\n"
_LOOSE_STUB: Final = '# mypy: disable-error-code="type-arg"\n'  # protoc writes a bare Mapping for maps of messages


def generate() -> dict[str, str]:
    """Return the text of every generated file by its name.

    Raises:
        RuntimeError: protoc refused a proto, or its output no longer looks as expected here.
    """
    protos = sorted(PROTOS.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["protoc", f"-I{PROTOS}", f"--python_out={folder}", f"--pyi_out={folder}", *map(str, protos)]
        if protoc.main(arguments) != 0:
            raise RuntimeError("protoc failed")
        made = sorted(path for path in Path(folder).rglob("*_pb2.py*"))
        return {
            _module_name(path.relative_to(folder)): _adapt(path.relative_to(folder), path.read_text()) for path in made
        }


def _module_name(path: Path) -> str:
    """All modules lie side by side: ``inference/x_pb2.py`` as ``x_pb2.py``, others by the folder that names a version.

    ``grpc/health/v1/health_pb2.py`` is ``health_v1_pb2.py``.
    """
    if len(path.parts) == 2:
        return path.name
    stem, rest = path.name.split("_pb2", 1)
    return f"{stem}_{path.parent.name}_pb2{rest}"


def _adapt(path: Path, text: str) -> str:
    """Move a generated module from protoc's package into ours, and its messages out of the process-wide pool.

    protobuf's default pool knows a message name once in a process, so that our messages would shut out those of any
    client library for the same protocol (and they ours). See ``private_pool.py``.
    """
    text = re.sub(r"^from inference import ", f"from {PACKAGE} import ", text, flags=re.MULTILINE)
    name = _module_name(path)
    if name.endswith(".pyi"):
        return _LOOSE_STUB + text
    if text.count(_DEFAULT_POOL) != 1:
        raise RuntimeError(f"{name}: expected one import of descriptor_pool")
    return text.replace(_DEFAULT_POOL, _OWN_POOL).replace(
        f"'{'.'.join(path.with_suffix('').parts)}'", f"'{PACKAGE}.{name.removesuffix('.py')}'"
    )


def stale(generated: dict[str, str]) -> list[str]:
    """Return the names of committed files that are missing, differ, or should not be there."""
    committed = {path.name: path.read_text() for path in GENERATED.glob("*_pb2.py*")}
    return sorted(name for name in generated.keys() | committed.keys() if generated.get(name) != committed.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the Python messages from the protos.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when committed files differ")
    check: bool = parser.parse_args().check
    generated = generate()
    differing = stale(generated)
    for name in differing:
        print(f"{'differs' if check else 'writing'}: {GENERATED / name}", file=sys.stderr)
    if check:
        return 1 if differing else 0
    for name in differing:
        if name in generated:
            (GENERATED / name).write_text(generated[name])
        else:
            (GENERATED / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
