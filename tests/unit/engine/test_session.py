"""Files that are models and files that are not, opened by the real ONNX Runtime."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import ortserve
from models import builders
from ortserve.config.session import GraphOptimization, SessionSettings
from ortserve.engine.ort_errors import run_error, without_paths
from ortserve.engine.provider_options import CPU, CUDA, OPENVINO
from ortserve.engine.providers import Provider, ProviderChoice
from ortserve.engine.runs import arenas_of, run_options
from ortserve.engine.runtime import Runtime
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import ErrorKind, ServeError

OPTIONS = SessionOptions(ProviderChoice(CPU), intra_op_threads=1)


def write_node(path: Path, operator: str, *, domain: str = "", opset: int = 21, ir_version: int = 10) -> Path:
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"], domain=domain)], "g", tensors[:1], tensors[1:])
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
    path.write_bytes(model.SerializeToString())
    return path


def write_external(path: Path) -> Path:
    """A model whose weights are in a missing file."""
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "weights.bin"), ("offset", "0"), ("length", "16")):
        weights.external_data.add(key=key, value=value)
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "g", tensors[:1], tensors[1:], initializer=[weights]
    )
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def write_empty(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def write_nothing(path: Path) -> Path:
    return path


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (builders.not_onnx, "expected an ONNX model, it is not one or is truncated"),
        (builders.not_onnx, "Protobuf parsing failed"),
        (write_empty, "expected an ONNX model, the file is empty"),
        (write_nothing, "File doesn't exist"),
        (lambda path: write_node(path, "NoSuchOperator"), "No Op registered for NoSuchOperator"),
        (lambda path: write_node(path, "Gelu", domain="my.domain"), "my.domain:Gelu"),
        (lambda path: write_node(path, "Identity", opset=99), "Opset 99 is under development"),
        (lambda path: write_node(path, "Identity", ir_version=99), "Unsupported model IR version: 99"),
        (lambda path: write_node(path, "RoiAlign"), "has input size 1 not in range [min=3, max=3]"),
        (write_external, "expected weights, as of tensor 'w', in weights.bin: there is no such file"),
    ],
)
def test_error_for_an_unopenable_file_omits_its_folder(
    tmp_path: Path, write: Callable[[Path], Path], reason: str
) -> None:
    folder = tmp_path / "models of a secret project" / "1"
    folder.mkdir(parents=True)
    path = write(folder / "model.onnx")
    with pytest.raises(ServeError) as caught:
        open_session(path, "m/1", OPTIONS)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    message = caught.value.message
    assert message.startswith("ONNX Runtime cannot load the model: ")
    assert reason in message
    for part in (*tmp_path.parts[1:], "secret", "onnxruntime_src", "\n"):
        assert part not in message


@pytest.mark.parametrize("name", ["model.onnx", "weights.bin"])
def test_pointer_of_git_lfs_is_neither_a_model_nor_weights(tmp_path: Path, name: str) -> None:
    """ONNX Runtime reads the first 16 bytes of the pointer as four weights."""
    write_external(tmp_path / "model.onnx")
    (tmp_path / name).write_text(builders.GIT_LFS_POINTER)
    with pytest.raises(ServeError, match=f"^{name} is a Git LFS pointer, not .*: run 'git lfs pull'$") as caught:
        open_session(tmp_path / "model.onnx", "m/1", OPTIONS)
    assert caught.value.kind is ErrorKind.INVALID_INPUT


def write_scan(path: Path, outputs: str, nodes: str) -> Path:
    """A Scan over the rows of x, with a state: its body has the inputs s and e."""
    body = f"body = b (float[4] s, float[4] e) => ({outputs}) {{ {nodes} }}"
    ends = "float[batch,4] x, float[4] w) => (float[4] f, float[batch,4] y"
    text = f"m ({ends}) {{ f, y = Scan <num_scan_inputs = 1, {body}> (w, x) }}"
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["": 21]> {text}'), str(path))
    return path


@pytest.mark.parametrize(
    ("outputs", "nodes", "unwritten"),
    [
        ("float[4] s, float[4] o", "o = Add (s, e)", "s"),
        ("float[4] s2, float[4] e", "s2 = Add (s, e)", "e"),
        ("float[4] e, float[4] o", "o = Add (s, e)", "e"),
        ("float[4] o, float[4] o", "o = Add (s, e)", "o"),
    ],
)
def test_scan_with_outputs_that_no_run_writes_is_rejected(
    tmp_path: Path, outputs: str, nodes: str, unwritten: str
) -> None:
    """Their memory contains values of earlier runs."""
    path = write_scan(tmp_path / "model.onnx", outputs, nodes)
    with pytest.raises(ServeError, match=f"got '{unwritten}', .*; return an Identity of it$") as caught:
        open_session(path, "m/1", OPTIONS)
    assert caught.value.kind is ErrorKind.UNSUPPORTED


_IN_IF = "y = If (c) <then_branch = t () => (a) {{ a = {0} }}, else_branch = e () => (b) {{ b = Relu (x) }}>"


@pytest.mark.parametrize(
    ("call", "opset", "is_rejected"),
    [
        ("LayerNormalization (x, w)", 16, True),
        ("LayerNormalization (x, w)", 17, False),
        ("SimplifiedLayerNormalization (x, w)", 21, True),
    ],
)
@pytest.mark.parametrize("is_in_branch", [False, True])
def test_function_that_ends_onnx_runtime_is_rejected(
    tmp_path: Path, call: str, opset: int, is_rejected: bool, is_in_branch: bool
) -> None:
    body = _IN_IF.format(call) if is_in_branch else f"y = {call}"
    text = f"""<ir_version: 10, opset_import: ["": {opset}, "local": 1]>
        m (float[n,4] x, float[4] w, bool c) => (float[n,4] y) {{ y = local.f (x, w, c) }}
        <domain: "local", opset_import: ["": {opset}]> f (x, w, c) => (y) {{ {body} }}"""
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model(text), path)
    if not is_rejected:
        open_session(path, "m/1", OPTIONS)
        return
    with pytest.raises(ServeError, match="got one in a function and set") as caught:
        open_session(path, "m/1", OPTIONS)
    assert caught.value.kind is ErrorKind.UNSUPPORTED


@pytest.mark.parametrize("level", ["none", "all"])
def test_scan_with_identities_of_its_inputs_writes_its_outputs(tmp_path: Path, level: GraphOptimization) -> None:
    path = write_scan(tmp_path / "model.onnx", "float[4] s2, float[4] o", "s2 = Identity (s) o = Identity (e)")
    options = SessionOptions(ProviderChoice(CPU), 1, SessionSettings(graph_optimization=level))
    x, w = np.arange(12, dtype=np.float32).reshape(3, 4), np.full(4, 7, np.float32)
    f, y = open_session(path, "m/1", options).run(["f", "y"], {"x": x, "w": w})
    np.testing.assert_array_equal(f, w)
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("scores", ["", ", qk_output = 0", ", qk_output = 1", ", qk_output = 2"])
def test_attention_that_does_not_write_its_scores_is_rejected(tmp_path: Path, scores: str) -> None:
    """The memory of the scores would contain values of earlier runs."""
    path = tmp_path / "model.onnx"
    text = f"""m (float[n,s,32] x, int32[n] lengths, int32 total) =>
        (float[n,s,16] y, float[n,1,u,8] k, float[n,1,u,8] v, float[n,2,s,u] qk) {{ y, k, v, qk =
        com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1{scores}> (x, , , , , lengths, total) }}"""
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["": 21, "com.microsoft": 1]> {text}'), path)
    if scores.endswith(("1", "2")):
        inputs = {
            "x": np.ones((2, 3, 32), np.float32),
            "lengths": np.full(2, 2, np.int32),
            "total": np.array(3, np.int32),
        }
        (found,) = open_session(path, "m/1", OPTIONS).run(["qk"], inputs)
        np.testing.assert_allclose(found[:, :, -1], 1 / 3 if scores.endswith("2") else 8**0.5, rtol=1e-6)
        return
    with pytest.raises(ServeError, match="qk_output to be 1 or 2 for output 'qk', got 0") as caught:
        open_session(path, "m/1", OPTIONS)
    assert caught.value.kind is ErrorKind.UNSUPPORTED


def test_threads_are_set_and_do_not_spin(tmp_path: Path) -> None:
    path = builders.identity(tmp_path / "model.onnx")
    for threads in (1, 3):
        settings = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), threads)).get_session_options()
        assert settings.intra_op_num_threads == threads
        assert settings.inter_op_num_threads == 1
        assert settings.get_session_config_entry("session.intra_op.allow_spinning") == "0"
        assert settings.get_session_config_entry("session.inter_op.allow_spinning") == "0"
        assert settings.logid == "m/1"


def test_provider_that_cannot_start_is_an_error_and_no_session_on_the_cpu(tmp_path: Path) -> None:
    path = builders.identity(tmp_path / "model.onnx")  # ONNX Runtime knows this provider, but does not have it on Linux
    with pytest.warns(UserWarning, match="not in available provider names"), pytest.raises(ServeError) as caught:
        open_session(path, "m/1", SessionOptions(ProviderChoice("CoreMLExecutionProvider"), 1))
    assert "CoreMLExecutionProvider was chosen" in caught.value.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Load model from /data/m/1/model.onnx failed:no", "Load model from …/model.onnx failed:no"),
        ("see '/a/b', \"/c/d\" and (/e)", "see '…/b', \"…/d\" and (…/e)"),
        ("two\n  lines\n", "two lines"),
        ("3 rows/s, and/or ratio 1/2", "3 rows/s, and/or ratio 1/2"),
        ("node /encoder/layer.0/MatMul", "node …/MatMul"),
        (
            "CUDA failure 2: out of memory ; GPU=0 ; hostname=n7 ; file=/a/b.cc ; line=1 ; expr=f(p, n); while running",
            "CUDA failure 2: out of memory while running",
        ),
        (
            (
                "Error in execution: /o/cuda_call.cc:154 std::conditional_t<THRW, void, onnxruntime::common::Status> "
                "onnxruntime::CudaCall(ERRTYPE, const char*, int) [with ERRTYPE = cudaError; bool THRW = true] "
                "/o/cuda_call.cc:146 std::conditional_t<THRW, void, onnxruntime::common::Status> "
                "onnxruntime::CudaCall(int) [with bool THRW = true] CUDA failure 901: it was broken"
            ),
            "Error in execution: CUDA failure 901: it was broken",
        ),
    ],
)
def test_paths_are_removed_from_text(text: str, expected: str) -> None:
    assert without_paths(text) == expected


def test_failed_run_is_an_internal_error() -> None:
    error = run_error(RuntimeError("at /home/x/y.cc"))
    assert error.kind is ErrorKind.INTERNAL
    assert error.message == "ONNX Runtime failed to run the model: at …"


def test_settings_are_those_of_the_session(tmp_path: Path) -> None:
    settings = SessionSettings(
        graph_optimization="basic",
        execution_mode="parallel",
        inter_op_threads=2,
        spinning=True,
        memory_arena=False,
        memory_pattern=False,
        deterministic=True,
        entries={"session.set_denormal_as_zero": True, "session.dynamic_block_base": 4},
    )
    options = SessionOptions(ProviderChoice(CPU), 1, settings)
    native = open_session(builders.mlp(tmp_path / "model.onnx"), "m", options).get_session_options()
    assert native.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert native.execution_mode == ort.ExecutionMode.ORT_PARALLEL
    assert (native.intra_op_num_threads, native.inter_op_num_threads) == (1, 2)
    assert (native.enable_cpu_mem_arena, native.enable_mem_pattern) == (False, False)
    assert native.use_deterministic_compute
    entries = ("session.set_denormal_as_zero", "session.dynamic_block_base", "session.intra_op.allow_spinning")
    assert [native.get_session_config_entry(entry) for entry in entries] == ["1", "4", "1"]


@pytest.mark.parametrize(
    ("level", "native"),
    [
        ("none", ort.GraphOptimizationLevel.ORT_DISABLE_ALL),
        ("extended", ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED),
        ("layout", ort.GraphOptimizationLevel.ORT_ENABLE_LAYOUT),
        ("all", ort.GraphOptimizationLevel.ORT_ENABLE_ALL),
    ],
)
def test_every_level_of_graph_optimization_is_onnx_runtimes_own(
    tmp_path: Path, level: GraphOptimization, native: ort.GraphOptimizationLevel
) -> None:
    options = SessionOptions(ProviderChoice(CPU), 1, SessionSettings(graph_optimization=level))
    session = open_session(builders.mlp(tmp_path / "model.onnx"), "m", options)
    assert session.get_session_options().graph_optimization_level == native


def test_entry_replaces_a_setting_without_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime writes a line to standard error for each entry that is added twice."""
    entry = "session.intra_op.allow_spinning"
    options = SessionOptions(ProviderChoice(CPU), 1, SessionSettings(spinning=False, entries={entry: "1"}))

    native = open_session(builders.mlp(tmp_path / "model.onnx"), "m", options).get_session_options()

    assert native.get_session_config_entry(entry) == "1"
    assert capfd.readouterr().err == ""


