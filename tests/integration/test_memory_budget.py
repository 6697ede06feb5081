"""A memory budget for models, and models that load on the first request, over both protocols."""

import platform
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from encodings_of_requests import triton_inputs
from held_files import held_file
from http_wire import wait_until
from models import builders, costly, members
from servers import (
    LONG_S,
    Samples,
    ServerProcess,
    add_model,
    json_input,
    read_metrics,
    rest_url,
    serving,
    triton_clients,
)

MIB = 1024 * 1024
ON_DEMAND = "not in memory: the next request loads it"
ROW = {"x": np.ones((1, 4), np.float32)}
PAIR = {"a": np.ones((1, 2), np.float32)}
TOO_LATE = "'m' is loaded on demand, which takes longer than the request may wait"
SHORT_LOADS = ("--warmup-s", "0", "--intra-op-threads", "1")
GLIBC = tuple(map(int, platform.libc_ver()[1].split(".")))
PLAIN = ("env",) if GLIBC < (2, 43) else ("env", "GLIBC_TUNABLES=glibc.malloc.hugetlb=0")
"""Starts a server that is not forked from another process, because a forked process shares its memory. Newer versions
of glibc grow the heap by huge pages, so that a session of these small models would hold some MiB beyond its weights."""


def write_options(folder: Path, text: str) -> None:
    (folder / "model.yaml").write_text(text)


def states(server: ServerProcess) -> dict[str, tuple[str, str]]:
    entries = httpx.post(f"{server.url}/v2/repository/index", timeout=LONG_S).json()
    return {entry["name"]: (entry["state"], entry.get("reason", "")) for entry in entries}


def is_loading(server: ServerProcess, model: str) -> bool:
    return states(server)[model][0] == "LOADING"


def versions(server: ServerProcess) -> set[tuple[str, str, str]]:
    """Name, version and state of all models in the repository index."""
    entries = httpx.post(f"{server.url}/v2/repository/index", timeout=LONG_S).json()
    return {(entry["name"], entry["version"], entry["state"]) for entry in entries}


