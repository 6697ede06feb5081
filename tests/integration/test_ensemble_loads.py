"""Loads of ensembles and their members, by calls, by changed folders, and with faults."""

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from held_files import held_file
from http_wire import wait_until
from models import builders, members, sequences
from models.members import Step, add_ensemble, ensemble_text
from ortserve.core.dtypes import DataType
from servers import (
    LONG_S,
    LOOK_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    json_input,
    read_metrics,
    rest_url,
    serving,
    wait_for_queue,
)

EXPLICIT = ("--model-control-mode", "explicit", *SHORT_WARMUP)
POLL = ("--model-control-mode", "poll", "--repository-poll-s", "0.05", *SHORT_WARMUP)
BODY = {"inputs": [json_input("x", np.array([[1, 2]], np.float32))]}
CHAIN: list[Step] = [("plus", {"a": "x"}, {"b": "t"}), ("double", {"a": "t"}, {"b": "y"})]


def put(folder: Path, name: str, scale: float, offset: float) -> None:
    """Replace the only version of a model atomically, by renaming."""
    fresh, old = folder / name / ".fresh", folder / name / ".old"
    shutil.rmtree(old, ignore_errors=True)
    fresh.mkdir(parents=True)
    members.affine(fresh / "model.onnx", scale, offset)
    if (folder / name / "1").exists():
        (folder / name / "1").rename(old)
    fresh.rename(folder / name / "1")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    put(tmp_path, "plus", 1, 1)
    put(tmp_path, "double", 2, 0)
    add_ensemble(tmp_path, "chain", ["x"], ["y"], CHAIN)
    add_ensemble(tmp_path, "outer", ["x"], ["y"], [("chain", {"x": "x"}, {"y": "y"})])
    return tmp_path


@pytest.fixture
def server(repository: Path) -> Iterator[ServerProcess]:
    with serving(repository, *EXPLICIT) as server:
        yield server


def change(server: ServerProcess, model: str, to: str = "load", **parameters: bool) -> httpx.Response:
    url = f"{server.url}/v2/repository/models/{model}/{to}"
    return httpx.post(url, json={"parameters": parameters}, timeout=LONG_S)


def states(server: ServerProcess) -> dict[str, str]:
    entries = httpx.post(f"{server.url}/v2/repository/index", timeout=LONG_S).json()
    return {entry["name"]: f"{entry.get('state', '')} {entry.get('reason', '')}".strip() for entry in entries}


def answer(server: ServerProcess, model: str = "chain") -> list[float]:
    response = httpx.post(rest_url(server, model), json=BODY, timeout=LONG_S).raise_for_status()
    return list(response.json()["outputs"][0]["data"])


def test_members_come_with_their_ensemble_and_ensembles_go_with_their_members(server: ServerProcess) -> None:
    assert change(server, "outer").status_code == 200
    assert set(states(server).values()) == {"READY"}
    assert answer(server, "outer") == [4, 6]
    assert change(server, "plus", "unload").status_code == 200
    assert states(server) == {
        "chain": "UNAVAILABLE unloaded",
        "outer": "UNAVAILABLE unloaded",
        "plus": "UNAVAILABLE unloaded",
        "double": "READY",
    }
    assert httpx.post(rest_url(server, "chain"), json=BODY, timeout=LONG_S).status_code == 404
    assert change(server, "plus").status_code == 200
    assert answer(server, "outer") == [4, 6]
    assert change(server, "outer", "unload").status_code == 200
    assert answer(server) == [4, 6]
    assert change(server, "plus", "unload").status_code == 200
    assert change(server, "plus").status_code == 200
    assert states(server)["chain"] == "READY"
    assert states(server)["outer"] != "READY"  # it was unloaded by name