def test_default_settings_suit_a_server(tmp_path: Path) -> None:
    native = open_session(builders.mlp(tmp_path / "model.onnx"), "m", OPTIONS).get_session_options()
    assert native.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert native.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert native.inter_op_num_threads == 1


@pytest.mark.parametrize("content", [None, b"no library"])
def test_invalid_operator_library_is_named_without_its_folder(tmp_path: Path, content: bytes | None) -> None:
    library = tmp_path / "ops.so"
    if content is not None:
        library.write_bytes(content)
    options = SessionOptions(ProviderChoice(CPU), 1, operator_libraries=(library,))
    with pytest.raises(ServeError, match=r"ONNX Runtime cannot load the model: .*ops\.so") as caught:
        open_session(builders.mlp(tmp_path / "model.onnx"), "m", options)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize(
    ("settings", "there"),
    [
        (SessionSettings(shrink_arenas=("cpu:0", "gpu:0")), "cpu:0"),
        (SessionSettings(shrink_arenas=("cpu:0",), memory_arena=False), "none"),
    ],
)
def test_unknown_arena_fails_the_load_not_each_run(tmp_path: Path, settings: SessionSettings, there: str) -> None:
    options = SessionOptions(ProviderChoice(CPU), 1, settings)
    with pytest.raises(ServeError, match=f"session.shrink_arenas: expected arenas out of {there}, got"):
        open_session(builders.mlp(tmp_path / "model.onnx"), "m", options)


