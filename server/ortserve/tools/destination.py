"""The destination of a model that a command makes: a file, a version of a repository, or both."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ortserve.errors import ServeError, invalid_input
from ortserve.registry.repository.model_files import MODEL_FILE
from ortserve.registry.repository.provenance import provenance_beside
from ortserve.tools.provenance import Provenance, external_files, write_provenance
from ortserve.tools.publish.folder import Published, publish_version
from ortserve.tools.publish.place import find_place
from ortserve.tools.staging import install_files, naming, staging_folder
from ortserve.tools.subject import Subject


@dataclass(frozen=True, slots=True)
class Delivered:
    """Where the model is.

    Attributes:
        output: The file; null without ``--output``.
        published: The model that has it as a version; null without ``--publish``.
        version: Its number; null without ``--publish``.
        notes: Limits of the version.
    """

    output: str | None = None
    published: str | None = None
    version: int | None = None
    notes: tuple[str, ...] = ()


def check_destination(given: argparse.Namespace, source: Subject) -> None:
    """Check the destination before the work begins. ``--dry-run``, if the command has it, needs none.

    Raises:
        ServeError: invalid_input: there is none, or it cannot be written.
    """
    output: Path | None = given.output
    if output is None and given.publish is None:
        if getattr(given, "dry_run", False):
            return
        raise invalid_input("expected -o OUT.onnx or --publish [REPOSITORY/name], got neither")
    if output is not None:
        if not output.absolute().parent.is_dir() or output.is_dir():
            raise invalid_input(f"-o: expected a file in an existing folder, got '{output}'")
        if output.suffix != ".onnx":  # such as the name of a page, which -o is for other tools
            raise invalid_input(f"-o: expected a model's name, which ends in .onnx, got '{output}'")
        own = {file.resolve() for file in (source.path, *external_files(source.path))}
        for file in (output, output.with_name(f"{output.name}.data")):
            if file.resolve() in own:
                raise invalid_input(f"-o: expected another file than the model itself, got '{file}'")
    if given.publish is not None:
        find_place(_target(given, source))


@contextmanager
def staged_model(given: argparse.Namespace, source: Subject) -> Iterator[Path]:
    """The path to write the model to, in a new folder that disappears again.

    The file already has its last name, so that external data keep theirs, which is ``<name>.data``. Write nothing else
    into its folder: with ``--output``, all files of the folder go to the folder of that file. Errors of the block name
    the destination instead of this path.
    """
    if given.output is not None:
        beside, name = given.output, given.output.name
    else:
        beside, name = find_place(_target(given, source)).beside, MODEL_FILE
    with staging_folder(beside) as folder:
        try:
            yield folder / name
        except ServeError as error:
            shown = str(given.output or "the new model")
            raise ServeError(error.kind, error.message.replace(str(folder / name), shown)) from None


def deliver(staged: Path, source: Subject, provenance: Provenance, given: argparse.Namespace) -> Delivered:
    """Publish the model, move it to ``--output``, or both, with its provenance.

    Args:
        staged: The path of ``staged_model``.
        source: The model that it was made from.
        provenance: The provenance of the model.
        given: The arguments, with those of ``add_destination``.

    Raises:
        ServeError: As ``publish_version``.
        OSError: The disk is full or cannot be written.
    """
    published: Published | None = None
    if given.output is not None:
        write_provenance(provenance, provenance_beside(staged))
    if given.publish is not None:
        published = publish_version(staged, _target(given, source), provenance, given)
    if given.output is not None:
        try:
            with naming(given.output, instead_of=staged.parent):
                install_files(staged.parent, given.output)
        except OSError as error:
            if published is not None:
                error.strerror = f"{error.strerror}; version {published.version} of {published.name} is published"
            raise
    output = None if given.output is None else str(given.output)
    if published is None:
        return Delivered(output)
    return Delivered(output, published.name, published.version, published.notes)


def _target(given: argparse.Namespace, source: Subject) -> str:
    if given.publish:
        return str(given.publish)
    if source.folder is None:
        raise invalid_input(f"--publish: expected REPOSITORY/name, because {source.path} is not a version of a model")
    return str(source.folder)
