"""Decides whether the time of a model's runs follows from the number of rows alone, as runs on the event loop require.

A dataflow analysis of the model's graph tracks the tensors whose values depend only on the model and on the shapes of
its inputs: initializers, constants, ``Shape``, and results computed from these. If shapes depend on other values, or a
node runs a graph of its own, the time of a run depends on the values of a request.

An operator in none of the tables is taken for one whose time depends on values, so that new versions of ONNX and ONNX
Runtime may add operators. Sources: the operator schemas of ONNX 1.23 (``''`` and ``ai.onnx.ml``) and
``docs/ContribOperators.md`` of ONNX Runtime 1.31 (``com.microsoft``).
"""

from collections.abc import Mapping, Sequence
from typing import Final

from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature
from ortserve.model_file.graph import STRING, Function, Model, Node, Tensor

MAX_NODES: Final = 1000
"""Maximum of nodes and initializers of a bounded model; nodes of a function count at each call. With more nodes, ONNX
Runtime takes longer than a run on the event loop may last."""

CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan", "SequenceMap"})
"""Operators of ONNX that run a graph of their own. Values decide how often it runs."""

RANDOM: Final = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators of ONNX whose results, but not their shapes, differ between runs."""

DATA_DEPENDENT: Final = frozenset({"Compress", "MaxRoiPool", "NonMaxSuppression", "NonZero", "RoiAlign", "Unique"})
"""Operators of ONNX whose time or output shapes depend on the values of any of their inputs."""

_REDUCTIONS: Final = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")

SHAPING_INPUTS: Final[Mapping[str, tuple[int, ...]]] = {
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "DFT": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1, 2, 3, 4),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1, 2),
    "TopK": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
    **{f"Reduce{kind}": (1,) for kind in _REDUCTIONS},
}
"""The inputs whose values decide the shapes of the outputs, by operator of ONNX."""

_ONNX: Final = """
    Abs Acos Acosh Add Affine And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization BitCast
    BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu Clip Concat Constant Conv ConvInteger
    ConvTranspose Cos Cosh CumProd CumSum DepthToSpace DequantizeLinear Det Div DynamicQuantizeLinear Einsum Elu Equal
    Erf Exp EyeLike Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool
    GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HardSigmoid HardSwish Hardmax Identity
    InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax
    LpNormalization LpPool MatMul MatMulInteger Max MaxPool Mean MeanVarianceNormalization Min Mish Mod Mul Neg Not Or
    PRelu Pow QLinearConv QLinearMatMul QuantizeLinear RMSNormalization RNN Reciprocal Relu ReverseSequence
    RotaryEmbedding Round Scatter ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Softmax
    Softplus Softsign SpaceToDepth Sqrt Sub Sum Swish Tan Tanh TensorScatter ThresholdedRelu Transpose Trilu Where Xor
"""

_ONNX_ML: Final = """
    ArrayFeatureExtractor Binarizer FeatureVectorizer Imputer LabelEncoder LinearClassifier LinearRegressor Normalizer
    OneHotEncoder SVMClassifier SVMRegressor Scaler TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor ZipMap
"""

_MICROSOFT: Final = """
    Attention BiasAdd BiasDropout BiasGelu BiasSoftmax BiasSplitGelu CDist DequantizeLinear DynamicQuantizeLSTM
    DynamicQuantizeMatMul EmbedLayerNormalization FastGelu FusedConv FusedGemm FusedMatMul FusedMatMulActivation
    GatherND Gelu GroupNorm GroupQueryAttention Inverse IsAllFinite MatMulBnb4 MatMulInteger16 MatMulIntegerToFloat
    MatMulNBits MultiHeadAttention NhwcConv NhwcFusedConv NhwcMaxPool QAttention QEmbedLayerNormalization QGemm
    QLinearAdd QLinearAveragePool QLinearConcat QLinearConv QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul
    QLinearReduceMean QLinearSigmoid QLinearSoftmax QLinearWhere QMoE QuantizeLinear QuickGelu RotaryEmbedding
    SkipGroupNorm SkipLayerNormalization SkipSimplifiedLayerNormalization TransposeMatMul Trilu