@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.parametrize(
    ("choice", "arena", "is_refused"),
    [
        (ProviderChoice(OPENVINO), "gpu:0", True),
        (ProviderChoice(OPENVINO), "cpu:0", False),
        (ProviderChoice(OPENVINO, behind=(Provider(CPU),)), "gpu:0", True),
        (ProviderChoice(OPENVINO, behind=(Provider(CUDA),)), "gpu:0", False),
        (ProviderChoice(CPU, behind=(Provider(CUDA),)), "gpu:0", True),  # no memory of this device is attached here
        (ProviderChoice(CUDA), "gpu:0", False),
    ],
)
def test_gpu_arena_needs_a_gpu_provider(tmp_path: Path, choice: ProviderChoice, arena: str, is_refused: bool) -> None:
    """The availability of the providers is checked after the arenas."""
    options = SessionOptions(choice, 1, SessionSettings(shrink_arenas=(arena,)))
    refusal = f"session.shrink_arenas: expected arenas out of cpu:0, got {arena}"
    with pytest.raises(ServeError) as caught:
        open_session(builders.mlp(tmp_path / "model.onnx"), "m", options)
    assert (caught.value.message == refusal) == is_refused


def test_configured_arenas_are_shrunk_after_every_run(tmp_path: Path) -> None:
    session = open_session(builders.mlp(tmp_path / "model.onnx"), "m", OPTIONS)
    feeds = {"x": np.zeros((1, 64), np.float32)}
    options = run_options(SessionSettings(shrink_arenas=("cpu:0",)))
    assert session.run(None, feeds, options)[0].shape == (1, 10)
    # ONNX Runtime rejects an unknown arena, which shows that it reads the option.
    with pytest.raises(Exception, match=r"gpu:7|arena"):
        session.run(None, feeds, run_options(SessionSettings(shrink_arenas=("gpu:7",))))


