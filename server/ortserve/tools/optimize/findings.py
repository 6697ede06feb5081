"""Findings about the limits of an optimized model. Pure."""

from collections.abc import Iterator
from typing import Final

from ortserve.engine.provider_options import CPU
from ortserve.tools.compare.measure import SYNTHETIC_NOTE
from ortserve.tools.compare.result import CompareResult
from ortserve.tools.optimize.checking import Look
from ortserve.tools.optimize.pipeline import Draft
from ortserve.tools.report import Finding, FindingCatalog
from ortserve.tools.speed import speed_text

_RUNTIME: Final = frozenset({"com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc"})


_CATALOG: Final = FindingCatalog(
    f"""
optimized_source (warning): Other tools do not know these operators, so most steps find nothing to do.
    → optimize the model that the exporter wrote
not_portable (warning): Layouts of weights follow the instruction set; elsewhere the model fails or is slow.
    → session.graph_optimization: none in model.yaml loads it without repeating the work
runtime_operators (advice): Other runtimes do not have these operators. Opset converters and quantizers do not know them
    either.
    → keep the source for other uses; quantize it rather than this model
lost_fusions (warning): Known sizes let ONNX Runtime rewrite multiplications before other fusions can use them.
    → leave the dimensions free, or compare both: the source and this model
half_on_cpu (warning): On CPUs, ONNX Runtime converts to fp32 and back around most operators.
    → use it on GPUs, or only to save space
slower (warning): The model was written nevertheless, because options ask for it.
    → use the source
synthetic_inputs (advice): {SYNTHETIC_NOTE[:1].upper()}{SYNTHETIC_NOTE[1:]}.
    → --inputs DATA.npz with an array of samples for each input
"""
)


def find(
    before: Look, draft: Draft, compared: CompareResult, level: str | None, precision: str | None
) -> Iterator[Finding]:
    """All findings. ``level`` and ``precision`` are the options that the user gave."""
    found = _CATALOG.finding
    if old := ", ".join(sorted(_RUNTIME & {*before.domains})):
        yield found("optimized_source", f"the source has operators of {old}: it was optimized or quantized before")
    new = sorted(_RUNTIME & {*draft.look.domains} - {*before.domains})
    if level is not None and ("com.microsoft.nchwc" in new or level in ("layout", "all")):
        only = "only for this version of ONNX Runtime and processors with these instruction sets"
        yield found("not_portable", f"saved at level {level}: {only}")
    elif new:
        yield found("runtime_operators", f"only for ONNX Runtime: operators of {', '.join(new)}")
    sizes = next((step for step in draft.steps if step.name == "dimensions"), None)
    if sizes and sizes.nodes_run and before.shape.nodes_run and sizes.nodes_run > before.shape.nodes_run:
        seen = f"with these dimensions {sizes.nodes_run:,} nodes run instead of {before.shape.nodes_run:,}"
        yield found("lost_fusions", seen)
    speed = compared.speed
    if speed is not None and precision and before.provider == CPU and not speed.is_faster:
        yield found("half_on_cpu", f"{precision} gains no time on a CPU: {speed_text(speed)}")
    elif speed is not None and speed.is_slower:
        yield found("slower", f"slower than the source: {speed_text(speed)}")
    if draft.inputs is None:
        yield found("synthetic_inputs", f"{compared.agreement.samples} synthetic samples were compared")
