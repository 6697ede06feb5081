"""Models that ONNX Runtime does not survive, or does not compute, if their inputs are empty along some axis.

As in ``models.builders``, every builder writes a model file to ``path`` and returns ``path``.
"""

from pathlib import Path
from typing import Final

import onnx
from onnx import parser

from models.builders import OPSET

DECODER: Final = """decoder (
int32[b,s] input_ids, int32[b,s] position_ids, int32[b,t] attention_mask, float[2,b,1,p,1] past_0)
=> (float[b,s,3] logits, float[2,b,1,q,1] present_0) <
float[3,3] scores = {0, 1, 0, 0, 0, 1, 1, 0, 0}, float[2,3,1] states = {1, 2, 3, 4, 5, 6}, int64[1] heads = {2}> {
logits = Gather (scores, input_ids) s = Gather <axis = 1> (states, input_ids) h = Unsqueeze (s, heads)
present_0 = Concat <axis = 3> (past_0, h) }"""
"""A language model of three words, each of which is followed by the next one."""


def continued(path: Path) -> Path:
    """A language model that continues prompts: x INT32 [batch, length] → y INT32 [batch, 6]."""
    text = f"""m (int32[batch,length] x) => (int32[batch,6] y) <int32[1] most = {{6}}> {{
        y = com.microsoft.GreedySearch <
            model_type = 0, eos_token_id = 9, pad_token_id = 0, decoder = {DECODER}> (x, most) }}"""
    return _parsed(path, text)


def normalized_image(path: Path) -> Path:
    """An image of any size, normalized: x FP16 [batch, 2, height, width] → y, of the same shape."""
    text = """m (float16[batch,2,height,width] x) => (float16[batch,2,height,width] y) <float16[2] one = {15360, 15360}>
        { y = InstanceNormalization (x, one, one) }"""
    return _parsed(path, text)


def normalized_beside_a_cache(path: Path) -> Path:
    """A normalized signal beside a cache: x FP32 [batch, 2, length] → y; cache FP32 [batch, before, 4] → kept."""
    text = """m (float[batch,2,length] x, float[batch,before,4] cache) =>
        (float[batch,2,length] y, float[batch,before,4] kept) <float[2] one = {1, 1}>
        { y = InstanceNormalization (x, one, one) kept = Neg (cache) }"""
    return _parsed(path, text)


def continued_beside_a_cache(path: Path) -> Path:
    """As ``continued``, with a cache: cache FP32 [batch, before, 4] → kept."""
    text = f"""m (int32[batch,length] x, float[batch,before,4] cache) =>
        (int32[batch,6] y, float[batch,before,4] kept) <int32[1] most = {{6}}> {{
        kept = Neg (cache) y = com.microsoft.GreedySearch <
            model_type = 0, eos_token_id = 9, pad_token_id = 0, decoder = {DECODER}> (x, most) }}"""
    return _parsed(path, text)


def attention_scores(path: Path) -> Path:
    """Products of all pairs: x FP32 [batch, length, size] → y FP32 [batch, length, length]."""
    text = """m (float[batch,length,size] x) => (float[batch,length,others] y)
        { y = Einsum <equation = "...id,...jd->...ij"> (x, x) }"""
    return _parsed(path, text)


def attention_to_a_past(path: Path) -> Path:
    """Attention to a past: x FP32 [batch, 1, length, 4] and past [batch, 1, before, size] → y [batch, 1, length, 4]."""
    text = """m (float[batch,1,length,4] x, float[batch,1,before,size] past) => (float[batch,1,length,4] y,
        float[batch,1,all,4] k, float[batch,1,all,4] v) { y, k, v = Attention (x, x, x, , past, past) }"""
    return _parsed(path, text, opset=25)


def _parsed(path: Path, text: str, opset: int = OPSET) -> Path:
    imports = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]>'
    onnx.save(parser.parse_model(f"{imports} {text}"), path)
    return path
