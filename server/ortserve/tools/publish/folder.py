"""Puts a new version into a repository. It is written to a hidden folder beside its place, and then renamed.

So a server that polls the repository sees the whole version or nothing of it, even if this process or the machine dies.
Version numbers are never used twice: a file in the model's folder stores the highest one, because removed versions
leave no trace.
"""

import errno
import fcntl
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ortserve.config.model import LoadOptions, ModelOptions, load_model_options
from ortserve.core.version_names import MAX_VERSION, version_of
from ortserve.engine.child_process import call_in_child
from ortserve.engine.providers import choose_provider
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.load.golden_samples import GOLDEN_FOLDER, GOLDEN_MISSING
from ortserve.registry.load.trial_load import trial_options
from ortserve.registry.repository.model_files import OPTIONS_FILE
from ortserve.registry.repository.provenance import PROVENANCE_FILE
from ortserve.registry.repository.source import choose_versions
from ortserve.tools.console import ShowProgress, progress
from ortserve.tools.golden.recording import check_version
from ortserve.tools.opening import OpenModel, open_model, read_graph
from ortserve.tools.provenance import Provenance, write_provenance
from ortserve.tools.publish.place import Place, find_place
from ortserve.tools.signatures import signature_differences
from ortserve.tools.staging import staging_folder, sync
from ortserve.tools.subject import Subject

RECORD: Final = ".highest-version"
"""A file in a model's folder, with the highest version number that the model ever had."""
_LIMIT_S: Final = 1800.0
"""Time limit of opening both models. Some execution providers compile for minutes."""


@dataclass(frozen=True, slots=True)
class Published:
    """A new version.

    Attributes:
        name: Name of the model.
        version: Number of the version.
        notes: Facts that may be unexpected, such as a version policy that does not select the version.
    """

    name: str
    version: int
    notes: tuple[str, ...] = ()


def publish_version(
    model: Path,
    target: str,
    provenance: Provenance,
    given: Namespace,
    options_text: str | None = None,
) -> Published:
    """Make a model the next version of ``REPOSITORY/name``, which is created if it is new.

    Args:
        model: The file to copy, with its external data beside it.
        target: The model in the repository.
        provenance: The provenance of the version.
        given: The arguments, with ``--allow-changed-interface`` and ``--golden``.
        options_text: The new text of the model's ``model.yaml``; None to leave the file as it is.

    Raises:
        ServeError: invalid_input: the model does not open, its interface differs, it disagrees with the golden samples,
            or the target cannot get a version.
        OSError: The repository cannot be written. Nothing has changed then but the highest version number.
    """
    while True:
        place = find_place(target)
        try:
            with staging_folder(place.beside) as staging, progress("publishing") as step:
                place = replace(place, options=_stage_options(staging, options_text, place))
                keeps_golden = given.golden == "keep"
                path = _stage_version(model, staging / "version", place, provenance, step, keeps_golden=keeps_golden)
                subject = Subject(place.name, path, place.folder, trial_options(place.options))
                notes = _check_interface(model, subject, place, step, allows_changes=given.allow_changed_interface)
                if (staging / "version" / GOLDEN_FOLDER).is_dir():
                    step(0, "checking golden samples in another process")
                    notes.append(f"golden samples: {_check_golden(model, subject)}")
                elif place.options.golden_required:
                    raise invalid_input(f"{model}: {GOLDEN_MISSING}")
                step(0, "writing to the disk")
                _sync_all(staging / "version")
                number = _install(staging, place)
        except OSError as error:
            if place.files is None and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                continue  # another process has created the model meanwhile
            raise OSError(error.errno, error.strerror, str(place.folder)) from error
        return Published(place.name, number, (*notes, *_policy_notes(place, number)))


def _check_interface(
    model: Path, subject: Subject, place: Place, step: ShowProgress, *, allows_changes: bool
) -> list[str]:
    """Open a staged copy of ``model``, and compare its interface with that of the served version. Returns notes.

    Raises:
        ServeError: invalid_input: the model does not open, or its interface differs and ``allows_changes`` is False.
    """
    step(0, "opening the model in another process")
    try:
        differences, notes = call_in_child(_LIMIT_S, _compare_interfaces, subject, place.newest())
    except ServeError as error:
        raise invalid_input(error.message.replace(str(subject.path), str(model))) from None
    if differences and not allows_changes:
        raise invalid_input(
            f"{model}: its interface is not that of {place.name}, which clients use: {'; '.join(differences)}; "
            "--allow-changed-interface publishes it nevertheless"
        )
    return [*notes, *(f"changed interface: {difference}" for difference in differences)]


