"""Properties and warnings of a loaded model."""

from dataclasses import replace
from pathlib import Path

from models import builders, interfaces
from ortserve.config.model import ModelOptions
from ortserve.engine.providers import ProviderChoice
from ortserve.registry.load.loaded_model import describe_properties
from ortserve.registry.load.pipeline import load_model

CPU = "CPUExecutionProvider"


def test_classes_of_maps_are_shown_and_label_the_columns(tmp_path: Path) -> None:
    path = interfaces.zipmap_classifier(tmp_path / "m.onnx", (3, -1))
    for served, classes in (((), '{"probabilities": [3, -1]}'), (("label",), None)):
        options = ModelOptions(warmup_s=0, intra_op_threads=1, served_outputs=served)
        loaded = load_model(path, "m", options)
        loaded.close()
        assert describe_properties(loaded, 1).get("classes") == classes
        assert loaded.output_labels == {"probabilities": ("3", "-1")}


def test_nodes_on_other_providers_are_named(tmp_path: Path) -> None:
    options = ModelOptions(warmup_s=0, intra_op_threads=1)
    loaded = load_model(builders.mlp(tmp_path / "m.onnx"), "m", options)
    loaded.close()
    assert "nodes_elsewhere" not in describe_properties(loaded, 1)
    of_another = replace(loaded, providers=ProviderChoice("OtherExecutionProvider"))
    assert describe_properties(of_another, 1)["nodes_elsewhere"] == f"{CPU}: MatMul, Relu, MatMul, Softmax"
