from pathlib import Path

import numpy as np
from onnx import helper

from models import patterns
from ortserve.tools.inputs import choose_inputs
from ortserve.tools.opening import open_model
from ortserve.tools.speed import Timed, _Runner
from ortserve.tools.subject import Subject


def test_a_model_whose_rows_meet_is_run_in_the_form_of_the_first_one(tmp_path: Path) -> None:
    """The first model has its rows on axis 1. The second does not show its axis; its fixed axis 0 rejects others."""
    x, y = patterns.value("x", 4, "batch", 3), patterns.value("y", 4, "batch", 3)
    nodes = [helper.make_node("ReduceMean", ["x"], ["mean"]), helper.make_node("Sub", ["x", "mean"], ["y"])]
    first = patterns.write(tmp_path / "first.onnx", [helper.make_node("Relu", ["x"], ["y"])], [x], [y], {})
    second = patterns.write(tmp_path / "second.onnx", nodes, [x], [y], {})
    feeds = [{"x": np.zeros((1, 4, 3), np.float32)}]
    runner = _Runner(Timed(Subject("second", second)), feeds)
    runner.open(1, _Runner(Timed(Subject("first", first)), feeds).open(1, None))
    assert runner.run(1).runs == 1


def test_a_scalar_that_all_rows_share_is_passed_as_an_array(tmp_path: Path) -> None:
    x, scale, y = patterns.value("x", "batch", 3), patterns.value("scale"), patterns.value("y", "batch", 3)
    nodes = [helper.make_node("Mul", ["x", "scale"], ["y"])]
    opened = open_model(Subject("scaled", patterns.write(tmp_path / "scaled.onnx", nodes, [x, scale], [y], {})))
    arrays = choose_inputs(opened).take(4, 0)

    (got,) = opened.runner().run(opened.for_model(arrays))

    assert opened.signature.is_batched
    np.testing.assert_array_equal(got, arrays[0] * arrays[1][0])
