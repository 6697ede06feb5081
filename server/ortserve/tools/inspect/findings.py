"""Finds the limits of a model in its file and its optimized graph. Pure."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ortserve.engine.bounded_time import CONTROL_FLOW
from ortserve.engine.provider_options import GPU_PROVIDERS
from ortserve.model_file.graph import DOUBLE, Node, all_graphs, all_nodes
from ortserve.tools.inspect import patterns
from ortserve.tools.inspect.content import described
from ortserve.tools.inspect.patterns import Wiring
from ortserve.tools.inspect.placement import Optimized, wishes
from ortserve.tools.inspect.result import Content, Placement, TensorInfo
from ortserve.tools.report import Finding, FindingCatalog, worst_first
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
_PIECES: Final = """\
 (warning): Each of these operators reads and writes its whole tensor. ONNX Runtime fuses the usual forms, unless a
    value inside them is an output of the model or is read by other nodes.
    → {first}export with opset_version={since} or higher, so that the exporter writes {operator}
"""
_CATALOG: Final = FindingCatalog(
    """
initializers_as_inputs (warning): ONNX Runtime does not treat them as constants, so it cannot fold, fuse or pack them.
    → python -m onnxruntime.tools.remove_initializer_from_input --input {file} --output {target}
unfused_attention (advice): A fused operator reads and writes memory once. On CPUs it saved 2 to 9 % of the time, on
    GPUs more.
    → export with opset_version=23, which has the operator Attention, or try ortserve optimize {file} -o {target}, which
    fuses those of some exporters and shows where others differ
old_opset (advice): {operator} exists since opset {since} and needs no fusion.
    → torch.onnx.export(…, opset_version={since}); converting the file would keep the separate operators
layout_transposes (warning): They only move memory, and ONNX Runtime's optimizer could not remove them.
    → export with channels first, for example: python -m tf2onnx.convert --saved-model FOLDER --output {file}
    --inputs-as-nchw INPUT --outputs-as-nchw OUTPUT; in PyTorch, export without permute
casts_back (warning): Both nodes copy the tensor, and a narrower type between them rounds it.
    → remove them before the export{more}
double_precision (warning): float64 takes twice the memory of float32 and has at most half its speed, on most GPUs 1/32.
    → convert before the export: model.float() in PyTorch, to_onnx(model, X.astype(numpy.float32)) in skl2onnx
not_batched (advice): Requests run one at a time, so concurrent ones wait for each other.
    → {how}
batched_against_evidence (warning): Answers may depend on the other requests of a batch.
    → remove batched: true or the batch_axis from model.yaml, or correct the model
control_flow (warning): The duration of a run depends on values. This excludes CUDA graphs and runs on the server's
    event loop, and on GPUs the host waits for each decision.
    → export without branches and loops that depend on data, as torch.onnx.export(…, dynamo=True) does{more}
shape_computation (advice): The next kernels on the GPU start only when the host has computed the shapes.
    → fix sizes that do not vary: {sizes}
provider_unusable (warning): The server uses another execution provider of the model's list, or fails to load the model.
    → ortserve doctor shows the cause
nodes_elsewhere (warning): Each change of provider copies tensors from one memory to another and waits for the copies.
    → ortserve profile {file} shows their share; replace the operators in the export, or choose another provider in
    model.yaml: execution_providers
"""
    + "".join(f"unfused_{kind}{_PIECES}" for kind in _OPERATORS)
)
"""Remedies have the names of words to fill in."""


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
        alone_because: Why requests run one at a time; empty if they share batches, or if the configuration forbids it.
        lacks_rows: Whether they do because inputs or outputs have no axis for rows, which no configuration can change.
        overruled: Evidence that rows depend on each other, although the configuration has them run together.
    """

    subject: Subject
    content: Content
    inputs: Sequence[TensorInfo]
    optimized: Optimized
    simplified: Optimized
    placement: Sequence[Placement]
    alone_because: str
    lacks_rows: bool
    overruled: str

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

    @property
    def free_sizes(self) -> str:
        """The setting that fixes all free sizes with names; empty if there are none."""
        names = dict.fromkeys(size for one in self.inputs for size in one.shape or () if isinstance(size, str))
        sizes = ", ".join(f"{name}: SIZE" for name in names)
        return f"session.free_dimensions: {{{sizes}}} in model.yaml" if names else ""


def find_all(evidence: Evidence) -> list[Finding]:
    """All findings, the worst first."""
    wirings = [Wiring.of(graph) for graph in all_graphs(evidence.optimized.model)]
    found = (_find_apart(evidence, wirings), _find_costs(evidence, wirings), _find_in_placement(evidence))
    return worst_first(finding for findings in found for finding in findings)