"""

BOUNDED: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset(_ONNX.split()) | RANDOM | SHAPING_INPUTS.keys(),
    "ai.onnx.ml": frozenset(_ONNX_ML.split()),
    "com.microsoft": frozenset(_MICROSOFT.split()),
}
"""The operators whose time follows from the shapes of their inputs and the values of ``SHAPING_INPUTS``, by domain."""

_STRING_CONSTANTS: Final = frozenset({"value_string", "value_strings"})
_TOO_LARGE: Final = f"the graph has more than {MAX_NODES} nodes and initializers"


def why_unbounded(model: Model, signature: ModelSignature) -> str:
    """The reason why the time of a run does not follow from the number of rows; empty if it does."""
    if signature.ragged is not None:
        return "the requests of a batch are joined, whatever their shapes"
    if because := _why_shapes_vary(signature):
        return because
    if not model.is_readable:
        return "the model file cannot be read as ONNX"
    return _Walk(model).why_unbounded({spec.name for spec in signature.inputs})


def _why_shapes_vary(signature: ModelSignature) -> str:
    for role, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            if spec.datatype is DataType.BYTES:
                return f"{role} '{spec.name}' holds strings"
    for spec in signature.inputs:
        if signature.is_batched and spec.is_optional and spec.batch_axis is None:
            return f"a request with input '{spec.name}' runs alone, with any number of rows"
        if spec.has_any_shape or -1 in spec.row_shape:
            return f"the number of rows does not fix the shape of input '{spec.name}'"
    return ""


class _Walk:
    """One walk over the nodes of a model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._left = MAX_NODES

    def why_unbounded(self, fed: set[str]) -> str:
        """See the function ``why_unbounded``; the inputs ``fed`` have fixed shapes but any values."""
        graph = self._model.graph
        self._left -= len(graph.constants)
        if self._left < 0 or len(graph.nodes) > MAX_NODES:
            return _TOO_LARGE
        for name, tensor in graph.constants.items():
            if tensor.dtype == STRING:
                return f"initializer '{name}' holds strings"
        # A request may replace the value of an initializer that is also an input.
        return self._why_nodes(graph.nodes, graph.constants.keys() - fed)

    def _why_nodes(self, nodes: Sequence[Node], fixed: set[str]) -> str:
        """The reason why the time of these nodes is not bounded. Adds the tensors with fixed values to ``fixed``."""
        for node in nodes:
            self._left -= 1
            if self._left < 0:
                return _TOO_LARGE
            function = self._model.functions.get((node.domain, node.op, node.overload))
            why = self._why_node(node, fixed) if function is None else self._why_function(node, function, fixed)
            if why:
                return why
        return ""

    def _why_node(self, node: Node, fixed: set[str]) -> str:
        is_fixed = all(not name or name in fixed for name in node.inputs)
        if not node.domain:
            if node.op in CONTROL_FLOW:
                return f"{_described(node)} is control flow"
            if node.op in DATA_DEPENDENT:
                if not is_fixed:
                    return f"the time of {_described(node)} depends on values"
            elif node.op not in BOUNDED[""]:
                return f"the time of {_described(node)} is not known to be bounded by its shapes"
            for index in SHAPING_INPUTS.get(node.op, ()):
                name = node.inputs[index] if index < len(node.inputs) else ""
                if name and name not in fixed:
                    return f"{_described(node)} takes a shape from values, through its input '{name}'"
            if _makes_strings(node):
                return f"{_described(node)} produces strings"
            is_fixed = (is_fixed or node.op in ("Shape", "Size")) and node.op not in RANDOM
        elif node.op not in BOUNDED.get(node.domain, ()):
            return f"the time of {_described(node)} is not known to be bounded by its shapes"
        if is_fixed:
            fixed.update(node.outputs)
        return ""

    def _why_function(self, node: Node, function: Function, fixed: set[str]) -> str:
        """Analyse the body of a function, called with the node's inputs; see ``_why_node``."""
        given = zip(function.inputs, node.inputs, strict=False)  # a call may omit the last inputs
        inside = {inner for inner, outer in given if not outer or outer in fixed}
        inside.update(function.inputs[len(node.inputs) :])
        why = self._why_nodes(function.nodes, inside)
        if not why:
            pairs = zip(function.outputs, node.outputs, strict=False)
            fixed.update(outer for inner, outer in pairs if inner in inside)
        return why


def _described(node: Node) -> str:
    operator = f"{node.domain}.{node.op}" if node.domain else node.op
    return f"node '{node.name}' ({operator})" if node.name else f"a node ({operator})"


def _makes_strings(node: Node) -> bool:
    value = node.attributes.get("value")
    if node.op == "Constant":
        has_text = not _STRING_CONSTANTS.isdisjoint(node.attributes)
        return has_text or (isinstance(value, Tensor) and value.dtype == STRING)
    return node.op == "Cast" and node.attributes.get("to") == STRING
