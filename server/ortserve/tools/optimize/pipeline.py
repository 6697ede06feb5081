"""Runs the steps of an optimization, each in a process of its own, and keeps those that improve the model."""

import errno
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from ortserve.core.agreement import ErrorBound
from ortserve.engine.child_process import call_in_child
from ortserve.engine.ort_errors import without_paths
from ortserve.errors import ErrorKind, ServeError
from ortserve.model_file.reading import read_model
from ortserve.registry.recording import write_arrays
from ortserve.tools.console import ShowProgress
from ortserve.tools.inspect.content import nodes_by_operator
from ortserve.tools.optimize.checking import Checked, Kind, Look, check
from ortserve.tools.optimize.files import nbytes_of
from ortserve.tools.optimize.recognition import fused_operators
from ortserve.tools.optimize.result import StepResult
from ortserve.tools.provenance import LIBRARIES
from ortserve.tools.report import number_text
from ortserve.tools.speed import Timed

LIMIT_S: Final = 3600.0
"""Time limit of one way to do a step, with its check."""
ASKED_FOR: Final = "asked for"
"""The reason of steps that are kept because the user requested them."""
_MUCH_SLOWER: Final = 0.75
"""Steps with a smaller ratio of times are dropped. A short measurement can tell such a loss from noise; the whole model
is measured longer at the end."""
_GROWTH: Final = 1.02
"""Largest growth of the file without fewer nodes to run."""
_MIN_SAVED_BYTES: Final = 1024
_FULL_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOTHING_GAINED: Final = "no improvement"

Make: TypeAlias = Callable[..., tuple[str, ...]]
"""Makes the second file from the first one, and returns notes for people. It can be pickled."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step.

    Attributes:
        name: Name for people.
        ways: Alternative ways to do the step, by name. The best result counts.
        bound: Largest error against the source.
        is_requested: Whether the user requested the step. It is then kept unless its error is too large, and the
            command fails if the step fails.
        kind: The change of the interface that the step may make.
        takes_inputs: Whether the ways receive the samples for checks, too.
    """

    name: str
    ways: Mapping[str, Make]
    bound: ErrorBound
    is_requested: bool = False
    kind: Kind = "same"
    takes_inputs: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """The model that the steps have made so far.

    Attributes:
        model: File of the model; the source if no step was kept.
        look: Properties of the model.
        reference: The model that it must agree with: the source with the requested interface.
        inputs: Samples for the comparison; None for synthetic ones.
        steps: The results of all steps so far.
        libraries: Packages that took part in kept steps.
        full_disk: The error of a step for which the disk was full; None without one.
    """

    model: Path
    look: Look
    reference: Timed
    inputs: Path | None
    steps: tuple[StepResult, ...] = ()
    libraries: frozenset[str] = frozenset()
    full_disk: OSError | None = None


@dataclass(frozen=True, slots=True)
class WayResult:
    """The result of one way to do a step: whether it is kept, and why.

    Attributes:
        is_kept: Whether the step is kept, if no other way has a better result.
        reason: Why it is kept or not.
        notes: Details for people.
        libraries: Packages that took part.
        checked: The model, compared with the one that it must agree with; None if it was not compared.
    """

    is_kept: bool
    reason: str
    notes: tuple[str, ...] = ()
    libraries: frozenset[str] = frozenset()
    checked: Checked | None = None

    def rank(self) -> tuple[bool, int, int, int]:
        """The sort key of results; the smallest is the best. A fused attention may take as many nodes to run."""
        if self.checked is None:
            return not self.is_kept, 1 << 62, 0, 0
        look = self.checked.look
        return not self.is_kept, look.shape.nodes_run or look.shape.nodes, len(look.almost), look.shape.nbytes


def run_steps(draft: Draft, steps: Sequence[Step], folder: Path, show: ShowProgress) -> Draft:
    """Do the steps one after the other.

    Args:
        draft: The source, whose file has external data only in ``files.data_file``.
        steps: The steps in their order.
        folder: Folder for the files of the steps.
        show: Called before each step, with its number and name.

    Raises:
        ServeError: A requested step fails, or its error is too large.
    """
    for number, step in enumerate(steps):
        show(number, step.name)
        draft = _do_step(step, draft, folder / str(number))
        for path in folder.iterdir():
            if not any(path in one.parents for one in (draft.model, draft.reference.subject.path, draft.inputs) if one):
                shutil.rmtree(path)
    return draft