def _find_apart(evidence: Evidence, wirings: Sequence[Wiring]) -> Iterator[Finding]:
    """Weights that are not folded, and patterns that are equivalent to one operator."""
    weights, target = evidence.content.initializers_as_inputs, evidence.beside("constant")
    about = "also declared as an input, which requests can replace"
    yield from _found("initializers_as_inputs", weights, "weight", about, file=evidence.file, target=target)
    about = f"split into several operators after optimization{evidence.fuses_nothing}"
    attentions = [softmax for wiring in wirings for softmax, _ in patterns.attentions(wiring)]
    target = evidence.beside("attention")
    yield from _found("unfused_attention", attentions, "attention", about, file=evidence.file, target=target)
    opset = evidence.content.opsets.get("ai.onnx", 0)
    first = "set session.graph_optimization: all in model.yaml, or " if evidence.fuses_nothing else ""
    pieces = [one for wiring in wirings for one in (*patterns.norms(wiring), *patterns.gelus(wiring))]
    for kind, (name, operator, since) in _OPERATORS.items():
        apart = [node for known, node in pieces if known == kind]
        words = {"first": first, "operator": operator, "since": str(max(since, opset))}
        yield from _found(f"unfused_{kind}", apart, name, about, **words)
        if apart and opset < since:
            seen = f"opset {opset} has no {operator}, so the exporter wrote several operators instead"
            yield _finding("old_opset", seen, (), **words)


def _find_costs(evidence: Evidence, wirings: Sequence[Wiring]) -> Iterator[Finding]:
    """Nodes that cost time or memory."""
    simplified, sizes = evidence.simplified, evidence.free_sizes
    graphs = all_graphs(simplified.model)  # optimization adds other Transposes for ONNX Runtime's kernels
    transposes = [node for graph in graphs for node in patterns.layout_transposes(Wiring.of(graph))]
    about = "next to convolutions, between channels first and channels last"
    yield from _found("layout_transposes", transposes, "Transpose", about, file=evidence.file)

    casts = [(wiring, node) for wiring in wirings for node in patterns.casts_back(wiring, simplified.values)]
    more = ""
    if any(wiring.makers[node.inputs[0]].op == "Cast" for wiring, node in casts):
        setting = "session.entries: {optimization.enable_cast_chain_elimination: 1} in model.yaml"
        more = f", or, right after the other Cast, set {setting}, which skips the rounding and so changes results"
    about = "back to the type that the value had before another Cast"
    yield from _found("casts_back", [node for _, node in casts], "Cast", about, more=more)

    doubles = {name for name, value in simplified.values.items() if value.dtype == DOUBLE}
    nodes = (node for wiring in wirings for node in wiring.graph.nodes)
    computing = [node for node in nodes if node.op not in ("Cast", "Constant", "Identity")]
    double = [node for node in computing if not doubles.isdisjoint(node.inputs + node.outputs)]
    nbytes = sum(one.nbytes for one in evidence.content.weights if one.datatype == "float64")
    yield from _found("double_precision", double, "node", f"in float64, with {nbytes:,} bytes of weights")

    if evidence.alone_because:
        how = "export without operators that mix rows; set batched: true in model.yaml only if rows are independent"
        if evidence.lacks_rows:
            how = "export with a free first dimension for the rows in all inputs and outputs"
        yield _finding("not_batched", evidence.alone_because, (), how=how)
    if evidence.overruled:
        yield _finding("batched_against_evidence", evidence.overruled, ())

    decisions = [node for node in all_nodes(evidence.optimized.model) if not node.domain and node.op in CONTROL_FLOW]
    more = f", or fix sizes that decide them: {sizes}" if sizes else ""
    yield from _found("control_flow", decisions, "node", "with inner graphs", more=more)

    known = (*wishes(evidence.subject), *(one.provider for one in evidence.placement))
    if gpu := next((name for name in known if name in GPU_PROVIDERS), None):
        shapes = [node for wiring in wirings for node in patterns.shape_nodes(wiring)]
        about = f"that compute shapes on the CPU in each run, although {gpu} runs the model"
        advice = sizes or "in the export, as no free dimension has a name"
        yield from _found("shape_computation", shapes, "node", about, sizes=advice)


def _find_in_placement(evidence: Evidence) -> Iterator[Finding]:
    for one in evidence.placement:
        if one.problem and one.provider in wishes(evidence.subject):
            yield _finding("provider_unusable", f"{one.provider}: {one.problem}", (one.provider,))
        if one.elsewhere or one.copies:
            copies = f"; ONNX Runtime inserted {len(one.copies)} copies between memories" if one.copies else ""
            seen = f"nodes that {one.provider} does not run: {one.elsewhere or 'none'}{copies}"
            yield _finding("nodes_elsewhere", seen, one.copies or (), file=evidence.file)


def _found(kind: str, places: Iterable[Node | str], thing: str, about: str, **words: str) -> Iterator[Finding]:
    """A finding about nodes or tensors, if there are any."""
    names = [described(place) if isinstance(place, Node) else place for place in places]
    if names:
        things = thing if len(names) == 1 or thing in ("Cast", "Transpose") else f"{thing}s"
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield _finding(kind, f"{len(names)} {things} {about}: {', '.join(names[:_SHOWN])}{more}", names, **words)


def _finding(kind: str, seen: str, where: Sequence[str], **words: str) -> Finding:
    finding = _CATALOG.finding(kind, seen, *where[:_MAX_NODES])
    return replace(finding, matters=finding.matters.format(**words), remedy=finding.remedy.format(**words))
