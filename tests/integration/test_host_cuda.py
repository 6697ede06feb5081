"""ONNX Runtime's own CUDA provider, and the server above it, with a CUDA runtime on host memory instead of a GPU.

Kernels compute nothing there, so these models only copy or multiply. All else is real: the provider's sessions,
streams, bindings, captures and replays, and a server on top.
"""

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from apart import UnavailableError
from gpu_package import environment_on_host_memory
from models import builders, sequences
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, read_metrics, serving, wait_for_sample

pytestmark = pytest.mark.timeout(600)  # the package may need to be installed

TESTS: Final = Path(__file__).parents[1]
OF_GPU: Final = (
    "(test_gpu.py and not [host and"
    " (every_datatype or id_of_another_shape or overlapping or another_process or gpu_runs or (growing and copies)))"
)
"""The tests that need a GPU, except those whose models compute with kernels."""
ANY_PACE: Final = "lost_device or cannot_capture"
"""Tests whose subject does not depend on when copies end. They run once, because they start processes."""
DEVICES: Final = 2

WISHES: Final[dict[str, dict[str, Any]]] = {
    "replayed": {"execution_providers": ["cuda"], "graph_replay": True, "buckets": [1, 2, 4]},
    "bound": {"execution_providers": ["cuda", "cpu"], "max_rows": 4},
    "plain": {"execution_providers": ["cuda"], "device_buffers": False},
    "spread": {"execution_providers": ["cuda"], "instances": 2, "gpus": [0, 1], "buckets": [4]},
    "behind": {"execution_providers": ["tensorrt", "cuda", "cpu"], "allow_fallback": True, "buckets": [2]},
    "refused": {"execution_providers": ["tensorrt", "cuda", "cpu"]},
}

STATES: Final = [{"input": "STATE", "output": "NEXT"}]
SEQUENCES: Final[dict[str, dict[str, Any]]] = {
    f"{strategy}_{way}": {
        "execution_providers": ["cuda"],
        "graph_replay": way == "replayed",
        "max_rows": 4,
        "sequences": {"strategy": strategy, "states": STATES, "max_idle_s": 60},
    }
    for strategy in ("oldest", "direct")
    for way in ("bound", "replayed")
}
GROWING: Final[dict[str, dict[str, Any]]] = {
    strategy: {
        "execution_providers": ["cuda"],
        "max_rows": 4,
        "sequences": {
            "strategy": strategy,
            "states": [{"input": "PAST", "output": "PRESENT", "initial_dims": [0, 4]}],
            "max_idle_s": 60,
        },
    }
    for strategy in ("oldest", "direct")
}


def host_cuda(**settings: str) -> dict[str, str]:
    try:
        return environment_on_host_memory(**{"pace": "late", "devices": str(DEVICES)} | settings)
    except UnavailableError as error:
        pytest.skip(f"ONNX Runtime's package for GPUs cannot be had here: {error}")


def pytest_in(environment: Mapping[str, str], *arguments: str | Path) -> str:
    """Run pytest in a separate process, in which all tests must pass without skips. Returns its output."""
    alone = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly")
    output = output_of(environment, "-m", "pytest", "-q", "-o", "faulthandler_timeout=60", *alone, *arguments)
    assert "skipped" not in output.splitlines()[-1], output
    return output


def output_of(environment: Mapping[str, str], *arguments: str | Path) -> str:
    """Run Python in a separate process, which must succeed. Returns its output."""
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=TESTS.parent,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


@pytest.mark.parametrize(
    ("pace", "which", "number"),
    [("late", f"host_cuda or {OF_GPU}", 62), ("any", f"test_cuda_provider and not ({ANY_PACE}) or {OF_GPU}", 54)],
    ids=["late", "any"],
)
def test_tests_of_the_provider_pass_on_host_memory(pace: str, which: str, number: int) -> None:
    """One process for all: what the provider does, the script of figures, and tests that otherwise need a GPU."""
    environment = host_cuda(pace=pace) | {"ORTSERVE_TEST_GPU": "1"}
    output = pytest_in(environment, TESTS / "host_cuda", TESTS / "gpu", "-k", which)
    assert re.search(rf"\b{number} passed", output), output