def _do_step(step: Step, draft: Draft, folder: Path) -> Draft:
    began = time.monotonic()
    tried: dict[str, WayResult] = {}
    for name, make in step.ways.items():
        target = folder / str(len(tried)) / draft.model.name
        target.parent.mkdir(parents=True)
        try:
            tried[name] = call_in_child(LIMIT_S, _try_way, step, make, draft, target)
        except ServeError as problem:
            tried[name] = _failed(step, problem, target)
        except OSError as problem:
            if problem.errno not in _FULL_DISK:  # no process could be started
                raise
            tried[name] = _failed(step, problem, target)
            draft = replace(draft, full_disk=problem)
    name, best = min(tried.items(), key=lambda one: one[1].rank())
    checked = best.checked
    if step.is_requested and not best.is_kept:
        is_argument = checked is None and step.kind != "same"
        kind = ErrorKind.INVALID_INPUT if is_argument else ErrorKind.UNSUPPORTED
        raise ServeError(kind, best.reason if best.reason.startswith("--") else f"{step.name}: {best.reason}")
    notes = best.notes
    if len(tried) > 1:
        others = (f"by {other}: {one.reason}" for other, one in tried.items() if other != name)
        notes = (f"by {name}", *notes, *others)
    result = StepResult(step.name, best.is_kept, best.reason, draft.look.shape.nodes, notes=notes)
    if checked is not None:
        error = checked.agreement.error(step.bound.measure)
        result = replace(result, **asdict(checked.look.shape), error=error, ratio=checked.ratio)
    result = replace(result, seconds=round(time.monotonic() - began, 2))
    draft = replace(draft, steps=(*draft.steps, result))
    if checked is None or not best.is_kept:
        return draft
    model = folder / str([*tried].index(name)) / draft.model.name
    draft = replace(draft, model=model, look=checked.look, libraries=draft.libraries | best.libraries)
    if step.kind == "same":
        return draft
    inputs = draft.inputs and keep_arrays(draft.inputs, checked.look.inputs, folder)
    return replace(draft, reference=draft.reference.at(model), inputs=inputs)


def _try_way(step: Step, make: Make, draft: Draft, target: Path) -> WayResult:
    """Do a step in one way and judge it. Runs in a process of its own. Raises OSError on a full disk."""
    tempfile.tempdir = str(target.parent)  # this folder is removed even if an interruption kills this process
    notes: tuple[str, ...] = ()
    try:
        notes = make(draft.model, target, *([draft.inputs] if step.takes_inputs else []))
        if not step.is_requested and not _may_gain(draft.model, target):
            return WayResult(False, _NOTHING_GAINED, notes)
        checked = check(draft.reference, target, step.kind, draft.inputs)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL_DISK:
            raise
        return replace(_failed(step, error, target), notes=notes)
    libraries = frozenset(LIBRARIES) & {*sys.modules}
    return replace(judge(step, draft.look, checked), notes=notes, libraries=libraries, checked=checked)


def _failed(step: Step, error: Exception, target: Path) -> WayResult:
    lines = without_paths(str(error)).strip().splitlines() or [""]
    text = error.message if isinstance(error, ServeError) else f"{type(error).__name__}: {lines[0][:300]}"
    text = text.removeprefix(f"{target}: ")
    return WayResult(False, text if step.is_requested else f"failed: {text}")


def judge(step: Step, before: Look, checked: Checked) -> WayResult:
    """Decide whether a step is kept: first by its error, then by speed, nodes and size. Pure."""
    if excess := step.bound.excess(checked.agreement):
        return WayResult(False, excess)
    if step.is_requested:
        return WayResult(True, ASKED_FOR)
    old, new, ratio = before.shape, checked.look.shape, checked.ratio
    if ratio < _MUCH_SLOWER:
        return WayResult(False, f"slower: {number_text(ratio)} times as fast")
    runs = (old.nodes_run or old.nodes, new.nodes_run or new.nodes)
    if runs[1] > runs[0]:
        return WayResult(False, f"more nodes to run: {runs[0]:,} → {runs[1]:,}")
    if runs[1] < runs[0]:
        return WayResult(True, f"nodes to run: {runs[0]:,} → {runs[1]:,}")
    if new.nbytes > _GROWTH * old.nbytes:
        return WayResult(False, "a larger file")
    if new.nodes < old.nodes:
        return WayResult(True, "fewer nodes in the file, but the same number runs")
    if new.nbytes < old.nbytes - _MIN_SAVED_BYTES:
        return WayResult(True, "a smaller file")
    return WayResult(False, _NOTHING_GAINED)


def _may_gain(model: Path, target: Path) -> bool:
    """Whether a step fused operators, or removed nodes or bytes. Others are dropped without a check, which takes long.

    Fusions may add nodes to the file, such as reshapes for an attention, and still leave fewer nodes to run.
    """
    before, after = (nodes_by_operator(read_model(path)) for path in (model, target))
    if fused_operators(before, after) or sum(after.values()) < sum(before.values()):
        return True
    return nbytes_of(target) < nbytes_of(model) - _MIN_SAVED_BYTES


def keep_arrays(inputs: Path, names: Collection[str], folder: Path) -> Path:
    """Copy samples, without the arrays of inputs that a model no longer has."""
    target = folder / "inputs" / inputs.name
    files = sorted(inputs.glob("[!.]*.npz")) if inputs.is_dir() else [inputs]
    for file in files:
        place = target / file.name if inputs.is_dir() else target
        place.parent.mkdir(parents=True, exist_ok=True)
        with np.load(file, allow_pickle=False) as archive, place.open("wb") as copy:
            write_arrays(copy, {name: archive[name] for name in archive.files if name in names})
    return target
