"""Sequences of maps as tensors: the session's outputs, compared with ONNX Runtime's own maps."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import builders, interfaces
from ortserve.core.batch import Batch
from ortserve.engine.host_binding import can_bind
from ortserve.engine.instance import Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.engine.zip_maps import read_classes, score_edits
from ortserve.model_file.editing import edited_model
from ortserve.model_file.reading import read_model

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def opened(path: Path) -> Session:
    return open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))


def plain(path: Path) -> Session:
    return ort.InferenceSession(str(path), providers=[CPU])


@pytest.mark.parametrize("is_tree", [False, True], ids=["linear", "tree"])
@pytest.mark.parametrize("classes", [(0, 1), (7, -2, 2**40), ("no", "yes"), ("ä", "b c", "")], ids=str)
@pytest.mark.parametrize("rows", [1, 64])
def test_scores_equal_the_maps_in_class_order(
    path: Path, classes: Sequence[int] | Sequence[str], is_tree: bool, rows: int
) -> None:
    interfaces.zipmap_classifier(path, classes, is_tree=is_tree)
    content = path.read_bytes()
    session, x = opened(path), X[:rows, : len(classes)]
    assert read_classes(read_model(path)) == {"probabilities": classes}
    assert [(arg.name, arg.type, arg.shape) for arg in session.get_outputs()][1:] == [
        ("probabilities", "tensor(float)", [None, len(classes)])
    ]
    label, scores = session.run(None, {"x": x})
    expected_label, maps = plain(path).run(None, {"x": x})
    assert label.tolist() == expected_label.tolist()
    assert scores.tolist() == [[row[name] for name in classes] for row in maps]
    assert path.read_bytes() == content


@pytest.mark.parametrize("shape", [(0, 3), (2, 3), (3,)], ids=str)
def test_rows_without_and_with_strange_scores_keep_their_shape(path: Path, shape: tuple[int, ...]) -> None:
    declared: list[int | str] = ["batch", 3]
    interfaces.zipped_scores(path, shape=declared[-len(shape) :])
    x = np.resize(np.array([np.nan, -np.inf, -0.0, 1e-42, np.inf, 3.4e38], np.float32), shape)
    (scores,) = opened(path).run(None, {"x": x})
    assert scores.dtype == np.float32
    assert scores.tobytes() == x.tobytes()
    assert scores.shape == (len(plain(path).run(None, {"x": x})[0]), 3)


@pytest.mark.parametrize("width", [2, 4, 6])
def test_score_count_unlike_the_class_count_fails(path: Path, width: int) -> None:
    interfaces.zipped_scores(path, shape=("batch", "width"))
    for session in (plain(path), opened(path)):
        with pytest.raises(Exception, match="Non-zero status code"):
            session.run(None, {"x": np.zeros((2, width), np.float32)})


def test_external_weights_are_read_from_the_model_folder(path: Path) -> None:
    model = onnx.load(interfaces.zipped_scores(path))
    np.array([1, 2, 3], np.float32).tofile(path.with_name("weights.bin"))
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value="weights.bin")
    model.graph.initializer.append(weights)
    model.graph.node.insert(0, helper.make_node("Add", ["x", "w"], ["sum"]))
    model.graph.node[1].input[0] = "sum"
    path.write_bytes(model.SerializeToString())
    assert opened(path).run(None, {"x": np.zeros((1, 3), np.float32)})[0].tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname"])
def test_external_weights_outside_the_folder_are_rejected(path: Path, location: str) -> None:
    path = path.with_name("m") / "model.onnx"
    path.parent.mkdir()
    path.parent.with_name("secret.bin").write_bytes(bytes(12))
    model = onnx.load(interfaces.zipped_scores(path))
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value=location)
    model.graph.initializer.append(weights)
    model.graph.node.insert(0, helper.make_node("Add", ["x", "w"], ["sum"]))
    model.graph.node[1].input[0] = "sum"
    path.write_bytes(model.SerializeToString())
    for open_it in (opened, plain):
        with pytest.raises(Exception, match="External data path"):
            open_it(path)


def test_rest_of_the_model_is_unchanged(path: Path) -> None:
    model = onnx.load(interfaces.zipmap_classifier(path, ("a", "b")))
    model.doc_string = "x" * 300
    helper.set_model_props(model, {"author": "somebody"})
    model.graph.value_info.append(interfaces.maps(("a", "b")))
    model.graph.initializer.append(numpy_helper.from_array(np.arange(1000), "unused"))
    path.write_bytes(model.SerializeToString())
    edited = onnx.load_from_string(edited_model(path, score_edits(read_model(path))))
    onnx.checker.check_model(edited, full_check=True)
    assert [node.op_type for node in edited.graph.node] == ["LinearClassifier", "Scaler", "FeatureVectorizer"]
    assert not edited.graph.value_info
    for changed in ("node", "output", "value_info"):
        model.graph.ClearField(changed)
        edited.graph.ClearField(changed)
    assert edited == model


def test_runs_are_bound_to_buffers(path: Path) -> None:
    session = opened(interfaces.zipmap_classifier(path, (4, 9, 2)))
    signature = read_signature(session, read_model(path))
    assert can_bind(session, signature, None)
    instance = Instance(session, signature, name="m/1", intra_op_threads=1, clock=time.monotonic_ns)
    try:
        for rows in (8, 8, 3):
            label, scores = instance.run(Batch(((X[:rows],),), rows, rows)).outputs
            assert label.tolist() == [(4, 9, 2)[index] for index in X[:rows].argmax(axis=1)]
            np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-5)
    finally:
        instance.close()


def test_truncated_file_is_read_without_a_crash(path: Path) -> None:
    whole = interfaces.zipmap_classifier(path, ("a", "b")).read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        score_edits(read_model(path))
        assert read_classes(read_model(path)) in ({}, {"probabilities": ("a", "b")})


def test_models_without_map_outputs_are_opened_from_their_file(path: Path) -> None:
    for build in (builders.mlp, builders.sequence_output, builders.not_onnx):
        assert score_edits(read_model(build(path))) == {}
        assert read_classes(read_model(path)) == {}


def test_map_used_by_another_node_is_kept(path: Path) -> None:
    model = onnx.load(interfaces.zipmap_classifier(path))
    reader = helper.make_node("Reader", ["probabilities"], ["z"])
    body = helper.make_graph([reader], "body", [], [])
    for node in (reader, helper.make_node("If", ["c"], ["z"], then_branch=body)):
        del model.graph.node[2:]
        model.graph.node.append(node)
        path.write_bytes(model.SerializeToString())
        assert score_edits(read_model(path)) == {}
        assert read_classes(read_model(path)) == {}
