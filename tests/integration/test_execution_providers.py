"""Where models run, and where they do not: wish lists of execution providers through a real server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from models import builders
from plugin_provider import OPENVINO, openvino_environment, openvino_folder
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, json_input, rest_url, serving, starting

CPU = "CPUExecutionProvider"
AZURE = "AzureExecutionProvider"
"""Built into every ONNX Runtime; it takes no node of ours."""

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
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    environment = openvino_environment()
    repository = tmp_path_factory.mktemp("providers")
    for name, options in WISHES.items():
        write_options(add_model(repository, name, builders.mlp), options)
    with serving(repository, *SHORT_WARMUP, env=environment) as server:
        yield server


def write_options(folder: Path, options: dict[str, Any]) -> None:
    (folder / "model.yaml").write_text(json.dumps(options))


def properties(server: ServerProcess, model: str) -> dict[str, str]:
    answer = httpx.get(f"http://{server.http}/v2/models/{model}", timeout=LONG_S)
    told: dict[str, str] = answer.raise_for_status().json()["properties"]
    return told


def reason(server: ServerProcess, model: str) -> str:
    """Why a model is not served; empty where it is."""
    answer = httpx.post(f"http://{server.http}/v2/repository/index", json={}, timeout=LONG_S)
    told: str = next(entry for entry in answer.json() if entry["name"] == model).get("reason", "")
    return told


def infer(server: ServerProcess, model: str, rows: np.ndarray) -> np.ndarray:
    answer = httpx.post(rest_url(server, model), json={"inputs": [json_input("x", rows)]}, timeout=LONG_S)
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


@pytest.mark.parametrize("model", ["first", "behind_a_missing_one", "beside_a_built_in", "one_thread"])
def test_model_runs_on_the_first_provider_there_is_and_its_metadata_says_so(server: ServerProcess, model: str) -> None:
    told = properties(server, model)
    assert (told["execution_provider"], told["nodes"]) == (OPENVINO, f"{OPENVINO}: 4")
    rows = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    np.testing.assert_allclose(infer(server, model, rows), infer(server, "behind_the_cpu", rows), atol=1e-5)


def test_nothing_runs_on_a_provider_behind_the_cpu(server: ServerProcess) -> None:
    told = properties(server, "behind_the_cpu")
    assert (told["execution_provider"], told["nodes"]) == (CPU, f"{CPU}: 4")
    assert "execution_providers_passed_over" not in told


def test_provider_that_is_not_there_is_passed_over_with_its_reason(server: ServerProcess) -> None:
    expected = "TensorrtExecutionProvider is not offered by this ONNX Runtime"
    assert properties(server, "behind_a_missing_one")["execution_providers_passed_over"] == expected
    server.wait_for_line("execution provider passed over", "behind_a_missing_one", expected)


def test_device_that_a_provider_does_not_have_is_passed_over(server: ServerProcess) -> None:
    told = properties(server, "by_device")
    assert told["execution_provider"] == CPU
    assert told["execution_providers_passed_over"] == f"{OPENVINO} has no device NPU 0"


def test_provider_that_fails_fails_the_model_and_is_named_with_its_reason(server: ServerProcess) -> None:
    told = reason(server, "fails")
    assert told.startswith(f"ONNX Runtime cannot load the model on {OPENVINO}: ")
    assert "Unsupported property NO_SUCH_PROPERTY" in told
    assert told.endswith(f"(with allow_fallback it would be tried on {CPU})")


def test_provider_that_fails_is_passed_over_where_that_is_allowed(server: ServerProcess) -> None:
    assert reason(server, "falls_back") == ""
    told = properties(server, "falls_back")
    assert (told["execution_provider"], told["nodes"]) == (CPU, f"{CPU}: 4")
    assert told["execution_providers_passed_over"].startswith(f"ONNX Runtime cannot load the model on {OPENVINO}: ")
    assert infer(server, "falls_back", np.zeros((1, 64), np.float32)).shape == (1, 10)


def test_plug_in_that_is_no_package_is_named_by_its_library(tmp_path: Path) -> None:
    environment = openvino_environment(with_package=False)
    write_options(add_model(tmp_path, "m", builders.mlp), WISHES["first"])
    library = openvino_folder() / "onnxruntime_ep_openvino" / "libonnxruntime_providers_openvino_plugin.so"
    with serving(tmp_path, *SHORT_WARMUP, "--execution-provider-libraries", library, env=environment) as server:
        assert properties(server, "m")["execution_provider"] == OPENVINO


def test_library_that_is_no_plug_in_stops_the_start(tmp_path: Path) -> None:
    library = tmp_path / "plugin.so"
    library.write_bytes(b"no library")
    with starting("--example", "--execution-provider-libraries", library) as server:
        assert server.wait() == 1
        server.wait_for_line("the server cannot start", f"execution_provider_libraries: '{library}' cannot be used: ")


def test_models_share_the_threads_of_the_process_where_that_is_asked_for(tmp_path: Path) -> None:
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
