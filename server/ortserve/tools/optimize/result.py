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
        nodes: Nodes in the file, with those of inner graphs.
        nodes_run: Nodes after ONNX Runtime's own optimization here; null if it cannot save that graph.
        nbytes: Size of the file and its external data.
    """

    nodes: int
    nodes_run: int | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step.

    Attributes:
        name: Name of the step.
        is_kept: Whether the optimized model contains the step.
        reason: Why the step is kept or not.
        nodes_before: Nodes in the file before the step.
        nodes: Nodes in the file after the step; null if it was not checked.
        nodes_run: Nodes after ONNX Runtime's own optimization; null if unknown.
        nbytes: Size after the step; null if it was not checked.
        error: Worst error against the source, in the measure of the bound; null if it was not checked.
        ratio: Time of a run of the source divided by the time of the model, on the CPU in processor time; null if it
            was not checked.
        seconds: Duration of the step with its check.
        notes: Details of the step.
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
    """Nodes that together compute a known operator, but are not fused in the graph that runs.

    Attributes:
        kind: ``attention``, ``layer_norm``, ``rms_norm`` or ``gelu``.
        node: The node that the pattern was recognized by.
        difference: The first edge that differs from what the fusions expect; empty if it is not known.
    """

    kind: str
    node: str
    difference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeResult:
    """An optimized model.

    Attributes:
        schema: Name and number of this schema.
        model: Name of the source.
        path: File of the source.
        provider: The execution provider that ran both models.
        runtime: Version of ONNX Runtime.
        before: The size of the source.
        after: The size of the optimized model.
        steps: The steps in their order.
        fused: Numbers of fused operators that the steps added, by operator.
        run_fused: Numbers of all fused operators of the graph that runs, with those that ONNX Runtime fuses itself.
        almost_fused: Patterns that are not fused in the graph that runs.
        bound: The largest error that was accepted.
        inputs: A description of the inputs for the measurement of errors and speed.
        agreement: Agreement of the outputs with those of the source.
        source_speed: Speed of the source; null if it was not measured.
        speed: Speed of the optimized model, with its ratio to the source; null if it was not measured.
        domains: Operator sets besides ONNX's own that the optimized model needs.
        findings: Limits of the use of the model.
        delivered: Where the model was written.
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
