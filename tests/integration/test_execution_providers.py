"""Execution providers of models by configured preference, through a real server."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import builders
from plugin_provider import OPENVINO, openvino_environment, openvino_folder
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, json_input, rest_url, serving, starting

CPU = "CPUExecutionProvider"
AZURE = "AzureExecutionProvider"
"""A provider in every build of ONNX Runtime; it accepts no node of these models."""

REFUSED_BY_OPENVINO = json.dumps({"CPU": {"NO_SUCH_PROPERTY": "1"}})

WISHES: dict[str, dict[str, Any]] = {
    "first": {"execution_providers": ["openvino", "cpu"]},
    "behind_a_missing_one": {"execution_providers": ["tensorrt", "openvino", "cpu"]},
    "behind_the_cpu": {"execution_providers": ["cpu", "openvino"]},
    "beside_a_built_in": {"execution_providers": ["openvino", AZURE]},
    "by_device": {"execution_providers": [{"openvino": {"device_type": "NPU"}}, "cpu"]},
    "fails": {"execution_providers": [{"openvino": {"load_config": REFUSED_BY_OPENVINO}}, "cpu"]},
    "falls_back": {
        "execution_providers": [{"openvino": {"load_config": REFUSED_BY_OPENVINO}}, "cpu"],
        "allow_fallback": True,
    },
    "one_thread": {"execution_providers": [{"openvino": {"num_of_threads": 1, "precision": "FP32"}}]},
    "cpu_arena": {"execution_providers": ["openvino", "cpu"], "session": {"shrink_arenas": ["cpu:0"]}},
    "gpu_arena": {"execution_providers": ["openvino", "cpu"], "session": {"shrink_arenas": ["gpu:0"]}},
}

WISHES_FOR_SOME: dict[str, dict[str, Any]] = {
    "partly": {"execution_providers": ["openvino"]},
    "forbidden": {
        "execution_providers": ["openvino"],
        "session": {"entries": {"session.disable_cpu_ep_fallback": 1}},
    },
}
"""Options of models with ``some_for_others``."""


def empty(path: Path) -> Path:
    return builders.identity(path, shape=(3, 0, 5))


def picky(path: Path) -> Path:
    return builders.pools_images(path, least=500)


WISHES_FOR_FAILING_RUNS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "empty_fails": (empty, WISHES["first"]),
    "empty_falls_back": (empty, WISHES["first"] | {"allow_fallback": True}),
    "empty_not_warmed": (empty, WISHES["first"] | {"warmup_s": 0}),
    "picky": (picky, WISHES["first"] | {"allow_fallback": True}),
}
"""OpenVINO fails runs with empty tensors; both providers fail runs with images that are too small."""


def some_for_others(path: Path) -> Path:
    """A dense layer, and an operator of ONNX Runtime that OpenVINO does not support: FP32 [batch, 64] → the same."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h1"], name="dense"),
        helper.make_node("FastGelu", ["h1"], ["h2"], name="/head/gelu", domain="com.microsoft"),
        helper.make_node("Relu", ["h2"], ["y"], name="last"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 64]) for name in ("x", "y")]
    weight = numpy_helper.from_array(np.eye(64, dtype=np.float32), "w")
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "some_for_others", ends[:1], ends[1:], [weight])
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    environment = openvino_environment()
    repository = tmp_path_factory.mktemp("providers")
    for name, options in WISHES.items():
        write_options(add_model(repository, name, builders.mlp), options)
    for name, options in WISHES_FOR_SOME.items():
        write_options(add_model(repository, name, some_for_others), options)
    for name, (build, options) in WISHES_FOR_FAILING_RUNS.items():
        write_options(add_model(repository, name, build), options)
    with serving(repository, *SHORT_WARMUP, env=environment) as server:
        yield server


def write_options(folder: Path, options: dict[str, Any]) -> None:
    (folder / "model.yaml").write_text(json.dumps(options))


def properties(server: ServerProcess, model: str) -> dict[str, str]:
    answer = httpx.get(f"http://{server.http}/v2/models/{model}", timeout=LONG_S)
    found: dict[str, str] = answer.raise_for_status().json()["properties"]
    return found


def reason(server: ServerProcess, model: str) -> str:
    """The reason why a model is not served; empty if it is."""
    answer = httpx.post(f"http://{server.http}/v2/repository/index", json={}, timeout=LONG_S)
    found: str = next(entry for entry in answer.json() if entry["name"] == model).get("reason", "")
    return found


def infer(server: ServerProcess, model: str, rows: np.ndarray) -> np.ndarray:
    answer = httpx.post(rest_url(server, model), json={"inputs": [json_input("x", rows)]}, timeout=LONG_S)
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