def test_instance_shrinks_only_arenas_of_its_own_gpu() -> None:
    settings = SessionSettings(shrink_arenas=("cpu:0", "gpu:0", "gpu:1", "gpu:7"))
    # The last one has no device, which a run reports.
    assert arenas_of(settings, 1, (0, 1)) == ["cpu:0", "gpu:1", "gpu:7"]
    assert arenas_of(settings, 0) == list(settings.shrink_arenas)


def test_settings_become_entries_of_onnx_runtime(tmp_path: Path) -> None:
    settings = SessionSettings(thread_affinities="1", dynamic_block_base=4, denormal_as_zero=True)
    options = SessionOptions(ProviderChoice(CPU), 2, settings)
    native = open_session(builders.mlp(tmp_path / "model.onnx"), "m", options).get_session_options()
    entries = ("session.intra_op_thread_affinities", "session.dynamic_block_base", "session.set_denormal_as_zero")
    assert [native.get_session_config_entry(entry) for entry in entries] == ["1", "4", "1"]


def test_session_entry_overrides_the_equivalent_setting(tmp_path: Path) -> None:
    settings = SessionSettings(dynamic_block_base=4, entries={"session.dynamic_block_base": 8})
    options = SessionOptions(ProviderChoice(CPU), 1, settings)
    native = open_session(builders.mlp(tmp_path / "model.onnx"), "m", options).get_session_options()
    assert native.get_session_config_entry("session.dynamic_block_base") == "8"


