"""Opens an ensemble in this process. The sessions of its members run one step after the other.

The tensors between the steps are those that clients of the members would send and get, as in the server. Nothing is
queued or batched, so that a run takes the time of its steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ortserve.config.ensemble import LATEST, EnsembleStep
from ortserve.config.model import LoadOptions
from ortserve.core.conversion import match_batch_axis, repeated
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import absent, is_absent
from ortserve.core.version_names import STABLE
from ortserve.engine.runs import PlainRun
from ortserve.errors import invalid_input
from ortserve.registry.ensemble.interface import Member, resolve_signature
from ortserve.registry.ensemble.plan import Plan, circular, make_plan
from ortserve.registry.load.interface import Interface, resolve_interface
from ortserve.registry.repository.source import read_source
from ortserve.tools.opening import OpenModel, arrays_for, rows_as
from ortserve.tools.subject import Subject, find_version


@dataclass(frozen=True, slots=True)
class OpenMember:
    """An open model behind its interface for clients."""

    model: OpenModel
    interface: Interface
    session_run: PlainRun

    @property
    def subject(self) -> Subject:
        return self.model.subject

    @property
    def signature(self) -> ModelSignature:
        return self.interface.client

    @property
    def models(self) -> tuple[OpenModel, ...]:
        return (self.model,)

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run a request as clients send it. Raises one of ``ORT_ERRORS``."""
        model, interface = self.model, self.interface
        rows, arrays = _rows_of(self.signature, inputs), tuple(inputs)
        if interface.conversions is not None:
            arrays = interface.conversions.to_model(arrays, rows)
        by_name = {spec.name: array for spec, array in zip(interface.model.inputs, arrays, strict=True)}
        staged = model.for_model([by_name[spec.name] for spec in model.signature.inputs])
        names = [spec.name for spec in model.signature.outputs]
        made = dict(zip(names, self.session_run.run(staged), strict=True))
        outputs = tuple([made[spec.name] for spec in interface.model.outputs])
        if interface.conversions is None:
            return list(outputs)
        if model.signature.is_batched:
            axes = [spec.batch_axis for spec in interface.model.outputs]
            outputs = tuple(
                repeated(array, rows) if axis is None else np.moveaxis(array, axis, 0)
                for array, axis in zip(outputs, axes, strict=True)
            )
        return list(interface.conversions.to_client(outputs))


