"""The steps of an optimization: each is made and checked in processes of their own, and kept only if it is worth it."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from ortserve.errors import ErrorKind, ServeError
from ortserve.model_file.reading import read_model
from ortserve.tools.agreement import ErrorBound
from ortserve.tools.apart import ObjectApart, call_apart
from ortserve.tools.console import Step as Progress
from ortserve.tools.inspect.content import all_nodes
from ortserve.tools.optimize.checking import Checked, Checker, Kind, Look
from ortserve.tools.optimize.files import Made, nbytes_of
from ortserve.tools.optimize.result import StepResult
from ortserve.tools.report import number_text
from ortserve.tools.speed import Timed

LIMIT_S: Final = 3600.0
"""Of a step, and of its check."""
ASKED_FOR: Final = "asked for"
"""The reason of steps that are kept for it."""
_MUCH_SLOWER: Final = 0.75
"""What a short measurement can tell from noise. The whole model is measured longer at the end."""
_GROWTH: Final = 1.02
"""Of the file, for which fewer nodes make up."""
_LEAST_SAVED_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Attempt:
    """A function of a module from file to file, with the arguments after these two."""

    make: Callable[..., Made]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """A step.

    Attributes:
        name: For people.
        attempts: Ways to do it; the best result counts.
        is_requested: Whether the caller asked for it: then it is kept unless its error is too large, and its failure is
            the command's.
        kind: What it may change for callers.
        bound: Of the error against the source.
    """

    name: str
    attempts: tuple[Attempt, ...]
    bound: ErrorBound
    is_requested: bool = False
    kind: Kind = "same"


@dataclass(frozen=True, slots=True)
class Work:
    """What the steps have made.

    Attributes:
        model: The file; the source's if no step was kept.
        look: What it is like.
        reference: The model that it must agree with: the source with the interface that was asked for.
        steps: All of them.
        libraries: Packages that made it.
    """

    model: Path
    look: Look
    reference: Timed
    steps: tuple[StepResult, ...]
    libraries: frozenset[str] = frozenset()


def run_steps(
    source: Timed, look: Look, steps: Sequence[Step], folder: Path, inputs: Path | None, progress: Progress
) -> Work:
    """Do the steps one after the other.

    Args:
        source: The model; its file has external data only in ``files.data_file``.
        look: What it is like.
        steps: In their order.
        folder: For all files of this function.
        inputs: Samples for the checks; None for synthetic ones.
        progress: Told which step is done.

    Raises:
        ServeError: A step that was asked for fails, or its error is too large.
    """
    checks = _Checks(source, inputs)
    try:
        return _run_steps(source, look, steps, folder, checks, progress)
    finally:
        checks.close()


def _run_steps(
    source: Timed, look: Look, steps: Sequence[Step], folder: Path, checks: "_Checks", progress: Progress
) -> Work:
    model, reference, results = source.subject.path, source, []
    libraries: set[str] = set()
    for number, step in enumerate(steps):
        progress(number, step.name)
        began = time.monotonic()
        before, tried = look, []
        for index, attempt in enumerate(step.attempts):
            target = folder / f"{number}.{index}" / model.name
            target.parent.mkdir()
            tried.append((*_attempt(step, attempt, model, target, checks, look), target))
        made, checked, verdict, target = min(tried, key=_rank)
        if step.is_requested and not verdict.is_kept:
            is_argument = checked is None and step.kind != "same"
            kind = ErrorKind.INVALID_INPUT if is_argument else ErrorKind.UNSUPPORTED
            raise ServeError(kind, f"{step.name}: {verdict.reason}")
        if verdict.is_kept and checked is not None:
            model, look = target, checked.look
            libraries.update(made.libraries)
            if step.kind != "same":
                reference = replace(source, subject=replace(source.subject, path=model))
                checks.change_reference(reference)
        others = tuple(
            f"{'; '.join(one.notes) or 'another way'}: {why.reason}" for one, _, why, path in tried if path != target
        )
        made = replace(made, notes=(*made.notes, *others))
        results.append(_result(step, before, made, checked, verdict, time.monotonic() - began))
        for path in folder.iterdir():
            if path not in (model.parent, reference.subject.path.parent):
                shutil.rmtree(path)
    return Work(model, look, reference, tuple(results), frozenset(libraries))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a step is kept, and why."""

    is_kept: bool
    reason: str


