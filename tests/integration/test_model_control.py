"""Loading, reloading and unloading while clients send requests, by calls and by changed folders."""

import base64
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from encodings_of_requests import rest_json, triton_inputs
from held_files import held_file
from http_wire import wait_until
from models import builders, members
from servers import (
    LONG_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    read_metrics,
    serving,
    starting,
    triton_clients,
    wait_for_sample,
)

EXPLICIT = ("--model-control-mode", "explicit", *SHORT_WARMUP)
POLL = ("--model-control-mode", "poll", "--repository-poll-s", "0.05", *SHORT_WARMUP)
ONES = {"x": np.ones((1, 4), np.float32)}


@pytest.fixture(scope="module")
def control_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server in the mode ``explicit``, without a loaded model."""
    with serving(tmp_path_factory.mktemp("empty"), *EXPLICIT) as server:
        yield server


def put(folder: Path, version: int, build: Callable[[Path], Path]) -> None:
    """Add a version to a model's folder atomically, by renaming, as operators should."""
    fresh = folder / f".{version}"
    fresh.mkdir(parents=True)
    build(fresh / "model.onnx")
    if (folder / str(version)).exists():
        shutil.rmtree(folder / str(version))
    fresh.rename(folder / str(version))


def index_of(server: ServerProcess, **body: Any) -> list[dict[str, str]]:
    answer = httpx.post(f"http://{server.http}/v2/repository/index", json=body, timeout=LONG_S)
    entries: list[dict[str, str]] = answer.raise_for_status().json()
    return entries


def answer_of(server: ServerProcess, model: str) -> float:
    return float(rest_json(server, model, ONES)["y"][0, 0])


@contextmanager
def load_on(server: ServerProcess, model: str) -> Iterator[list[float]]:
    """Keep two clients of each protocol busy. Yields the list of their answers. Any failure fails the test."""
    answers: list[float] = []
    failures: list[Exception] = []
    stopping = threading.Event()

    def ask(library: Any, address: str) -> None:
        with library.InferenceServerClient(address) as client:
            inputs = triton_inputs(library, ONES)
            while not stopping.is_set():
                try:
                    answers.append(float(client.infer(model, inputs).as_numpy("y")[0, 0]))
                except Exception as error:
                    failures.append(error)
                    return

    askers = [
        threading.Thread(target=ask, args=arguments)
        for arguments in ((triton_http, server.http), (triton_grpc, server.grpc)) * 2
    ]
    for asker in askers:
        asker.start()
    try:
        yield answers
    finally:
        stopping.set()
        for asker in askers:
            asker.join(LONG_S)
    assert failures == []


def test_no_request_fails_while_versions_are_swapped_under_load(tmp_path: Path) -> None:
    put(tmp_path / "m", 1, builders.identity)
    with serving(tmp_path, *EXPLICIT, "--load-model", "m") as server, triton_clients(server) as (http, grpc):
        with load_on(server, "m") as answers:
            for _ in range(3):
                put(tmp_path / "m", 1, builders.unnamed_dims)
                http.load_model("m")
                assert answer_of(server, "m") == 2
                put(tmp_path / "m", 1, builders.identity)
                grpc.load_model("m")
                assert answer_of(server, "m") == 1
            for version in (2, 3, 4, 5):
                put(tmp_path / "m", version, builders.unnamed_dims)
                http.load_model("m")
                assert answer_of(server, "m") == 2
            put(tmp_path / "m", 6, builders.not_onnx)
            with pytest.raises(
                InferenceServerException, match="load failed for model 'm': version 6 is at UNAVAILABLE state: O"
            ):
                grpc.load_model("m")
        assert set(answers) == {1, 2}
        entries = {entry["version"]: entry for entry in index_of(server)}
        assert entries["5"] == {"name": "m", "version": "5", "state": "READY"}
        assert entries["6"]["state"] == "UNAVAILABLE"
        assert "ONNX Runtime cannot load the model" in entries["6"]["reason"]
        assert httpx.get(f"http://{server.http}/v2/health/ready").status_code == 200