def _stage_options(staging: Path, text: str | None, place: Place) -> ModelOptions:
    if text is None:
        return place.options
    if place.files is not None and place.files.options is not None and place.files.options.name != OPTIONS_FILE:
        raise invalid_input(f"{place.name}: expected a {OPTIONS_FILE} to replace, it has {place.files.options.name}")
    file = staging / OPTIONS_FILE
    file.write_text(text, encoding="utf-8")
    sync(file)
    return load_model_options(file, LoadOptions())


def _stage_version(
    model: Path, version: Path, place: Place, provenance: Provenance, step: ShowProgress, *, keeps_golden: bool
) -> Path:
    """Copy all files of the version. Returns the path of its model."""
    graph = read_graph(model)
    name, companions = place.companions()
    path = version / name
    newest = place.newest()
    copies = {path: model}  # files to copy, by their paths in the version
    for other in graph.external_files:
        if "\0" in other or not (path.parent / other).resolve().is_relative_to(version.resolve()):
            raise invalid_input(f"{model}: expected external data beside the model, got '{other}'")
        copies[path.parent / other] = model.parent / other
    if newest is not None:
        before = place.folder / str(newest.version)
        kept = [one for one in companions if keeps_golden or one.parts[0] != GOLDEN_FOLDER]
        copies = {version / companion: before / companion for companion in kept} | copies
    for target, file in copies.items():
        step(0, f"copying {file.name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(file, target)
        except FileNotFoundError:
            raise invalid_input(f"{model}: its file {file.name} is missing") from None
    write_provenance(provenance, version / PROVENANCE_FILE)
    return path


def _compare_interfaces(subject: Subject, served: Subject | None) -> tuple[list[str], list[str]]:
    """Differences between the interfaces of a new version and the served one, and notes. Runs in another process."""
    notes: list[str] = []
    opened = _open(subject, notes)
    signature, dependence = opened.signature, opened.rows.known_dependence
    del opened  # frees its weights
    if served is None:
        return [], notes
    try:
        before = _open(replace(served, options=trial_options(served.options)), [])
    except ServeError as error:
        return [], [*notes, f"version {served.version} does not open, so its interface was not compared: {error}"]
    if dependence and not before.rows.known_dependence:
        notes.append(f"its requests run alone, while those of version {served.version} shared batches: {dependence}")
    return signature_differences(before.signature, signature), notes


def _check_golden(model: Path, subject: Subject) -> str:
    """Describe how a version agrees with its golden samples. Raises ServeError: invalid_input, if it does not."""
    try:
        return call_in_child(_LIMIT_S, check_version, subject)
    except ServeError as error:
        hint = "" if subject.options.golden_required else "; --golden none publishes it without samples"
        raise invalid_input(f"{model}: {error.message.replace(str(subject.path), str(model))}{hint}") from None


def _open(subject: Subject, notes: list[str]) -> OpenModel:
    try:
        choose_provider(subject.options.execution_providers)
    except ServeError:
        notes.append("none of the model's execution providers can be used here: it was opened on the CPU")
        return open_model(subject, provider="cpu")
    return open_model(subject)


def _install(staging: Path, place: Place) -> int:
    """Choose the number of the version and rename its folder, or that of a new model. Returns the number."""
    if place.files is None:
        folder = staging / "model"
        folder.mkdir()
        _add_version(staging, folder, 1)
        folder.rename(place.folder)
        sync(place.folder.parent)
        return 1
    with _locked(place.folder):
        number = 1 + max((_recorded(place.folder), *_numbers(place.folder)))
        if number > MAX_VERSION:
            raise invalid_input(f"{place.folder}: version {MAX_VERSION} is the highest possible one")
        _add_version(staging, place.folder, number)
    return number


def _add_version(staging: Path, folder: Path, number: int) -> None:
    """Move the staged version, and the staged configuration if there is one, to the folder of a model."""
    record = staging / RECORD
    record.write_text(f"{number}\n")
    sync(record)
    record.replace(folder / RECORD)
    version = (staging / "version").rename(folder / str(number))
    try:
        if (staging / OPTIONS_FILE).is_file():
            (staging / OPTIONS_FILE).replace(folder / OPTIONS_FILE)
    except BaseException:
        version.rename(staging / "version")
        raise
    sync(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude other publishers of the model. The system releases the lock when this process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems cannot lock folders. If the number is in use, the rename fails without a lock, too.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _numbers(folder: Path) -> list[int]:
    return [number for entry in folder.iterdir() if (number := version_of(entry.name))]


def _recorded(folder: Path) -> int:
    try:
        return int((folder / RECORD).read_text())
    except FileNotFoundError:
        return 0
    except ValueError:
        raise invalid_input(f"{folder / RECORD}: expected the highest version number, got other content") from None


def _sync_all(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        sync(path)


def _policy_notes(place: Place, number: int) -> list[str]:
    known = {number, *(place.files.versions if place.files else ())}
    if number in choose_versions(place.options.version_policy, known):
        return []
    return [f"the version_policy of {place.name} does not serve version {number}"]
