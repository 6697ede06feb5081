"""Models in which a tensor becomes empty in front of an operator that crashes then, or leaves its output unwritten.

A model cuts its input ``x``: the tensor ``t`` begins at the input ``from``. Each comes with the sizes of free axes, by
position.
"""

from typing import Final

from models.empty_inputs import DECODER

_CUT_AT: Final = "int64[1] long = {9223372036854775807}, int64[1] at = {0}, int64[1] next = {1}, int64[1] third = {2}"


def cut(inputs: str, outputs: str, nodes: str, weights: str = "") -> str:
    """A model in which the tensor ``t`` is ``x`` without what is in front of ``from`` along an axis."""
    return f"m ({inputs}, int64[1] from) => ({outputs}) <{_CUT_AT}{weights}> {{ t = Slice (x, from, long, {nodes} }}"


_QUANTIZED: Final = "{0}q = QuantizeLinear ({0}, half, zero) {1} = DequantizeLinear ({0}q, half, zero)"
_SCALES: Final = ", float half = {0.5}, uint8 zero = {0}"
EMPTY_INSIDE: Final = {
    "Concat": (cut("float[n,c] x, float[n,c] z", "float[n,e] y", "at) y = Concat <axis = 1> (t, z)"), (3, 2)),
    "Concat of quantized": (
        cut(
            "float[n,c] x, float[n,c] z",
            "float[n,e] y",
            f"at) {_QUANTIZED.format('t', 'u')} {_QUANTIZED.format('z', 'v')} c = Concat <axis = 1> (u, v) "
            f"{_QUANTIZED.format('c', 'y')}",
            _SCALES,
        ),
        (3, 2),
    ),
    "LSTM": (
        cut("float[s,b,2] x, float[1,8,2] w", "float[s,1,b,2] y", "next) y = LSTM <hidden_size=2> (t, w, w)"),
        (3, 2, 2),
    ),
    "LSTM with only its last state": (
        cut("float[s,b,2] x, float[1,8,2] w", "float[1,b,2] y", "next) , y = LSTM <hidden_size=2> (t, w, w)"),
        (3, 2, 2),
    ),
    "GRU": (
        cut("float[s,b,2] x, float[1,6,2] w", "float[s,1,b,2] y", "at) y = GRU <hidden_size=2> (t, w, w)"),
        (3, 2, 2),
    ),
    "InstanceNormalization": (
        cut(
            "float16[n,2,h,w] x",
            "float16[n,2,h,w] y",
            "third) y = InstanceNormalization (t, a, a)",
            ", float16[2] a = {15360, 15360}",
        ),
        (1, 2, 4, 4),
    ),
    "MatMul": (
        cut("float[n,c] x, float[c] z", "float[n] y", "next) u = Slice (z, from, long, at) y = MatMul (t, u)"),
        (2, 2),
    ),
    "MatMul of quantized": (
        cut(
            "float[n,c] x, float[c,m] z",
            "float[n,m] y",
            f"next) v = Slice (z, from, long, at) {_QUANTIZED.format('t', 'a')} {_QUANTIZED.format('v', 'b')} "
            f"c = MatMul (a, b) {_QUANTIZED.format('c', 'y')}",
            _SCALES,
        ),
        (2, 2),
    ),
    "MatMulInteger": (
        cut(
            "uint8[n,c] x, uint8[c,m] z", "int32[n,m] y", "next) v = Slice (z, from, long, at) y = MatMulInteger (t, v)"
        ),
        (2, 2),
    ),
    "ConvInteger": (
        cut("uint8[n,1,h,w] x, uint8[n,1,h,w] z", "int32[n,m,a,b] y", "third) y = ConvInteger (z, t)"),
        (1, 1, 4, 4),
    ),
    "ConvTranspose": (
        cut(
            "float[n,1,a,b,c] x",
            "float[n,1,d,e,f] y",
            "third) y = ConvTranspose (t, k)",
            ", float[1,1,2,2,2] k = {1, 2, 3, 4, 5, 6, 7, 8}",
        ),
        (1, 1, 2, 2, 2),
    ),
    "Attention": (cut("float[n,h,s,4] x", "float[n,h,s,4] y", "next) y = Attention (t, t, t)"), (1, 2, 4, 4)),
    "RoiAlign": (
        cut("float[n,c,h,w] x", "float[r,c,a,b] y", "third) y = RoiAlign (t, b, at)", ", float[1,4] b = {0, 0, 1, 1}"),
        (1, 1, 4, 4),
    ),
    "QuantizeLinear": (
        cut(
            "float[n,c] x",
            "uint8[n,c] y",
            "next) s = Slice (z, from, long, next) "
            "y = QuantizeLinear <axis = 1, block_size = 2, output_dtype = 2> (t, s)",
        ).replace("float[n,c] x", "float[n,c] x, float[n,2] z"),
        (2, 4),
    ),
    "SequenceAt": (
        cut(
            "int64[k] x, float[n] z",
            "float[n] y",
            "at) s = SequenceConstruct (z, z) p = Sub (t, t) y = SequenceAt (s, p)",
        ),
        (1,),
    ),
    "Einsum": (
        cut(
            "float[n,m,k] x, float[n,j,k] z",
            "float[n,m,j] y",
            'third) u = Slice (z, from, long, third) y = Einsum <equation = "bij,bkj->bik"> (t, u)',
        ),
        (2, 3, 4),
    ),
    "MatMul with a transposed factor": (
        cut(
            "float[n,m,k] x, float[n,j,k] z",
            "float[n,m,j] y",
            "third) u = Slice (z, from, long, third) v = Transpose <perm = [0, 2, 1]> (u) y = MatMul (t, v)",
        ),
        (2, 3, 4),
    ),
    "MatMul of transposed rows": (
        cut(
            "float[m,n,k] x, float[k,n,j] z",
            "float[n,m,j] y",
            "at) u = Transpose <perm = [1, 0, 2]> (t) v = Transpose <perm = [1, 0, 2]> (z) y = MatMul (u, v)",
        ),
        (2, 2, 2),
    ),
    "FusedMatMul": (
        cut(
            "float[n,m,k] x, float[n,j,k] z",
            "float[n,m,j] y",
            "third) v = Slice (z, from, long, third) y = com.microsoft.FusedMatMul <transB = 1> (t, v)",
        ),
        (2, 3, 4),
    ),
    "QGemm": (
        cut(
            "uint8[n,k] x, uint8[k,m] z",
            "float[n,m] y",
            "next) v = Slice (z, from, long, at) y = com.microsoft.QGemm (t, half, zero, v, half, zero)",
            _SCALES,
        ),
        (2, 2),
    ),
    "QLinearConcat": (
        cut(
            "uint8[n,k] x, uint8[n,m] z",
            "uint8[n,m] y",
            "at) y = com.microsoft.QLinearConcat <axis = 1> (half, zero, t, half, zero, z, half, zero)",
            _SCALES,
        ),
        (2, 2),
    ),
    "SkipLayerNormalization": (
        cut(
            "float[n,s,4] x, float[n,s,4] z",
            "float[n,s,4] y",
            "at) y = com.microsoft.SkipLayerNormalization (z, t, w)",
            ", float[4] w = {1, 2, 3, 4}",
        ),
        (2, 2, 4),
    ),
    "MultiHeadAttention": (
        cut(
            "float[n,s,h] x",
            "float[n,s,h] y",
            "third) y = com.microsoft.MultiHeadAttention <num_heads = 2, scale = 0.5> (t, t, t)",
        ),
        (2, 3, 8),
    ),
    "Unique": (cut("float[n,c] x", "float[n,c] y", "next) y = Unique <axis = 0> (t)"), (3, 2)),
    "Conv": (cut("float[n,c,h,w] x, float[n,c,h,w] z", "float[n,m,a,b] y", "third) y = Conv (z, t)"), (2, 2, 4, 4)),
    "FusedConv": (
        cut(
            "float[n,c,h,w] x, float[n,c,h,w] z",
            "float[n,m,a,b] y",
            'third) y = com.microsoft.FusedConv <activation = "Relu"> (z, t)',
        ),
        (2, 2, 4, 4),
    ),
    "QLinearConv": (
        cut(
            "uint8[n,1,h,w] x, uint8[n,1,h,w] z",
            "uint8[n,m,a,b] y",
            "third) y = QLinearConv (z, half, zero, t, half, zero, half, zero)",
            _SCALES,
        ),
        (1, 1, 4, 4),
    ),
    "QLinearConv with channels last": (
        cut(
            "uint8[n,1,h,w] x, uint8[n,h,w,1] z",
            "uint8[n,a,b,m] y",
            "third) y = com.microsoft.QLinearConv <channels_last = 1> (z, half, zero, t, half, zero, half, zero)",
            _SCALES,
        ),
        (1, 4, 4, 4),
    ),
    "Add of quantized": (
        cut(
            "float[n,c] x",
            "float[n,c] y",
            f"next) {_QUANTIZED.format('t', 'a')} b = DequantizeLinear (scales, half, zero) c = Add (a, b) "
            f"{_QUANTIZED.format('c', 'y')}",
            f"{_SCALES}, uint8[1] scales = {{3}}",
        ),
        (2, 3),
    ),
    "Mul of quantized": (
        cut(
            "float[n,c] x",
            "float[n,c] y",
            f"next) {_QUANTIZED.format('t', 'a')} b = DequantizeLinear (scales, half, zero) c = Mul (a, b) "
            f"{_QUANTIZED.format('c', 'y')}",
            f"{_SCALES}, uint8[1] scales = {{3}}",
        ),
        (2, 3),
    ),
    "QLinearAdd": (
        cut(
            "uint8[n,c] x, uint8[1] z",
            "uint8[n,c] y",
            "next) y = com.microsoft.QLinearAdd (t, half, zero, z, half, zero, half, zero)",
            _SCALES,
        ),
        (2, 3),
    ),
    "QLinearMul": (
        cut(
            "uint8[n,c] x, uint8[1] z",
            "uint8[n,c] y",
            "next) y = com.microsoft.QLinearMul (z, half, zero, t, half, zero, half, zero)",
            _SCALES,
        ),
        (2, 3),
    ),
    "DFT": (cut("int64[k] x, float[n,3,1] z", "float[n,3,2] y", "at) a = Sub (t, t) y = DFT (z, , a)"), (1,)),
    "Scan that reads other axes": (
        cut(
            "float[n,c] x",
            "float[c,n] y",
            "next) y = Scan <num_scan_inputs = 1, scan_input_axes = [1], body = b (float[n] v) => (float[n] w) "
            "{ w = Neg (v) }> (t)",
        ),
        (2, 3),
    ),
    "Scan that writes other axes": (
        cut(
            "float[n,c] x",
            "float[c,n] y",
            "next) y = Scan <num_scan_inputs = 1, scan_output_axes = [1], body = b (float[c] v) => (float[c] w) "
            "{ w = Neg (v) }> (t)",
        ),
        (2, 3),
    ),
    "SequenceErase": (
        cut(
            "int64[k] x, float[n] z",
            "float[n] y",
            "at) s = SequenceConstruct (z, z) p = Sub (t, t) e = SequenceErase (s, p) y = SequenceAt (e, first)",
            ", int64 first = {0}",
        ),
        (1,),
    ),
    "SequenceInsert": (
        cut(
            "int64[k] x, float[n] z",
            "float[n] y",
            "at) s = SequenceConstruct (z, z) p = Sub (t, t) e = SequenceInsert (s, z, p) y = SequenceAt (e, first)",
            ", int64 first = {0}",
        ),
        (1,),
    ),
    "FeatureVectorizer": (
        cut("float[n,2] x", "float[n,4] y", "at) y = ai.onnx.ml.FeatureVectorizer <inputdimensions = [2, 2]> (t, t)"),
        (3,),
    ),
    "DynamicQuantizeLSTM": (
        cut(
            "float[s,b,2] x, uint8[1,2,8] w",
            "float[s,1,b,2] y",
            "next) y = com.microsoft.DynamicQuantizeLSTM <hidden_size = 2> (t, w, w, , , , , , one, none, one, none)",
            ", float[1] one = {1}, uint8[1] none = {0}",
        ),
        (3, 2),
    ),
    "DynamicQuantizeMatMul": (
        cut(
            "float[n,k] x, uint8[k,m] z",
            "float[n,m] y",
            "next) v = Slice (z, from, long, at) y = com.microsoft.DynamicQuantizeMatMul (t, v, half, zero)",
            _SCALES,
        ),
        (2, 2),
    ),
    "MatMulIntegerToFloat": (
        cut(
            "uint8[n,k] x, uint8[k,m] z",
            "float[n,m] y",
            "next) v = Slice (z, from, long, at) y = com.microsoft.MatMulIntegerToFloat (t, v, half, half)",
            _SCALES,
        ),
        (2, 2),
    ),
    "QLinearMatMul": (
        cut(
            "uint8[n,k] x, uint8[k,m] z",
            "uint8[n,m] y",
            "next) v = Slice (z, from, long, at) y = QLinearMatMul (t, half, zero, v, half, zero, half, zero)",
            _SCALES,
        ),
        (2, 2),
    ),
    "Gemm of quantized": (
        cut(
            "float[n,k] x, float[k,m] z",
            "float[n,m] y",
            f"next) v = Slice (z, from, long, at) {_QUANTIZED.format('t', 'a')} {_QUANTIZED.format('v', 'b')} "
            "y = Gemm (a, b)",
            _SCALES,
        ),
        (2, 2),
    ),
    **{
        search: (
            cut(
                "int32[n,s] x",
                f"int32[{dims}] y",
                f"next) y = com.microsoft.{search} <model_type = 0, eos_token_id = 9, pad_token_id = 0, "
                f"decoder = {DECODER}> (t, most, {operands})",
                ", int32[1] most = {6}, int32[1] one = {1}, float[1] penalty = {1}",
            ),
            (2, 3),
        )
        for search, dims, operands in (
            ("BeamSearch", "n,1,l", "one, one, one, penalty"),
            ("GreedySearch", "n,l", "one"),
            ("Sampling", "n,l", "one"),
        )
    },
    "Attention to a past": (
        cut(
            "float[n,1,s,4] x, float[n,1,s,4] z",
            "float[n,1,s,4] y, float[n,1,u,4] k, float[n,1,u,4] v",
            "last) y, k, v = Attention (z, z, z, , t, t)",
            ", int64[1] last = {3}",
        ),
        (2, 1, 3, 4),
    ),
    "GroupQueryAttention": (
        cut(
            "float[n,1,64] x, int32[n] z",
            "float[n,1,32] y",
            "at) u = Slice (z, from, long, at) v = Sub (u, u) y = com.microsoft."
            "GroupQueryAttention <num_heads = 2, kv_num_heads = 1> (t, , , , , v, one)",
            ", int32 one = {1}",
        ),
        (2,),
    ),
    "QAttention": (
        cut(
            "uint8[n,s,8] x, uint8[8,24] w, float[24] b",
            "float[n,s,8] y",
            "at) y = com.microsoft.QAttention <num_heads = 2> (t, w, b, half, half, , zero, zero)",
            _SCALES,
        ),
        (2, 3),
    ),
    "LinearAttention": (
        cut(
            "float[n,s,h] x",
            "float[n,s,h] y",
            "third) y, p = com.microsoft."
            'LinearAttention <q_num_heads = 2, kv_num_heads = 2, update_rule = "linear"> (t, t, t)',
        ),
        (2, 3, 8),
    ),
    "MoE": (
        cut(
            "float[n,c] x, float[n,2] z, float[2,c,4] w, float[2,4,c] u",
            "float[n,c] y",
            "next) a = Slice (w, from, long, next) b = Slice (u, from, long, third) "
            "y = com.microsoft.MoE (t, z, a, , b)",
        ),
        (3, 4, 4),
    ),
    "QMoE": (
        cut(
            "float[n,c] x, float[n,1] z",
            "float[n,c] y",
            "next) y = com.microsoft.QMoE <expert_weight_bits = 8> (t, z, w, s, , w, s)",
            ", uint8[1,2,2] w = {1, 1, 1, 1}, float[1,2] s = {1, 1}",
        ),
        (3, 2),
    ),
    "RotaryEmbedding": (
        cut(
            "float[n,s,h] x, int64[n,s] z",
            "float[n,s,h] y",
            "third) y = com.microsoft.RotaryEmbedding <num_heads = 2> (t, z, c, c)",
            ", float[3,2] c = {1, 2, 3, 4, 5, 6}",
        ),
        (2, 3, 8),
    ),
    "SkipSimplifiedLayerNormalization": (
        cut(
            "float[n,s,4] x, float[n,s,4] z",
            "float[n,s,4] y",
            "at) y = com.microsoft.SkipSimplifiedLayerNormalization (z, t, w)",
            ", float[4] w = {1, 2, 3, 4}",
        ),
        (2, 2, 4),
    ),
}

COMPUTED_SINCE_1_32: Final = frozenset(
    {
        "FusedMatMul",
        "MatMul",
        "MatMul of transposed rows",
        "MatMul with a transposed factor",
        "QuantizeLinear",
    }
)
"""Those that ONNX Runtime computes without a check since 1.32."""
REJECTED_SINCE_1_32: Final = frozenset({"Attention", "LinearAttention", "MoE", "QMoE"})
"""Those that it rejects by itself since 1.32."""