def test_members_that_nothing_else_needs_are_unloaded_with_their_ensemble(
    server: ServerProcess, repository: Path
) -> None:
    assert change(server, "outer").status_code == 200
    assert change(server, "outer", "unload", unload_dependents=True).status_code == 200
    assert "READY" not in states(server).values()
    add_ensemble(repository, "other", ["x"], ["y"], [("plus", {"a": "x"}, {"b": "y"})])
    assert change(server, "other").status_code == 200
    assert change(server, "chain").status_code == 200
    assert change(server, "chain", "unload", unload_dependents=True).status_code == 200
    assert {name for name, state in states(server).items() if state == "READY"} == {"other", "plus"}


@pytest.mark.parametrize("mode", ["explicit", "poll"])
def test_no_request_fails_while_members_are_reloaded(repository: Path, mode: str) -> None:
    flags = POLL if mode == "poll" else (*EXPLICIT, "--load-model", "outer")
    with serving(repository, *flags) as server:
        seen: list[list[float]] = []
        failures: list[Exception] = []
        stopping = threading.Event()

        def ask() -> None:
            with httpx.Client(timeout=LONG_S) as client:
                while not stopping.is_set():
                    try:
                        response = client.post(rest_url(server, "outer"), json=BODY).raise_for_status()
                        seen.append(list(response.json()["outputs"][0]["data"]))
                    except Exception as error:
                        failures.append(error)
                        return

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for offset in (2, 3, 4, 5):
                put(repository, "plus", 1, offset)
                expected = [2 * (1 + offset), 2 * (2 + offset)]
                if mode == "explicit":
                    assert change(server, "plus").status_code == 200
                    assert answer(server, "outer") == expected
                else:
                    deadline = time.monotonic() + LONG_S
                    while (not seen or seen[-1] != expected) and not failures and time.monotonic() < deadline:
                        stopping.wait(0.01)
                    assert seen[-1] == expected
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
        assert not failures, failures[0]


@pytest.mark.parametrize("changed", ["another member", "the ensemble", "its version", "a member that does not fit"])
def test_a_sequence_keeps_its_order_during_changes(tmp_path: Path, changed: str) -> None:
    passes = add_model(tmp_path, "passes", builders.identity, datatype=DataType.INT32, shape=("batch", 1))
    (add_model(tmp_path, "adds", sequences.slow, steps=10_000) / "model.yaml").write_text(
        "sequences: {max_idle_s: 30, states: [{input: STATE, output: NEXT}]}\n"
    )
    steps: list[Step] = [("passes", {"x": "x"}, {"y": "t"}), ("adds", {"INPUT": "t"}, {"TOTAL": "total"})]
    add_ensemble(tmp_path, "through", ["x"], ["total"], steps)
    answers: Queue[tuple[Any, Any]] = Queue()
    options = ("--model-control-mode", "explicit", "--load-model", "*", "--warmup-s", "0.05")
    with serving(tmp_path, *options) as server, triton_grpc.InferenceServerClient(server.grpc) as client:

        def send(value: int, model: str = "through") -> None:
            tensor = triton_grpc.InferInput("x", [1, 1], "INT32")
            tensor.set_data_from_numpy(np.array([[value]], np.int32))
            flags = {"sequence_start": value == 1, "sequence_end": value == 70}
            client.async_stream_infer(model, [tensor], sequence_id=1, **flags)

        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for value in range(1, 61):  # they wait in the ensemble until it follows the load
            send(value)
        send(0, "no model")  # answered at once, so the server has received all earlier requests
        found: list[tuple[Any, Any]] = []
        while (one := answers.get(timeout=LONG_S))[1] is None:
            found.append(one)
        if changed == "the ensemble":
            with (tmp_path / "through" / "model.yaml").open("a") as configuration:
                configuration.write("max_rows: 7\n")
        elif changed == "its version":
            (tmp_path / "through" / "2").mkdir()
        elif changed == "a member that does not fit":  # the ensemble goes out of service and returns
            good = (passes / "1" / "model.onnx").read_bytes()
            builders.identity(passes / "1" / "model.onnx", datatype=DataType.INT32, shape=("batch", 2))
            assert change(server, "passes").status_code == 200
            assert "inconsistent shape" in states(server)["through"]
            (passes / "1" / "model.onnx").write_bytes(good)
        else:
            (passes / "model.yaml").write_text("max_queue_rows: 1000\n")
        assert change(server, "through" if changed in ("the ensemble", "its version") else "passes").status_code == 200
        for value in range(61, 71):
            send(value)
        found += [answers.get(timeout=LONG_S) for _ in range(70 - len(found))]
    assert "no model" in str(one[1])
    assert {error for _, error in found} == {None}
    assert [int(result.as_numpy("total")[0, 0]) for result, _ in found] == np.cumsum(range(1, 71)).tolist()


