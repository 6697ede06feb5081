"""The result of ``ortserve optimize``, which ``--json`` prints."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ortserve.core.agreement import Agreement
from ortserve.tools.destination import Delivered
from ortserve.tools.report import Finding
from ortserve.tools.speed import Speed


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a model.

    Attributes:
        nodes: In the file, with those of inner graphs.
        nodes_run: Left when ONNX Runtime has optimized it here; null if it cannot save that graph.
        nbytes: Of the file and its external data.
    """

    nodes: int
    nodes_run: int | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did.

    Attributes:
        name: Of the step.
        is_kept: Whether the model has it.
        reason: Why it is kept or not.
        nodes_before: In the file before the step.
        nodes: In the file after it; null if it was not checked.
        nodes_run: After ONNX Runtime's own optimization; null if unknown.
        nbytes: Size after the step; null if it was not checked.
        error: Worst error against the source, in the measure of the bound; null if it was not checked.
        ratio: Time of a run of the source divided by that of the model, on the CPU in processor time; null if
            it was not checked.
        seconds: That the step and its check took.
        notes: What it did.
    """

    name: str
    is_kept: bool
    reason: str
    nodes_before: int
    nodes: int | None = None
    nodes_run: int | None = None
    nbytes: int | None = None
    error: float | None = None
    ratio: float | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AlmostFused:
    """Nodes that form an operator, but are still in pieces in the graph that runs.

    Attributes:
        kind: ``attention``, ``layer_norm``, ``rms_norm`` or ``gelu``.
        node: By which it was recognized.
        difference: The first edge that differs from what the fusions expect; empty if it is not known.
    """

    kind: str
    node: str
    difference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeResult:
    """An optimized model.

    Attributes:
        schema: Of this result.
        model: Name of the source.
        path: Of the source.
        provider: The execution provider that ran both models.
        runtime: Version of ONNX Runtime.
        before: The size of the source.
        after: The size of the optimized model.
        steps: In their order.
        fused: Operators that stand for several others, with their numbers: those that the steps added.
        run_fused: All such operators of the graph that runs, with those that ONNX Runtime fuses itself.
        almost_fused: What is left in pieces.
        bound: The largest error that was accepted.
        inputs: With which errors and speed were measured.
        agreement: How the outputs agree with those of the source.
        source_speed: Of the source.
        speed: Of the optimized model, with its ratio to the source.
        domains: Operator sets besides ONNX's own that the optimized model needs.
        findings: What limits the use of the model.
        delivered: Where the model is.
    """

    schema: str = "ortserve.optimize/1"
    model: str
    path: str
    provider: str
    runtime: str
    before: Shape
    after: Shape
    steps: tuple[StepResult, ...]
    fused: Mapping[str, int]
    run_fused: Mapping[str, int]
    almost_fused: tuple[AlmostFused, ...]
    bound: str
    inputs: str
    agreement: Agreement
    source_speed: Speed | None
    speed: Speed | None
    domains: tuple[str, ...]
    findings: tuple[Finding, ...]
    delivered: Delivered = field(default_factory=Delivered)
