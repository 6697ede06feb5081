"""The axes of rows: from the graph, from the configuration, or from names that permit a trial."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from models import builders
from ortserve.config.model import ModelOptions
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.engine.model_signature import read_signature
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.model_file.reading import read_model
from ortserve.registry.load.row_axes import Grounds, RowAxes, find_row_axes
from rows.exported import CORPUS


def find(path: Path, **options: Any) -> RowAxes:
    return find_row_axes(read_model(path), ModelOptions.model_validate(options))


def applied(path: Path, **options: Any) -> ModelSignature:
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))
    return find(path, **options).apply(read_signature(session, read_model(path)))


def parsed(path: Path, text: str) -> Path:
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17]> {text}'), path)
    return path


def test_graph_that_keeps_rows_apart_is_proven_with_any_names_of_dimensions(tmp_path: Path) -> None:
    path = parsed(tmp_path / "m.onnx", "g (float[one,4] x) => (float[other,4] y) { y = Relu(x) }")
    signature = applied(path)
    assert find(path).grounds is Grounds.PROVEN
    assert signature.is_batched
    assert signature.rows_lead
    assert find(path, batched=True).grounds is Grounds.PROVEN
    assert applied(path, batched=False).unbatched_because == "its configuration says so"


def test_the_longest_axis_of_a_proof_is_that_of_the_signature(tmp_path: Path) -> None:
    squared = "s = Shape(x) c = Cast<to=6>(s) n, l = Split<axis=0>(c) p = Mul(l, l) f = Cast<to=1>(p) y = Div(x, f)"
    path = parsed(tmp_path / "m.onnx", f"g (float[n,l] x) => (float[n,l] y) {{ {squared} }}")
    assert applied(path).longest_axis == 1 << 15


def test_row_axes_are_found_in_the_graph() -> None:
    signature = applied(CORPUS / "torch_lstm_time_first.onnx")
    assert signature.is_batched
    assert {spec.batch_axis for spec in signature.inputs} == {1}
    assert not signature.rows_lead


def test_graph_in_which_rows_meet_is_reported_with_the_node(tmp_path: Path) -> None:
    path = builders.row_mixer(tmp_path / "m.onnx")
    found = find(path)
    reason = "rows may depend on each other: node 'ReduceMean #0': ReduceMean reduces along the axis of the rows"
    assert (found.grounds, found.is_mixed, found.known_dependence) == (Grounds.TRIED, True, reason)
    believed = find(path, batched=True)
    assert (believed.grounds, believed.doubt, believed.known_dependence) == (Grounds.CONFIGURED, reason, "")


@pytest.mark.parametrize(
    ("names", "is_batched"),
    [
        (("batch", "batch"), True),
        (("one", "other"), False),
        (("batch", "Addy_dim_0"), True),
        (("unk__7", "unk__8"), True),
    ],
)
def test_undecided_graph_is_tried_if_names_allow_it(tmp_path: Path, names: tuple[str, str], is_batched: bool) -> None:
    path = builders.in_sequence(tmp_path / "m.onnx", names)
    found = find(path)
    assert (found.grounds, found.known_dependence) == (Grounds.TRIED, None)
    assert "node 'SequenceConstruct #0'" in found.doubt
    assert applied(path).is_batched is is_batched
    assert applied(path, batched=True).is_batched, "as it is configured, with any names"


@pytest.mark.parametrize(
    ("q", "d", "nodes", "axes"),
    [
        ("float[nq,4]", "float[nd,4]", "y = Relu(q) z = Relu(d)", None),
        ("float[nq,4]", "float[nd,4]", "y = Mul(q, r) z = Mul(d, r)", None),
        ("float[n,4]", "float[n,4]", "y = Relu(q) z = Relu(d)", {"q": 0, "d": 0}),
        ("float[nq,4]", "float[nd,4]", "y = Relu(q) z = Add(q, d)", {"q": 0, "d": 0}),
        ("float[n,4]", "float[s,n,4]", "y = Relu(q) z = Relu(d)", {"q": 0, "d": 1}),
        ("float[q_dynamic_axes_1,4]", "float[d_dynamic_axes_1,4]", "y = Relu(q) z = Relu(d)", {"q": 0, "d": 0}),
    ],
)
def test_inputs_that_never_meet_have_equal_rows_only_if_their_names_say_so(
    tmp_path: Path, q: str, d: str, nodes: str, axes: dict[str, int] | None
) -> None:
    path = parsed(tmp_path / "m.onnx", f"g ({q} q, {d} d, float[4] r) => ({q} y, {d} z) {{ {nodes} }}")
    found = find(path)
    if axes is not None:
        assert (found.grounds, {name: found.inputs[name] for name in axes}) == (Grounds.PROVEN, axes)
        return
    assert "no node needs both inputs 'q' and 'd', so their dimensions 'nq' and 'nd' may differ" in found.doubt
    assert not applied(path).is_batched, "a request may have 1 query and 5 documents"
    assert applied(path, batched=True).is_batched


def test_configured_axes_are_proven_or_believed(tmp_path: Path) -> None:
    path = parsed(tmp_path / "m.onnx", "g (float[t,n,4] x, float[n,4] h) => (float[t,n,4] y) { y = Add(x, h) }")
    axes = {"x": {"batch_axis": 1}, "h": {"batch_axis": 0}}
    found = find(path, inputs=axes, outputs={"y": {"batch_axis": 1}})
    assert (found.grounds, dict(found.inputs), dict(found.outputs)) == (Grounds.PROVEN, {"x": 1, "h": 0}, {"y": 1})
    found = find(path, inputs=axes, outputs={"y": {"batch_axis": 0}})
    assert (found.grounds, dict(found.outputs)) == (Grounds.CONFIGURED, {"y": 0})
    shared = applied(path, inputs={"x": {"batch_axis": 0}, "h": {"batch_axis": "none"}})
    assert [spec.batch_axis for spec in shared.inputs] == [0, None]


def test_axis_that_is_fixed_carries_no_rows() -> None:
    x = TensorSpec("x", DataType.FP32, (-1, 4))
    found = RowAxes(Grounds.CONFIGURED, {"x": 1}, {"y": 0})
    signature = found.apply(ModelSignature((x,), (TensorSpec("y", DataType.FP32, (-1, 4)),)))
    assert signature.unbatched_because == "axis 1 of input 'x' is fixed at 4"
    found = RowAxes(Grounds.CONFIGURED, {"x": 0}, {"y": 2})
    signature = found.apply(ModelSignature((x,), (TensorSpec("y", DataType.FP32, (-1, 4)),)))
    assert signature.unbatched_because == "output 'y' has no axis 2"


def test_proven_axis_of_an_output_is_free_although_the_file_declares_one_row(tmp_path: Path) -> None:
    path = parsed(tmp_path / "m.onnx", "g (float[n,4] x) => (float[1,4] y) { y = Relu(x) }")
    assert applied(path).is_batched
    assert [spec.shape for spec in applied(path).outputs] == [(-1, 4)]
    signature = applied(CORPUS / "lightgbm_classifier.onnx")
    assert signature.is_batched
    assert [spec.shape for spec in signature.outputs] == [(-1,), (-1, 3)]


def test_initializers_have_no_rows_in_a_model_that_is_proven(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> g (float[n,4] x, float[4] w = {1, 2, 3, 4}) => (float[n,4] y) '
        "{ y = Mul(x, w) }"
    )
    onnx.save(model, tmp_path / "m.onnx")
    signature = applied(tmp_path / "m.onnx")
    assert [(spec.name, spec.batch_axis, spec.is_optional) for spec in signature.inputs] == [
        ("x", 0, False),
        ("w", None, True),
    ]


def test_file_that_is_not_onnx_uses_names_and_configuration(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(np.arange(100, dtype=np.uint8).tobytes())
    assert find(path).grounds is Grounds.TRIED
    assert find(path).doubt == "the file cannot be read as an ONNX model"
    assert find(path, batched=True).grounds is Grounds.CONFIGURED