def test_affinities_of_more_threads_than_there_are_fail_the_load(tmp_path: Path) -> None:
    options = SessionOptions(ProviderChoice(CPU), 2, SessionSettings(thread_affinities="1;1;1"))
    with pytest.raises(ServeError, match=r"ONNX Runtime cannot load the model: .*affinities"):
        open_session(builders.mlp(tmp_path / "model.onnx"), "m", options)


@pytest.mark.parametrize("is_entry", [False, True])
@pytest.mark.parametrize("group", ["100000", "100001-200000", "0"])
def test_affinities_to_no_processor_of_the_machine_fail_the_load(tmp_path: Path, group: str, is_entry: bool) -> None:
    before = os.sched_getaffinity(0)
    text, entry = f"1-100000;{group}", "session.intra_op_thread_affinities"
    settings = SessionSettings(entries={entry: text}) if is_entry else SessionSettings(thread_affinities=text)
    options = SessionOptions(ProviderChoice(CPU), 3, settings)
    key = f"session.entries: {entry}" if is_entry else "session.thread_affinities"
    expected = f"{key}: expected processors that the server may use, counted from 1, got '{group}'"
    with pytest.raises(ServeError, match=expected):
        open_session(builders.mlp(tmp_path / "model.onnx"), "m", options)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("group", ["1-200000000", "1,1-100000"])
def test_more_affinities_than_onnx_runtime_can_log_fail_the_load(tmp_path: Path, group: str) -> None:
    options = SessionOptions(ProviderChoice(CPU), 2, SessionSettings(thread_affinities=group))
    expected = f"session.thread_affinities: expected at most 100000 processors in a group, got '{group}'"
    with pytest.raises(ServeError, match=expected):
        open_session(builders.mlp(tmp_path / "model.onnx"), "m", options)


@pytest.mark.parametrize("text", ["x", "-1", ""])
def test_malformed_affinities_of_an_entry_fail_in_onnx_runtime(tmp_path: Path, text: str) -> None:
    settings = SessionSettings(entries={"session.intra_op_thread_affinities": text})
    with pytest.raises(ServeError, match="ONNX Runtime cannot load the model: "):
        open_session(builders.mlp(tmp_path / "model.onnx"), "m", SessionOptions(ProviderChoice(CPU), 2, settings))


