"""The plan of an ensemble: the steps that a request needs, and the dependencies between them. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ortserve.config.model import ModelOptions
from ortserve.errors import RunTimeoutError, SequenceError, ServeError, invalid_input


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step of an ensemble. Tensors are given by their numbers in the plan.

    Attributes:
        inputs: Tensor of each mapped input, by the input's name in the member.
        outputs: Tensor of each mapped output, by the output's name in the member.
    """

    model: str
    version: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Selection:
    """The steps and tensors that a request for certain outputs needs.

    Attributes:
        steps: Numbers of the needed steps.
        first: Numbers of the steps that may start at once.
        waits: For each step of the plan, the number of steps that must end before it may start; 0 if it is not needed.
        readers: For each tensor, the number of needed steps that read it, plus one if it is a requested output.
        followers: For each step, the needed steps that wait for it.
        outputs: For each step, the names of the member's outputs that are used.
    """

    steps: tuple[int, ...]
    first: tuple[int, ...]
    waits: tuple[int, ...]
    readers: tuple[int, ...]
    followers: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The graph of an ensemble.

    Attributes:
        tensors: Names of the tensors. The number of a tensor is its index here.
        steps: Steps in the order of the configuration.
        inputs: Numbers of the ensemble's inputs.
        outputs: Numbers of the ensemble's outputs.
    """

    tensors: tuple[str, ...]
    steps: tuple[PlannedStep, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def select(self, wanted: Collection[int], always: Iterable[int] = ()) -> Selection:
        """Select the steps that compute ``wanted``, a subset of ``outputs``, and the steps ``always``."""
        writer = {tensor: number for number, step in enumerate(self.steps) for tensor in step.outputs.values()}
        needed: set[int] = set()
        pending = [*always, *[writer[tensor] for tensor in wanted if tensor in writer]]
        while pending:
            number = pending.pop()
            if number not in needed:
                needed.add(number)
                pending += [writer[tensor] for tensor in self.steps[number].inputs.values() if tensor in writer]
        readers = [0] * len(self.tensors)
        for tensor in wanted:
            readers[tensor] += 1
        waits = [0] * len(self.steps)
        followers: list[list[int]] = [[] for _ in self.steps]
        for number in sorted(needed):
            read = set(self.steps[number].inputs.values())
            for tensor in read:
                readers[tensor] += 1
            before = {writer[tensor] for tensor in read if tensor in writer}
            waits[number] = len(before)
            for other in before:
                followers[other].append(number)
        steps = tuple(sorted(needed))
        return Selection(
            steps=steps,
            first=tuple(number for number in steps if not waits[number]),
            waits=tuple(waits),
            readers=tuple(readers),
            followers=tuple(map(tuple, followers)),
            outputs=tuple(
                tuple(name for name, tensor in step.outputs.items() if number in needed and readers[tensor])
                for number, step in enumerate(self.steps)
            ),
        )


def make_plan(name: str, options: ModelOptions) -> Plan:
    """Check the graph of an ensemble and number its tensors.

    Raises:
        ServeError: invalid_input, for a tensor that is written twice, never written or never used, and for a cycle.
    """
    assert options.ensemble is not None
    inputs, outputs, steps = tuple(options.inputs), tuple(options.outputs), options.ensemble.steps
    for role, names in (("inputs", inputs), ("outputs", outputs)):
        if not names:
            raise invalid_input(f"{role}: expected the names of the {role} of ensemble '{name}'")
    for tensor, declared in (*options.inputs.items(), *options.outputs.items()):
        if declared.reshape is not None or declared.batch_axis is not None:
            raise invalid_input(f"'{tensor}': expected no reshape and no batch_axis, which members have, not ensembles")
    writer: dict[str, int] = {}
    for number, step in enumerate(steps):
        for tensor in step.outputs.values():
            if tensor in writer or tensor in inputs:
                raise invalid_input(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' "
                    f"step {number}"
                )
            writer[tensor] = number
    read = {tensor for step in steps for tensor in step.inputs.values()}
    if unused := next((tensor for tensor in inputs if tensor not in read), ""):
        raise invalid_input(f"ensemble input '{unused}' for ensemble {name}' is not used")
    if unused := next((tensor for tensor in outputs if tensor not in writer), ""):
        raise invalid_input(f"ensemble output '{unused}' for ensemble {name}' is not used")
    _check_written(name, inputs, outputs, [(step.inputs.values(), step.outputs.values()) for step in steps])
    if unused := next((tensor for tensor in writer if tensor not in read and tensor not in outputs), ""):
        raise invalid_input(f"ensemble tensor '{unused}' is unused in ensemble '{name}'")
    tensors = tuple(dict.fromkeys((*inputs, *writer)))
    numbers = {tensor: number for number, tensor in enumerate(tensors)}
    return Plan(
        tensors,
        tuple(
            PlannedStep(
                step.model,
                step.version,
                {own: numbers[tensor] for own, tensor in step.inputs.items()},
                {own: numbers[tensor] for own, tensor in step.outputs.items()},
            )
            for step in steps
        ),
        tuple(numbers[tensor] for tensor in inputs),
        tuple(numbers[tensor] for tensor in outputs),
    )


def _check_written(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    steps: Sequence[tuple[Collection[str], Collection[str]]],
) -> None:
    """Check that each step receives all its tensors, so that the graph has no gap and no cycle."""
    written, waiting = set(inputs), list(steps)
    while waiting:
        later = [step for step in waiting if not written.issuperset(step[0])]
        if len(later) == len(waiting):
            break
        written.update(tensor for step in waiting if step not in later for tensor in step[1])
        waiting = later
    if not waiting:
        return
    gap = next(tensor for step in waiting for tensor in step[0] if tensor not in written)
    if output := next((tensor for tensor in outputs if tensor not in written), ""):
        raise invalid_input(
            f"output '{output}' for ensemble '{name}' is not written: at least one of its depending tensors, "
            f"'{gap}', is not connected"
        )
    raise invalid_input(f"ensemble tensor '{gap}' is not written in ensemble '{name}': it is not connected")


def member_names(options: ModelOptions) -> tuple[str, ...]:
    """The members of an ensemble, without duplicates; empty for other models."""
    if options.ensemble is None:
        return ()
    return tuple(dict.fromkeys(step.model for step in options.ensemble.steps))


def find_cycle(name: str, members: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Find a cycle of ensembles through ``name``, which is its first and last element. Empty if there is no cycle.

    ``members`` has the members of each ensemble.
    """
    came_from: dict[str, str] = {}
    pending = [name]
    while pending:
        at = pending.pop()
        for member in members.get(at, ()):
            if member == name:
                return (*reversed(list(_path(at, came_from))), name)
            if member not in came_from:
                came_from[member] = at
                pending.append(member)
    return ()


def _path(at: str, came_from: Mapping[str, str]) -> Iterator[str]:
    """The path from ``at`` back to the start of a search."""
    yield at
    while at in came_from:
        at = came_from[at]
        yield at


def circular(cycle: Sequence[str]) -> str:
    """The problem of ensembles that contain each other."""
    return f"circular dependency between ensembles: {' -> '.join(cycle)}"


def of_ensemble(error: ServeError, ensemble: str, member: str) -> ServeError:
    """Copy the error of a step for the caller of the ensemble. The text names the ensemble and the member."""
    message = f"in ensemble '{ensemble}', {error.message}"
    if f"'{member}'" not in error.message:
        message += f" (model '{member}')"
    if isinstance(error, RunTimeoutError):
        return RunTimeoutError(message)
    # The kind stays, because errors of sequences reach clients without the id of the request before the text.
    kind = SequenceError if isinstance(error, SequenceError) else ServeError
    return kind(error.kind, message, retry_after_s=error.retry_after_s)
