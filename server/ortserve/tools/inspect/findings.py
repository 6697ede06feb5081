"""Finds the limits of a model in its file and its optimized graph. Pure."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ortserve.engine.bounded_time import CONTROL_FLOW
from ortserve.engine.provider_options import GPU_PROVIDERS
from ortserve.model_file.graph import DOUBLE, Node, all_graphs, all_nodes
from ortserve.tools.inspect import patterns
from ortserve.tools.inspect.content import described
from ortserve.tools.inspect.patterns import Wiring
from ortserve.tools.inspect.placement import Optimized, wishes
from ortserve.tools.inspect.result import Content, Placement, TensorInfo
from ortserve.tools.report import Finding, Level, worst_first
from ortserve.tools.subject import Subject

_MAX_NODES: Final = 20
"""Limit of the nodes that a finding names."""
_SHOWN: Final = 3
"""Limit of the nodes in its text."""
_FUSES_NOTHING: Final = ("none", "basic")
"""Levels of graph optimization."""
_OPERATORS: Final = {
    "layer_norm": ("LayerNorm", "LayerNormalization", 17),
    "rms_norm": ("RMSNorm", "RMSNormalization", 23),
    "gelu": ("GELU", "Gelu", 20),
}
"""Name, equivalent operator of ONNX, and first opset with this operator, by pattern."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The facts that findings are derived from.

    Attributes:
        subject: The model on disk.
        content: The content of its file.
        inputs: Its inputs.
        optimized: The graph that runs.
        simplified: The graph before fusions and changes of layout.
        placement: Placements by the execution providers.
    """

    subject: Subject
    content: Content
    inputs: Sequence[TensorInfo]
    optimized: Optimized
    simplified: Optimized
    placement: Sequence[Placement]

    @property
    def fuses_nothing(self) -> str:
        """A remark in parentheses if the configuration turns fusions off; otherwise empty."""
        level = self.subject.options.session.graph_optimization
        return f" (session.graph_optimization is {level}, which turns fusions off)" if level in _FUSES_NOTHING else ""

    @property
    def file(self) -> str:
        """The model file, quoted for a shell."""
        return shlex.quote(str(self.subject.path))

    def beside(self, word: str) -> str:
        """A new file in the folder of the model, quoted for a shell."""
        return shlex.quote(str(self.subject.path.with_suffix(f".{word}.onnx")))

    def wirings(self) -> list[Wiring]:
        """The wiring of the graph that runs, and of each graph inside it."""
        return [Wiring.of(graph) for graph in all_graphs(self.optimized.model)]

    @property
    def free_sizes(self) -> str:
        """The setting that fixes all free sizes with names; empty if there are none."""
        names = dict.fromkeys(size for one in self.inputs for size in one.shape or () if isinstance(size, str))
        sizes = ", ".join(f"{name}: SIZE" for name in names)
        return f"session.free_dimensions: {{{sizes}}} in model.yaml" if names else ""


def find_all(evidence: Evidence) -> list[Finding]:
    """All findings, the worst first."""
    return worst_first(finding for rule in _RULES for finding in rule(evidence))


def _initializers_as_inputs(evidence: Evidence) -> Iterator[Finding]:
    yield from _found(
        "initializers_as_inputs",
        evidence.content.initializers_as_inputs,
        "weight",
        "also declared as an input, which requests can replace",
        "ONNX Runtime does not treat them as constants, so it cannot fold, fuse or pack them.",
        "python -m onnxruntime.tools.remove_initializer_from_input "
        f"--input {evidence.file} --output {evidence.beside('constant')}",
    )


def _attention(evidence: Evidence) -> Iterator[Finding]:
    yield from _found(
        "unfused_attention",
        [softmax for wiring in evidence.wirings() for softmax, _ in patterns.attentions(wiring)],
        "attention",
        f"split into several operators after optimization{evidence.fuses_nothing}",
        "A fused operator reads and writes memory once. On CPUs it saved 2 to 9 % of the time, on GPUs more.",
        "export with opset_version=23, which has the operator Attention, or try "
        f"ortserve optimize {evidence.file} -o {evidence.beside('attention')}, which fuses those of some exporters and "
        "shows where others differ",
        level="advice",
    )


def _norms_and_gelus(evidence: Evidence) -> Iterator[Finding]:
    opset = evidence.content.opsets.get("ai.onnx", 0)
    wirings = evidence.wirings()
    found = [one for wiring in wirings for one in (*patterns.norms(wiring), *patterns.gelus(wiring))]
    for kind, (name, operator, since) in _OPERATORS.items():
        apart = [node for known, node in found if known == kind]
        first = "set session.graph_optimization: all in model.yaml, or " if evidence.fuses_nothing else ""
        yield from _found(
            f"unfused_{kind}",
            apart,
            name,
            f"split into several operators after optimization{evidence.fuses_nothing}",
            "Each of these operators reads and writes its whole tensor. ONNX Runtime fuses the usual forms, "
            "unless a value inside them is an output of the model or is read by other nodes.",
            f"{first}export with opset_version={max(since, opset)} or higher, so that the exporter writes {operator}",
        )
        if apart and opset < since:
            yield Finding(
                "old_opset",
                "advice",
                f"opset {opset} has no {operator}, so the exporter wrote several operators instead",
                f"{operator} exists since opset {since} and needs no fusion.",
                f"torch.onnx.export(…, opset_version={since}); converting the file would keep the separate operators",
            )


def _transposes(evidence: Evidence) -> Iterator[Finding]:
    graphs = all_graphs(evidence.simplified.model)  # optimization adds others for ONNX Runtime's kernels
    yield from _found(
        "layout_transposes",
        [node for graph in graphs for node in patterns.layout_transposes(Wiring.of(graph))],
        "Transpose",
        "next to convolutions, between channels first and channels last",
        "They only move memory, and ONNX Runtime's optimizer could not remove them.",
        "export with channels first, for example: python -m tf2onnx.convert --saved-model FOLDER "
        f"--output {evidence.file} --inputs-as-nchw INPUT --outputs-as-nchw OUTPUT; in PyTorch, export without permute",
    )


def _casts(evidence: Evidence) -> Iterator[Finding]:
    values = evidence.simplified.values
    found = [(wiring, node) for wiring in evidence.wirings() for node in patterns.casts_back(wiring, values)]
    remedy = "remove them before the export"
    if any(wiring.makers[node.inputs[0]].op == "Cast" for wiring, node in found):
        setting = "session.entries: {optimization.enable_cast_chain_elimination: 1} in model.yaml"
        remedy += f", or, right after the other Cast, set {setting}, which skips the rounding and so changes results"
    yield from _found(
        "casts_back",
        [node for _, node in found],
        "Cast",
        "back to the type that the value had before another Cast",
        "Both nodes copy the tensor, and a narrower type between them rounds it.",
        remedy,
    )


def _double(evidence: Evidence) -> Iterator[Finding]:
    doubles = {name for name, value in evidence.simplified.values.items() if value.dtype == DOUBLE}
    nbytes = sum(one.nbytes for one in evidence.content.weights if one.datatype == "float64")
    yield from _found(
        "double_precision",
        [
            node
            for wiring in evidence.wirings()
            for node in wiring.graph.nodes
            if node.op not in ("Cast", "Constant", "Identity") and not doubles.isdisjoint(node.inputs + node.outputs)
        ],
        "node",
        f"in float64, with {nbytes:,} bytes of weights",
        "float64 takes twice the memory of float32 and has at most half its speed, on most GPUs 1/32.",
        "convert before the export: model.float() in PyTorch, to_onnx(model, X.astype(numpy.float32)) in skl2onnx",
    )


def _control_flow(evidence: Evidence) -> Iterator[Finding]:
    yield from _found(
        "control_flow",
        [node for node in all_nodes(evidence.optimized.model) if not node.domain and node.op in CONTROL_FLOW],
        "node",
        "with inner graphs",
        "The duration of a run depends on values. This excludes CUDA graphs and runs on the server's event loop, and "
        "on GPUs the host waits for each decision.",
        "export without branches and loops that depend on data, as torch.onnx.export(…, dynamo=True) does"
        + (f", or fix sizes that decide them: {evidence.free_sizes}" if evidence.free_sizes else ""),
    )


def _shapes_on_gpu(evidence: Evidence) -> Iterator[Finding]:
    known = (*wishes(evidence.subject), *(one.provider for one in evidence.placement))
    for gpu in [name for name in known if name in GPU_PROVIDERS][:1]:
        yield from _found(
            "shape_computation",
            [node for wiring in evidence.wirings() for node in patterns.shape_nodes(wiring)],
            "node",
            f"that compute shapes on the CPU in each run, although {gpu} runs the model",
            "The next kernels on the GPU start only when the host has computed the shapes.",
            f"fix sizes that do not vary: {evidence.free_sizes or 'in the export, as no free dimension has a name'}",
            level="advice",
        )


def _fallen_back(evidence: Evidence) -> Iterator[Finding]:
    for one in evidence.placement:
        if one.problem and one.provider in wishes(evidence.subject):
            seen = f"{one.provider}: {one.problem}"
            matters = "The server uses another execution provider of the model's list, or fails to load the model."
            yield Finding(
                "provider_unusable", "warning", seen, matters, "ortserve doctor shows the cause", (one.provider,)
            )
        if one.elsewhere or one.copies:
            copies = f"; ONNX Runtime inserted {len(one.copies)} copies between memories" if one.copies else ""
            yield Finding(
                "nodes_elsewhere",
                "warning",
                f"nodes that {one.provider} does not run: {one.elsewhere or 'none'}{copies}",
                "Each change of provider copies tensors from one memory to another and waits for the copies.",
                f"ortserve profile {evidence.file} shows their share; replace the operators in the export, or choose "
                "another provider in model.yaml: execution_providers",
                tuple(one.copies or ())[:_MAX_NODES],
            )


_RULES: Final[Sequence[Callable[[Evidence], Iterator[Finding]]]] = (
    *(_initializers_as_inputs, _attention, _norms_and_gelus, _transposes, _casts, _double),
    *(_control_flow, _shapes_on_gpu, _fallen_back),
)


def _found(
    kind: str, places: Iterable[Node | str], thing: str, about: str, *advice: str, level: Level = "warning"
) -> Iterator[Finding]:
    """A finding about nodes or tensors, if there are any. ``advice`` is why they matter, and the remedy."""
    names = [described(place) if isinstance(place, Node) else place for place in places]
    if names:
        things = thing if len(names) == 1 or thing in ("Cast", "Transpose") else f"{thing}s"
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        seen = f"{len(names)} {things} {about}: {', '.join(names[:_SHOWN])}{more}"
        matters, remedy = advice
        yield Finding(kind, level, seen, matters, remedy, tuple(names[:_MAX_NODES]))