def test_failed_reload_of_a_version_keeps_the_old_one_and_shows_the_reason(tmp_path: Path) -> None:
    put(tmp_path / "m", 1, builders.identity)
    with serving(tmp_path, *EXPLICIT, "--load-model", "m") as server, triton_clients(server) as (http, _):
        put(tmp_path / "m", 1, builders.not_onnx)
        with pytest.raises(InferenceServerException, match="load failed for model 'm'") as caught:
            http.load_model("m")
        assert caught.value.status() == "500"
        assert answer_of(server, "m") == 1
        (entry,) = index_of(server)
        assert (entry["state"], "ONNX Runtime cannot load" in entry["reason"]) == ("READY", True)
        assert str(tmp_path) not in entry["reason"]
        (tmp_path / "m" / "model.yaml").write_text("max_rows: many")
        with pytest.raises(
            InferenceServerException, match=r"failed to load 'm', failed to poll from model repository: model\.yaml"
        ):
            http.load_model("m")
        (tmp_path / "m" / "model.yaml").unlink()
        put(tmp_path / "m", 1, builders.unnamed_dims)
        http.load_model("m")
        assert answer_of(server, "m") == 2
        assert index_of(server) == [{"name": "m", "version": "1", "state": "READY"}]
        loads = read_metrics(server).by_labels("ortserve_model_loads_total", "outcome")
        assert loads == {"ok": 2, "failed": 2}


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Returns a function that adds a version 2 with a changed model file."""

    def put_version(folder: Path) -> None:
        (folder / "2").mkdir()
        file = builders.identity(folder / "2" / "model.onnx")
        file.write_bytes(change(file.read_bytes()))

    return put_version


def configured(name: str, text: str) -> Callable[[Path], None]:
    """Returns a function that adds a version 2 and a configuration."""

    def put_version(folder: Path) -> None:
        put(folder, 2, builders.identity)
        (folder / name).write_text(text)

    return put_version


def lacks_weights(folder: Path) -> None:
    put(folder, 2, lambda path: builders.external_weights(path, "weights.bin"))


def fails_golden(folder: Path) -> None:
    put(folder, 2, builders.identity)
    (folder / "2" / "golden").mkdir()
    row = np.ones((1, 4), np.float32)
    arrays: dict[str, Any] = {"input.x": row, "output.y": row + 1}
    np.savez(folder / "2" / "golden" / "a.npz", **arrays)


FAULTS: dict[str, Callable[[Path], None]] = {
    "Protobuf parsing failed": damaged(lambda content: b"not a model"),
    "No graph was found": damaged(lambda content: b""),
    "Load model from model.onnx failed": damaged(lambda content: content[: len(content) // 2]),
    "No Op registered for Identitx": damaged(lambda content: content.replace(b"Identity", b"Identitx")),
    "Unsupported model IR version: 127": damaged(lambda content: b"\x08\x7f" + content[2:]),
    'External data path does not exist: "weights.bin"': lacks_weights,
    "golden samples: output 'y'": fails_golden,
    "model.yaml: max_rows: expected integer": configured("model.yaml", "max_rows: many"),
    "none of NoSuchProvider can be used": configured("model.yaml", "execution_providers: [NoSuchProvider]"),
    "specifies INT64": configured("config.pbtxt", 'input [{name: "x" data_type: TYPE_INT64 dims: [4]}]'),
}
"""Functions that add a version 2 that cannot serve, by the reason."""


def test_failed_loads_keep_the_old_version_and_leak_nothing(tmp_path: Path) -> None:
    """100 failed loads of ten kinds over both protocols, with a request after each."""
    folder = tmp_path / "m"
    put(folder, 1, builders.identity)
    with serving(tmp_path, *EXPLICIT, "--load-model", "m") as server, triton_clients(server) as clients:
        process = psutil.Process(server.pid)
        for turn in range(10):
            for reason, put_version in FAULTS.items():
                put_version(folder)
                is_unread = reason.startswith("model.yaml")
                begin = "failed to load 'm', failed to poll" if is_unread else "load failed for model 'm': version 2 "
                with pytest.raises(InferenceServerException, match=f"{begin}.*{re.escape(reason)}"):
                    clients[turn % 2].load_model("m")
                assert answer_of(server, "m") == 1
                shutil.rmtree(folder / "2")
                for name in ("model.yaml", "config.pbtxt"):
                    (folder / name).unlink(missing_ok=True)
            if turn == 4:
                before = process.num_fds(), process.num_threads(), process.memory_info().rss
        wait_until(lambda: process.num_fds() <= before[0])  # the server may not have closed the last connection yet
        after = process.num_fds(), process.num_threads(), process.memory_info().rss
        assert after[1] <= before[1] + 1
        assert after[2] <= before[2] * 1.02
        assert {entry["version"]: entry["state"] for entry in index_of(server)}["1"] == "READY"
        put(folder, 2, builders.unnamed_dims)
        clients[0].load_model("m")
        assert answer_of(server, "m") == 2


def test_unchanged_load_keeps_counters_and_changed_load_resets_them(tmp_path: Path) -> None:
    put(tmp_path / "m", 1, builders.identity)
    with serving(tmp_path, *EXPLICIT, "--load-model", "*") as server, triton_clients(server) as (http, _):

        def inferences() -> int:
            count: int = http.get_inference_statistics("m")["model_stats"][0]["inference_count"]
            return count

        answer_of(server, "m")
        http.load_model("m")
        (tmp_path / "m" / "1" / "model.onnx").parent.touch()
        http.load_model("m")
        assert inferences() == 1
        (tmp_path / "m" / "model.yaml").write_text("max_rows: 3")
        http.load_model("m")
        assert inferences() == 0
        assert http.get_model_config("m")["max_batch_size"] == 3


def test_explicit_mode_loads_named_models_and_unloads_at_once(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        add_model(tmp_path, name, builders.identity)
    with (
        serving(tmp_path, *EXPLICIT, "--load-model", "a", "--load-model", "b") as server,
        triton_clients(server) as (http, grpc),
    ):
        assert index_of(server) == [
            {"name": "a", "version": "1", "state": "READY"},
            {"name": "b", "version": "1", "state": "READY"},
            {"name": "c"},
        ]
        for client in (http, grpc):
            client.load_model("c")
            assert client.is_model_ready("c")
            client.unload_model("c")
            assert not client.is_model_ready("c")
            client.unload_model("c")
            client.unload_model("never there")
        assert index_of(server)[2] == {"name": "c", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
        assert [entry["name"] for entry in index_of(server, ready=True)] == ["a", "b"]
        assert [entry.name for entry in grpc.get_model_repository_index().models] == ["a", "b", "c"]
        with pytest.raises(InferenceServerException, match="'c' has no available versions: it was unloaded") as caught:
            http.infer("c", triton_inputs(triton_http, ONES))
        assert caught.value.status() == "404"
        add_model(tmp_path, "d", builders.identity)
        http.load_model("d")
        assert answer_of(server, "d") == 1


def test_unload_answers_admitted_requests_and_rejects_later_ones(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "slow", builders.slow, steps=60_000)
    (folder / "model.yaml").write_text("max_rows: 1\nwarmup_s: 0\n")
    with serving(tmp_path, *EXPLICIT, "--load-model", "*") as server, triton_clients(server) as (_, grpc):
        done: list[int] = []

        def ask() -> None:
            rest_json(server, "slow", ONES)
            done.append(1)

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        wait_for_sample(server, "ortserve_queue_rows", lambda rows: rows >= 3, model="slow", version="1")
        grpc.unload_model("slow")
        for asker in askers:
            asker.join(LONG_S)
        assert len(done) == 4
        assert not grpc.is_model_ready("slow")
        assert read_metrics(server).by_labels("ortserve_model_state", "model") == {}


def test_lower_version_does_not_answer_while_the_highest_one_is_loaded(tmp_path: Path) -> None:
    """Version 1 returns its input, version 2 does not. The warm-up of version 2 takes seconds."""
    folder = add_model(tmp_path, "m", builders.identity)
    add_model(tmp_path, "m", builders.slow, version=2, steps=60_000)
    (folder / "model.yaml").write_text("version_policy: {all: true}\n")
    members.add_ensemble(tmp_path, "e", ["x"], ["y"], [("m", {"x": "x"}, {"y": "y"})])
    with (
        serving(tmp_path, *EXPLICIT) as server,
        triton_clients(server) as (http, grpc),
        ThreadPoolExecutor(2) as threads,
    ):
        loading = threads.submit(httpx.post, f"{server.url}/v2/repository/models/m/load", timeout=LONG_S)
        wait_until(lambda: grpc.is_model_ready("m", "1"))
        for client, library in ((http, triton_http), (grpc, triton_grpc)):
            with pytest.raises(InferenceServerException, match=r"no available versions: (LOADING|WARMING) \([^;]*\)$"):
                client.infer("m", triton_inputs(library, ONES))
            assert not client.is_model_ready("m")
        of_ensemble = threads.submit(httpx.post, f"{server.url}/v2/repository/models/e/load", timeout=LONG_S)
        assert (loading.result().status_code, of_ensemble.result().status_code) == (200, 200)
        assert answer_of(server, "m") == answer_of(server, "e") != 1


def test_changes_of_one_model_at_the_same_time_follow_each_other(tmp_path: Path) -> None:
    add_model(tmp_path, "m", builders.identity)
    with serving(tmp_path, *EXPLICIT) as server:
        failures: list[Exception] = []

        def change(call: str) -> None:
            try:
                with triton_http.InferenceServerClient(server.http) as client:
                    getattr(client, call)("m")
            except InferenceServerException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=change, args=(call,)) for call in ("load_model", "load_model", "unload_model") * 3
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        # An unload cancels earlier loads.
        assert all("its load was cancelled: the model is unloaded" in str(failure) for failure in failures)
        failures.clear()
        change("load_model")
        assert failures == []
        assert index_of(server) == [{"name": "m", "version": "1", "state": "READY"}]


def states(index: list[dict[str, str]]) -> set[tuple[str, str]]:
    return {(entry["name"], entry.get("state", "")) for entry in index}


@pytest.mark.parametrize("at_start", [True, False])
def test_load_that_does_not_end_delays_no_change(tmp_path: Path, *, at_start: bool) -> None:
    """Neither changes of other models nor a newer one of the same model, also while the server still starts."""
    add_model(tmp_path, "old", builders.identity)
    slow = builders.identity(tmp_path / ("slow.onnx" if at_start else ".slow"))
    with held_file(slow) as file, starting(tmp_path, *POLL) as server, triton_clients(server) as (http, _):
        if not at_start:
            server.wait_for_line("initial loading has ended")
            slow.rename(tmp_path / "slow.onnx")
        wait_until(lambda: {("slow", "LOADING"), ("old", "READY")} <= states(index_of(server)))
        shutil.move(tmp_path / "old", tmp_path / ".old")
        add_model(tmp_path, "new", builders.identity)
        wait_until(lambda: {("new", "READY"), ("old", "UNAVAILABLE")} <= states(index_of(server)))
        assert ("slow", "LOADING") in states(index_of(server))
        assert http.is_server_ready() is not at_start
        builders.identity(tmp_path / ".new").rename(tmp_path / "slow.onnx")
        add_model(tmp_path, "next", builders.identity)
        wait_until(lambda: ("next", "READY") in states(index_of(server)))  # a poll has seen the new file
        file.release()
        server.wait_for_line("load cancelled", "its files or options have changed")
        server.wait_for_line("model is ready", "model=slow")
        wait_until(http.is_server_ready)


def test_polling_follows_the_folders(tmp_path: Path) -> None:
    add_model(tmp_path, "stays", builders.identity)
    with serving(tmp_path, *POLL) as server:
        # Wait for the log line, because polling may see the folder between mkdir and the write of the file.
        add_model(tmp_path, "new", builders.identity)
        server.wait_for_line("model is ready", "model=new")
        with load_on(server, "new") as answers:
            put(tmp_path / "new", 2, builders.unnamed_dims)
            server.wait_for_line("model is ready", "model=new", "version=2")
            assert answer_of(server, "new") == 2
            put(tmp_path / "new", 3, builders.not_onnx)
            server.wait_for_line("model cannot be served", "model=new", "version=3")
            assert answer_of(server, "new") == 2
        assert 2 in answers
        shutil.rmtree(tmp_path / "new")
        server.wait_for_line("model is no longer in the repositories", "model=new")
        labels = {"model": "new", "version": "2", "state": "ready"}
        wait_for_sample(server, "ortserve_model_state", lambda shown: not shown, **labels)
        assert answer_of(server, "stays") == 1
        assert sum("model=stays" in line and "model is ready" in line for line in server.lines) == 1
        tmp_path.rename(tmp_path.with_name("away"))
        server.wait_for_line("the repositories cannot be polled")
        assert answer_of(server, "stays") == 1
        tmp_path.with_name("away").rename(tmp_path)


def test_links_are_served_and_followed(tmp_path: Path) -> None:
    """Links out of the repository to a model, a version and to files, as caches of hubs and Kubernetes make them."""
    repository, elsewhere = tmp_path / "repository", tmp_path / "elsewhere"
    model = add_model(elsewhere, "model", builders.identity)
    (repository / "files" / "1").mkdir(parents=True)
    (repository / "version").mkdir()
    (repository / "model").symlink_to(model)
    (repository / "version" / "1").symlink_to(model / "1")
    content, weights = elsewhere / "content", elsewhere / "other" / "weights"
    builders.external_weights(content, "weights.bin")
    weights.parent.mkdir()
    weights.write_bytes(np.full(4, 2, np.float32).tobytes())
    (repository / "files" / "1" / "model.onnx").symlink_to(content)
    (repository / "files" / "1" / "weights.bin").symlink_to(weights)
    for name, link in (("hard", Path.hardlink_to), ("refused", Path.symlink_to)):
        (repository / name / "1").mkdir(parents=True)
        builders.external_weights(repository / name / "1" / "model.onnx", "weights.bin")
        link(repository / name / "1" / "weights.bin", weights)
    mounted = repository / "mounted"
    for name, build in (("..first", builders.identity), ("..second", builders.unnamed_dims)):
        (mounted / name).mkdir(parents=True)
        build(mounted / name / "model.onnx")
    (mounted / "1").mkdir()
    (mounted / "..data").symlink_to("..first")
    (mounted / "1" / "model.onnx").symlink_to("../..data/model.onnx")
    with serving(repository, *POLL) as server:
        assert {name: answer_of(server, name) for name in ("model", "version", "files", "hard", "mounted")} == {
            "model": 1,
            "version": 1,
            "files": 3,
            "hard": 3,
            "mounted": 1,
        }
        server.wait_for_line("model cannot be served", "model=refused", "External data path escapes model directory")
        (mounted / "..new").symlink_to("..second")
        (mounted / "..new").rename(mounted / "..data")
        wait_until(lambda: answer_of(server, "mounted") == 2)
        put(model, 2, builders.unnamed_dims)
        wait_until(lambda: answer_of(server, "model") == 2)


@pytest.mark.parametrize("mode", [(), POLL])
def test_load_calls_are_rejected_outside_the_explicit_mode(tmp_path: Path, mode: tuple[str, ...]) -> None:
    add_model(tmp_path, "m", builders.identity)
    with serving(tmp_path, *(mode or SHORT_WARMUP)) as server, triton_clients(server) as (http, grpc):
        text = "explicit model load / unload is not allowed if polling is enabled"
        for client, status in ((http, "503"), (grpc, "StatusCode.UNAVAILABLE")):
            for call in (client.load_model, client.unload_model):
                with pytest.raises(InferenceServerException, match=text) as caught:
                    call("m")
                assert caught.value.status() == status


def test_shutdown_during_a_requested_load_answers_it_and_exits_cleanly(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "slow", builders.slow, steps=60_000)
    (folder / "model.yaml").write_text("warmup_s: 2\n")
    with starting(tmp_path, *EXPLICIT) as server:
        server.wait_until_loaded()

        def ask() -> None:
            with triton_http.InferenceServerClient(server.http) as client:
                client.load_model("slow")
            is_answered.set()

        is_answered = threading.Event()
        thread = threading.Thread(target=ask)
        thread.start()
        wait_for_sample(
            server, "ortserve_model_state", lambda shown: shown == 1, model="slow", version="1", state="warming"
        )
        server.stop()
        thread.join(LONG_S)
        assert not thread.is_alive()
        assert is_answered.is_set()


def test_names_of_models_to_load_need_the_explicit_mode(tmp_path: Path) -> None:
    with starting(tmp_path, "--load-model", "m") as server:
        assert server.wait() == 2
        assert "load_model: expected model_control_mode to be 'explicit', got 'none'" in server.output


def model_bytes(build: Callable[[Path], Path], folder: Path) -> bytes:
    return build(folder / "sent.onnx").read_bytes()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_client_configuration_applies_until_the_next_load(tmp_path: Path, protocol: str) -> None:
    repository = tmp_path / "repository"
    add_model(repository, "m", builders.identity)
    with serving(repository, *EXPLICIT, "--load-model", "m") as server, triton_clients(server) as clients:
        client = clients[protocol == "grpc"]

        def max_batch_size() -> int:
            size: int = clients[0].get_model_config("m")["max_batch_size"]
            return size

        assert max_batch_size() != 3
        client.load_model("m", config='{"max_batch_size":"3"}')
        assert max_batch_size() == 3
        client.load_model("m", config='{"maxBatchSize":5, "input":[{"name":"x","dataType":"TYPE_FP32","dims":["4"]}]}')
        assert max_batch_size() == 5
        for bad in ("no json", '{"made_up":1}', '{"max_batch_size":"many"}'):
            with pytest.raises(
                InferenceServerException, match="failed to load 'm', failed to poll from model repository"
            ) as caught:
                client.load_model("m", config=bad)
            assert caught.value.status() in ("500", "StatusCode.INTERNAL")
        assert max_batch_size() == 5
        client.load_model("m")
        assert max_batch_size() not in (3, 5)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_files_of_a_client_are_the_model_until_the_next_load(tmp_path: Path, protocol: str) -> None:
    repository, scratch = tmp_path / "repository", tmp_path / "scratch"
    scratch.mkdir()
    add_model(repository, "m", builders.identity)
    kept = tmp_path / "kept"
    kept.mkdir()
    double = model_bytes(builders.unnamed_dims, tmp_path)
    config = '{"backend":"onnxruntime"}'
    environment = {"TMPDIR": str(kept)}
    with (
        serving(repository, *EXPLICIT, "--load-model", "m", env=environment) as server,
        triton_clients(server) as clients,
    ):
        client = clients[protocol == "grpc"]
        with load_on(server, "m"):
            client.load_model("m", config=config, files={"file:1/model.onnx": double})
            assert answer_of(server, "m") == 2
            client.load_model("m")
            assert answer_of(server, "m") == 1
        client.load_model("sent", config=config, files={"file:4/model.onnx": double})
        assert answer_of(server, "sent") == 2
        assert {"name": "sent", "version": "4", "state": "READY"} in index_of(server)
        assert list(kept.iterdir()) == [], "what was sent is not kept once it is loaded"
        client.unload_model("sent")
        assert list(kept.iterdir()) == []
        wrapped = {
            "config": "{}",
            "file:1/model.onnx": base64.encodebytes(double).decode(),
        }  # lines of 76 characters, as a shell's base64 writes them
        url = f"http://{server.http}/v2/repository/models/wrapped/load"
        httpx.post(url, json={"parameters": wrapped}, timeout=LONG_S).raise_for_status()
        assert answer_of(server, "wrapped") == 2


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    "path", ["file:../1/model.onnx", "file:/etc/model.onnx", f"file:1/{'x' * 300}", "file:", "file:1/./model.onnx"]
)
def test_files_outside_the_model_folder_are_rejected(control_server: ServerProcess, protocol: str, path: str) -> None:
    with triton_clients(control_server) as clients:
        with pytest.raises(
            InferenceServerException, match="failed to load 'new', failed to poll from model repository"
        ) as caught:
            clients[protocol == "grpc"].load_model("new", config="{}", files={path: b"x"})
        assert caught.value.status() in ("500", "StatusCode.INTERNAL")
        assert clients[0].is_server_ready()
        with pytest.raises(InferenceServerException, match="'config'"):
            clients[protocol == "grpc"].load_model("new", files={"file:1/model.onnx": b"x"})
        assert "new" not in [entry["name"] for entry in index_of(control_server)]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_invalid_model_file_fails_the_load_and_shows_in_the_index(control_server: ServerProcess, protocol: str) -> None:
    with triton_clients(control_server) as clients:
        with pytest.raises(InferenceServerException, match="load failed for model 'junk': version 1 is at UNAVAILABLE"):
            clients[protocol == "grpc"].load_model("junk", config="{}", files={"file:1/model.onnx": b"junk"})
        (entry,) = (entry for entry in index_of(control_server) if entry["name"] == "junk")
        assert (entry["state"], "/tmp" in entry["reason"]) == ("UNAVAILABLE", False)
        clients[0].unload_model("junk")
        assert clients[0].is_server_ready()
