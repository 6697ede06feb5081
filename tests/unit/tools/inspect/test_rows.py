"""The trial of rows beside the verdict of the graph."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models import builders
from ortserve.tools.inspect.arguments import build_parser
from ortserve.tools.inspect.command import run
from servers import add_model


def large_sine(file: Path) -> Path:
    """A model whose rows the graph keeps apart. The sum of one row rounds otherwise, and the sine grows that."""
    nodes = [
        helper.make_node("ReduceSum", ["x", "axes"], ["sum"]),
        helper.make_node("Mul", ["sum", "scale"], ["large"]),
        helper.make_node("Sin", ["large"], ["y"]),
    ]
    constants = [
        numpy_helper.from_array(np.array([1]), "axes"),
        numpy_helper.from_array(np.array(1e5, np.float32), "scale"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 2048, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 1, 3])
    graph = helper.make_graph(nodes, "large_sine", [x], [y], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return file


def test_trial_against_the_configuration_is_a_finding(tmp_path: Path) -> None:
    model = add_model(tmp_path, "m", builders.row_mixer)
    (model / "model.yaml").write_text("batched: true\n")

    result = run(build_parser().read([str(model), "--batch", "1"])).result

    (found,) = (one for one in result.findings if one.kind == "batched_against_evidence")
    assert result.rows.trial
    assert found.seen.endswith(f"; {result.rows.trial}")


def test_rounding_of_proven_rows_is_shown_with_its_size(tmp_path: Path) -> None:
    rows = run(build_parser().read([str(large_sine(tmp_path / "m.onnx")), "--batch", "1"])).result.rows

    assert rows.verdict == "proven"
    assert rows.drift > 0.01
    assert rows.trial == (
        f"a row alone and among others differs by {rows.drift:.1e}, beyond the tolerance; as the graph keeps rows "
        "apart, this is rounding, which changes with the number of rows"
    )
