"""What limits a model: decisions over its file and its optimized graph, each with evidence and what mends it. Pure."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ortserve.engine.bounded_time import CONTROL_FLOW
from ortserve.engine.provider_options import CPU, GPU_PROVIDERS
from ortserve.model_file.graph import DOUBLE, Model
from ortserve.tools.inspect import patterns
from ortserve.tools.inspect.content import all_graphs, all_nodes, described
from ortserve.tools.inspect.patterns import Occurrence, Wiring
from ortserve.tools.inspect.result import Content, Placement, Rows
from ortserve.tools.report import Finding, Level

_MOST_NODES: Final = 20
_FUSES_NOTHING: Final = ("none", "basic")
"""Levels of graph optimization."""
_ORDER: Final = ("problem", "warning", "advice")
_FLOAT16: Final = 10

_TEXTS: Final[Mapping[str, tuple[Level, str, str]]] = {
    "initializers_as_inputs": (
        "warning",
        "ONNX Runtime does not treat them as constants, so it cannot fold, fuse or pack them.",
        "python -m onnxruntime.tools.remove_initializer_from_input --input {path} --output {out}",
    ),
    "unfused_attention": (
        "advice",
        "One operator for an attention reads and writes memory once. On CPUs it gained 2 to 9 %, on GPUs more.",
        "export with opset_version=23, which has Attention; or try, as it knows some exporters only: {command}",
    ),
    "unfused": (
        "warning",
        "Each piece reads and writes its whole tensor; one operator does it once.",
        "{first}export with opset_version={opset} or higher, so that the exporter writes {operator}",
    ),
    "old_opset": (
        "advice",
        "{operator} exists since opset {since}; then no fusion has to recognize the pieces.",
        "torch.onnx.export(…, opset_version={opset}); converting the file would keep the pieces",
    ),
    "layout_transposes": (
        "warning",
        "They only move memory: ONNX Runtime's optimizer could not cancel them.",
        (
            "export channels first, for example: python -m tf2onnx.convert --saved-model FOLDER --output {path} "
            "--inputs-as-nchw INPUT --outputs-as-nchw OUTPUT; in PyTorch without permute"
        ),
    ),
    "casts_back": (
        "warning",
        "Both copy the tensor; the way through a narrower type also rounds it.",
        (
            "remove them before the export, or set session.entries: {{optimization.enable_cast_chain_elimination: 1}} "
            "in model.yaml, which skips the rounding and so changes results"
        ),
    ),
    "half_precision_on_cpu": (
        "warning",
        "The CPU computes most operators in float32 only, so half precision costs time there.",
        "serve the float32 model on CPUs, or choose a GPU: execution_providers: [cuda, cpu] in model.yaml",
    ),
    "double_precision": (
        "warning",
        "Twice the memory and at most half the speed of float32; on most GPUs 1/32 of it.",
        "convert before the export: model.float() in PyTorch, to_onnx(model, X.astype(numpy.float32)) in skl2onnx",
    ),
    "control_flow": (
        "warning",
        (
            "The time of a run depends on values: no CUDA graphs, no runs on the server's event loop, and on GPUs the "
            "host waits for each decision."
        ),
        (
            "export without branches and loops that depend on data, as torch.onnx.export(…, dynamo=True) does, or fix "
            "sizes by session.free_dimensions: {{{sizes}}} in model.yaml"
        ),
    ),
    "shape_computation": (
        "advice",
        "The GPU's kernels behind them start only when the host has finished.",
        "fix sizes that do not vary: session.free_dimensions: {{{sizes}}} in model.yaml",
    ),
    "provider_unusable": ("warning", "The server passes over it, or refuses the model.", "ortserve doctor"),
    "nodes_elsewhere": (
        "warning",
        "Each change of provider copies tensors between memories and waits for them.",
        (
            "ortserve profile {path} shows their share; replace the operators in the export, or choose another "
            "provider in model.yaml: execution_providers"
        ),
    ),
    "rows_meet": (
        "advice",
        "The server cannot batch concurrent requests.",
        (
            "make the first axis of all inputs and outputs free and the same in the export; 'batched: true' in "
            "model.yaml overrules the analysis if rows are independent nevertheless"
        ),
    ),
}
"""By kind: its level, why it matters, and what mends it, with places for what was found."""

_SINCE: Final = {"layer_norm": ("LayerNormalization", 17), "rms_norm": ("RMSNormalization", 23), "gelu": ("Gelu", 20)}
"""The operator of ONNX that replaces a pattern, and its first opset."""
_TITLES: Final = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm", "gelu": "GELU"}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What findings are derived from.

    Attributes:
        path: The model file, for commands.
        model: Its record.
        content: Its content.
        optimized: The graph that runs; the file's own if it cannot be saved.
        simplified: The graph before fusions and changes of layout.
        level: The configured level of graph optimization.
        placement: By provider.
        rows: None if the model was not run.
        wishes: Full names of the execution providers that the configuration or the user asks for.
    """

    path: str
    model: Model
    content: Content
    optimized: Model
    simplified: Model
    level: str
    placement: Sequence[Placement]
    rows: Rows | None
    wishes: Sequence[str]

    @property
    def file(self) -> str:
        """The model file as a word of a command."""
        return shlex.quote(self.path)

    def beside(self, word: str) -> str:
        """A new file beside the model, as a word of a command."""
        return shlex.quote(f"{self.path.removesuffix('.onnx')}.{word}.onnx")

    def wirings(self) -> list[Wiring]:
        """The optimized graph and those within it."""
        return [Wiring.of(graph) for graph in all_graphs(self.optimized)]

    def free_sizes(self) -> str:
        """The entries of ``session.free_dimensions`` that fix all sizes with names."""
        return ", ".join(f"{name}: SIZE" for name in self.content.free_dimensions if name != "-1") or "NAME: SIZE"