@pytest.mark.parametrize("model", ["first", "behind_a_missing_one", "beside_a_built_in", "one_thread"])
def test_model_runs_on_the_first_available_provider_that_metadata_names(server: ServerProcess, model: str) -> None:
    described = properties(server, model)
    assert (described["execution_provider"], described["nodes"]) == (OPENVINO, f"{OPENVINO}: 4")
    rows = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    np.testing.assert_allclose(infer(server, model, rows), infer(server, "behind_the_cpu", rows), atol=1e-5)


def test_no_node_runs_on_a_provider_after_the_cpu(server: ServerProcess) -> None:
    described = properties(server, "behind_the_cpu")
    assert (described["execution_provider"], described["nodes"]) == (CPU, f"{CPU}: 4")
    assert "execution_providers_passed_over" not in described


def test_unavailable_provider_is_skipped_with_its_reason(server: ServerProcess) -> None:
    expected = "TensorrtExecutionProvider is not offered by this ONNX Runtime"
    assert properties(server, "behind_a_missing_one")["execution_providers_passed_over"] == expected
    server.wait_for_line("execution provider passed over", "behind_a_missing_one", expected)


def test_missing_device_of_a_provider_is_skipped(server: ServerProcess) -> None:
    described = properties(server, "by_device")
    assert described["execution_provider"] == CPU
    assert described["execution_providers_passed_over"] == f"{OPENVINO} has no device NPU 0"


def test_failing_provider_fails_the_model_with_name_and_reason(server: ServerProcess) -> None:
    failure = reason(server, "fails")
    assert failure.startswith(f"ONNX Runtime cannot load the model on {OPENVINO}: ")
    assert "Unsupported property NO_SUCH_PROPERTY" in failure
    assert failure.endswith(f"(with allow_fallback it would be tried on {CPU})")


def test_failing_provider_is_skipped_with_allow_fallback(server: ServerProcess) -> None:
    assert reason(server, "falls_back") == ""
    found = properties(server, "falls_back")
    assert (found["execution_provider"], found["nodes"]) == (CPU, f"{CPU}: 4")
    assert found["execution_providers_passed_over"].startswith(f"ONNX Runtime cannot load the model on {OPENVINO}: ")
    assert infer(server, "falls_back", np.zeros((1, 64), np.float32)).shape == (1, 10)


def test_provider_that_fails_every_run_has_failed_unless_the_cpu_fails_too(server: ServerProcess) -> None:
    failed = f"execution_providers: {OPENVINO} opens the model, but fails on inputs that {CPU} accepts: "
    words = "Tensor data equal nullptr"
    shown = reason(server, "empty_fails")
    assert shown.startswith(failed)
    assert words in shown
    assert shown.endswith(f"(with allow_fallback it would be tried on {CPU})")
    described = {model: properties(server, model) for model in ("empty_falls_back", "empty_not_warmed", "picky")}
    assert [found["execution_provider"] for found in described.values()] == [CPU, OPENVINO, OPENVINO]
    passed_over = described["empty_falls_back"]["execution_providers_passed_over"]
    assert passed_over.startswith(failed)
    assert words in passed_over
    assert described["empty_falls_back"]["warm_up"].startswith("1: ")
    assert infer(server, "empty_falls_back", np.zeros((3, 0, 5), np.float32)).shape == (3, 0, 5)
    server.wait_for_line("execution provider passed over", "empty_falls_back", words)
    assert described["empty_not_warmed"]["warm_up"] == "not warmed up"
    assert described["picky"]["warm_up"].startswith("not warmed up: the model rejects synthetic inputs: ")
    images = np.ones((1, 1, 500, 500), np.float32)
    assert infer(server, "picky", images) == 1


def test_gpu_arena_is_rejected_on_a_plug_in_without_one(server: ServerProcess) -> None:
    assert reason(server, "gpu_arena").startswith("session.shrink_arenas: expected arenas out of cpu:0, got gpu:0")
    assert properties(server, "cpu_arena")["execution_provider"] == OPENVINO
    assert infer(server, "cpu_arena", np.zeros((1, 64), np.float32)).shape == (1, 10)


def test_plug_in_outside_a_package_is_named_by_its_library(tmp_path: Path) -> None:
    environment = openvino_environment(with_package=False)
    write_options(add_model(tmp_path, "m", builders.mlp), WISHES["first"])
    library = openvino_folder() / "onnxruntime_ep_openvino" / "libonnxruntime_providers_openvino_plugin.so"
    with serving(tmp_path, *SHORT_WARMUP, "--execution-provider-libraries", library, env=environment) as server:
        assert properties(server, "m")["execution_provider"] == OPENVINO


