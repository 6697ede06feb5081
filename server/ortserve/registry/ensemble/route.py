"""The route of requests through an ensemble: the members and tensors of the steps for the requested outputs."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.conversion import match_batch_axis
from ortserve.core.inflight import Scheduling, Terms
from ortserve.core.request import RequestedOutput
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import absent, why_not_stacked
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.ensemble.plan import Plan, PlannedStep, Selection
from ortserve.registry.request_shapes import shape_error, unequal_rows_error
from ortserve.registry.served_version import ServedVersion


class EnsembleTerms(Terms):
    """Terms of a request to an ensemble, with the values from which its steps derive their own terms.

    Attributes:
        scheduling: Scheduling parameters of the request. Each member interprets them.
        outputs: Names of the requested outputs; empty for all.
    """

    __slots__ = ("outputs", "scheduling")

    def __init__(self, answer_by_ns: int | None, scheduling: Scheduling, outputs: tuple[str, ...] = ()) -> None:
        super().__init__(scheduling.priority, answer_by_ns)
        self.scheduling: Final[Scheduling] = scheduling
        self.outputs: Final[tuple[str, ...]] = outputs

    def suit(self, other: Terms) -> bool:
        """As ``Terms.suit``. A member may rank any two priorities: 0, and one above its levels, are its default."""
        return isinstance(other, EnsembleTerms) and other.scheduling == self.scheduling and super().suit(other)


class BoundStep:
    """A step with its member. It reads and writes the tensors of a request, which are None until they are computed.

    Attributes:
        member: The version that answers the step.
        inputs: Tensor of each input of the member; -1 for an input that is not mapped.
        read: The tensors that the step reads, each once.
        outputs: Used outputs: the index among the member's outputs, and the tensor.
        wanted: The same outputs as a list of names, for a member that is an ensemble.
    """

    __slots__ = ("inputs", "member", "outputs", "read", "wanted")

    def __init__(self, step: PlannedStep, used: tuple[str, ...], member: ServedVersion) -> None:
        signature = member.signature
        self.member: Final[ServedVersion] = member
        self.inputs: Final[tuple[int, ...]] = tuple([step.inputs.get(spec.name, -1) for spec in signature.inputs])
        self.read: Final[tuple[int, ...]] = tuple(dict.fromkeys(step.inputs.values()))
        self.outputs: Final[tuple[tuple[int, int], ...]] = tuple(
            [(signature.output_index[name], step.outputs[name]) for name in used]
        )
        self.wanted: Final[tuple[RequestedOutput, ...]] = tuple([RequestedOutput(name) for name in used])

    def gather(self, tensors: list[np.ndarray | None], names: Sequence[str]) -> tuple[Arrays, int]:
        """Gather the member's inputs from ``tensors``, which have these ``names``, without copies, and count rows.

        Raises:
            ServeError: invalid_input, for a required input that the request omits, and for a shape that the member does
                not accept.
        """
        signature, model = self.member.signature, self.member.name
        arrays: list[np.ndarray | None] = []
        rows, counted = 1, ""
        is_whole = True
        for spec, tensor in zip(signature.inputs, self.inputs, strict=True):
            array = tensors[tensor] if tensor >= 0 else None
            if array is None:
                if not spec.is_optional:
                    raise invalid_input(
                        f"model '{model}' requires its input '{spec.name}', and the request leaves out "
                        f"'{names[tensor]}'"
                    )
                is_whole = False
                arrays.append(None)
                continue
            array = match_batch_axis(array, spec)
            if not spec.accepts_shape(array.shape):
                raise shape_error(array.shape, spec, signature, model)
            axis = spec.batch_axis
            if axis is not None:
                if not counted:
                    rows, counted = array.shape[axis], spec.name
                elif array.shape[axis] != rows:
                    raise unequal_rows_error(spec.name, model, rows, array.shape[axis])
            arrays.append(array)
        if is_whole:
            return tuple([array for array in arrays if array is not None]), rows
        return tuple([absent(rows) if array is None else array for array in arrays]), rows

    def keep(self, outputs: Arrays, tensors: list[np.ndarray | None]) -> None:
        """Store the used outputs of the member in the tensors of a request.

        Raises:
            ServeError: unsupported, for a sequence of tensors that cannot be stacked to one tensor.
        """
        specs = self.member.signature.outputs
        for index, tensor in self.outputs:
            array = outputs[index]
            if specs[index].is_sequence and (why := why_not_stacked(array)):
                raise ServeError(
                    ErrorKind.UNSUPPORTED,
                    f"output '{specs[index].name}' of model '{self.member.name}' is a sequence that cannot be passed "
                    f"on as one tensor: {why}",
                )
            tensors[tensor] = array


class Route:
    """The route of all requests for the same outputs through an ensemble.

    Attributes:
        name: Name of the ensemble.
        signature: Signature of the ensemble.
        plan: Plan of the ensemble.
        selection: The steps that run.
        steps: All steps of the plan, with their members.
        outputs: Tensor of each output of the signature; -1 if it is not requested.
    """

    __slots__ = ("name", "outputs", "plan", "selection", "signature", "steps")

    def __init__(
        self,
        name: str,
        signature: ModelSignature,
        plan: Plan,
        selection: Selection,
        members: tuple[ServedVersion, ...],
        wanted: frozenset[int],
    ) -> None:
        self.name: Final[str] = name
        self.signature: Final[ModelSignature] = signature
        self.plan: Final[Plan] = plan
        self.selection: Final[Selection] = selection
        self.steps: Final[tuple[BoundStep, ...]] = tuple(
            [BoundStep(plan.steps[number], selection.outputs[number], member) for number, member in enumerate(members)]
        )
        self.outputs: Final[tuple[int, ...]] = tuple([tensor if tensor in wanted else -1 for tensor in plan.outputs])


def make_route(
    name: str,
    signature: ModelSignature,
    plan: Plan,
    members: tuple[ServedVersion, ...],
    outputs: tuple[str, ...],
    *,
    has_part: bool = False,
) -> Route:
    """Create the route of requests for some outputs, or for all if ``outputs`` is empty.

    With ``has_part``, they are requests of sequences. All steps with sequences then run: a state would lack a request
    without its step, and a start or an end that the step does not receive would continue the sequence before it.
    """
    wanted = frozenset(
        [
            tensor
            for spec, tensor in zip(signature.outputs, plan.outputs, strict=True)
            if not outputs or spec.name in outputs
        ]
    )
    always = [number for number, member in enumerate(members) if has_part and member.takes_sequences]
    return Route(name, signature, plan, plan.select(wanted, always), members, wanted)