def test_optimized_model_is_saved_and_servable(tmp_path: Path) -> None:
    kept = tmp_path / "optimized.onnx"
    model = builders.mlp(tmp_path / "model.onnx")
    first = open_session(
        model, "m", SessionOptions(ProviderChoice(CPU), 1, SessionSettings(optimized_model_file=str(kept)))
    )
    settings = SessionSettings(graph_optimization="none")
    again = open_session(kept, "m", SessionOptions(ProviderChoice(CPU), 1, settings))
    feeds = {"x": np.ones((2, 64), np.float32)}
    np.testing.assert_array_equal(first.run(None, feeds)[0], again.run(None, feeds)[0])
    domains = [{opset.domain for opset in onnx.load(path).opset_import} for path in (model, kept)]
    assert domains[0] < domains[1]  # the domains of operators into which ONNX Runtime fuses nodes


@pytest.mark.parametrize(
    ("file", "came"),
    [
        ("a secret project/optimized.onnx", "…/optimized.onnx, whose folder does not exist"),
        ("model.onnx/optimized.onnx", "…/optimized.onnx, whose folder does not exist"),
        ("folder", "…/folder, which is a folder"),
    ],
)
def test_unwritable_optimized_model_is_rejected_with_the_expectation(tmp_path: Path, file: str, came: str) -> None:
    (tmp_path / "folder").mkdir()
    settings = SessionSettings(optimized_model_file=str(tmp_path / file))
    with pytest.raises(ServeError) as caught:
        open_session(builders.mlp(tmp_path / "model.onnx"), "m", SessionOptions(ProviderChoice(CPU), 1, settings))
    assert caught.value.message == (f"session.optimized_model_file: expected a file in an existing folder, got {came}")


@pytest.mark.parametrize("name", ["model.onnx", "weights.bin", "link.onnx"])
def test_optimized_model_does_not_overwrite_the_model_or_its_weights(tmp_path: Path, name: str) -> None:
    path, weights = write_external(tmp_path / "model.onnx"), tmp_path / "weights.bin"
    weights.write_bytes(np.full(4, 3, np.float32).tobytes())
    (tmp_path / "link.onnx").symlink_to(path)
    before = path.read_bytes(), weights.read_bytes()
    settings = SessionSettings(optimized_model_file=str(tmp_path / name))
    with pytest.raises(ServeError) as caught:
        open_session(path, "m", SessionOptions(ProviderChoice(CPU), 1, settings))
    assert caught.value.message == (
        "session.optimized_model_file: expected another file than the model's own, "
        f"got …/{name}, which would be overwritten"
    )
    assert (path.read_bytes(), weights.read_bytes()) == before


@pytest.mark.parametrize("name", ["model.onnx", "weights.bin"])
def test_weights_of_an_optimized_model_do_not_overwrite_the_model_or_its_weights(tmp_path: Path, name: str) -> None:
    path, weights = write_external(tmp_path / "model.onnx"), tmp_path / "weights.bin"
    weights.write_bytes(np.full(4, 3, np.float32).tobytes())
    before = path.read_bytes(), weights.read_bytes()
    key = "session.optimized_model_external_initializers_file_name"
    settings = SessionSettings(optimized_model_file=str(tmp_path / "optimized.onnx"), entries={key: name})
    with pytest.raises(ServeError) as caught:
        open_session(path, "m", SessionOptions(ProviderChoice(CPU), 1, settings))
    assert caught.value.message == (
        f"session.entries: {key}: expected another file than the model's own, got …/{name}, which would be overwritten"
    )
    assert (path.read_bytes(), weights.read_bytes()) == before


def test_external_weights_are_read_from_the_model_folder(tmp_path: Path) -> None:
    path = write_external(tmp_path / "model.onnx")
    (tmp_path / "weights.bin").write_bytes(np.full(4, 3, np.float32).tobytes())
    (result,) = open_session(path, "m", OPTIONS).run(None, {"x": np.ones((2, 4), np.float32)})
    np.testing.assert_array_equal(result, np.full((2, 4), 4))


