"""The provenance of a model: a file that tools write beside each model that they make.

``publish`` puts it into the version. The server shows its ``summary`` (``registry/repository/provenance``).
"""

import hashlib
import importlib.metadata
import platform
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import onnx
import onnxruntime as ort
from pydantic import TypeAdapter, ValidationError

from ortserve import __version__
from ortserve.core.agreement import Agreement
from ortserve.core.version_names import version_of
from ortserve.model_file.reading import read_model
from ortserve.paths import is_file
from ortserve.registry.repository.provenance import PROVENANCE_FILE, provenance_beside
from ortserve.tools.command import json_text
from ortserve.tools.doctor.machine import Files, read_processors
from ortserve.tools.report import number_text
from ortserve.tools.speed import Speed, speed_text
from ortserve.tools.subject import Subject

LIBRARIES: Final = ("numpy", "onnxscript", "onnx_ir", "onnxslim", "onnxconverter_common", "sympy", "optuna")
"""Libraries whose versions are recorded if this process has loaded them."""
_DIGITS: Final = 12
"""Characters of a digest in a summary."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A model file.

    Attributes:
        name: Name of the model; the name of the file outside of repositories.
        version: Number of the version; null outside of repositories.
        digest: SHA-256 over the file and then its external data by name, so that for a single file it is what
            ``sha256sum`` prints.
        nbytes: Their size.
    """

    name: str
    version: int | None
    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that made a model.

    Attributes:
        processor: Name of the processor.
        cores: Processors that the process could use.
        instruction_sets: Instruction sets of the processor with kernels in ONNX Runtime.
    """

    processor: str
    cores: int
    instruction_sets: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a model came from.

    Attributes:
        schema: Schema of this file.
        summary: All that matters in one line, which the server shows in the model's metadata.
        source: The model that it was made from.
        model: The digest and size of the model itself.
        commands: Command lines that made it, the oldest first, with those that made its source. Of files they have
            the names without folders.
        created: When, in UTC.
        versions: Versions of ortserve, Python, ONNX Runtime, onnx and the libraries that were loaded.
        machine: The machine that made it.
        notes: Conditions of its use, such as ``only for processors with AVX-512``.
        inputs: The inputs with which it was compared with its source; empty if it was not.
        agreement: Agreement of its outputs with those of its source; null if they were not compared.
        speed: Its speed compared with its source; null if it was not measured.
        figures: More figures of the command that made it.
    """

    schema: str = "ortserve.provenance/1"
    summary: str
    source: Origin
    model: Origin
    commands: tuple[str, ...]
    created: str
    versions: Mapping[str, str]
    machine: Machine
    notes: tuple[str, ...] = ()
    inputs: str = ""
    agreement: Agreement | None = None
    speed: Speed | None = None
    figures: Mapping[str, float | str] = field(default_factory=dict)


def make_provenance(
    source: Subject,
    model: Path,
    *,
    arguments: Sequence[str],
    notes: Sequence[str] = (),
    agreement: Agreement | None = None,
    inputs: str = "",
    speed: Speed | None = None,
    figures: Mapping[str, float | str] | None = None,
    libraries: Collection[str] = (),
) -> Provenance:
    """Describe how a model was made. Reads both models whole.

    Args:
        source: The model that it was made from. If this has a provenance, its commands come first.
        model: The file, with its external data beside it.
        arguments: The command line: ``("quantize", "in.onnx", "-o", "out.onnx")``.
        notes: Conditions of the use of the model.
        agreement: Agreement with the source.
        inputs: The ``origin`` of the inputs of ``agreement``.
        speed: Compared with the source.
        figures: More figures of the command.
        libraries: Libraries that other processes of the command have loaded.
    """
    before = read_provenance(source.path)
    name = source.path.name if source.version is None else source.name
    origin = describe_model(source.path, name, source.version)
    earlier = before.commands if before is not None and before.model.digest == origin.digest else ()
    return with_summary(
        Provenance(
            summary="",
            source=origin,
            model=describe_model(model, model.name, None),
            commands=(*earlier, command_line(arguments)),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=_versions(libraries),
            machine=_machine(),
            notes=tuple(notes),
            inputs=inputs,
            agreement=agreement,
            speed=speed,
            figures={name: one if isinstance(one, str) else float(one) for name, one in (figures or {}).items()},
        )
    )


def with_summary(provenance: Provenance) -> Provenance:
    """The same with a summary of its present content."""
    source, agreement, speed = provenance.source, provenance.agreement, provenance.speed
    version = f" version {source.version}" if source.version is not None else ""
    parts = [
        f"from {source.name}{version} (sha256 {source.digest[:_DIGITS]})",
        f"by {'; '.join(provenance.commands)}",
        f"on {provenance.created}",
    ]
    if agreement is not None:
        worst = f"largest error {number_text(agreement.error('max'))}, top-1 {number_text(agreement.error('top1'))}"
        parts.append(f"{worst}, {agreement.samples} samples ({provenance.inputs})")
        if agreement.accuracy is not None and agreement.reference_accuracy is not None:
            parts.append(f"accuracy {agreement.accuracy:.2%}, source {agreement.reference_accuracy:.2%}")
    if speed is not None:
        parts.append(speed_text(speed))
    return replace(provenance, summary=", ".join((*parts, *provenance.notes)))


def read_provenance(model: Path) -> Provenance | None:
    """The provenance of a model file; None if it has none that can be read."""
    file = provenance_beside(model)
    if not file.is_file() and version_of(model.parent.name):
        file = model.with_name(PROVENANCE_FILE)
    try:
        return TypeAdapter(Provenance).validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def write_provenance(provenance: Provenance, file: Path) -> None:
    """Write the file."""
    file.write_text(json_text(provenance), encoding="utf-8")


def describe_model(path: Path, name: str, version: int | None) -> Origin:
    """Digest and size of a model with its external data."""
    digest, files = hashlib.sha256(), (path, *external_files(path))
    for file in files:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)  # adds the file to the digest
    return Origin(name, version, digest.hexdigest(), sum(file.stat().st_size for file in files))


def external_files(model: Path) -> list[Path]:
    """The existing files with external data of a model, by name."""
    files = (model.parent / name for name in sorted(read_model(model).external_files))
    return [file for file in files if is_file(file)]


def command_line(arguments: Sequence[str]) -> str:
    """A command line without the folders of this machine."""
    return shlex.join(("ortserve", *map(_without_folder, arguments)))


def _without_folder(argument: str) -> str:
    flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value)
    is_path = "/" in value and (path.exists() or (path.parent.is_dir() and path.parent != Path("/")))
    if not is_path:
        return argument
    kept = path.parts[-2:] if version_of(path.name) else path.parts[-1:]
    return f"{flag}{equals}{'/'.join(kept)}"


def _versions(libraries: Collection[str]) -> dict[str, str]:
    versions = {
        "ortserve": __version__,
        "Python": platform.python_version(),
        "onnxruntime": ort.__version__,
        "onnx": onnx.__version__,
    }
    used = {*libraries, *sys.modules}
    return versions | {name: importlib.metadata.version(name) for name in LIBRARIES if name in used}


def _machine() -> Machine:
    found = read_processors(Files())
    sets = tuple(name for name, has_it in found.instruction_sets.items() if has_it)
    return Machine(found.model or platform.machine(), found.budget or 1, sets)