def test_script_of_figures_runs_the_gpu_tests_without_plugins_of_pytest() -> None:
    """Its settings differ from the repository's, which need plugins that a GPU machine may lack."""
    script = TESTS.parent / "loadtests" / "gpu_figures.py"
    which = {"PYTEST_ADDOPTS": "-k 'another_process or gpu_runs or (growing and copies)'"}
    output = output_of(host_cuda() | which, script, "--only", "checks")
    assert re.search(r"\b4 passed", output), output


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    environment = host_cuda()
    repository = tmp_path_factory.mktemp("cuda")
    for name, options in WISHES.items():
        folder = add_model(repository, name, builders.identity)
        (folder / "model.yaml").write_text(json.dumps(options))
    for name, options in SEQUENCES.items():
        folder = add_model(repository, name, sequences.delayed)
        (folder / "model.yaml").write_text(json.dumps(options))
    for name, options in GROWING.items():
        folder = add_model(repository, f"growing_{name}", sequences.history)
        (folder / "model.yaml").write_text(json.dumps(options))
    explicit = ("--model-control-mode", "explicit", "--load-model", "*", "--allow-client-shm")
    providers = ("--execution-providers", "cuda,cpu")
    with serving(repository, *SHORT_WARMUP, *explicit, *providers, env=environment) as server:
        yield server


def properties(server: ServerProcess, model: str) -> dict[str, str]:
    answer = httpx.get(f"{server.url}/v2/models/{model}", timeout=LONG_S)
    found: dict[str, str] = answer.raise_for_status().json()["properties"]
    return found


