"""The minimum numbers of axes, derived from the operators that read an input."""

from pathlib import Path

import onnx
import pytest
from onnx import parser

from ortserve.engine.corrections.least_axes import least_axes
from ortserve.model_file.reading import read_model


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Conv (x, w)", {"x": 3, "w": 3}),
        ("s = Cast <to = 1> (x) t = Relu (s) y = RoiAlign (t, w, w)", {"x": 4, "w": 2}),
        ('y = Einsum <equation = "...ij,j->...i"> (x, w)', {"x": 2, "w": 1}),
        ("s = ReverseSequence (x, w) y = Multinomial (x)", {"x": 2, "w": 1}),
        ("s = Reshape (x, w) y = Conv (s, s)", {"x": 0, "w": 0}),
        ("y = com.example.Conv (x, w)", {"x": 0, "w": 0}),
        ("y = com.microsoft.Attention (x, w)", {"x": 0, "w": 0}),
        ("y = Attention (x, x, x, , w, w)", {"x": 3, "w": 4}),
        ("y = com.microsoft.SparseAttention (q, q, q, q, q, q, q, q, q, x, w)", {"x": 2, "w": 2}),
    ],
    ids=[
        "direct",
        "behind others",
        "an equation",
        "the most",
        "reshaped",
        "another domain",
        "fused",
        "a past",
        "tables",
    ],
)
def test_operators_determine_the_least_axes_of_inputs(tmp_path: Path, nodes: str, expected: dict[str, int]) -> None:
    imports = '<ir_version: 8, opset_import: ["": 23, "com.microsoft": 1, "com.example": 1]>'
    model = parser.parse_model(f"{imports} m (float[n] x, float[n] w) => (float[n] y) {{ {nodes} }}")
    onnx.save(model, str(tmp_path / "model.onnx"))
    least = least_axes(read_model(tmp_path / "model.onnx"))
    assert {name: least.get(name, 0) for name in expected} == expected
