"""Whether batches can be replayed as CUDA graphs: the conditions of the loader, and the nodes that violate them."""

from collections.abc import Mapping, Sequence
from typing import Final

from ortserve.config.session import SessionSettings
from ortserve.device.preparation import why_no_replay
from ortserve.engine.bounded_time import CONTROL_FLOW, DATA_DEPENDENT
from ortserve.engine.placement import COPIES
from ortserve.engine.provider_options import CPU, CUDA
from ortserve.model_file.graph import STRING, Model, Node, Tensor, all_nodes
from ortserve.registry.load.loaded_model import LoadedModel
from ortserve.tools.inspect.content import described
from ortserve.tools.inspect.patterns import Wiring, shape_nodes
from ortserve.tools.inspect.result import Condition, Placement, Replay

_MAX_NODES: Final = 10

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
"""Operators by domain with CUDA kernels for any datatype: docs/OperatorKernels.md of ONNX Runtime."""


def predict_replay(simplified: Model, settings: SessionSettings, shapes_vary: str) -> Replay:
    """Predict whether CUDA graphs can be captured on a machine with CUDA, from the list of its kernels.

    Args:
        simplified: The graph before providers take nodes.
        settings: The settings of sessions.
        shapes_vary: Why the number of rows does not fix all shapes; empty if it does.
    """
    shapes = {id(node) for node in shape_nodes(Wiring.of(simplified.graph))}
    calls = {(domain, name) for domain, name, _ in simplified.functions}
    nodes = [node for node in all_nodes(simplified) if node.op != "Constant" and (node.domain, node.op) not in calls]
    missing = [node for node in nodes if not _has_kernel(node) and id(node) not in shapes]
    operators = {CUDA: {node.op for node in nodes if _has_kernel(node)}, CPU: {node.op for node in missing}}
    return _judge("predicted", operators, missing, nodes, settings, shapes_vary)


def judge_replay(optimized: Model, settings: SessionSettings, shapes_vary: str, placement: Placement) -> Replay:
    """Judge whether CUDA graphs can be captured, from the placement of a session on CUDA and its optimized graph."""
    nodes = list(all_nodes(optimized))
    operators = {name: set(kinds) for name, kinds in placement.operators.items()}
    elsewhere = set[str]().union(*(kinds for name, kinds in operators.items() if name != CUDA))
    suspects = [node for node in nodes if node.op in elsewhere - operators.get(CUDA, set())]
    return _judge("placed", operators, suspects, nodes, settings, shapes_vary)


def with_captures(replay: Replay, loaded: LoadedModel) -> Replay:
    """Add the result of the captures of a load. A load on another provider captures nothing and changes nothing."""
    sizes = loaded.on_device.replayed
    because = loaded.on_device.no_replay_because or loaded.on_device.no_buffers_because
    if loaded.execution_provider != CUDA or not (sizes or because):
        return replay
    conditions = [*replay.conditions, Condition("captured", because, [])]
    return Replay("captured", bool(sizes), list(sizes), conditions)


def _judge(
    source: str,
    operators: Mapping[str, set[str]],
    elsewhere: Sequence[Node],
    nodes: Sequence[Node],
    settings: SessionSettings,
    shapes_vary: str,
) -> Replay:
    def ask(reason: str, kinds: Mapping[str, set[str]]) -> str:
        present = {name: frozenset(found) for name, found in kinds.items() if found}
        obstacle = why_no_replay(CUDA, present, settings)
        return obstacle.because if obstacle is not None and obstacle.reason == reason else ""

    others = {name: found - CONTROL_FLOW for name, found in operators.items()}
    other_provider = ask("other_provider", others)
    if other_provider and source == "predicted":
        other_provider = f"{CUDA} has no kernel for {', '.join(sorted(others[CPU]))}"
    control = [node for node in nodes if not node.domain and node.op in CONTROL_FLOW]
    dynamic = [node for node in nodes if not node.domain and node.op in DATA_DEPENDENT]
    copies = [node for node in nodes if node.op in COPIES]
    waits = "the size of their results depends on values, so each run waits for the GPU" if dynamic else ""
    copied = f"ONNX Runtime inserted {len(copies)} copies between the host and the device" if copies else ""
    conditions = [
        _condition("no_control_flow", ask("control_flow", {CUDA: {node.op for node in control}}), control),
        _condition("one_provider", other_provider, elsewhere),
        _condition("shapes_follow_from_rows", shapes_vary, []),
        _condition("no_shapes_from_values", waits, dynamic),
        _condition("memory_stays", ask("shrinks_arena", {}), []),
        _condition("no_copies", copied, copies),
    ]
    return Replay(source, not any(one.fails_because for one in conditions), [], conditions)


def _condition(name: str, because: str, nodes: Sequence[Node]) -> Condition:
    return Condition(name, because, [described(node) for node in nodes[:_MAX_NODES]] if because else [])


def _has_kernel(node: Node) -> bool:
    values = node.attributes.values()
    holds_texts = any(isinstance(value, Tensor) and value.dtype == STRING for value in values)
    makes_texts = node.op == "Cast" and node.attributes.get("to") == STRING
    return node.op in _ON_CUDA.get(node.domain, ()) and not holds_texts and not makes_texts
