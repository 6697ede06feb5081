from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from models import builders, patterns
from ortserve.errors import ServeError
from ortserve.model_file.reading import read_model
from ortserve.tools.quantize.arguments import build_parser
from ortserve.tools.quantize.making import LARGE_NBYTES, PreparedModel, calibrate, make, prepare
from ortserve.tools.quantize.plan import choose_settings, find_candidates
from ortserve.tools.quantize.result import Settings


def settings_of(words: str, path: Path) -> Settings:
    """The settings for arguments that begin with a mode."""
    given = build_parser().read(["m.onnx", "--mode", *words.split()])
    return choose_settings(given, read_model(path), {"avx512_vnni": True})


def prepared_by(words: str, path: Path, folder: Path, nbytes: int = 0) -> tuple[Settings, PreparedModel]:
    settings = settings_of(words, path)
    folder.mkdir()
    return settings, prepare(path, folder, settings, nbytes)


def run(path: Path, x: np.ndarray) -> np.ndarray:
    found: np.ndarray = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    return found


@pytest.mark.parametrize("words", ["dynamic", "weights --bits 8", "weights --bits 4"])
def test_a_large_model_keeps_its_weights_in_a_file_beside_it(words: str, tmp_path: Path) -> None:
    source = builders.mlp(tmp_path / "source.onnx", hidden=512)
    settings, prepared = prepared_by(words, source, tmp_path / "work", LARGE_NBYTES)
    candidates = find_candidates(read_model(prepared.path), settings, prepared.dtypes, (), "source")
    target = tmp_path / "made" / "out.onnx"
    target.parent.mkdir()

    make(prepared, target, settings, candidates.nodes)

    assert set(read_model(target).external_files) == {"out.onnx.data"}
    moved = tmp_path / "moved"
    target.parent.rename(moved)
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    np.testing.assert_allclose(run(moved / "out.onnx", x), run(source, x), atol=0.2)


def test_preparation_names_nodes_drops_wrong_shapes_and_converts_old_opsets(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], [name]) for name in ("a", "b")]
    nodes.append(helper.make_node("Add", ["a", "b"], ["y"]))
    ends, outputs = [patterns.value("x", "batch", 4)], [patterns.value("y", "batch", 4)]
    weights = {"w": np.eye(4, dtype=np.float32)}
    path = patterns.write(tmp_path / "old.onnx", nodes, ends, outputs, weights, opset=11)
    model = onnx.load(path)
    model.graph.value_info.append(patterns.value("a", "batch", 17))
    onnx.save(model, path)

    settings, prepared = prepared_by("dynamic --ops MatMul", path, tmp_path / "work")

    ready = onnx.load(prepared.path)
    assert prepared.notes == ("converted from opset 11 to 13",)
    assert len({node.name for node in ready.graph.node} - {""}) == len(ready.graph.node)
    found = find_candidates(read_model(prepared.path), settings, prepared.dtypes, (), "old")
    make(prepared, tmp_path / "out.onnx", settings, found.nodes)
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    np.testing.assert_allclose(run(tmp_path / "out.onnx", x), 2 * x, atol=0.1)


def test_opsets_that_cannot_be_converted_are_refused(tmp_path: Path) -> None:
    node = helper.make_node("Unknown", ["x"], ["y"])
    path = patterns.write(tmp_path / "m.onnx", [node], [patterns.value("x", 2)], [patterns.value("y", 2)], opset=12)
    settings = settings_of("dynamic", path)
    with pytest.raises(ServeError, match="expected opset 13 for these settings, the model has 12"):
        prepare(path, tmp_path, settings, 0)


