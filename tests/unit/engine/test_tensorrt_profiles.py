"""What TensorRT is told of the batches that will come; it is not there to take it."""

from collections.abc import Sequence

import pytest

from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.engine.tensorrt_profiles import profile_shapes

IMAGE = TensorSpec("image", DataType.FP32, (-1, 3, 8, 8))
SCALE = TensorSpec("scale", DataType.FP32, (-1,))
TOKENS = TensorSpec("tokens", DataType.INT64, (-1, -1))


@pytest.mark.parametrize(
    ("inputs", "sizes", "given", "expected"),
    [
        ((IMAGE,), (8, 1, 4), {}, ["image:1x3x8x8", "image:8x3x8x8", "image:8x3x8x8"]),
        ((IMAGE, SCALE), (2,), {}, ["image:2x3x8x8,scale:2"] * 3),
        ((IMAGE,), (), {}, []),
        ((IMAGE,), (2,), {"trt_profile_max_shapes": "image:9x3x8x8"}, []),
        ((TOKENS,), (2,), {}, []),
        ((TensorSpec("a:b", DataType.FP32, (-1, 2)),), (2,), {}, []),
    ],
)
def test_one_profile_spans_all_sizes(
    inputs: tuple[TensorSpec, ...], sizes: Sequence[int], given: dict[str, str], expected: list[str]
) -> None:
    made = profile_shapes(ModelSignature(inputs, inputs), sizes, given)
    assert list(made.values()) == expected
    assert list(made) == [f"trt_profile_{bound}_shapes" for bound in ("min", "opt", "max")][: len(expected)]


def test_an_unbatched_model_has_none() -> None:
    assert profile_shapes(ModelSignature((IMAGE,), (IMAGE,), "why not"), (2,), {}) == {}
