"""Gather of texts: whole slices, as ONNX defines them; other nodes are unchanged."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from ortserve.engine.corrections.replaced_nodes import replacement_edits
from ortserve.engine.ort_errors import ORT_ERRORS
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.model_file.reading import read_model

TEXTS = np.array([f"ä{number}" for number in range(24)], object).reshape(2, 3, 4)


def write(folder: Path, inputs: str, nodes: str, opset: int = 21, **constants: np.ndarray) -> Path:
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "ai.onnx.ml": 2]> m ({inputs}) => (string y) {{ {nodes} }}'
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    onnx.save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


def opened(path: Path) -> Session:
    return open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))


@pytest.mark.parametrize(("dtype", "opset"), [(np.int32, 12), (np.int64, 21)])
@pytest.mark.parametrize("indices", [1, [1, 0, -1], [[0], [1]], []], ids=["scalar", "list", "matrix", "nothing"])
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_slices_are_whole(tmp_path: Path, axis: int, indices: object, dtype: type, opset: int) -> None:
    path = write(tmp_path, "string[a,b,c] x", f"y = Gather <axis = {axis}> (x, i)", opset, i=np.array(indices, dtype))
    (found,) = opened(path).run(None, {"x": TEXTS})
    expected = np.take(TEXTS, np.array(indices, np.int64), axis)
    assert found.shape == expected.shape
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "nodes",
    ["h = StringConcat (x, empty)", 'h = ai.onnx.ml.LabelEncoder <keys_strings=["-"], values_strings=["-"]> (x)'],
    ids=["StringConcat", "LabelEncoder"],
)
@pytest.mark.parametrize("axis", [1, -2])
def test_slices_of_computed_texts_are_whole(tmp_path: Path, axis: int, nodes: str) -> None:
    nodes = nodes.replace("> (x)", ', default_string="ä"> (x)')
    nodes = f"{nodes} y = Gather <axis = {axis}> (h, i)"
    path = write(tmp_path, "string[a,b,c] x", nodes, i=np.array([1, 0]), empty=np.array([""], object))
    (found,) = opened(path).run(None, {"x": TEXTS})
    expected = TEXTS[:, [1, 0]] if "StringConcat" in nodes else np.full((2, 2, 4), "ä", object)
    assert found.tolist() == expected.tolist()


def test_slices_in_a_branch_are_whole(tmp_path: Path) -> None:
    branches = (
        "then_branch = t () => (u) { u = Gather <axis = 1> (x, i) }, else_branch = e () => (v) { v = Identity (x) }"
    )
    path = write(tmp_path, "string[a,b,c] x, bool c", f"y = If (c) <{branches}>", i=np.array([1, 0]))
    (found,) = opened(path).run(None, {"x": TEXTS, "c": np.array(True)})
    assert found.tolist() == TEXTS[:, [1, 0]].tolist()


@pytest.mark.parametrize("texts", [TEXTS[:0], TEXTS[:, :, :0]], ids=["no rows", "no columns"])
def test_gather_of_empty_texts_is_empty(tmp_path: Path, texts: np.ndarray) -> None:
    path = write(tmp_path, "string[a,b,c] x", "y = Gather <axis = 1> (x, i)", i=np.array([1, 0]))
    (found,) = opened(path).run(None, {"x": texts})
    assert found.shape == (len(texts), 2, texts.shape[2])


def test_table_of_texts_is_looked_up_by_row(tmp_path: Path) -> None:
    path = write(tmp_path, "int64[n] i", "y = Gather (table, i)", table=TEXTS.reshape(6, 4))
    session = opened(path)
    (found,) = session.run(None, {"i": np.array([5, -6])})
    assert found.tolist() == [TEXTS[1, 2].tolist(), TEXTS[0, 0].tolist()]
    with pytest.raises(ORT_ERRORS):
        session.run(None, {"i": np.array([6])})


@pytest.mark.parametrize(
    "nodes",
    [
        "t = Transpose <perm = [1, 0]> (x) y = Gather (t, i)",
        "t = Cast <to = 8> (f) y = Gather (t, i)",
        "t = StringConcat (x, x) y = Gather (t, i)",
        "t, u = Split <num_outputs = 2> (x) y = Gather (u, i)",
    ],
    ids=["Transpose", "Cast", "StringConcat", "Split"],
)
def test_texts_that_nodes_make_are_found(tmp_path: Path, nodes: str) -> None:
    path = write(tmp_path, "string[a,b] x, float[a,b] f, int64[n] i", nodes)
    assert list(replacement_edits(read_model(path))) == [(1, "y")]


@pytest.mark.parametrize(
    ("inputs", "nodes", "opset"),
    [
        ("string[a] x, int64[n] i", "y = Gather (x, i)", 21),
        ("string[a,b] x, int64[n] i", "y = Gather <axis = 1> (x, i)", 21),
        ("float[a,b] x, int64[n] i", "z = Gather (x, i) y = Cast <to = 8> (z)", 21),
        ("string[a,b] x, int64[n] i", "y = Gather (x, i)", 11),
    ],
    ids=["a list", "columns", "numbers", "before batch_dims"],
)
def test_other_gathers_stay_as_they_are(tmp_path: Path, inputs: str, nodes: str, opset: int) -> None:
    assert replacement_edits(read_model(write(tmp_path, inputs, nodes, opset))) == {}
