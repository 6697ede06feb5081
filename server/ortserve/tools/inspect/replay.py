"""Whether batches can be replayed as CUDA graphs: the loader's conditions, each with the nodes at which it fails.

If the provider is here, the placement of its session decides. Otherwise its list of kernels stands in for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ortserve.config.session import SessionSettings
from ortserve.core.signature import ModelSignature
from ortserve.device.preparation import why_no_replay
from ortserve.engine.bounded_time import CONTROL_FLOW, DATA_DEPENDENT, why_unbounded
from ortserve.engine.provider_options import CPU, CUDA
from ortserve.model_file.graph import STRING, Model, Node, Tensor
from ortserve.tools.inspect.content import all_nodes, described
from ortserve.tools.inspect.patterns import Wiring, shape_nodes
from ortserve.tools.inspect.result import Condition, Replay

COPIES: Final = frozenset({"MemcpyFromHost", "MemcpyToHost"})
"""The operators that ONNX Runtime inserts where tensors change between the host and a device."""
_MOST_NODES: Final = 10

_ONNX_ON_CUDA: Final = """
    Abs Add Affine And ArgMax ArgMin Attention AveragePool BatchNormalization Cast Ceil Clip Compress Concat
    ConcatFromSequence ConstantOfShape Conv ConvTranspose Cos Crop CumSum DepthToSpace DequantizeLinear Div Dropout
    DynamicSlice Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm
    GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual GridSample HardSigmoid HardSwish Identity If ImageScaler
    InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Loop MatMul
    MatMulInteger Max MaxPool Min Mod Mul Neg NonZero Not OneHot Or PRelu Pad Pow QuantizeLinear RMSNormalization RNN
    RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize
    ReverseSequence RoiAlign RotaryEmbedding Round Scan Scatter ScatterElements ScatterND Selu SequenceAt
    SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength Shape Shrink Sigmoid Sign Sin Size Slice
    Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tanh TensorScatter ThresholdedRelu Tile TopK
    SimplifiedLayerNormalization Transpose Trilu Unsqueeze Upsample Where Xor
"""
_MICROSOFT_ON_CUDA: Final = """
    Attention BiasAdd BiasDropout BiasGelu BiasSoftmax BiasSplitGelu DequantizeLinear EmbedLayerNormalization FastGelu
    FusedConv FusedMatMul GatherBlockQuantized Gelu GridSample GroupNorm GroupQueryAttention Inverse Irfft MatMulBnb4
    MatMulNBits MoE MultiHeadAttention NhwcConv PackedAttention PackedMultiHeadAttention QAttention QMoE QuantizeLinear
    QuickGelu RelativePositionBias RemovePadding RestorePadding Rfft RotaryEmbedding SkipGroupNorm
    SkipLayerNormalization SkipSimplifiedLayerNormalization SparseAttention TransposeMatMul Trilu UnfoldTensor