@pytest.mark.parametrize(
    ("target", "link", "is_open"),
    [
        ("blobs/a", "blobs/b", True),
        ("blobs/a", "blobs/deep/b", True),
        ("blobs/a", "b", False),
        (None, "blobs/b", False),
    ],
)
def test_edited_model_behind_a_link_reads_the_weights_that_onnx_runtime_accepts(
    tmp_path: Path, target: str | None, link: str, is_open: bool
) -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (int32[n,2] x, int32[n,2] z) => (int32[n,2] y) <int32[2] w = {3, 4}, int32[2] v = {10, 20}> {
            d = Div(x, z)
            a = Add(d, w)
            y = Mul(a, v)
        }"""
    )
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))  # as bytes
    (tmp_path / "blobs" / "deep").mkdir(parents=True)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    for name, place in (("weights", link), ("model.onnx", target)):
        if place is not None:
            (folder / name).rename(tmp_path / place)
            (folder / name).symlink_to(tmp_path / place)
    if not is_open:
        with pytest.raises(Exception, match="External data path escapes model directory"):
            ort.InferenceSession(str(path))
        with pytest.raises(ServeError, match="External data path escapes model directory"):
            open_session(path, "m", OPTIONS)
        return
    x = np.array([[6, 8]], np.int32)
    for session in (ort.InferenceSession(str(path)), open_session(path, "m", OPTIONS)):
        assert session.run(None, {"x": x, "z": x})[0].tolist() == [[40, 100]]
    with pytest.raises(Exception, match="Integer division by zero"):
        session.run(None, {"x": x, "z": x * 0})


def test_free_dimension_gets_its_configured_size(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "model.onnx")
    options = SessionOptions(ProviderChoice(CPU), 1, SessionSettings(free_dimensions={"batch": 3}))
    assert open_session(path, "m", options).get_inputs()[0].shape == [3, 64]
    options = SessionOptions(ProviderChoice(CPU), 1, SessionSettings(free_dimensions={"rows": 3}))
    with pytest.raises(ServeError, match=r"session\.free_dimensions: expected dimensions out of batch, got rows"):
        open_session(path, "m", options)


def test_free_dimension_gets_its_length_by_denotation(tmp_path: Path) -> None:
    path = builders.denoted(tmp_path / "model.onnx")
    settings = SessionSettings(free_dimensions_by_denotation={"data_feature": 7})
    session = open_session(path, "m", SessionOptions(ProviderChoice(CPU), 1, settings))
    assert session.get_inputs()[0].shape == ["batch", 3, 7]
    settings = SessionSettings(free_dimensions_by_denotation={"DATA_WIDTH": 7})
    with pytest.raises(
        ServeError,
        match=r"session\.free_dimensions_by_denotation: expected denotations out of DATA_BATCH, DATA_CHANNEL, "
        "DATA_FEATURE, got DATA_WIDTH",
    ):
        open_session(path, "m", SessionOptions(ProviderChoice(CPU), 1, settings))


@pytest.mark.parametrize(
    ("build", "settings", "is_planned"),
    [
        (builders.mlp, SessionSettings(), True),
        (builders.variable_length, SessionSettings(), False),
        (builders.variable_length, SessionSettings(memory_pattern=True), True),
        (builders.variable_length, SessionSettings(free_dimensions={"seq": 8}), True),
        (builders.denoted, SessionSettings(), False),
        (builders.denoted, SessionSettings(free_dimensions_by_denotation={"Data_Feature": 8}), True),
    ],
)
def test_memory_is_planned_where_only_the_rows_of_requests_vary(
    tmp_path: Path, build: Callable[[Path], Path], settings: SessionSettings, is_planned: bool
) -> None:
    options = SessionOptions(ProviderChoice(CPU), 1, settings)
    session = open_session(build(tmp_path / "model.onnx"), "m", options)
    assert session.get_session_options().enable_mem_pattern == is_planned


def test_sessions_may_share_an_arena(tmp_path: Path) -> None:
    Runtime().share_arena()
    settings = SessionSettings(shared_arena=True, shrink_arenas=("cpu:0",))
    session = open_session(builders.mlp(tmp_path / "model.onnx"), "m", SessionOptions(ProviderChoice(CPU), 1, settings))
    assert session.get_session_options().get_session_config_entry("session.use_env_allocators") == "1"
    assert session.run(None, {"x": np.zeros((1, 64), np.float32)}, run_options(settings))[0].shape == (1, 10)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            SessionSettings(shared_arena=True, memory_arena=False),
            "session.shared_arena: expected memory_arena: true with it",
        ),
        (SessionSettings(thread_affinities="1"), "session.thread_affinities: expected unset"),
        (
            SessionSettings(entries={"session.intra_op_thread_affinities": "1"}),
            (
                "session.entries: session.intra_op_thread_affinities: expected unset, because the server uses "
                "global_threads"
            ),
        ),
    ],
)
def test_settings_that_exclude_each_other_fail_the_load(
    tmp_path: Path, settings: SessionSettings, problem: str
) -> None:
    options = SessionOptions(ProviderChoice(CPU), 2, settings, has_global_threads=True)
    with pytest.raises(ServeError, match=problem):
        open_session(builders.mlp(tmp_path / "model.onnx"), "m", options)


def test_disabled_optimizers_are_separated_by_semicolons(tmp_path: Path) -> None:
    """ONNX Runtime ignores a list with commas."""
    digits = Path(ortserve.__file__).parent / "example" / "repository" / "digits" / "1" / "model.onnx"

    def node_count(names: str) -> int:
        entries = {"optimization.disable_specified_optimizers": names}
        settings = SessionSettings(entries=entries, optimized_model_file=str(tmp_path / "saved.onnx"))
        open_session(digits, "m", SessionOptions(ProviderChoice(CPU), 1, settings))
        return len(onnx.load(tmp_path / "saved.onnx").graph.node)

    assert node_count("NchwcTransformer;ConvActivationFusion") > node_count("")
    with pytest.raises(ServeError, match="expected semicolons between names, got 'NchwcTransformer,ConvActivation"):
        node_count("NchwcTransformer,ConvActivationFusion")


def test_provider_that_runs_no_node_is_an_error(tmp_path: Path) -> None:
    # Every ONNX Runtime has this provider; it is for operators that call a remote service.
    options = SessionOptions(ProviderChoice("AzureExecutionProvider"), 1)
    with pytest.raises(ServeError) as caught:
        open_session(builders.mlp(tmp_path / "model.onnx"), "m", options)
    assert caught.value.message == (
        "execution_providers: AzureExecutionProvider runs none of the model's nodes; CPUExecutionProvider runs 4"
    )


def test_cpu_fallback_of_nodes_can_be_forbidden(tmp_path: Path) -> None:
    settings = SessionSettings(entries={"session.disable_cpu_ep_fallback": True})
    options = SessionOptions(ProviderChoice("AzureExecutionProvider"), 1, settings)
    with pytest.raises(
        ServeError, match=r"cannot load the model on AzureExecutionProvider: .*fallback to CPU EP has been"
    ):
        open_session(builders.mlp(tmp_path / "model.onnx"), "m", options)


def test_error_for_a_missing_locale_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(ServeError) as caught:
        open_session(builders.lower_case(tmp_path / "model.onnx", locale="xx_XX.UTF-8"), "m", OPTIONS)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message.endswith(
        "; install the locale 'xx_XX.UTF-8' that the model's StringNormalizer needs: on Debian and Ubuntu, "
        "apt-get install locales && localedef -i xx_XX -f UTF-8 xx_XX.UTF-8"
    )


@pytest.mark.parametrize("domain", ["ai.onnx.contrib", "com.microsoft.extensions"])
def test_error_for_an_operator_of_the_extensions_names_the_option(tmp_path: Path, domain: str) -> None:
    path = write_node(tmp_path / "model.onnx", "StringUpper", domain=domain)
    with pytest.raises(ServeError) as caught:
        open_session(path, "m", OPTIONS)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message.endswith(
        "; operators of onnxruntime-extensions need the option session: {operator_libraries: [onnxruntime-extensions]}"
    )
    with pytest.raises(ServeError) as caught:
        open_session(write_node(path, "StringUpper", domain="com.example"), "m", OPTIONS)
    assert "operator_libraries" not in caught.value.message
