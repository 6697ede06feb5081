"""Each finding occurs, with its evidence, on a model that has it, and not on another. ONNX Runtime optimizes both."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.tools.onnx_model_utils import make_dim_param_fixed

from models import builders, patterns, ragged
from ortserve.cli.main import main
from ortserve.tools.inspect.arguments import build_parser
from ortserve.tools.inspect.command import run
from ortserve.tools.inspect.result import InspectResult
from ortserve.tools.report import Finding
from servers import add_model


def inspected(path: Path, *flags: str) -> InspectResult:
    result = run(build_parser().read([str(path), "--no-run", *flags])).result
    assert isinstance(result, InspectResult)
    return result


def findings(path: Path, *flags: str) -> dict[str, Finding]:
    return {finding.kind: finding for finding in inspected(path, *flags).findings}


def test_model_without_flaws_has_no_findings(tmp_path: Path) -> None:
    assert findings(builders.mlp(tmp_path / "m.onnx")) == {}


@pytest.mark.parametrize(
    ("name", "why"), [("row_mixer", "rows may depend on each other: "), ("fixed_batch", "the first dimension")]
)
def test_model_that_runs_requests_alone_is_found(name: str, why: str, tmp_path: Path) -> None:
    model = add_model(tmp_path, "m", getattr(builders, name))

    assert findings(model)["not_batched"].seen.startswith(f"not batched because {why}")
    (model / "model.yaml").write_text("batched: false\n")
    assert "not_batched" not in findings(model)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("scalar_sum", "export with a free first dimension for the rows in all inputs and outputs"),
        ("fixed_batch", "export with a free first dimension for the rows in all inputs and outputs"),
        ("row_mixer", "export without operators that mix rows; set batched: true in model.yaml only if"),
    ],
)
def test_configuration_is_a_remedy_only_for_models_that_have_rows(name: str, remedy: str, tmp_path: Path) -> None:
    model = add_model(tmp_path, "m", getattr(builders, name))

    assert findings(model)["not_batched"].remedy.startswith(remedy)


def test_configuration_is_a_remedy_for_rows_of_several_names(tmp_path: Path) -> None:
    types = "float[queries,4] {}, float[documents,4] {}".format
    graph = f"g ({types('q', 'd')}) => ({types('y', 'z')}) {{ y = Relu(q) z = Relu(d) }}"
    model = tmp_path / "m"
    (model / "1").mkdir(parents=True)
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 17]> {graph}'), model / "1" / "model.onnx")

    assert "set batched: true in model.yaml only if" in findings(model)["not_batched"].remedy
    (model / "model.yaml").write_text("batched: true\n")
    assert "not_batched" not in findings(model)


def test_configuration_that_has_dependent_rows_run_together_is_found(tmp_path: Path) -> None:
    for name, build, is_found in (("mixed", builders.row_mixer, True), ("apart", builders.mlp, False)):
        model = add_model(tmp_path, name, build)
        (model / "model.yaml").write_text("batched: true\n")

        found = findings(model).get("batched_against_evidence")
        assert (found is not None) is is_found
        assert found is None or found.seen.startswith("rows may depend on each other: ")

    joined = add_model(tmp_path, "joined", ragged.double)
    (joined / "model.yaml").write_text("batched: true\nmax_rows: 8\ninputs: {X: {ragged: true}}\n")
    assert findings(joined) == {}


def test_attention_in_pieces_is_found(tmp_path: Path) -> None:
    found = findings(patterns.attention(tmp_path / "m.onnx", heads=2, size=4))["unfused_attention"]

    assert found.where == ("Softmax 'shares'",)


@pytest.mark.usefixtures("preloaded_commands")
def test_command_for_attentions_fuses_those_of_an_export(tmp_path: Path) -> None:
    corpus = Path(__file__).parents[3] / "rows" / "corpus"
    source = Path(shutil.copy(corpus / "dynamo_encoder.onnx", tmp_path / "an encoder.onnx"))
    command = shlex.split(findings(source)["unfused_attention"].remedy.partition(" try ")[2].partition(", which")[0])
    short = ("--seconds=0", "--skip=fold", "--skip=slim", "--skip=share")
    assert main([*command[1:], *short]) == 0

    assert "unfused_attention" not in findings(tmp_path / "an encoder.attention.onnx")


def test_softmax_of_a_classifier_is_no_attention(tmp_path: Path) -> None:
    assert "unfused_attention" not in findings(builders.mlp(tmp_path / "m.onnx"))


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm", "gelu"])
def test_pattern_that_onnx_runtime_cannot_fuse_is_found(kind: str, tmp_path: Path) -> None:
    build = getattr(patterns, kind)
    name = f"unfused_{kind}"

    assert "split into several operators" in findings(build(tmp_path / "apart.onnx", leak=True))[name].seen
    assert name not in findings(build(tmp_path / "fused.onnx", leak=False)), "ONNX Runtime fuses this one"


def test_approximated_gelu_is_found_which_onnx_runtime_leaves_apart_on_the_cpu(tmp_path: Path) -> None:
    assert findings(patterns.gelu_by_tanh(tmp_path / "m.onnx"))["unfused_gelu"].where == ("Tanh 'tanh'",)


def test_level_that_fuses_nothing_is_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    patterns.gelu(folder / "1" / "model.onnx", leak=False)
    (folder / "model.yaml").write_text("session: {graph_optimization: none}")

    found = findings(folder)["unfused_gelu"]

    assert "session.graph_optimization is none" in found.seen
    assert found.remedy.startswith("set session.graph_optimization: all in model.yaml")


@pytest.mark.parametrize(("opset", "is_old"), [(13, True), (18, False)])
def test_opset_without_the_operator_is_found(opset: int, is_old: bool, tmp_path: Path) -> None:
    found = findings(patterns.layer_norm(tmp_path / "m.onnx", leak=True, opset=opset))

    assert ("old_opset" in found) is is_old
    if is_old:
        assert "opset 13 has no LayerNormalization" in found["old_opset"].seen


def test_transposes_beside_convolutions_are_found(tmp_path: Path) -> None:
    found = findings(patterns.convolution(tmp_path / "last.onnx", channels_last=True))

    assert len(found["layout_transposes"].where) == 2
    assert "layout_transposes" not in findings(patterns.convolution(tmp_path / "first.onnx", channels_last=False))


def test_transposes_that_onnx_runtime_inserts_for_its_own_kernels_are_not_counted() -> None:
    path = Path(__file__).parents[3] / "rows" / "corpus" / "quantized_cnn_qdq.onnx"

    result = inspected(path)

    assert "Transpose" in (result.placement[0].fused or {})
    assert "layout_transposes" not in {finding.kind for finding in result.findings}


def test_cast_back_is_found(tmp_path: Path) -> None:
    assert findings(patterns.casts(tmp_path / "back.onnx", back=True))["casts_back"].where == ("Cast 'back'",)
    assert "casts_back" not in findings(patterns.casts(tmp_path / "there.onnx", back=False))


@pytest.mark.parametrize("is_moved", [False, True])
def test_setting_that_removes_casts_is_named_where_it_removes_them(is_moved: bool, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    patterns.casts(folder / "1" / "model.onnx", back=True, is_moved=is_moved)
    setting = "session.entries: {optimization.enable_cast_chain_elimination: 1}"

    assert (setting in findings(folder)["casts_back"].remedy) is not is_moved

    (folder / "model.yaml").write_text(setting.replace("session.entries: {", "session: {entries: {") + "}")
    assert ("casts_back" in findings(folder)) is is_moved


def test_double_precision_is_found(tmp_path: Path) -> None:
    found = findings(patterns.dense(tmp_path / "double.onnx", np.float64))["double_precision"]

    assert "288 bytes of weights" in found.seen
    assert "double_precision" not in findings(patterns.dense(tmp_path / "single.onnx", np.float32))


def test_control_flow_is_found(tmp_path: Path) -> None:
    found = findings(patterns.branch(tmp_path / "if.onnx"))["control_flow"]
    assert found.where == ("If 'decide'",)
    assert "session.free_dimensions: {batch: SIZE} in model.yaml" in found.remedy


def test_sizes_are_not_advised_to_be_fixed_if_no_free_dimension_has_a_name(tmp_path: Path) -> None:
    path = patterns.branch(tmp_path / "if.onnx")
    model = onnx.load(path)
    make_dim_param_fixed(model.graph, "batch", 1)
    onnx.save(model, path)
    assert "free_dimensions" not in findings(path)["control_flow"].remedy


def test_shapes_computed_beside_a_gpu_are_found_only_if_one_is_wanted(tmp_path: Path) -> None:
    path = patterns.flattens(tmp_path / "m.onnx")

    assert "shape_computation" not in findings(path)
    found = findings(path, "--provider", "cuda")["shape_computation"]
    assert found.where == ("Shape 'shape'", "Gather 'batch'", "Concat 'target'")
    assert "{batch: SIZE, rows: SIZE}" in found.remedy


def test_provider_that_is_wanted_but_not_here_is_found(tmp_path: Path) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("CUDA is here")

    found = findings(builders.mlp(tmp_path / "m.onnx"), "--provider", "cuda")

    assert "CUDAExecutionProvider" in found["provider_unusable"].seen


def test_weights_that_are_inputs_are_found_and_the_command_mends_them(tmp_path: Path) -> None:
    path = patterns.dense(tmp_path / "m.onnx", is_input=True)

    found = findings(path)["initializers_as_inputs"]
    assert "1 weight also declared as an input, which requests can replace: w" in found.seen
    _, *arguments = shlex.split(found.remedy)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=60)

    assert findings(tmp_path / "m.constant.onnx") == {}


def test_worst_findings_come_first_and_decide_the_status(tmp_path: Path) -> None:
    path = patterns.layer_norm(tmp_path / "m.onnx", leak=True, opset=13)

    levels = [finding.level for finding in inspected(path).findings]

    assert levels == ["warning", "advice"]
    for flags, status in (([], 0), (["--fail-on", "problem"], 0), (["--fail-on", "warning"], 1)):
        assert run(build_parser().read([str(path), "--no-run", *flags])).status == status
