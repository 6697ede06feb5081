"""Models that receive requests of different shapes as one tensor, with the inputs that separate them."""

from pathlib import Path

import onnx
from onnx import parser

_HEAD = '<ir_version: 8, opset_import: ["" : 17]>'

_KINDS = """
kinds (float[total] X, int32[r] COUNT, float[a] ENDS, int32[z] STARTS, int32[m] LARGEST,
  int32[s, 1] SHAPE, float[f] FLAT)
=> (float[total] DOUBLE, float[r] SUM, int32[r] COUNTED, float[a] ENDED, int64[r] MOST,
  int32[s, 1] SHAPED, float[f] FLATTENED)
<float[1] zero = {0}, int64 axis = {0}, int64[1] one = {1}, int64[1] begin = {0}, int64[1] last = {-1},
 int64[1] far = {9223372036854775807}, float[1] two = {2}>
{
  DOUBLE = Mul (X, two)
  running = CumSum (X, axis)
  sums = Concat <axis = 0> (zero, running)
  upper = Slice (STARTS, one, far)
  lower = Slice (STARTS, begin, last)
  above = Gather (sums, upper)
  below = Gather (sums, lower)
  SUM = Sub (above, below)
  COUNTED = Identity (COUNT)
  ENDED = Identity (ENDS)
  size = Shape (LARGEST)
  requests = Shape (COUNT)
  MOST = Expand (size, requests)
  SHAPED = Identity (SHAPE)
  FLATTENED = Identity (FLAT)
}
"""

_DOUBLE = """
double (float[n] X) => (float[n] Y)
<float[1] two = {2}>
{
  Y = Mul (X, two)
}
"""


def kinds(path: Path) -> Path:
    """Returns the double of the joined ``X``, the sum of each request, and the values of each kind of batch input."""
    return _save(_KINDS, path)


def double(path: Path) -> Path:
    """Returns the double of the joined ``X``."""
    return _save(_DOUBLE, path)


def _save(text: str, path: Path) -> Path:
    onnx.save(parser.parse_model(f"{_HEAD} {text}"), str(path))
    return path
