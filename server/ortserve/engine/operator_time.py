"""Which operators take a time that the shapes of their inputs bound, and give outputs whose shapes these fix.

An operator that is in none of the tables is taken for one whose time depends on values, so that a new version of ONNX
or of ONNX Runtime can add operators without a change here. Sources: the operator schemas of ONNX 1.23 (``''`` and
``ai.onnx.ml``) and ``docs/ContribOperators.md`` of ONNX Runtime 1.31 (``com.microsoft``).
"""

from collections.abc import Mapping
from typing import Final

CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan", "SequenceMap"})
"""Operators of ONNX that run a graph of their own as often as values say."""

RANDOM: Final = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators of ONNX whose values differ from run to run, their shapes not."""

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
"""By operator of ONNX, the inputs whose values decide the shapes of its outputs."""

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
"""By domain, the operators whose time the shapes of their inputs bound, given the values of ``SHAPING_INPUTS``."""
