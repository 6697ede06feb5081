"""Finds the row axes of a model's tensors, by its graph and its configuration, and the grounds to believe them."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ortserve.config.model import ModelOptions
from ortserve.config.tensors import NO_ROWS, TensorOptions
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.model_file.graph import Model
from ortserve.rows import (
    Axes,
    Outcome,
    RowVerdict,
    TooMuchWorkError,
    prove_axes,
    prove_model,
    real_inputs,
    why_not_analysed,
)

JOINED: Final = "the requests of a batch are joined, so only the model can keep them apart"
"""The doubt about the rows of every model with ragged inputs."""


class Grounds(enum.Enum):
    """Why the server considers rows independent."""

    PROVEN = "proven"
    """The graph shows that rows are independent."""
    TRIED = "tried"
    """The graph does not show it, but rows alone and together gave the same outputs."""
    CONFIGURED = "configured"
    """The configuration says so."""


@dataclass(frozen=True, slots=True)
class RowAxes:
    """The row axes of a model, as known before a session is open.

    Attributes:
        grounds: TRIED if a trial will follow, unless ``is_mixed``.
        inputs: Row axis of each input, None for an input without rows. Empty to use axis 0 of all tensors.
        outputs: Row axis of each output, in the same form.
        equal_sizes: The field of ``ModelSignature``, as are ``fixed_sizes`` and ``longest_axis``.
        is_disabled: Whether the configuration says that requests run alone.
        doubt: Why rows may meet according to the graph, or why the graph does not tell; empty if proven.
        is_mixed: Whether the graph shows that rows may influence each other.
    """

    grounds: Grounds
    inputs: Axes = field(default_factory=dict)
    outputs: Axes = field(default_factory=dict)
    equal_sizes: tuple[str, ...] = ()
    fixed_sizes: tuple[tuple[str, int], ...] = ()
    longest_axis: int | None = None
    is_disabled: bool = False
    doubt: str = ""
    is_mixed: bool = False

    @property
    def known_dependence(self) -> str | None:
        """How rows depend on each other; None if a trial must show it.

        Empty if rows are proven to be independent, or if the configuration overrules a graph in which they may meet.
        """
        if self.grounds is Grounds.PROVEN:
            return ""
        if self.is_mixed:
            return self.doubt if self.grounds is Grounds.TRIED else ""
        return None

    def apply(self, signature: ModelSignature) -> ModelSignature:
        """Set these axes in a signature.

        Args:
            signature: Result of ``read_signature``: batched along axis 0 if the names of dimensions allow that.
        """
        if self.is_disabled:
            return replace(signature, unbatched_because="its configuration says so")
        if not self.inputs:
            return signature
        inputs = tuple(replace(spec, batch_axis=self._input_axis(spec)) for spec in signature.inputs)
        outputs = tuple(self._output(spec) for spec in signature.outputs)
        because = _why_not_free("input", inputs) or _why_not_free("output", outputs)
        return replace(
            signature,
            inputs=inputs,
            outputs=outputs,
            unbatched_because=because,
            equal_sizes=self.equal_sizes,
            fixed_sizes=self.fixed_sizes,
            longest_axis=self.longest_axis,
        )

    def _output(self, spec: TensorSpec) -> TensorSpec:
        axis = self.outputs.get(spec.name, 0)
        shape = spec.shape
        if self.grounds is Grounds.PROVEN and axis is not None and axis < len(shape):
            # Exporters, such as that of LightGBM's classifiers, may declare the size of one row. ONNX Runtime returns
            # all rows.
            shape = (*shape[:axis], -1, *shape[axis + 1 :])
        return replace(spec, batch_axis=axis, shape=shape)

    def _input_axis(self, spec: TensorSpec) -> int | None:
        if spec.name in self.inputs:
            return self.inputs[spec.name]
        # The input is an initializer. A proof holds for its default value only, so it has no rows then.
        has_rows = self.grounds is not Grounds.PROVEN and spec.shape[:1] == (-1,)
        return 0 if has_rows else None


def find_row_axes(model: Model, options: ModelOptions) -> RowAxes:
    """Find the row axes from the graph and the configuration.

    Raises:
        ServeError: invalid_input, for a ``batch_axis`` of an unknown input or output.
    """
    if options.is_ragged:
        axes: Axes = {declared.name: 0 for declared in real_inputs(model)}
        return RowAxes(Grounds.CONFIGURED, axes, {}, doubt=JOINED, is_mixed=True)
    if options.batched is False:
        return RowAxes(Grounds.CONFIGURED, is_disabled=True)
    if because := why_not_analysed(model):
        return _unproven(options, because)
    try:
        return _decide(model, options)
    except TooMuchWorkError as failure:
        return _unproven(options, f"the model is not analysed: {failure}")


def _unproven(options: ModelOptions, doubt: str) -> RowAxes:
    return RowAxes(Grounds.CONFIGURED if options.batched else Grounds.TRIED, doubt=doubt)


def _decide(model: Model, options: ModelOptions) -> RowAxes:
    configured = {**_configured(options.inputs), **_configured(options.outputs)}
    free_first = {declared.name for declared in real_inputs(model) if _has_free_first(declared.dims)}
    if configured or (options.batched and len(free_first) == len(real_inputs(model))):
        axes: dict[str, int | None] = {
            declared.name: configured.get(declared.name, 0 if declared.name in free_first else None)
            for declared in real_inputs(model)
        }
        verdict = prove_axes(model, axes)
        outputs = {output.name: configured.get(output.name, 0) for output in model.graph.outputs}
        if verdict.outcome is Outcome.PROVEN and all(
            verdict.output_axes[name] == axis for name, axis in outputs.items() if name in configured
        ):
            return _proven(verdict)
        is_mixed = verdict.outcome is Outcome.MIXED
        return RowAxes(Grounds.CONFIGURED, axes, outputs, doubt=_doubt(verdict), is_mixed=is_mixed)
    verdict = prove_model(model, has_equal_rows=options.batched is True)
    if verdict.outcome is Outcome.PROVEN:
        return _proven(verdict)
    is_mixed, doubt = verdict.outcome is Outcome.MIXED, _doubt(verdict)
    if options.batched:
        return RowAxes(Grounds.CONFIGURED, doubt=doubt, is_mixed=is_mixed)
    return RowAxes(Grounds.TRIED, doubt=doubt, is_mixed=is_mixed)


def _configured(tensors: Mapping[str, TensorOptions]) -> dict[str, int | None]:
    return {
        name: None if declared.batch_axis == NO_ROWS else declared.batch_axis
        for name, declared in tensors.items()
        if declared.batch_axis is not None
    }


def _proven(verdict: RowVerdict) -> RowAxes:
    return RowAxes(
        Grounds.PROVEN,
        verdict.input_axes,
        verdict.output_axes,
        verdict.equal_sizes,
        verdict.fixed_sizes,
        verdict.longest_axis,
    )


def _doubt(verdict: RowVerdict) -> str:
    where = f"node '{verdict.node}': " if verdict.node else ""
    if verdict.outcome is Outcome.MIXED:
        return f"rows may depend on each other: {where}{verdict.reason}"
    return f"the graph does not show whether rows are independent: {where}{verdict.reason}"


def _has_free_first(dims: Sequence[int | str | None] | None) -> bool:
    return dims is not None and len(dims) > 0 and not isinstance(dims[0], int)


def _why_not_free(role: str, specs: Sequence[TensorSpec]) -> str:
    return next((why for spec in specs if (why := spec.why_no_rows(role))), "")