def test_no_cached_answer_of_an_ensemble_outlives_its_members(repository: Path) -> None:
    add_ensemble(repository, "cached", ["x"], ["y"], CHAIN, response_cache="true")
    with serving(repository, *EXPLICIT, "--load-model", "cached") as server:
        assert answer(server, "cached") == [4, 6]
        assert answer(server, "cached") == [4, 6]
        url = f"{server.url}/v2/models/cached/stats"
        statistics = httpx.get(url, timeout=LONG_S).json()["model_stats"][0]["inference_stats"]
        assert statistics["cache_hit"]["count"] == 1
        put(repository, "plus", 1, 9)
        assert change(server, "plus").status_code == 200
        assert answer(server, "cached") == [20, 22]


def test_a_broken_reload_of_a_member_changes_nothing(server: ServerProcess, repository: Path) -> None:
    assert change(server, "chain").status_code == 200
    (repository / "plus" / "1" / "model.onnx").write_bytes(b"not a model")
    assert change(server, "plus").status_code == 500
    assert answer(server) == [4, 6]


def test_an_ensemble_goes_out_of_service_when_a_member_does_not_fit_any_more(
    server: ServerProcess, repository: Path
) -> None:
    assert change(server, "chain").status_code == 200
    good = (repository / "plus" / "1" / "model.onnx").read_bytes()
    members.affine(repository / "plus" / "1" / "model.onnx", shape=("batch", 3))
    assert change(server, "plus").status_code == 200
    refused = httpx.post(rest_url(server, "chain"), json=BODY, timeout=LONG_S)
    assert refused.status_code == 503
    reason = "ensemble tensor t: inconsistent shape: [-1,3] is inferred from model plus"
    assert reason in refused.json()["error"]
    assert "model cannot be served" in server.wait_for_line("model=chain", reason)
    (repository / "plus" / "1" / "model.onnx").write_bytes(good)
    assert change(server, "plus").status_code == 200
    assert answer(server) == [4, 6]


@pytest.mark.parametrize("options", ["ensemble: [", "another member"])
def test_an_ensemble_whose_reload_failed_follows_its_members_and_leaves_with_them(
    server: ServerProcess, repository: Path, options: str
) -> None:
    assert change(server, "outer").status_code == 200
    good = (repository / "chain" / "model.yaml").read_text()
    if options == "another member":
        options = ensemble_text(["x"], ["y"], [("double", {"nothing": "x"}, {"b": "y"})])
    (repository / "chain" / "model.yaml").write_text(options)
    reason = change(server, "chain").json()["error"].partition("'chain'")[2]
    put(repository, "plus", 1, 9)
    assert change(server, "plus").status_code == 200
    assert answer(server, "outer") == [20, 22]
    shown = states(server)["chain"].removeprefix("READY ")
    assert shown in reason, (shown, reason)
    assert change(server, "plus", "unload").status_code == 200
    assert set(states(server).values()) == {"READY", "UNAVAILABLE unloaded"}
    (repository / "chain" / "model.yaml").write_text(good)
    assert change(server, "outer").status_code == 200
    assert answer(server, "outer") == [20, 22]


