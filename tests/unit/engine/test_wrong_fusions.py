"""Fusions that change results: sessions answer as numpy does."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from ortserve.config.session import SessionSettings
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.engine.wrong_fusions import wrong_fusions
from ortserve.model_file.reading import read_model

_TURN = "t = Transpose <perm = [0, 2, 1]> (x)"


def write(folder: Path, inputs: str, nodes: str, constants: str = "") -> Path:
    text = f"m ({inputs}) => (float[n,d] y) <{constants}> {{ {nodes} }}".replace("<>", "")
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}'), str(folder / "model.onnx"))
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("inputs", "nodes", "constants"),
    [
        ("float[n,4,d] x, float[4] w", f"{_TURN} y = MatMul (t, w)", ""),
        ("float[n,4,d] x", f"{_TURN} y = MatMul (t, w)", "float[4] w = {1, 2, 3, 4}"),
        ("float[n,4,d] x", f"w = Constant <value = float[4] {{1, 2, 3, 4}}> () {_TURN} y = MatMul (t, w)", ""),
        ("float[n,4,d] x", f"w = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> () {_TURN} y = MatMul (t, w)", ""),
        ("float16[n,4,d] h, float[4] w", f"{_TURN.replace('(x)', '(h)')} c = Cast <to = 1> (t) y = MatMul (c, w)", ""),
        ("float[n,4,d] x, float[4] w", f"{_TURN} i = Identity (w) y = MatMul (t, i)", ""),
        ("float[n,4,d] x, float[4,1] v", f"{_TURN} i = Squeeze (v) y = MatMul (t, i)", ""),
        (
            "float[n,4,d] x, float[4] w",
            f"{_TURN} h = Mul (t, half) s = Add (h, h) y = MatMul (s, w)",
            "float half = {0.5}",
        ),
    ],
    ids=[
        "an input",
        "weights",
        "a constant",
        "a list",
        "behind a Cast",
        "a copy",
        "a column",
        "behind a moved Transpose",
    ],
)
@pytest.mark.parametrize("entry", ["", "ConstantFolding"])
def test_transposed_matrix_times_a_vector(tmp_path: Path, inputs: str, nodes: str, constants: str, entry: str) -> None:
    entries = {"optimization.disable_specified_optimizers": entry} if entry else {}
    options = SessionOptions(ProviderChoice(CPU), 1, SessionSettings(entries=entries))
    session = open_session(write(tmp_path, inputs, nodes, constants), "m/1", options)
    x, w = np.arange(24, dtype=np.float32).reshape(2, 4, 3), np.arange(1, 5, dtype=np.float32)
    given = {"x": x, "h": x.astype(np.float16), "w": w, "v": w[:, None]}
    (y,) = session.run(None, {arg.name: given[arg.name] for arg in session.get_inputs()})
    np.testing.assert_allclose(y, x.transpose(0, 2, 1) @ w, rtol=1e-6)


@pytest.mark.parametrize(
    "nodes",
    [
        f"{_TURN} y = MatMul (x, t)",
        f"{_TURN} y = MatMul (w, t)",
        "y = MatMul (x, w)",
    ],
    ids=["of matrices", "of a vector and a matrix", "not transposed"],
)
def test_other_products_are_fused(tmp_path: Path, nodes: str) -> None:
    assert wrong_fusions(read_model(write(tmp_path, "float[n,4,d] x", nodes, "float[4] w = {1, 2, 3, 4}"))) == ()