@pytest.mark.parametrize("calibrator", ["minmax", "entropy", "percentile"])
def test_ranges_cover_all_samples_or_leave_out_rare_values(calibrator: str, tmp_path: Path) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv")
    ends, outputs = [patterns.value("x", "batch", 1, "h", "w")], [patterns.value("y", "batch", 1, "h", "w")]
    path = patterns.write(tmp_path / "m.onnx", [node], ends, outputs, {"w": np.ones((1, 1, 1, 1), np.float32)})
    settings, prepared = prepared_by(f"static --calibrator {calibrator}", path, tmp_path / "work")
    samples = np.random.default_rng(1).standard_normal((20, 1, 1, 100, 100)).astype(np.float32)
    samples[0, 0, 0, 0, 0] = 50.0
    samples[-1, 0, 0, 0, 0] = -6.0

    calibrate(prepared, settings, ({"x": one} for one in samples))
    make(prepared, tmp_path / "out.onnx", settings, {"conv": "Conv"})

    (scale,) = (one for one in onnx.load(tmp_path / "out.onnx").graph.initializer if one.name == "x_scale")
    width = float(onnx.numpy_helper.to_array(scale)) * 255
    assert width == pytest.approx(56) if calibrator == "minmax" else 4 < width < 40


def test_preparation_keeps_free_dimensions_and_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symbolic inference renames dimensions of this model, fails, and writes its state to the current folder."""
    source = Path(__file__).parents[3] / "rows" / "corpus" / "optimized_bert.onnx"
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    _, prepared = prepared_by("static", source, tmp_path / "work")
    assert list(Path.cwd().iterdir()) == []
    assert read_model(prepared.path).graph.outputs == read_model(source).graph.outputs


def test_old_models_that_list_their_weights_as_inputs_are_prepared(tmp_path: Path) -> None:
    """The inference makes weights of constant nodes, and lists them as inputs, too."""
    weight = np.eye(4, dtype=np.float32)
    nodes = [
        helper.make_node("Constant", [], ["c"], value=onnx.numpy_helper.from_array(np.ones(4, np.float32))),
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "c"], ["y"]),
    ]
    ends, outputs = [patterns.value("x", "batch", 4), patterns.value("w", 4, 4)], [patterns.value("y", "batch", 4)]
    path = patterns.write(tmp_path / "m.onnx", nodes, ends, outputs, {"w": weight}, opset=8)
    model = onnx.load(path)
    model.ir_version = 3
    onnx.save(model, path)

    settings, prepared = prepared_by("dynamic", path, tmp_path / "work")

    found = find_candidates(read_model(prepared.path), settings, prepared.dtypes, (), "old")
    make(prepared, tmp_path / "out.onnx", settings, found.nodes)
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    np.testing.assert_allclose(run(tmp_path / "out.onnx", x), x + 1, atol=0.1)


def test_weights_that_several_gemms_share_are_not_transposed_twice(tmp_path: Path) -> None:
    """Layers that start with equal weights share them after deduplication, as do an embedding and an output layer."""
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["a"], transB=1),
        helper.make_node("Gemm", ["a", "w"], ["b"], transB=1),
        helper.make_node("ArgMax", ["x"], ["i"], axis=1, keepdims=0),
        helper.make_node("Gather", ["w", "i"], ["row"]),
        helper.make_node("Add", ["b", "row"], ["y"]),
        helper.make_node("Gemm", ["y", "v"], ["c"], transB=1),
        helper.make_node("Gemm", ["c", "v"], ["z"], transB=1),
    ]
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal((4, 4)).astype(np.float32) for name in ("w", "v")}
    ends, outputs = [patterns.value("x", "batch", 4)], [patterns.value("z", "batch", 4)]
    path = patterns.write(tmp_path / "m.onnx", nodes, ends, outputs, weights)

    _, prepared = prepared_by("dynamic", path, tmp_path / "work")

    x = random.standard_normal((2, 4)).astype(np.float32)
    np.testing.assert_allclose(run(prepared.path, x), run(path, x), atol=1e-5)
    ready = onnx.load(prepared.path)
    assert {node.op_type for node in ready.graph.node} == {"MatMul", "Gather", "Add", "ArgMax"}
    assert {one.name for one in ready.graph.initializer} <= {"w", "w_untied", "v_untied"}
