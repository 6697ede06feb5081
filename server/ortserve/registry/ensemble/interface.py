"""Checks the inputs and outputs of an ensemble against those of its members, and derives its signature."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ortserve.config.model import ModelOptions
from ortserve.config.tensors import TensorOptions
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import format_shape
from ortserve.errors import invalid_input
from ortserve.registry.ensemble.plan import Plan
from ortserve.registry.repository.triton_fields import type_name

UNBATCHED: Final = "the configuration of the ensemble says so"


@dataclass(frozen=True, slots=True)
class Member:
    """A member, as far as its steps are checked. ``max_rows`` is its configured limit, or None."""

    name: str
    signature: ModelSignature
    max_rows: int | None


@dataclass(frozen=True, slots=True)
class _Use:
    """A tensor of the ensemble as one model declares it. Values that the model does not declare are None.

    ``full`` is the shape, and ``dims`` omits its leading batch dimension. ``has_batches`` tells whether the model is
    batched. If it is, ``batch_axis`` is the row axis, or None for a tensor without rows.
    """

    model: str
    datatype: DataType | None
    dims: tuple[int, ...] | None
    full: tuple[int, ...] | None
    batch_axis: int | None = 0
    has_batches: bool = True


def resolve_signature(name: str, options: ModelOptions, plan: Plan, members: Sequence[Member]) -> ModelSignature:
    """Check the steps against their members, and derive the signature of the ensemble.

    Datatypes and dims that the ensemble does not declare come from the first member that uses the tensor.

    Raises:
        ServeError: invalid_input, for a step that maps unknown inputs or outputs or leaves out a required input, for
            members that disagree on a tensor, and for a batch size that a member does not accept.
    """
    _check_mapping(name, plan, members)
    is_batched = options.batched
    if is_batched is None:
        is_batched = all(member.signature.rows_lead for member in members)
    if is_batched and options.max_rows is not None:
        for member in members:
            most = member.max_rows
            if member.signature.is_batched and most is not None and most < options.max_rows:
                raise invalid_input(
                    f"ensemble {name} allows maximum batch size {options.max_rows}, but it contains model "
                    f"{member.name} which only allows maximum batch size to be {most}"
                )
    uses: list[list[_Use]] = [[] for _ in plan.tensors]
    declared = {**options.inputs, **options.outputs}
    for tensor in (*plan.inputs, *plan.outputs):
        uses[tensor].append(_declared(name, declared[plan.tensors[tensor]], is_batched=is_batched))
    for tensor, use in _member_uses(plan, members):
        uses[tensor].append(use)
    for tensor, known in enumerate(uses):
        _check_agreement(name, plan.tensors[tensor], known)
    inputs = [_spec(plan.tensors[tensor], uses[tensor], is_batched=is_batched) for tensor in plan.inputs]
    outputs = [_spec(plan.tensors[tensor], uses[tensor], is_batched=is_batched) for tensor in plan.outputs]
    return ModelSignature(
        tuple(replace(spec, is_optional=options.inputs[spec.name].optional) for spec in inputs),
        tuple(outputs),
        "" if is_batched else UNBATCHED,
    )


def _check_mapping(name: str, plan: Plan, members: Sequence[Member]) -> None:
    for step, member in zip(plan.steps, members, strict=True):
        signature = member.signature
        for own, tensor in step.inputs.items():
            if own not in signature.inputs_by_name:
                raise invalid_input(
                    f"in ensemble {name}, ensemble tensor {plan.tensors[tensor]} is mapping to non-existing input "
                    f"{own} in model {member.name}{_why_unserved(own, signature.unserved_inputs)}"
                )
        for own, tensor in step.outputs.items():
            if own not in signature.output_index:
                raise invalid_input(
                    f"in ensemble {name}, ensemble tensor {plan.tensors[tensor]} is mapped from non-existing output "
                    f"{own} in model {member.name}{_why_unserved(own, signature.unserved_outputs)}"
                )
        for spec in signature.inputs:
            if spec.name not in step.inputs and not spec.is_optional:
                raise invalid_input(
                    f"in ensemble {name}, input {spec.name} in model {member.name} is not mapped to any ensemble "
                    "tensors"
                )


def _why_unserved(name: str, unserved: Mapping[str, str]) -> str:
    return f": it is not served, because {unserved[name]}" if name in unserved else ""


def _declared(name: str, options: TensorOptions, *, is_batched: bool) -> _Use:
    dims = options.dims
    full = None if dims is None else (-1, *dims) if is_batched else dims
    return _Use(name, options.datatype, dims, full, has_batches=is_batched)


def _member_uses(plan: Plan, members: Sequence[Member]) -> Iterator[tuple[int, _Use]]:
    for step, member in zip(plan.steps, members, strict=True):
        signature = member.signature
        for own, tensor in step.inputs.items():
            yield tensor, _used(member, signature.inputs_by_name[own])
        for own, tensor in step.outputs.items():
            yield tensor, _used(member, signature.outputs[signature.output_index[own]])


def _used(member: Member, spec: TensorSpec) -> _Use:
    if spec.has_any_shape:
        return _Use(member.name, spec.datatype, None, None)
    is_batched = member.signature.is_batched
    return _Use(member.name, spec.datatype, spec.shape[spec.leading :], spec.shape, spec.batch_axis, is_batched)


def _check_agreement(name: str, tensor: str, uses: Sequence[_Use]) -> None:
    """Check that all models agree on the datatype of a tensor, and on its shape with or without a batch dimension."""
    datatype, typed = next(((use.datatype, use.model) for use in uses if use.datatype is not None), (None, ""))
    shaped = next((use for use in uses if use.dims is not None), None)
    for use in uses:
        if datatype is not None and use.datatype is not None and use.datatype is not datatype:
            raise invalid_input(
                f"in ensemble {name}, ensemble tensor {tensor}: inconsistent data type: {type_name(datatype)} is "
                f"inferred from model {typed} while {type_name(use.datatype)} is inferred from model {use.model}"
            )
        if shaped is not None and not (_fits(shaped.dims, use.dims) or _fits(shaped.full, use.full)):
            assert shaped.full is not None
            assert use.full is not None
            raise invalid_input(
                f"in ensemble {name}, ensemble tensor {tensor}: inconsistent shape: {format_shape(shaped.full)} is "
                f"inferred from model {shaped.model} while {format_shape(use.full)} is inferred from model {use.model}"
            )


def _fits(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> bool:
    if one is None or other is None:
        return True
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def _spec(tensor: str, uses: Sequence[_Use], *, is_batched: bool) -> TensorSpec:
    datatype = next((use.datatype for use in uses if use.datatype is not None), None)
    assert datatype is not None, "a member uses it, or it would be unused"
    known = [use for use in uses if use.dims is not None]
    if not known:
        return TensorSpec(tensor, datatype, (), has_any_shape=True)
    use = known[0] if known[0] is uses[0] else next((use for use in known if use.has_batches), known[0])
    assert use.dims is not None
    assert use.full is not None
    if use.has_batches or not is_batched:
        return TensorSpec(tensor, datatype, use.full, batch_axis=use.batch_axis)
    return TensorSpec(tensor, datatype, (-1, *use.dims))
