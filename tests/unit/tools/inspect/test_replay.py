"""The conditions of CUDA graphs on a machine without CUDA, each with a model that violates it alone."""

from pathlib import Path

import pytest

import gpu_models
from models import builders, patterns
from ortserve.config.session import SessionSettings
from ortserve.core.dtypes import DataType
from ortserve.tools.inspect.arguments import build_parser
from ortserve.tools.inspect.command import run
from ortserve.tools.inspect.replay import predict_replay
from ortserve.tools.inspect.result import Replay
from ortserve.tools.opening import open_model
from ortserve.tools.subject import find_model

CORPUS = Path(__file__).parents[3] / "rows" / "corpus"


def replay(model: Path) -> Replay:
    found = run(build_parser().read([str(model), "--no-run"])).result.replay
    assert isinstance(found, Replay)
    return found


def broken(found: Replay) -> dict[str, tuple[str, list[str]]]:
    return {one.name: (one.fails_because, one.nodes) for one in found.conditions if one.fails_because}


@pytest.mark.parametrize("name", ["dynamo_cnn", "torch_mlp", "dynamo_gru_with_lengths", "transformers_vit"])
def test_model_that_breaks_no_condition_is_capturable(name: str) -> None:
    found = replay(CORPUS / f"{name}.onnx")

    assert (found.possible, broken(found)) == (True, {})


def test_operator_without_a_kernel_is_named_with_its_nodes() -> None:
    found = broken(replay(CORPUS / "sklearn_naive_bayes.onnx"))

    because, nodes = found["one_provider"]
    assert because == "CUDAExecutionProvider has no kernel for ArrayFeatureExtractor"
    assert nodes == ["ai.onnx.ml.ArrayFeatureExtractor 'ArrayFeatureExtractor'"]


def test_control_flow_is_named_with_its_nodes(tmp_path: Path) -> None:
    found = broken(replay(patterns.branch(tmp_path / "m.onnx")))

    assert found["no_control_flow"] == ("which nodes run is decided during the run, by If", ["If 'decide'"])


def test_texts_are_named(tmp_path: Path) -> None:
    found = broken(replay(builders.identity(tmp_path / "m.onnx", DataType.BYTES)))

    assert found["shapes_follow_from_rows"][0] == "input 'x' holds strings"


def test_free_sizes_beside_the_rows_are_named(tmp_path: Path) -> None:
    found = broken(replay(builders.variable_length(tmp_path / "m.onnx")))

    assert list(found) == ["shapes_follow_from_rows"]


def test_shapes_from_values_are_named_with_their_nodes(tmp_path: Path) -> None:
    found = broken(replay(gpu_models.counting(tmp_path / "m.onnx")))

    assert found["no_shapes_from_values"][1] == ["NonZero 't0'"]


def test_shape_arithmetic_on_the_cpu_breaks_nothing() -> None:
    found = replay(CORPUS / "torch_unet.onnx")

    assert found.possible


def test_model_whose_rows_meet_has_no_buffers(tmp_path: Path) -> None:
    because, _ = broken(replay(builders.row_mixer(tmp_path / "m.onnx")))["shapes_follow_from_rows"]

    assert because.startswith("requests run one at a time")
    assert "rows may depend on each other" in because


def test_arena_of_the_gpu_that_shrinks_is_named(tmp_path: Path) -> None:
    opened = open_model(find_model(str(builders.mlp(tmp_path / "m.onnx"))))
    settings = SessionSettings(shrink_arenas=("gpu:0",))

    found = broken(predict_replay(opened.graph, settings, ""))

    assert list(found) == ["memory_stays"]