def ask(server: ServerProcess, model: str, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Return the only output of a model. Uses a new client, because Triton's HTTP client belongs to a thread."""
    with triton_http.InferenceServerClient(server.http) as client:
        answer = client.infer(model, triton_inputs(triton_http, inputs))
        return np.asarray(answer.as_numpy(answer.get_response()["outputs"][0]["name"]))


def ask_briefly(server: ServerProcess, model: str, inputs: dict[str, np.ndarray], timeout_ms: int = 200) -> str:
    """Send a request that waits for a moment, and return the text of its rejection."""
    answer = httpx.post(
        rest_url(server, model),
        json={"inputs": [json_input(name, array) for name, array in inputs.items()]},
        headers={"x-request-timeout-ms": str(timeout_ms)},
        timeout=LONG_S,
    )
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1"), answer.text
    return str(answer.json()["error"])


def test_requests_of_both_protocols_share_a_load_that_outlives_a_late_one(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_options(add_model(repository, "other", builders.identity), "required: true")
    with (
        held_file(builders.identity(repository / "m.onnx")) as file,
        serving(repository, "--load-policy", "on_demand", "--on-demand-wait-s", "600", *SHORT_LOADS) as server,
        triton_clients(server) as (http, grpc),
        ThreadPoolExecutor(2) as threads,
    ):
        assert states(server) == {"m": ("UNAVAILABLE", ON_DEMAND), "other": ("READY", "")}
        assert http.is_model_ready("m")
        assert grpc.is_model_ready("m")
        for timeout_ms in (200, 0):
            assert TOO_LATE in ask_briefly(server, "m", ROW, timeout_ms)
        with pytest.raises(InferenceServerException, match=r"Deadline Exceeded|loaded on demand"):
            grpc.infer("m", triton_inputs(triton_grpc, ROW), client_timeout=0.2)
        assert states(server)["m"][0] == "LOADING"
        by_http = threads.submit(ask, server, "m", ROW)
        by_grpc = threads.submit(grpc.infer, "m", triton_inputs(triton_grpc, ROW))
        file.release()
        np.testing.assert_array_equal(by_http.result(LONG_S), ROW["x"])
        np.testing.assert_array_equal(by_grpc.result(LONG_S).as_numpy("y"), ROW["x"])
        samples = read_metrics(server)
        assert samples.value("ortserve_model_loads_total", model="m", outcome="ok") == 1
        outcomes = samples.by_labels("ortserve_on_demand_requests_total", "outcome")
        assert outcomes["late"] >= 1
        assert states(server)["m"] == ("READY", "")


def test_requests_wait_for_the_newer_load_that_cancels_the_one_they_waited_for(tmp_path: Path) -> None:
    """A load that a held file delays holds the only slot, so that the model's load is cancelled while it waits."""
    repository = tmp_path / "repository"
    folder = add_model(repository, "m", members.affine, offset=1)
    flags = ("--model-control-mode", "explicit", "--load-model", "*", "--load-policy", "on_demand")
    with (
        held_file(builders.identity(repository / "slow.onnx")) as file,
        serving(repository, *flags, "--memory-budget-bytes", str(1024 * MIB), *SHORT_LOADS) as server,
        ThreadPoolExecutor(4) as threads,
    ):
        slow = threads.submit(ask, server, "slow", ROW)
        wait_until(partial(is_loading, server, "slow"))
        early = threads.submit(ask, server, "m", PAIR)
        wait_until(partial(is_loading, server, "m"))
        members.affine(folder / "1" / "model.onnx", offset=2)
        load = threads.submit(httpx.post, f"{server.url}/v2/repository/models/m/load", timeout=LONG_S)
        server.wait_for_line("load cancelled", "model=m")
        assert TOO_LATE in ask_briefly(server, "m", PAIR)
        file.release()
        np.testing.assert_array_equal(early.result(LONG_S), PAIR["a"] + 2)
        assert load.result(LONG_S).status_code == 200
        np.testing.assert_array_equal(slow.result(LONG_S), ROW["x"])


def test_lower_version_does_not_answer_while_the_highest_one_is_loaded_on_demand(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m", members.affine, offset=1)
    add_model(tmp_path, "m", members.affine, version=2, offset=2)
    write_options(folder, "version_policy: {all: true}")
    flags = ("--load-policy", "on_demand", "--memory-budget-bytes", str(1024 * MIB))
    with (
        held_file(folder / "2" / "model.onnx") as file,
        serving(tmp_path, *flags, *SHORT_LOADS) as server,
        triton_clients(server) as (http, grpc),
        ThreadPoolExecutor(2) as threads,
    ):
        waiting = threads.submit(ask, server, "m", PAIR)
        wait_until(lambda: ("m", "1", "READY") in versions(server))
        assert ("m", "2", "LOADING") in versions(server)
        for client, library in ((http, triton_http), (grpc, triton_grpc)):
            answer = client.infer("m", triton_inputs(library, PAIR), model_version="1")
            np.testing.assert_array_equal(answer.as_numpy("b"), PAIR["a"] + 1)
        assert TOO_LATE in ask_briefly(server, "m", PAIR)
        later = threads.submit(grpc.infer, "m", triton_inputs(triton_grpc, PAIR))
        file.release()
        np.testing.assert_array_equal(waiting.result(LONG_S), PAIR["a"] + 2)
        np.testing.assert_array_equal(later.result(LONG_S).as_numpy("b"), PAIR["a"] + 2)


def test_lower_version_answers_once_the_load_of_the_highest_one_has_failed(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m", members.affine, offset=1)
    write_options(folder, "version_policy: {all: true}")
    (folder / "2").mkdir()
    (folder / "2" / "model.onnx").write_bytes(b"no model")
    with serving(tmp_path, "--load-policy", "on_demand", *SHORT_LOADS) as server:
        for _ in range(2):
            np.testing.assert_array_equal(ask(server, "m", PAIR), PAIR["a"] + 1)


def publish_another_version(folder: Path) -> None:
    (folder / "1").rename(folder / "2")
    members.affine(folder / "2" / "model.onnx", offset=2)


def publish_another_file(folder: Path) -> None:
    members.affine(folder / "1" / "other.onnx", offset=2)
    (folder / "1" / "model.onnx").unlink()
    write_options(folder, "model_file: other.onnx")


@pytest.mark.parametrize("publish", [publish_another_version, publish_another_file])
def test_request_loads_files_that_were_replaced_since_the_last_poll(
    tmp_path: Path, publish: Callable[[Path], None]
) -> None:
    folder = add_model(tmp_path, "m", members.affine, offset=1)
    poll = ("--model-control-mode", "poll", "--repository-poll-s", "3600")
    with serving(tmp_path, *poll, "--load-policy", "on_demand", *SHORT_LOADS) as server:
        publish(folder)
        np.testing.assert_array_equal(ask(server, "m", PAIR), PAIR["a"] + 2)


def test_load_on_demand_of_a_removed_file_fails_with_the_reason(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m", members.affine, offset=1)
    with serving(tmp_path, "--load-policy", "on_demand", *SHORT_LOADS) as server:
        publish_another_version(folder)
        with pytest.raises(
            InferenceServerException, match=r"load failed for model 'm': version 1 .*there is no such file"
        ):
            ask(server, "m", PAIR)


def test_start_without_a_model_in_memory_says_how_many_there_are(tmp_path: Path) -> None:
    for name in ("one", "two"):
        add_model(tmp_path, name, builders.identity)
    with serving(tmp_path, "--load-policy", "on_demand") as server:
        assert "initial loading has ended ready=True models=0 failed=0 not_in_memory=2" in server.output
        assert "found no models" not in server.output


def held(samples: Samples) -> dict[str, float]:
    """Private memory of each version in the ledger."""
    found: dict[str, float] = {}
    for labels, nbytes in samples.by_labels("ortserve_model_memory_bytes", "model", "kind").items():
        model, kind = labels.split()
        assert kind != "expected"
        if kind != "mapped":
            found[model] = found.get(model, 0) + nbytes
    return found


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Three models of 4 MB with memory for two, one of them pinned; one that never fits; two ensembles on demand."""
    repository = tmp_path_factory.mktemp("crowded")
    for name in ("a", "b", "c"):
        add_model(repository, name, costly.weighty, width=1000, layers=1)
    write_options(repository / "a", "load_policy: pinned")
    write_options(add_model(repository, "huge", costly.weighty, width=2000, layers=1), "load_policy: on_demand")
    write_options(add_model(repository, "double", members.affine, scale=2), "load_policy: on_demand")
    steps = [("double", {"a": "x"}, {"b": "half"}), ("double", {"a": "half"}, {"b": "y"})]
    members.add_ensemble(repository, "fourfold", ["x"], ["y"], steps, load_policy="on_demand")
    steps = [(name, {"x": "x"}, {"y": f"of_{name}"}) for name in ("b", "c")]
    members.add_ensemble(repository, "apart", ["x"], ["of_b", "of_c"], steps, load_policy="on_demand")
    with serving(repository, "--memory-budget-bytes", str(12 * MIB), "--warmup-s", "0.1", through=PLAIN) as server:
        yield server


def test_least_recently_used_model_leaves_and_comes_back(crowded: ServerProcess) -> None:
    wide = {"x": np.linspace(-1, 1, 1000, dtype=np.float32)[None]}
    assert {name: state for name, (state, _) in states(crowded).items()} == {
        "a": "READY",
        "apart": "UNAVAILABLE",
        "b": "READY",
        "c": "UNAVAILABLE",
        "double": "UNAVAILABLE",
        "fourfold": "UNAVAILABLE",
        "huge": "UNAVAILABLE",
    }
    with triton_clients(crowded) as (http, grpc):
        expected = http.infer("a", triton_inputs(triton_http, wide)).as_numpy("y")
        for name in ("c", "b", "a", "c"):
            for client, library in ((http, triton_http), (grpc, triton_grpc)):
                answer = client.infer(name, triton_inputs(library, wide)).as_numpy("y")
                np.testing.assert_allclose(answer, expected, rtol=1e-5)
        assert grpc.get_model_metadata("b").inputs[0].shape == [-1, 1000]  # this also loads it
    samples = read_metrics(crowded)
    assert samples.by_labels("ortserve_model_evictions_total", "model") == {"b": 2, "c": 2}
    assert samples.value("ortserve_memory_budget_bytes") == 12 * MIB
    memory = held(samples)
    assert memory.keys() == {"a", "b"}
    assert sum(memory.values()) <= 12 * MIB
    # The model's series continue across loads.
    http_requests = samples.by_labels("ortserve_request_duration_seconds_count", "model", "protocol", "outcome")
    assert http_requests["c http ok"] == 2


def test_model_that_never_has_room_is_refused_with_the_missing_bytes(crowded: ServerProcess) -> None:
    wide = {"x": np.ones((1, 2000), np.float32)}
    with triton_clients(crowded) as (http, grpc):
        for client, library in ((http, triton_http), (grpc, triton_grpc)):
            with pytest.raises(InferenceServerException) as caught:
                client.infer("huge", triton_inputs(library, wide))
            pattern = r"'huge' needs about 15\.\d MiB, memory_budget_bytes is 12\.0 MiB, .*: \d+\.\d MiB too few"
            assert re.search(pattern, str(caught.value)), caught.value
    assert states(crowded)["huge"][0] == "UNAVAILABLE"
    assert read_metrics(crowded).by_labels("ortserve_refused_loads_total", "reason")["budget"] == 1


def test_ensemble_on_demand_loads_its_members_and_leaves_with_them(crowded: ServerProcess) -> None:
    with triton_clients(crowded) as (http, _):
        answer = http.infer("fourfold", triton_inputs(triton_http, {"x": np.ones((1, 2), np.float32)}))
        np.testing.assert_array_equal(answer.as_numpy("y"), np.full((1, 2), 4))
    now = states(crowded)
    assert (now["fourfold"], now["double"]) == (("READY", ""), ("READY", ""))


def test_ensemble_whose_members_do_not_fit_together_fails_and_evicts_nothing_more(crowded: ServerProcess) -> None:
    wide = {"x": np.ones((1, 1000), np.float32)}
    pattern = (
        r"the members of 'apart' need about \d\.\d MiB together, memory_budget_bytes is 12\.0 MiB, "
        r"of which pinned models hold \d\.\d MiB: \d\.\d MiB too few"
    )

    def refusal() -> str:
        with pytest.raises(InferenceServerException) as caught:
            http.infer("apart", triton_inputs(triton_http, wide))
        return str(caught.value)

    with triton_clients(crowded) as (http, _):
        wait_until(lambda: bool(re.search(pattern, refusal())))  # by then both members have been loaded
        evictions = read_metrics(crowded).by_labels("ortserve_model_evictions_total", "model")
        for _ in range(3):
            assert re.search(pattern, refusal())
    assert read_metrics(crowded).by_labels("ortserve_model_evictions_total", "model") == evictions
    state, reason = states(crowded)["apart"]
    assert state == "UNAVAILABLE"
    assert re.search(pattern, reason)


def test_ensemble_on_demand_loads_a_member_again_that_leaves_before_it_is_held(tmp_path: Path) -> None:
    """The load of ``c`` waits behind that of ``b``, whose file is held, and evicts ``a`` before the ensemble loads."""
    repository = tmp_path / "repository"
    for name in ("a", "b", "c"):
        add_model(repository, name, costly.weighty, width=1000, layers=1)
    steps = [(name, {"x": "x"}, {"y": f"of_{name}"}) for name in ("a", "b")]
    members.add_ensemble(repository, "ab", ["x"], ["of_a", "of_b"], steps)
    wide = {"x": np.ones((1, 1000), np.float32)}
    flags = ("--load-policy", "on_demand", "--memory-budget-bytes", str(12 * MIB), *SHORT_LOADS)
    with (
        held_file(repository / "b" / "1" / "model.onnx") as file,
        serving(repository, *flags, through=PLAIN) as server,
        ThreadPoolExecutor(2) as threads,
    ):
        expected = ask(server, "a", wide)
        stays_until_s = time.monotonic() + 1  # five times its load, or more
        whole = threads.submit(ask, server, "ab", wide)
        wait_until(partial(is_loading, server, "b"))
        other = threads.submit(ask, server, "c", wide)
        wait_until(lambda: is_loading(server, "c") and time.monotonic() > stays_until_s)
        file.release()
        for answer in (whole, other):
            np.testing.assert_allclose(answer.result(LONG_S), expected, rtol=1e-5)
        assert read_metrics(server).by_labels("ortserve_model_evictions_total", "model")["a"] >= 1


def private_bytes(server: ServerProcess) -> int:
    status = Path(f"/proc/{server.pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def test_ledger_agrees_with_what_the_process_holds(tmp_path: Path) -> None:
    """Models of a few KB, 50 MB and 100 MB, and several instances; after unloads and repeated loads."""
    add_model(tmp_path, "tiny", builders.mlp)
    write_options(add_model(tmp_path, "several", costly.weighty, width=2000, layers=1), "instances: 3")
    add_model(tmp_path, "medium", costly.weighty, width=3500, layers=1)
    add_model(tmp_path, "large", costly.weighty, layers=1)
    flags = ("--model-control-mode", "explicit", "--memory-budget-bytes", str(1024 * MIB), "--warmup-s", "0.1")
    with serving(tmp_path, *flags, through=PLAIN) as server, triton_clients(server) as (http, _):

        def agreement() -> float:
            return (private_bytes(server) - before) / sum(held(read_metrics(server)).values())

        http.load_model("tiny")  # the first load allocates memory once that later loads do not
        http.unload_model("tiny")
        read_metrics(server)
        before = private_bytes(server)
        for name in ("tiny", "several", "medium", "large"):
            http.load_model(name)
        memory = held(read_metrics(server))
        assert memory["large"] == pytest.approx(100e6, rel=0.1)
        assert memory["several"] == pytest.approx(3 * 16e6, rel=0.15)
        assert agreement() == pytest.approx(1, abs=0.1)
        for name in ("several", "large"):
            http.unload_model(name)
        assert held(read_metrics(server)).keys() == {"tiny", "medium"}
        assert agreement() == pytest.approx(1, abs=0.1)
        http.load_model("several")
        assert agreement() == pytest.approx(1, abs=0.1)
