"""Steps from file to file, against plain runs of ONNX Runtime."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import builders, interfaces
from ortserve.errors import ServeError
from ortserve.tools.inspect.placement import open_optimized
from ortserve.tools.optimize import steps
from ortserve.tools.optimize.files import MIN_EXTERNAL_BYTES, data_file, pack, prepare
from ortserve.tools.optimize.recognition import sizes_of
from ortserve.tools.subject import find_model

BIG = np.arange(MIN_EXTERNAL_BYTES, dtype=np.float32).reshape(32, 32) / 1000


def two_branches(path: Path) -> Path:
    """Outputs a = x·W and b = z·V with equal W and V, and branches of an If that also read V."""
    branch = helper.make_graph(
        [helper.make_node("MatMul", ["z", "V"], ["inner"])],
        "branch",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, ["batch", 32])],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["a"]),
        helper.make_node("MatMul", ["z", "V"], ["b"]),
        helper.make_node("If", ["yes"], ["c"], then_branch=branch, else_branch=branch),
    ]
    ends = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 32]) for name in "xzabc"}
    weights = [numpy_helper.from_array(BIG, "W"), numpy_helper.from_array(BIG, "V")]
    weights.append(numpy_helper.from_array(np.array(True), "yes"))
    graph = helper.make_graph(nodes, "two", [ends["x"], ends["z"]], [ends[name] for name in "abc"], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def run(path: Path, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(path)
    return dict(zip((one.name for one in session.get_outputs()), session.run(None, dict(feeds)), strict=True))


def feeds(rows: int = 3) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal((rows, 32), np.float32) for name in "xz"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return two_branches(tmp_path / "in" / "m.onnx")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir(exist_ok=True)
    return tmp_path / "out" / "m.onnx"


def assert_same(source: Path, target: Path) -> None:
    expected, got = run(source, feeds()), run(target, feeds())
    for name, value in got.items():
        np.testing.assert_array_equal(value, expected[name])


def test_equal_weights_are_kept_once(source: Path, target: Path) -> None:
    assert steps.share_weights(source, target) == ("1 duplicate weights",)
    assert {one.name for one in onnx.load(target).graph.initializer} == {"W", "yes"}
    assert_same(source, target)


def test_external_data_shrink_with_their_weights(source: Path, target: Path) -> None:
    packed = source.with_name("packed") / "m.onnx"
    packed.parent.mkdir()
    pack(source, packed)
    assert data_file(packed).stat().st_size >= 2 * BIG.nbytes
    steps.share_weights(packed, target)
    assert data_file(target).stat().st_size == BIG.nbytes
    assert_same(source, target)


def test_packing_takes_weights_out_of_any_external_file(tmp_path: Path, source: Path, target: Path) -> None:
    other = tmp_path / "in" / "other.onnx"
    onnx.save(onnx.load(source), other, save_as_external_data=True, location="strange.bin", size_threshold=0)
    pack(other, target)
    (tmp_path / "in" / "strange.bin").unlink()
    assert_same(source, target)


def test_a_model_without_large_weights_has_no_data_file(tmp_path: Path, target: Path) -> None:
    pack(builders.scalar_sum(tmp_path / "small.onnx"), target)
    assert not data_file(target).exists()


CORPUS = Path(__file__).parents[3] / "rows" / "corpus"


def test_maps_which_onnx_ir_does_not_know_are_no_obstacle(target: Path, tmp_path: Path) -> None:
    classifier = CORPUS / "lightgbm_classifier.onnx"
    prepare(classifier, target)
    assert target.samefile(classifier)
    pack(classifier, tmp_path / "packed.onnx")
    onnx.checker.check_model(tmp_path / "packed.onnx")


def test_nodes_are_put_in_order(target: Path) -> None:
    with pytest.raises(onnx.checker.ValidationError, match="topologically sorted"):
        onnx.checker.check_model(CORPUS / "half_cnn.onnx")
    prepare(CORPUS / "half_cnn.onnx", target)
    onnx.checker.check_model(target)


def test_missing_data_are_named(source: Path, target: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.onnx"
    pack(source, packed)
    data_file(packed).unlink()
    with pytest.raises(ServeError, match=r"its external data 'packed.onnx.data' are missing"):
        prepare(packed, target)


def test_sizes_are_written_without_a_copy_of_the_data(source: Path, target: Path) -> None:
    packed = source.with_name("packed") / "m.onnx"
    packed.parent.mkdir()
    pack(source, packed)
    steps.set_dimensions(packed, target, {"batch": 3}, {})
    assert data_file(target).stat().st_ino == data_file(packed).stat().st_ino
    assert_same(source, target)


def test_weights_that_callers_may_replace_are_not_shared(source: Path, target: Path) -> None:
    """Models of old exporters list weights among the inputs."""
    model = onnx.load(source)
    model.graph.input.append(helper.make_tensor_value_info("W", TensorProto.FLOAT, BIG.shape))
    onnx.save(model, source)
    steps.share_weights(source, target)
    replaced = feeds() | {"W": 2 * BIG}
    np.testing.assert_array_equal(run(target, replaced)["b"], run(source, replaced)["b"])


def test_outputs_are_kept_with_what_they_need(source: Path, target: Path) -> None:
    made = steps.keep_outputs(source, target, ("a",))
    graph = onnx.load(target).graph
    assert [one.name for one in graph.input] == ["x"]
    assert [one.name for one in graph.initializer] == ["W"]
    assert made == ("inputs that no node needs any more are removed: z",)
    np.testing.assert_array_equal(run(target, {"x": feeds()["x"]})["a"], run(source, feeds())["a"])


def test_what_inner_graphs_read_is_needed(source: Path, target: Path) -> None:
    steps.keep_outputs(source, target, ("c",))
    assert {one.name for one in onnx.load(target).graph.initializer} == {"V", "yes"}
    np.testing.assert_array_equal(run(target, {"z": feeds()["z"]})["c"], run(source, feeds())["c"])


def test_dimensions_are_named_and_fixed(source: Path, target: Path) -> None:
    steps.set_dimensions(source, target, {"rows": 3}, {("x", 0): "rows"})
    session = ort.InferenceSession(target)
    assert [one.shape for one in (*session.get_inputs(), *session.get_outputs())] == [[3, 32]] * 5
    assert_same(source, target)


def test_opsets_are_converted(source: Path, target: Path) -> None:
    steps.set_opset(source, target, 21)
    assert onnx.load(target).opset_import[0].version == 21
    assert_same(source, target)


@pytest.mark.parametrize(
    ("step", "arguments", "problem"),
    [
        (steps.keep_outputs, (("d",),), "expected outputs out of a, b, c, got d"),
        (steps.set_dimensions, ({"rows": 2}, {}), "expected dimensions out of batch, got rows"),
        (steps.set_dimensions, ({}, {("y", 0): "n"}), "expected an input or output out of x, z, a, b, c"),
        (steps.set_dimensions, ({}, {("x", 2): "n"}), "expected an axis below 2"),
        (steps.set_dimensions, ({}, {("x", 1): "n"}), "expected a free dimension, its size is 32"),
        (steps.set_opset, (999,), "--opset 999"),
    ],
)
def test_wrong_arguments_are_named(
    source: Path, target: Path, step: object, arguments: tuple[object, ...], problem: str
) -> None:
    assert callable(step)
    with pytest.raises(ServeError) as error:
        step(source, target, *arguments)
    assert problem in error.value.message


@pytest.mark.parametrize("step", [steps.fold, steps.share_weights, pack])
def test_outputs_that_are_maps_stay_maps(target: Path, tmp_path: Path, step: Callable[[Path, Path], object]) -> None:
    source = interfaces.zipmap_classifier(tmp_path / "maps.onnx")
    step(source, target)
    before, after = onnx.load(source), onnx.load(target)
    assert list(after.graph.output) == list(before.graph.output)
    x = np.array([[1, 2], [4, 3]], np.float32)
    assert run(target, {"x": x})["probabilities"] == run(source, {"x": x})["probabilities"]


def test_outputs_beside_maps_can_be_kept(target: Path, tmp_path: Path) -> None:
    steps.keep_outputs(interfaces.zipmap_classifier(tmp_path / "maps.onnx"), target, ["label"])
    assert [one.name for one in onnx.load(target).graph.output] == ["label"]


@pytest.mark.parametrize("name", ["transformers_bert", "transformers_distilbert", "transformers_vit"])
def test_heads_of_real_exports_are_read_from_shapes_with_free_sizes(name: str) -> None:
    source = find_model(str(Path(__file__).parents[3] / "rows" / "corpus" / f"{name}.onnx"))
    _, simplified = open_optimized(source, "CPUExecutionProvider", level="basic")

    assert sizes_of(simplified) == (2, 16)