@pytest.mark.parametrize("to", ["load", "unload"])
def test_a_change_of_an_ensemble_that_waits_to_follow_a_member_fails_no_request(repository: Path, to: str) -> None:
    (repository / "plus" / "2").mkdir()
    members.affine(repository / "plus" / "2" / "model.onnx", 1, 9)
    (repository / "plus" / "model.yaml").write_text("version_policy: {all: true}\nlabels: {stable: 1}\n")
    # A budget makes loads sequential.
    flags = (*EXPLICIT, "--load-model", "chain", "--memory-budget-bytes", "8000000000")
    with (
        held_file(members.affine(repository / "held.onnx")) as file,
        serving(repository, *flags) as server,
        ThreadPoolExecutor(2) as threads,
    ):
        holding = threads.submit(change, server, "held")
        wait_until(lambda: file.is_awaited)
        url = f"{server.url}/v2/models/plus/labels"
        httpx.put(url, json={"labels": {"stable": 2}}, timeout=LONG_S).raise_for_status()
        with (repository / "chain" / "model.yaml").open("a") as configuration:
            configuration.write("max_rows: 7\n")
        changing = threads.submit(change, server, "chain", to)
        server.wait_for_line("load cancelled", "model=chain")
        if to == "load":
            assert answer(server) == [4, 6]
        file.release()
        assert (holding.result().status_code, changing.result().status_code) == (200, 200)
        if to == "load":
            assert answer(server) == [20, 22]
        else:
            assert states(server)["chain"] == "UNAVAILABLE unloaded"


def test_an_ensemble_that_is_loaded_during_an_unload_of_its_members_goes_with_them(repository: Path) -> None:
    slow = add_model(repository, "slow", builders.slow, steps=150_000)
    (slow / "model.yaml").write_text("max_rows: 1\nwarmup_s: 0\n")
    steps: list[Step] = [("chain", {"x": "x"}, {"y": "y"}), ("slow", {"x": "z"}, {"y": "w"})]
    add_ensemble(repository, "busy", ["x", "z"], ["y", "w"], steps)
    named = [part for name in ("outer", "busy") for part in ("--load-model", name)]
    with serving(repository, *EXPLICIT, *named) as server, ThreadPoolExecutor(3) as threads:
        body = {"inputs": [*BODY["inputs"], json_input("z", np.ones((1, 4), np.float32))]}
        asking = [threads.submit(httpx.post, rest_url(server, "busy"), json=body, timeout=LONG_S) for _ in range(2)]
        wait_for_queue(server, "slow", 1)
        unloading = threads.submit(change, server, "plus", "unload")
        while states(server)["busy"] != "UNLOADING unloaded":
            time.sleep(LOOK_S)
        assert change(server, "outer").status_code == 200  # chain still serves, until busy has answered
        assert [call.result().status_code for call in (*asking, unloading)] == [200, 200, 200]
        gone = dict.fromkeys(("busy", "chain", "outer", "plus"), "UNAVAILABLE unloaded")
        assert states(server) == gone | {"double": "READY", "slow": "READY"}


def test_an_ensemble_follows_a_member_after_the_ensembles_that_it_contains(
    server: ServerProcess, repository: Path
) -> None:
    steps: list[Step] = [("chain", {"x": "x"}, {"y": "t"}), ("plus", {"a": "t"}, {"b": "y"})]
    add_ensemble(repository, "both", ["x"], ["y"], steps)
    for call in (("both",), ("chain", "unload"), ("chain",)):  # so that chain was loaded after both
        assert change(server, *call).status_code == 200
    counted = ("ortserve_model_loads_total", "model", "outcome")
    loads = read_metrics(server).by_labels(*counted)["both ok"]
    put(repository, "plus", 1, 2)
    assert change(server, "plus").status_code == 200
    assert answer(server, "both") == [8, 10]
    # One load, because an earlier one would use the new load of plus, and that of chain still the old one.
    assert read_metrics(server).by_labels(*counted)["both ok"] == loads + 1