def find_all(evidence: Evidence) -> list[Finding]:
    """All findings, the worst first."""
    found = [finding for rule in _RULES for finding in rule(evidence)]
    return sorted(found, key=lambda finding: _ORDER.index(finding.level))


def _initializers_as_inputs(evidence: Evidence) -> Iterator[Finding]:
    if names := evidence.content.initializers_as_inputs:
        seen = f"{_count(names, 'weight')} can be replaced by requests, because they are inputs, too: {_some(names)}"
        yield _finding("initializers_as_inputs", seen, names, path=evidence.file, out=evidence.beside("constant"))


def _attention(evidence: Evidence) -> Iterator[Finding]:
    found = [(wiring, one) for wiring in evidence.wirings() for one in patterns.attentions(wiring)]
    if not found:
        return
    wiring, first = found[0]
    heads, hidden = patterns.attention_heads(wiring, first.node) or ("HEADS", "WIDTH")
    source, out = evidence.file, evidence.beside("attention")
    if any(node.name.startswith("node_") for node in evidence.model.graph.nodes):  # PyTorch's newer exporter
        command = (
            'python -c "import sys; from onnxscript import ir; from onnxscript.rewriter.ort_fusions import '
            f'optimize_for_ort; ir.save(optimize_for_ort(ir.load(sys.argv[1]))[0], sys.argv[2])" {source} {out}'
        )
    else:
        command = (
            f"python -m onnxruntime.transformers.optimizer --input {source} --output {out} "
            f"--model_type bert --num_heads {heads} --hidden_size {hidden} --opt_level 0"
        )
    apart = [one for _, one in found]
    yield _finding("unfused_attention", _in_pieces(evidence, apart, "attention"), _nodes(apart), command=command)


def _norms_and_gelus(evidence: Evidence) -> Iterator[Finding]:
    found: dict[str, list[Occurrence]] = {kind: [] for kind in _SINCE}
    for wiring in evidence.wirings():
        found["gelu"] += patterns.gelus(wiring)
        for kind, one in patterns.norms(wiring):
            found[kind].append(one)
    opset = evidence.model.opsets.get("", 0)
    for kind, apart in found.items():
        if not apart:
            continue
        operator, since = _SINCE[kind]
        first = ""
        if evidence.level in _FUSES_NOTHING:
            first = "set session.graph_optimization: all in model.yaml, or "
        elif any(one.because for one in apart):
            first = "remove the extra reader or output before the export, or "
        seen = _in_pieces(evidence, apart, _TITLES[kind])
        facts: dict[str, Any] = {"operator": operator, "since": since, "opset": max(since, opset), "first": first}
        yield _finding(f"unfused_{kind}", seen, _nodes(apart), text="unfused", **facts)
        if opset < since:
            yield _finding(
                "old_opset", f"opset {opset} has no {operator}, so the exporter wrote it in pieces", [], **facts
            )


def _transposes(evidence: Evidence) -> Iterator[Finding]:
    wirings = map(Wiring.of, all_graphs(evidence.simplified))
    if nodes := _nodes([one for wiring in wirings for one in patterns.layout_transposes(wiring)]):
        seen = f"{_count(nodes, 'Transpose')} between channels first and last beside convolutions: {_some(nodes)}"
        yield _finding("layout_transposes", seen, nodes, path=evidence.file)


