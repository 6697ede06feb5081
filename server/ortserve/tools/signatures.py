"""Whether a model can take the place of another one: names, datatypes and shapes of its inputs and outputs. Pure."""

from collections.abc import Iterator, Sequence

from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import format_shape


def signature_differences(expected: ModelSignature, got: ModelSignature, *, may_narrow: bool = False) -> list[str]:
    """Describe the differences; empty if there are none.

    A fixed dimension may become a free one. A free dimension may become fixed only if ``may_narrow``.
    """
    inputs = _differences("input", expected.inputs, got.inputs, may_narrow=may_narrow)
    return [*inputs, *_differences("output", expected.outputs, got.outputs, may_narrow=may_narrow)]


def _differences(
    role: str, expected: Sequence[TensorSpec], got: Sequence[TensorSpec], *, may_narrow: bool
) -> Iterator[str]:
    found = {spec.name: spec for spec in got}
    for spec in expected:
        other = found.pop(spec.name, None)
        if other is None:
            yield f"{role} '{spec.name}': expected {_text(spec)}, got none"
        elif spec.datatype != other.datatype or not _fits(spec, other, may_narrow=may_narrow):
            yield f"{role} '{spec.name}': expected {_text(spec)}, got {_text(other)}"
    yield from (f"{role} '{name}': expected none, got {_text(spec)}" for name, spec in found.items())


def _fits(expected: TensorSpec, got: TensorSpec, *, may_narrow: bool) -> bool:
    if got.has_any_shape or expected.has_any_shape:
        return got.has_any_shape or may_narrow
    return len(expected.shape) == len(got.shape) and all(
        after in (-1, before) or (before == -1 and may_narrow)
        for before, after in zip(expected.shape, got.shape, strict=True)
    )


def _text(spec: TensorSpec) -> str:
    return f"{spec.datatype.value}{'' if spec.has_any_shape else format_shape(spec.shape)}"