def test_no_request_uses_two_loads_of_a_model_that_two_members_contain(server: ServerProcess, repository: Path) -> None:
    add_ensemble(repository, "plain", ["x"], ["y"], [("plus", {"a": "x"}, {"b": "y"})])
    steps: list[Step] = [("chain", {"x": "x"}, {"y": "doubled"}), ("plain", {"x": "x"}, {"y": "single"})]
    add_ensemble(repository, "both", ["x"], ["doubled", "single"], steps)
    assert change(server, "both").status_code == 200
    stopping = threading.Event()

    def ask() -> set[tuple[float, float]]:
        seen = set()
        with httpx.Client(timeout=LONG_S) as client:
            is_last = False
            while not is_last:
                is_last = stopping.is_set()
                outputs = client.post(rest_url(server, "both"), json=BODY).raise_for_status().json()["outputs"]
                (doubled, _), (single, _) = (output["data"] for output in outputs)
                seen.add((doubled, single))
        return seen

    offsets = range(2, 12)
    with ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(ask) for _ in range(2)]
        for offset in offsets:
            put(repository, "plus", 1, offset)
            assert change(server, "plus").status_code == 200
        stopping.set()
        seen = set.union(*(one.result() for one in asking))
    assert (2.0 * (1 + offsets[-1]), 1.0 + offsets[-1]) in seen
    assert {doubled / single for doubled, single in seen} == {2}


def test_each_fault_of_an_ensemble_has_its_text(server: ServerProcess, repository: Path) -> None:
    def load_error(steps: list[Step], **more: str) -> str:
        shutil.rmtree(repository / "e", ignore_errors=True)
        add_ensemble(repository, "e", ["x"], ["y"], steps, **more)
        response = change(server, "e")
        assert response.status_code == 500
        return str(response.json()["error"])

    plus, double = CHAIN
    assert "ensemble e contains models that are not available or ambiguous: nomodel" in load_error(
        [("nomodel", {"a": "x"}, {"b": "y"})]
    )
    assert "in ensemble e, ensemble tensor x is mapping to non-existing input no in model plus" in load_error(
        [("plus", {"no": "x"}, {"b": "y"})]
    )
    assert "in ensemble e, ensemble tensor y is mapped from non-existing output no in model plus" in load_error(
        [("plus", {"a": "x"}, {"no": "y"})]
    )
    assert "output 'y' for ensemble 'e' is not written: at least one of its depending tensors, 'u'" in load_error(
        [("plus", {"a": "x"}, {"b": "t"}), ("double", {"a": "u"}, {"b": "y"})]
    )
    assert "ensemble tensor 't' can appear in an output map only once" in load_error(
        [plus, ("plus", {"a": "x"}, {"b": "t"}), double]
    )
    add_ensemble(repository, "a", ["x"], ["y"], [("b", {"x": "x"}, {"y": "y"})])
    add_ensemble(repository, "b", ["x"], ["y"], [("a", {"x": "x"}, {"y": "y"})])
    assert "circular dependency between ensembles: a -> b -> a" in change(server, "a").json()["error"]
    assert change(server, "chain").status_code == 200
    assert answer(server) == [4, 6]
    add_model(repository, "broken", members.affine)
    (repository / "broken" / "1" / "model.onnx").write_bytes(b"no")
    text = load_error([("broken", {"a": "x"}, {"b": "y"})])
    assert "ensemble 'e' depends on 'broken' which has no loaded version. Model 'broken' loading failed with" in text


def test_the_other_modes_load_members_first(repository: Path) -> None:
    with serving(repository, *SHORT_WARMUP) as server:
        assert set(states(server).values()) == {"READY"}
        assert answer(server, "outer") == [4, 6]