def _casts(evidence: Evidence) -> Iterator[Finding]:
    if nodes := _nodes([one for wiring in evidence.wirings() for one in patterns.casts_back(wiring)]):
        yield _finding(
            "casts_back", f"{_count(nodes, 'Cast')} back to the type before another Cast: {_some(nodes)}", nodes
        )
    is_on_cpu = not evidence.wishes or evidence.wishes[0] == CPU
    if not is_on_cpu or all(one.datatype != "float16" for one in evidence.content.weights):
        return
    half = [
        described(node)
        for wiring in evidence.wirings()
        for types in [patterns.element_types(wiring)]
        for node in wiring.graph.nodes
        if node.op == "Cast" and _FLOAT16 in (node.attributes.get("to"), types.get(node.inputs[0]))
    ]
    if half:
        seen = f"{_count(half, 'Cast')} from and to float16 run on the CPU, most of them inserted by ONNX Runtime"
        yield _finding("half_precision_on_cpu", seen, half)


def _double(evidence: Evidence) -> Iterator[Finding]:
    nodes = [described(node) for wiring in evidence.wirings() for node in patterns.double_nodes(wiring)]
    inputs = [one.name for one in evidence.model.graph.inputs if one.is_tensor and one.dtype == DOUBLE]
    if nodes:
        nbytes = sum(one.nbytes for one in evidence.content.weights if one.datatype == "float64")
        fed = f"; inputs {_some(inputs)}" if inputs else ""
        seen = f"{_count(nodes, 'node')} compute in float64, with {nbytes:,} bytes of weights: {_some(nodes)}{fed}"
        yield _finding("double_precision", seen, nodes)


def _control_flow(evidence: Evidence) -> Iterator[Finding]:
    nodes = [node for node in all_nodes(evidence.optimized) if not node.domain and node.op in CONTROL_FLOW]
    if names := [described(node) for node in nodes]:
        seen = f"{_count(names, 'node')} with graphs of their own: {_some(names)}"
        yield _finding("control_flow", seen, names, sizes=evidence.free_sizes())


def _shapes_on_gpu(evidence: Evidence) -> Iterator[Finding]:
    gpus = [name for name in (*evidence.wishes, *(one.provider for one in evidence.placement)) if name in GPU_PROVIDERS]
    nodes = [described(node) for wiring in evidence.wirings() for node in patterns.shape_nodes(wiring)]
    if gpus and nodes:
        seen = f"{_count(nodes, 'node')} compute shapes in each run on the CPU, beside {gpus[0]}: {_some(nodes)}"
        yield _finding("shape_computation", seen, nodes, sizes=evidence.free_sizes())


def _fallen_back(evidence: Evidence) -> Iterator[Finding]:
    for one in evidence.placement:
        if one.problem and one.provider in evidence.wishes:
            yield _finding("provider_unusable", f"{one.provider}: {one.problem}", [one.provider])
        left = [f"leaves nodes to others: {one.elsewhere}"] if one.elsewhere else []
        if one.copies:
            left.append(f"ONNX Runtime inserted {_count(one.copies, 'Memcpy')}: {_some(one.copies)}")
        if left:
            seen = f"{one.provider}: {'; '.join(left)}"
            yield _finding("nodes_elsewhere", seen, one.copies or [], path=evidence.file)


def _rows_meet(evidence: Evidence) -> Iterator[Finding]:
    if evidence.rows is not None and evidence.rows.verdict == "alone":
        yield _finding("rows_meet", f"each request runs alone: {evidence.rows.because}", [])


_RULES: Final[Sequence[Callable[[Evidence], Iterator[Finding]]]] = (
    _initializers_as_inputs,
    _attention,
    _norms_and_gelus,
    _transposes,
    _casts,
    _double,
    _control_flow,
    _shapes_on_gpu,
    _fallen_back,
    _rows_meet,
)


def _finding(kind: str, seen: str, where: Sequence[str], *, text: str = "", **facts: object) -> Finding:
    level, matters, remedy = _TEXTS[text or kind]
    return Finding(kind, level, seen, matters.format(**facts), remedy.format(**facts), tuple(where[:_MOST_NODES]))


def _in_pieces(evidence: Evidence, found: Sequence[Occurrence], name: str) -> str:
    """How many there are, where, and why they are not fused, as far as known."""
    because = next((one.because for one in found if one.because), "")
    if evidence.level in _FUSES_NOTHING:
        because = f"session.graph_optimization is {evidence.level}, which fuses nothing"
    where = f"{_count(found, name)} in pieces after optimization, at {_some(_nodes(found))}"
    return f"{where}; {because}" if because else where


def _nodes(found: Sequence[Occurrence]) -> list[str]:
    return [described(one.node) for one in found]


def _count(things: Sequence[object], name: str) -> str:
    """A number of things; the names of operators have no plural."""
    return f"{len(things)} {name if len(things) == 1 or name in ('Transpose', 'Cast', 'Memcpy') else f'{name}s'}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