def test_library_that_is_not_a_plug_in_stops_the_start(tmp_path: Path) -> None:
    library = tmp_path / "plugin.so"
    library.write_bytes(b"no library")
    with starting("--example", "--execution-provider-libraries", library) as server:
        assert server.wait() == 1
        server.wait_for_line("the server cannot start", f"execution_provider_libraries: '{library}' cannot be used: ")


def test_unknown_provider_stops_the_start() -> None:
    with starting("--example", "--execution-providers", "cdua,cpu") as server:
        assert server.wait() == 1
        server.wait_for_line(
            "the server cannot start", "execution_providers: expected cpu, cuda, ", "got 'cdua'; did you mean 'cuda'?"
        )


def test_models_share_the_process_threads_when_configured(tmp_path: Path) -> None:
    for number in range(3):
        write_options(add_model(tmp_path, f"m{number}", builders.mlp), {"intra_op_threads": 9})
    rows = np.ones((2, 64), np.float32)
    threads, answers = [], []
    for flag in ("--no-global-threads", "--global-threads"):
        with serving(tmp_path, *SHORT_WARMUP, flag) as server:
            threads.append(psutil.Process(server.pid).num_threads())
            answers.append(infer(server, "m2", rows))
    assert threads[0] - threads[1] >= 3 * 8 - (psutil.cpu_count() or 1)
    np.testing.assert_allclose(answers[0], answers[1], atol=1e-6)


def test_nodes_left_to_the_cpu_are_reported_or_forbidden(server: ServerProcess) -> None:
    described = properties(server, "partly")
    assert described["nodes"] == f"{OPENVINO}: 2, {CPU}: 1"
    assert described["nodes_elsewhere"] == f"{CPU}: com.microsoft.FastGelu '/head/gelu'"
    server.wait_for_line("nodes are left to the CPU", "model=partly", OPENVINO, "1 FastGelu")
    assert "nodes_elsewhere" not in properties(server, "first")
    assert not [line for line in server.lines if "nodes are left to the CPU" in line and "model=first" in line]
    assert "fallback to CPU EP has been explicitly disabled" in reason(server, "forbidden")


def test_plug_in_providers_are_found_in_any_order_and_a_compiled_model_is_no_change(tmp_path: Path) -> None:
    environment = openvino_environment()
    second = f"{OPENVINO}.AUTO"
    write_options(add_model(tmp_path, "a", builders.mlp), {"execution_providers": [second, "cpu"]})
    write_options(add_model(tmp_path, "b", builders.mlp), WISHES["first"])
    write_options(add_model(tmp_path, "c", builders.mlp), {"execution_providers": [f"{OPENVINO}.NO_SUCH", "cpu"]})
    write_options(add_model(tmp_path, "d", builders.mlp), {"execution_providers": [f"{OPENVINO}.NO_SUCH", "cpu"]})
    options = WISHES["first"] | {"intra_op_threads": 1, "session": {"entries": {"ep.context_enable": 1}}}
    folder = add_model(tmp_path, "m", builders.mlp)
    write_options(folder, options)
    control = ("--model-control-mode", "explicit", "--load-model", "*")
    with serving(tmp_path, *SHORT_WARMUP, *control, env=environment) as server:
        assert [properties(server, model)["execution_provider"] for model in "abcd"] == [second, OPENVINO, CPU, CPU]
        for model in "cd":
            reason = (
                f"{OPENVINO}.NO_SUCH finds no device that it supports, according to the package onnxruntime_ep_openvino"
            )
            assert properties(server, model)["execution_providers_passed_over"] == reason
        written = {path.name for path in (folder / "1").iterdir()}
        assert written == {"model.onnx", "model_ctx.onnx", f"model_{OPENVINO}.bin"}
        for _ in range(2):  # loading an unchanged model is a no-op; ONNX Runtime would not overwrite these files
            httpx.post(f"http://{server.http}/v2/repository/models/m/load", timeout=LONG_S).raise_for_status()
        assert sum("model is ready" in line and "model=m " in line for line in server.lines) == 1


def test_plug_in_named_by_its_library_is_not_registered_again_for_its_package(tmp_path: Path) -> None:
    environment = openvino_environment()
    write_options(add_model(tmp_path, "a", builders.mlp), {"execution_providers": [f"{OPENVINO}.NO_SUCH", "cpu"]})
    second_device = {"execution_providers": [{"openvino": {"device_id": 1}}, "cpu"]}
    write_options(add_model(tmp_path, "b", builders.mlp), second_device)
    library = openvino_folder() / "onnxruntime_ep_openvino" / "libonnxruntime_providers_openvino_plugin.so"
    with serving(tmp_path, *SHORT_WARMUP, "--execution-provider-libraries", library, env=environment) as server:
        assert properties(server, "b")["execution_providers_passed_over"] == f"{OPENVINO} has no device 1"