"""
_ON_CUDA: Final = {"": frozenset(_ONNX_ON_CUDA.split()), "com.microsoft": frozenset(_MICROSOFT_ON_CUDA.split())}
"""Operators by domain with CUDA kernels, whatever datatypes: docs/OperatorKernels.md of ONNX Runtime."""


@dataclass(frozen=True, slots=True)
class Serving:
    """How a model is served, as far as replay depends on it.

    Attributes:
        model: The file.
        signature: Inputs and outputs.
        settings: Of sessions.
        alone_because: Why each request runs alone; empty if requests share batches.
    """

    model: Model
    signature: ModelSignature
    settings: SessionSettings
    alone_because: str


def predict_replay(serving: Serving, simplified: Model) -> Replay:
    """Whether CUDA graphs could be captured on a machine that has CUDA.

    ``simplified`` is the graph before it is placed.
    """
    graph = simplified if simplified.is_readable else serving.model
    shapes = {id(node) for node in shape_nodes(Wiring.of(graph.graph))}
    calls = {(domain, name) for domain, name, _ in graph.functions}
    nodes = [node for node in all_nodes(graph) if node.op != "Constant" and (node.domain, node.op) not in calls]
    missing = [node for node in nodes if not _has_kernel(node) and id(node) not in shapes]
    operators = {
        CUDA: frozenset(node.op for node in nodes if _has_kernel(node)),
        CPU: frozenset(node.op for node in missing),
    }
    present = {name: kinds for name, kinds in operators.items() if kinds}
    return _decide(CUDA, "graph", present, missing, nodes, serving)


def known_replay(
    serving: Serving, provider: str, operators: Mapping[str, Mapping[str, int]], optimized: Model
) -> Replay:
    """The same from the placement of a session on a provider that is here."""
    kinds = {name: frozenset(found) for name, found in operators.items()}
    graph = optimized if optimized.is_readable else serving.model
    nodes = list(all_nodes(graph))
    elsewhere = frozenset().union(*(found for name, found in kinds.items() if name != provider))
    suspects = [node for node in nodes if node.op in elsewhere and node.op not in kinds.get(provider, ())]
    replay = _decide(provider, "session", kinds, suspects, nodes, serving)
    copies = [node for node in nodes if node.op in COPIES]
    copied = f"ONNX Runtime inserted {len(copies)} copies between the host and the device" if copies else ""
    conditions = [*replay.conditions, _condition("no_copies", copied, copies)]
    return replace(
        replay, conditions=conditions, possible=replay.possible and not copies, because=replay.because or copied
    )


def _decide(
    provider: str,
    source: str,
    operators: Mapping[str, frozenset[str]],
    elsewhere: Sequence[Node],
    nodes: Sequence[Node],
    serving: Serving,
) -> Replay:
    def ask(reason: str, kinds: Mapping[str, frozenset[str]]) -> str:
        obstacle = why_no_replay(provider, kinds, serving.settings)
        return obstacle.because if obstacle is not None and obstacle.reason == reason else ""

    others = {name: left for name, found in operators.items() if (left := found - CONTROL_FLOW)}
    elsewhere_because = ask("other_provider", others)
    if elsewhere_because and source == "graph":
        elsewhere_because = f"{provider} has no kernel for {', '.join(sorted(others.get(CPU, ())))}"
    strings = _strings(serving.signature, serving.model)
    dynamic = [node for node in nodes if not node.domain and node.op in DATA_DEPENDENT]
    shapes = why_unbounded(serving.model, serving.signature)
    if serving.alone_because:
        shapes = f"requests run one at a time, and only batches have buffers: {serving.alone_because}"
    control = [node for node in nodes if not node.domain and node.op in CONTROL_FLOW]
    tied = "their results have as many elements as values decide, so runs wait for the GPU" if dynamic else ""
    conditions = [
        _condition("no_control_flow", ask("control_flow", {provider: frozenset(node.op for node in control)}), control),
        _condition("one_provider", elsewhere_because, elsewhere),
        _condition("no_strings", strings, []),
        _condition("shapes_follow_from_rows", "" if _is_told(shapes, control, strings) else shapes, []),
        _condition("no_shapes_from_values", tied, dynamic),
        _condition("memory_stays", ask("shrinks_arena", {provider: frozenset()}), []),
    ]
    because = next((one.because for one in conditions if not one.holds), "")
    return Replay(provider, source, not because, [], because, conditions)


def _is_told(shapes: str, control: Sequence[Node], strings: str) -> bool:
    """Whether another condition has this reason already."""
    return bool((control and "control flow" in shapes) or (strings and "string" in shapes))


def _condition(name: str, because: str, nodes: Sequence[Node]) -> Condition:
    return Condition(name, not because, because, [described(node) for node in nodes[:_MOST_NODES]] if because else [])


def _strings(signature: ModelSignature, model: Model) -> str:
    for role, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            if spec.datatype.value == "BYTES":
                return f"{role} '{spec.name}' holds texts"
            if spec.is_sequence:
                return f"{role} '{spec.name}' is a sequence"
    name = next((name for name, tensor in model.graph.constants.items() if tensor.dtype == STRING), "")
    return f"the constant '{name}' holds texts" if name else ""


def _has_kernel(node: Node) -> bool:
    if node.op == "Cast" and node.attributes.get("to") == STRING:
        return False
    kernels: frozenset[str] = _ON_CUDA.get(node.domain, frozenset())
    return node.op in kernels and not any(
        isinstance(value, Tensor) and value.dtype == STRING for value in node.attributes.values()
    )


def has_cpu_fusions(model: Model) -> bool:
    """Whether a graph has operators that only fusions for the CPU make."""
    return any(
        node.domain == "com.microsoft.nchwc"
        or (node.domain == "com.microsoft" and node.op not in _ON_CUDA["com.microsoft"])
        for node in all_nodes(model)
    )