def rows(number: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal((number, 4)).astype(np.float32)


@pytest.mark.parametrize("model", [name for name in WISHES if name != "refused"])
def test_requests_get_their_rows_over_both_protocols(server: ServerProcess, model: str) -> None:
    with triton_http.InferenceServerClient(server.http) as http, triton_grpc.InferenceServerClient(server.grpc) as grpc:
        for client, module in ((http, triton_http), (grpc, triton_grpc)):
            for number in (1, 2, 3, 4, 1):
                x = rows(number)
                tensor = module.InferInput("x", x.shape, "FP32")
                tensor.set_data_from_numpy(x)
                assert np.array_equal(client.infer(model, [tensor]).as_numpy("y"), x)


@pytest.mark.parametrize("model", SEQUENCES)
def test_states_of_sequences_stay_on_the_device(server: ServerProcess, model: str) -> None:
    assert properties(server, model)["sequence_states"] == "on cuda:0"
    with triton_http.InferenceServerClient(server.http, concurrency=3) as client:
        before = {sequence: np.zeros((1, 4), np.float32) for sequence in (1, 2, 3)}
        for step in range(6):
            sent = {sequence: rows(1) + 10 * step + 100 * sequence for sequence in before}
            ends = {"sequence_start": step == 0, "sequence_end": step == 5}
            waiting = {}
            for sequence, x in sent.items():
                tensor = triton_http.InferInput("INPUT", x.shape, "FP32")
                tensor.set_data_from_numpy(x)
                waiting[sequence] = client.async_infer(model, [tensor], sequence_id=sequence, **ends)
            for sequence, answer in waiting.items():
                assert np.array_equal(answer.get_result().as_numpy("OUTPUT"), before[sequence])
            before = sent
    samples = read_metrics(server)
    assert samples.value("ortserve_sequence_state_bytes", model=model, version="1") == 0
    ledger = samples.by_labels("ortserve_device_ledger_bytes", "device", "owner", "purpose")
    assert ledger[f"cuda:0 {model}/1 states"] == 16 * 1024


@pytest.mark.parametrize("strategy", GROWING)
def test_growing_states_stay_on_the_device(server: ServerProcess, strategy: str) -> None:
    model = f"growing_{strategy}"
    assert properties(server, model)["sequence_states"] == "on cuda:0"
    assert properties(server, model)["device_buffers"].startswith("none: ")
    with triton_http.InferenceServerClient(server.http, concurrency=3) as client:
        sent: dict[int, list[np.ndarray]] = {1: [], 2: [], 3: []}
        for step in range(6):
            waiting = {}
            for sequence, values in sent.items():
                if sequence == 3 and step in (1, 3):
                    continue  # this part becomes shorter than the others
                values.append(rows(1) + 10 * step + 100 * sequence)
                tensor = triton_http.InferInput("INPUT", (1, 4), "FP32")
                tensor.set_data_from_numpy(values[-1])
                ends = {"sequence_start": step == 0, "sequence_end": step == 5}
                waiting[sequence] = client.async_infer(model, [tensor], sequence_id=sequence, **ends)
            for sequence, answer in waiting.items():
                assert np.array_equal(answer.get_result().as_numpy("OUTPUT")[0], np.concatenate(sent[sequence]))
    samples = read_metrics(server)
    assert samples.value("ortserve_sequence_state_bytes", model=model, version="1") == 0
    ledger = samples.by_labels("ortserve_device_ledger_bytes", "device", "owner", "purpose")
    assert ledger[f"cuda:0 {model}/1 states"] == 256 * 1024


def test_metadata_describes_how_models_run(server: ServerProcess) -> None:
    assert properties(server, "replayed")["device_buffers"] == "batches of 1, 2, 4 rows"
    assert properties(server, "replayed")["graph_replay"] == "batches of 1, 2, 4 rows"
    assert properties(server, "bound")["device_buffers"] == "batches of 1, 2, 4 rows"
    assert "graph_replay" not in properties(server, "bound")
    assert properties(server, "plain")["device_buffers"] == "none: device_buffers is off"
    behind = properties(server, "behind")
    assert behind["execution_provider"] == "CUDAExecutionProvider"
    assert behind["device_buffers"] == "batches of 2 rows"
    assert "TensorrtExecutionProvider" in behind["execution_providers_passed_over"]
    index = httpx.post(f"{server.url}/v2/repository/index", json={}, timeout=LONG_S).json()
    (reason,) = [model["reason"] for model in index if model["name"] == "refused"]
    assert "TensorRT" in reason
    assert "with allow_fallback it would be tried on CUDAExecutionProvider" in reason


def test_start_says_that_the_options_leave_the_gpu_unused(server: ServerProcess, tmp_path: Path) -> None:
    add_model(tmp_path, "copies", builders.identity)
    with serving(tmp_path, *SHORT_WARMUP, "--execution-providers", "cpu", env=host_cuda()) as unused:
        (line,) = [line for line in unused.lines if "execution_providers names only the CPU" in line]
        assert "CUDAExecutionProvider" in line
    assert "execution_providers names only the CPU" not in server.output


def test_runs_captures_and_memory_are_counted(server: ServerProcess) -> None:
    samples = read_metrics(server)
    batches = samples.by_labels("ortserve_device_batches_total", "model", "way")
    assert batches["replayed replayed"] > 0
    assert batches["bound bound"] > 0
    captures = samples.by_labels("ortserve_device_captures_total", "model", "result")
    assert captures == {f"{model} captured": 6.0 for model in ("replayed", "oldest_replayed", "direct_replayed")}
    memory = samples.by_labels("ortserve_device_memory_bytes", "device", "kind")
    assert memory["cuda:0 total"] == memory["cuda:1 total"] == 4 << 30
    assert memory["cuda:0 free"] < memory["cuda:0 total"]
    ledger = samples.by_labels("ortserve_device_ledger_bytes", "device", "owner", "purpose")
    assert ledger["cuda:0 spread/1 buffers"] == ledger["cuda:1 spread/1 1 buffers"] == 1024


def test_nvml_figures_are_exported_for_each_gpu(server: ServerProcess) -> None:
    samples = read_metrics(server)
    assert samples.by_labels("ortserve_device_utilization", "device") == {"cuda:0": 0.25, "cuda:1": 0.25}
    assert samples.by_labels("nv_gpu_utilization", "gpu_uuid") == {"GPU-0": 0.25, "GPU-1": 0.25}
    assert samples.by_labels("nv_gpu_memory_total_bytes", "gpu_uuid")["GPU-1"] == 4 << 30
    assert samples.by_labels("nv_gpu_memory_used_bytes", "gpu_uuid")["GPU-1"] == 1 << 30
    assert samples.by_labels("nv_gpu_power_usage", "gpu_uuid")["GPU-1"] == 312.5
    assert samples.by_labels("nv_gpu_power_limit", "gpu_uuid") == {"GPU-0": 700.0}, "what one does not tell is left out"
    assert samples.by_labels("nv_energy_consumption", "gpu_uuid")["GPU-0"] >= 1


def test_unloaded_model_releases_its_memory_and_can_be_reloaded(server: ServerProcess) -> None:
    name, labels = "ortserve_device_memory_bytes", {"device": "cuda:1", "kind": "free"}

    def free_bytes() -> float:
        return read_metrics(server).value(name, **labels)

    with triton_http.InferenceServerClient(server.http, network_timeout=LONG_S) as client:
        before = free_bytes()
        client.unload_model("spread")
        wait_for_sample(server, name, lambda value: value > before, **labels)
        client.load_model("spread")
        assert free_bytes() == before


def test_models_leave_a_gpu_whose_budget_they_exceed(server: ServerProcess, tmp_path: Path) -> None:
    names = ("first", "second", "third")
    for name in names:
        folder = add_model(tmp_path, name, builders.identity)
        options = WISHES["bound"] | {"load_policy": "on_demand"}
        (folder / "model.yaml").write_text(json.dumps(options))

    def ask(server: ServerProcess, model: str) -> None:
        tensor = triton_http.InferInput("x", [2, 4], "FP32")
        tensor.set_data_from_numpy(rows(2))
        with triton_http.InferenceServerClient(server.http, network_timeout=LONG_S) as client:
            assert np.array_equal(client.infer(model, [tensor]).as_numpy("y"), rows(2))

    def held(server: ServerProcess) -> dict[str, float]:
        samples = read_metrics(server).by_labels("ortserve_device_ledger_bytes", "owner")
        return {owner: nbytes for owner, nbytes in samples.items() if owner != "unloaded"}

    samples = read_metrics(server).by_labels("ortserve_device_ledger_bytes", "owner", "purpose")
    one = int(sum(nbytes for place, nbytes in samples.items() if place.startswith("bound/1 ")))
    assert samples["bound/1 buffers"] > 0
    with serving(tmp_path, *SHORT_WARMUP, "--gpu-memory-budget-bytes", str(2 * one), env=host_cuda()) as limited:
        for name in (*names, *names):
            ask(limited, name)
        assert read_metrics(limited).value("ortserve_gpu_memory_budget_bytes") == 2 * one
        assert len(held(limited)) == 2, "the third one is evicted"
        evicted = read_metrics(limited).by_labels("ortserve_model_evictions_total", "model")
        assert sum(evicted.values()) >= 2


EXPORTER: Final = """
import sys
import numpy as np
from cupy.cuda import runtime

content = np.arange(8, dtype=np.float32)
address = runtime.malloc(4096)
runtime.memcpy(address, content.ctypes.data, content.nbytes, runtime.memcpyHostToDevice)
print(runtime.ipcGetMemHandle(address).hex(), flush=True)
sys.stdin.readline()
answer = np.zeros(8, np.float32)
runtime.memcpy(answer.ctypes.data, address + 64, answer.nbytes, runtime.memcpyDeviceToHost)
print(*answer, flush=True)
"""
"""Holds eight numbers on a GPU and prints their handle; later it prints the numbers 64 bytes behind them."""


def test_gpu_memory_of_another_process_is_read_and_written(server: ServerProcess) -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-c", EXPORTER], env=host_cuda(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as owner,
        triton_http.InferenceServerClient(server.http, network_timeout=LONG_S) as client,
    ):
        assert owner.stdin is not None
        assert owner.stdout is not None
        handle = base64.b64encode(bytes.fromhex(owner.stdout.readline()))
        client.register_cuda_shared_memory("region", handle, 0, 4096)
        x, y = triton_http.InferInput("x", [2, 4], "FP32"), triton_http.InferRequestedOutput("y")
        x.set_shared_memory("region", 32)
        y.set_shared_memory("region", 32, 64)
        client.infer("bound", [x], outputs=[y])
        client.unregister_cuda_shared_memory("region")
        with pytest.raises(triton_http.InferenceServerException, match="byte_size"):
            client.register_cuda_shared_memory("region", handle, 0, 2**30)
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.stdout.readline().split() == [f"{number:.1f}" for number in range(8)]