def judge(step: Step, before: Look, checked: Checked) -> Verdict:
    """Decide over a step: its error first, then whether anything became better and nothing worse. Pure."""
    if excess := step.bound.excess(checked.agreement):
        return Verdict(False, excess)
    if step.is_requested:
        return Verdict(True, ASKED_FOR)
    old, new, ratio = before.shape, checked.look.shape, checked.ratio
    if ratio < _MUCH_SLOWER:
        return Verdict(False, f"slower: {number_text(ratio)} times as fast")
    runs = (old.nodes_run or old.nodes, new.nodes_run or new.nodes)
    if runs[1] > runs[0]:
        return Verdict(False, f"more nodes to run: {runs[0]:,} → {runs[1]:,}")
    if runs[1] < runs[0]:
        return Verdict(True, f"nodes to run: {runs[0]:,} → {runs[1]:,}")
    if new.nbytes > _GROWTH * old.nbytes:
        return Verdict(False, "a larger file")
    if new.nodes < old.nodes:
        return Verdict(True, "fewer nodes in the file; the same number runs")
    if new.nbytes < old.nbytes - _LEAST_SAVED_BYTES:
        return Verdict(True, "a smaller file")
    return Verdict(False, "nothing became better")


_Tried: TypeAlias = tuple[Made, Checked | None, Verdict, Path]


def _attempt(
    step: Step, attempt: Attempt, model: Path, target: Path, checks: "_Checks", look: Look
) -> tuple[Made, Checked | None, Verdict]:
    made = Made()
    try:
        made = call_apart(LIMIT_S, attempt.make, model, target, *attempt.arguments)
        if not step.is_requested and not _is_leaner(model, target):
            return made, None, Verdict(False, "nothing became better")
        checked = checks.check(target, step.kind)
    except ServeError as error:
        return made, None, Verdict(False, error.message if step.is_requested else f"failed: {error.message}")
    return made, checked, judge(step, look, checked)


def _is_leaner(model: Path, target: Path) -> bool:
    """Whether a step could have gained anything: a check takes much longer."""
    counts = [sum(1 for _ in all_nodes(read_model(path))) for path in (model, target)]
    return counts[1] < counts[0] or nbytes_of(target) < nbytes_of(model) - _LEAST_SAVED_BYTES


class _Checks:
    """A ``Checker`` in its process, which is started again after a failure, as it may have ended."""

    def __init__(self, reference: Timed, inputs: Path | None) -> None:
        self._reference = reference
        self._inputs: Final = inputs
        self._checker: ObjectApart[Checker] | None = None

    def check(self, path: Path, kind: Kind) -> Checked:
        candidate = replace(self._reference, subject=replace(self._reference.subject, path=path))
        if self._checker is None:
            self._checker = ObjectApart(LIMIT_S, Checker, self._reference, self._inputs)
        try:
            return self._checker.call(Checker.check, candidate, kind)
        except ServeError:
            self.close()
            raise

    def change_reference(self, reference: Timed) -> None:
        self.close()
        self._reference = reference

    def close(self) -> None:
        if self._checker is not None:
            self._checker.__exit__(None, None, None)
            self._checker = None


def _rank(tried: _Tried) -> tuple[bool, int, int]:
    _, checked, verdict, _ = tried
    shape = None if checked is None else checked.look.shape
    return (not verdict.is_kept, *((shape.nodes_run or shape.nodes, shape.nbytes) if shape else (1 << 62, 0)))


def _result(
    step: Step, before: Look, made: Made, checked: Checked | None, verdict: Verdict, seconds: float
) -> StepResult:
    common = StepResult(step.name, verdict.is_kept, verdict.reason, before.shape.nodes, seconds=round(seconds, 2))
    if checked is None:
        return common
    shape = checked.look.shape
    return replace(
        common,
        nodes=shape.nodes,
        nodes_run=shape.nodes_run,
        nbytes=shape.nbytes,
        error=checked.agreement.error(step.bound.measure),
        ratio=checked.ratio,
        notes=made.notes,
    )