@dataclass(frozen=True, slots=True)
class OpenEnsemble:
    """An open ensemble, with the attributes and methods of ``OpenModel`` that comparisons use.

    Attributes:
        subject: The ensemble on disk; ``max_rows`` of its options is also limited by those of its members.
        signature: Its inputs and outputs.
        plan: Its graph.
        members: The member of each step.
        order: The steps, each after those whose tensors it reads.
    """

    subject: Subject
    signature: ModelSignature
    plan: Plan
    members: "tuple[OpenMember | OpenEnsemble, ...]"
    order: tuple[int, ...]

    @property
    def opening_s(self) -> float:
        """Time that ONNX Runtime took to open the members."""
        return sum(model.opening_s for model in self.models)

    @property
    def models(self) -> tuple[OpenModel, ...]:
        """The open models, each once."""
        return tuple({id(model): model for member in self.members for model in member.models}.values())

    def runner(self) -> "OpenEnsemble":
        """The runner: this object, for arrays from ``for_model``."""
        return self

    def with_rows_of(self, reference: ModelSignature) -> "OpenEnsemble":
        """As ``OpenModel.with_rows_of``."""
        return replace(self, signature=rows_as(self.signature, reference))

    def for_model(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """As ``OpenModel.for_model``."""
        return arrays_for(self.signature, arrays)

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run all steps. Raises one of ``ORT_ERRORS``."""
        plan = self.plan
        tensors = {tensor: array for tensor, array in zip(plan.inputs, inputs, strict=True) if not is_absent(array)}
        for number in self.order:
            step, member = plan.steps[number], self.members[number]
            given: list[np.ndarray] = []
            for spec in member.signature.inputs:
                array = tensors.get(step.inputs.get(spec.name, -1))
                given.append(absent(1) if array is None else match_batch_axis(array, spec))
            for spec, array in zip(member.signature.outputs, member.run(given), strict=True):
                if spec.name in step.outputs:
                    tensors[step.outputs[spec.name]] = array
        specs = zip(self.signature.outputs, plan.outputs, strict=True)
        return [match_batch_axis(tensors[tensor], spec) for spec, tensor in specs]


Opened: TypeAlias = OpenModel | OpenEnsemble


def open_ensemble(subject: Subject, open_one: Callable[[Subject], OpenModel]) -> OpenEnsemble:
    """Open an ensemble and its members, each once by ``open_one``. Blocks while ONNX Runtime opens them.

    Raises:
        ServeError: A member cannot be opened or is not compared, or the steps do not fit their members.
    """
    return _Opener(open_one).open(subject, ())


class _Opener:
    """Opens models, each once."""

    def __init__(self, open_one: Callable[[Subject], OpenModel]) -> None:
        self._open_one = open_one
        self._members: dict[tuple[str, int | None], OpenMember | OpenEnsemble] = {}

    def open(self, subject: Subject, within: tuple[str, ...]) -> OpenEnsemble:
        """Open an ensemble inside the ensembles ``within``. Raises ServeError, as ``open_ensemble``."""
        name, options = subject.name, subject.options
        assert options.ensemble is not None
        assert subject.folder is not None
        if name in within:
            raise invalid_input(circular((*within[within.index(name) :], name)))
        members = tuple(
            self._open_member(_find_member(subject.folder.parent, step), (*within, name))
            for step in options.ensemble.steps
        )
        seen = [Member(member.subject.name, member.signature, member.subject.options.max_rows) for member in members]
        plan = make_plan(name, options)
        signature = resolve_signature(name, options, plan, seen)
        # A member that is not batched takes one row at a time.
        most = [options.max_rows, *(one.max_rows if one.signature.is_batched else 1 for one in seen)]
        least = min((rows for rows in most if rows is not None), default=None)
        subject = replace(subject, options=options.model_copy(update={"max_rows": least}))
        return OpenEnsemble(subject, signature, plan, members, _order(plan))

    def _open_member(self, subject: Subject, within: tuple[str, ...]) -> OpenMember | OpenEnsemble:
        key, options = (subject.name, subject.version), subject.options
        if what := subject.joint_requests:
            raise invalid_input(
                f"ensemble '{within[-1]}': expected members that answer requests alone, and '{subject.name}' has "
                f"{what}: compare the answers of a server"
            )
        if key not in self._members:
            if options.ensemble is not None:
                self._members[key] = self.open(subject, within)
            else:
                model = self._open_one(subject)
                interface = resolve_interface(options, model.signature, subject.folder)
                self._members[key] = OpenMember(model, interface, model.runner())
        return self._members[key]


def _order(plan: Plan) -> tuple[int, ...]:
    """The steps, each after those whose tensors it reads."""
    selection = plan.select(plan.outputs)
    waits, order = list(selection.waits), list(selection.first)
    for number in order:  # the loop appends steps whose inputs exist
        for follower in selection.followers[number]:
            waits[follower] -= 1
            if not waits[follower]:
                order.append(follower)
    return tuple(order)


def _find_member(repository: Path, step: EnsembleStep) -> Subject:
    """The version that a step uses: the one that it names, the one with the label ``stable``, or the highest one."""
    version: int | None = step.version
    if step.version == LATEST:
        source = read_source(step.model, [repository], LoadOptions())
        version = None if source is None else source.labels.get(STABLE)
    folder = repository / step.model
    return find_version(str(folder if version is None else folder / str(version)))


def _rows_of(signature: ModelSignature, arrays: Sequence[np.ndarray]) -> int:
    for spec, array in zip(signature.inputs, arrays, strict=True):
        if spec.batch_axis is not None and not is_absent(array):
            return int(array.shape[spec.batch_axis])
    return 1
