"""Labels of versions, by configuration and by calls, on both protocols: routing, restarts, promotion, rollback."""

import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from encodings_of_requests import triton_inputs
from models import builders
from servers import LONG_S, LOOK_S, SHORT_WARMUP, ServerProcess, add_model, serving, starting, triton_clients

EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "m", *SHORT_WARMUP)
POLLED = ("--model-control-mode", "poll", "--repository-poll-s", "0.05", *SHORT_WARMUP)
ONES = {"x": np.ones((1, 4), np.float32)}
BUILDERS: dict[int, Callable[..., Path]] = {1: builders.identity, 2: builders.unnamed_dims, 3: builders.identity}
"""Version 2 answers 2 to an input of 1; the others answer 1."""


def add_versions(repository: Path, options: str, *versions: int, name: str = "m") -> Path:
    for version in versions:
        folder = add_model(repository, name, BUILDERS[version], version=version)
    configure(folder, options)
    return folder


def asked(server: ServerProcess, method: str, path: str, **body: Any) -> httpx.Response:
    return httpx.request(method, f"{server.url}/v2/models/{path}", json=body or None, timeout=LONG_S)


def configure(folder: Path, options: str) -> None:
    """Replace the configuration of a model in one step, because a poll may read it at any time."""
    beside = folder.parent / ".model.yaml"
    beside.write_text(options)
    beside.replace(folder / "model.yaml")


def labels_of(server: ServerProcess, model: str = "m") -> dict[str, str]:
    document = asked(server, "GET", f"{model}/labels").raise_for_status().json()
    return {label["name"]: label["version"] for label in document["labels"]}


def versions_that_answer(server: ServerProcess, version: str) -> set[str]:
    """The versions that answer requests to ``version``, over both protocols."""
    found = set()
    with triton_clients(server) as clients:
        for library, client in zip((triton_http, triton_grpc), clients, strict=True):
            answer = client.infer("m", triton_inputs(library, ONES), model_version=version)
            response = answer.get_response()
            found.add(response["model_version"] if isinstance(response, dict) else response.model_version)
    return found


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Versions 1 to 3, of which the file labels 1 and 2; tests remove the labels that they set."""
    repository = tmp_path_factory.mktemp("labelled")
    add_versions(repository, "labels: {stable: 1, canary: 2, gone: 9}", 1, 2, 3)
    with serving(repository, *SHORT_WARMUP) as server:
        yield server


def test_a_label_of_a_missing_version_is_logged(labelled: ServerProcess) -> None:
    labelled.wait_for_line("WARNING", "labels name versions that do not exist", 'model=m labels="gone=9"')


def test_label_works_wherever_a_version_does(labelled: ServerProcess) -> None:
    for version, number in (("", "1"), ("stable", "1"), ("canary", "2"), ("3", "3")):
        assert versions_that_answer(labelled, version) == {number}
    with triton_clients(labelled) as (http, grpc):
        for client in (http, grpc):
            assert client.is_model_ready("m", "canary")
            assert not client.is_model_ready("m", "gone")
        assert http.get_model_metadata("m", "canary")["versions"] == ["2"]
        assert list(grpc.get_model_metadata("m", "canary").versions) == ["2"]
        assert http.get_inference_statistics("m", "canary")["model_stats"][0]["version"] == "2"
        assert grpc.get_inference_statistics("m", "canary").model_stats[0].version == "2"
        assert http.get_model_config("m", "canary")["name"] == "m"
    assert asked(labelled, "GET", "m/versions/canary/batching").status_code == 200


def test_label_without_a_serving_version_is_an_error_that_names_both(labelled: ServerProcess) -> None:
    text = "'m' version 9, which is labelled 'gone', is not found"
    with triton_clients(labelled) as clients:
        for library, client, status in zip((triton_http, triton_grpc), clients, ("404", "NOT_FOUND"), strict=True):
            with pytest.raises(InferenceServerException, match=text) as caught:
                client.infer("m", triton_inputs(library, ONES), model_version="gone")
            assert status in str(caught.value.status())
            with pytest.raises(InferenceServerException, match="'m' version nowhere is not found"):
                client.infer("m", triton_inputs(library, ONES), model_version="nowhere")
    with (
        triton_clients(labelled) as (_, client),
        pytest.raises(InferenceServerException, match="stol"),
    ):
        client.infer("m", triton_inputs(triton_grpc, ONES), model_version="1st")


def test_call_changes_labels_in_one_step_and_null_restores_the_files(labelled: ServerProcess) -> None:
    changed = asked(labelled, "PUT", "m/labels", labels={"stable": 3, "next": 2}).raise_for_status().json()
    assert {"name": "stable", "version": "3", "state": "READY", "set_by": "call"} in changed["labels"]
    assert versions_that_answer(labelled, "") == versions_that_answer(labelled, "stable") == {"3"}
    asked(labelled, "PUT", "m/labels", labels={"stable": None, "next": None}).raise_for_status()
    assert labels_of(labelled) == {"stable": "1", "canary": "2", "gone": "9"}
    assert versions_that_answer(labelled, "") == {"1"}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"),
    [
        (
            "PUT",
            "m/labels",
            {"labels": {"a": 1, "b": 9}},
            404,
            "label 'b': expected a version of model 'm' that serves",
        ),
        ("PUT", "m/labels", {"labels": {"1st": 1}}, 400, "label '1st': expected at most 63 letters"),
        ("PUT", "m/labels", {"labels": {"x" * 64: 1}}, 400, "expected at most 63 letters"),
        ("PUT", "m/labels", {"labels": {"a": "1"}}, 400, "label 'a': expected the number of a version, got '1'"),
        ("PUT", "m/labels", {"labels": {"a": 2**63}}, 400, f"expected the number of a version, got {2**63}"),
        ("POST", "m/promote", {"version": 2**63}, 400, f"version: expected the number of a version, got {2**63}"),
        ("POST", "m/promote", {"versoin": 3}, 400, "expected an object with at most one key, 'version'"),
        (
            "PUT",
            "m/rollout",
            {"candidate": 2, "tolerance": {}},
            400,
            "tolerance: expected {max: x, relative",
        ),
        ("PUT", "m/rollout", {"candidate": 2**63}, 400, f"candidate: expected integer, 1 to {2**63 - 1}, got {2**63}"),
        (
            "PUT",
            "m/labels",
            {"labels": {f"l{n}": 1 for n in range(64)}},
            400,
            "expected at most 63 labels of model 'm' beside 'stable', got 64",
        ),
        ("PUT", "m/labels", {"stable": 1}, 400, "expected an object with one key, 'labels'"),
        ("PUT", "nowhere/labels", {"labels": {"a": 1}}, 404, "'nowhere' is not found"),
        ("GET", "nowhere/labels", {}, 404, "'nowhere' is not found"),
        ("POST", "m/promote", {"version": 1}, 409, "version 1 of model 'm' is already labelled 'stable'"),
        (
            "POST",
            "m/promote",
            {"version": 9},
            404,
            "promote: expected a version of model 'm' that serves (1, 2, 3), got 9",
        ),
        ("POST", "m/rollback", {}, 409, "model 'm' has no promotion to roll back"),
    ],
)
def test_wrong_change_is_rejected_and_changes_nothing(
    labelled: ServerProcess, method: str, path: str, body: dict[str, Any], status: int, text: str
) -> None:
    answer = asked(labelled, method, path, **body)
    assert (answer.status_code, text in answer.json()["error"]) == (status, True), answer.text
    assert labels_of(labelled) == {"stable": "1", "canary": "2", "gone": "9"}


def test_changes_survive_a_restart_and_keep_their_versions_loaded(tmp_path: Path) -> None:
    add_versions(tmp_path, "labels: {canary: 2}", 1, 2, 3)
    with serving(tmp_path, *SHORT_WARMUP) as server:  # the policy selects version 3 only
        assert asked(server, "GET", "m/versions/1").status_code == 404
        assert versions_that_answer(server, "") == {"3"}
        asked(server, "PUT", "m/labels", labels={"stable": 2}).raise_for_status()
        assert asked(server, "POST", "m/promote", version=3).raise_for_status().json()["previous"] == "2"
    with serving(tmp_path, *SHORT_WARMUP) as server:
        assert labels_of(server) == {"canary": "2", "stable": "3"}
        asked(server, "POST", "m/rollback").raise_for_status()
        assert versions_that_answer(server, "") == {"2"}
        (tmp_path / "m" / "model.yaml").unlink()
    with serving(tmp_path, *SHORT_WARMUP) as server:
        assert labels_of(server) == {"stable": "2"}
        assert versions_that_answer(server, "") == {"2"}
        assert asked(server, "PUT", "m/labels", labels={"stable": None}).json()["labels"] == []
        server.wait_for_line("labels changed", "stable=-")
        assert versions_that_answer(server, "") == {"3"}
    assert json.loads((tmp_path / ".ortserve" / "state.json").read_text())["models"] == {}


def test_concurrent_changes_of_two_servers_lose_none(tmp_path: Path) -> None:
    repository, state = tmp_path / "models", tmp_path / "state"
    add_versions(repository, "labels: {stable: 1}", 1)
    add_versions(repository, "labels: {stable: 1}", 1, name="n")
    flags = (repository, "--state-dir", state, *SHORT_WARMUP)
    with serving(*flags) as one, serving(*flags) as other, ThreadPoolExecutor(8) as threads:
        puts = [
            threads.submit(asked, server, "PUT", f"{model}/labels", labels={f"l{number}": 1})
            for number in range(10)
            for server, model in ((one, "m"), (other, "n"))
        ]
        for put in puts:
            put.result().raise_for_status()
        wanted = {"stable": "1"} | {f"l{number}": "1" for number in range(10)}
        assert labels_of(one, "m") == labels_of(other, "n") == wanted
    with serving(*flags) as server:
        assert labels_of(server, "m") == labels_of(server, "n") == wanted


@contextmanager
def holding_up_writes(repository: Path) -> Iterator[None]:
    """Hold the lock of the state file, like another server during a write."""
    folder = repository / ".ortserve"
    folder.mkdir(exist_ok=True)
    with (folder / ".state.json.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wait_for_write(server: ServerProcess) -> None:
    """Poll until the server waits for the lock of the state file."""
    end_s = time.monotonic() + LONG_S
    while not any(link.name == ".state.json.lock" for link in open_files(server)):
        assert time.monotonic() < end_s
        time.sleep(LOOK_S)


def open_files(server: ServerProcess) -> Iterator[Path]:
    for link in Path(f"/proc/{server.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield link.readlink()


def load(server: ServerProcess) -> None:
    httpx.post(f"{server.url}/v2/repository/models/m/load", timeout=LONG_S).raise_for_status()


def test_version_whose_label_leaves_the_file_drains(tmp_path: Path) -> None:
    folder = add_versions(tmp_path, "labels: {stable: 1, canary: 2}", 1, 2, 3)
    with serving(tmp_path, *EXPLICIT) as server:
        assert versions_that_answer(server, "canary") == {"2"}
        configure(folder, "labels: {stable: 1}")
        load(server)
        assert asked(server, "GET", "m/versions/2").status_code == 404
        assert {versions_that_answer(server, version).pop() for version in ("1", "3")} == {"1", "3"}


def test_version_that_a_call_labels_stays_while_the_change_is_written(tmp_path: Path) -> None:
    folder = add_versions(tmp_path, "labels: {stable: 1, canary: 2}", 1, 2, 3)
    with serving(tmp_path, *EXPLICIT) as server, ThreadPoolExecutor(1) as threads:
        with holding_up_writes(tmp_path):
            labelling = threads.submit(asked, server, "PUT", "m/labels", labels={"kept": 2})
            wait_for_write(server)
            configure(folder, "labels: {stable: 1}")
            load(server)
            load(server)
        assert labelling.result().status_code == 200
        assert versions_that_answer(server, "kept") == {"2"}


def test_change_that_cannot_be_kept_is_refused_and_a_broken_state_stops_the_start(tmp_path: Path) -> None:
    add_versions(tmp_path, "", 1)
    with serving(tmp_path, "--state-dir", tmp_path / "no" / "such", *SHORT_WARMUP) as server:
        answer = asked(server, "PUT", "m/labels", labels={"stable": 1})
        assert (answer.status_code, labels_of(server)) == (409, {})
        assert answer.json()["error"].startswith("state_dir: expected a folder to store the change in: state.json: No")
    for content in (
        "{",
        '{"schema": "other"}',
        '{"schema": "ortserve.state/1", "models": {"m": {"labels": {"1": 1}}}}',
        '{"schema": "ortserve.state/1", "models": {"m": {"labels": {}, "rollout": [2]}}}',
        '{"schema": "ortserve.state/1", "models": {"m": {"labels": {}, "ended": {"candidate": Infinity}}}}',
    ):
        (tmp_path / "state.json").write_text(content)
        with starting(tmp_path, "--state-dir", tmp_path, *SHORT_WARMUP) as server:
            assert server.wait() == 1
            assert "state.json is not a state file of this version" in server.output
            assert "Traceback" not in server.output


def test_label_of_the_file_moves_when_its_version_serves(tmp_path: Path) -> None:
    folder = add_versions(tmp_path, "labels: {stable: 1}", 1)
    with serving(tmp_path, "--model-control-mode", "poll", "--repository-poll-s", "0.05", *SHORT_WARMUP) as server:
        (folder / "2").mkdir()
        builders.not_onnx(folder / "2" / "model.onnx")
        configure(folder, "labels: {stable: 2}")
        server.wait_for_line("model cannot be served", "version=2")
        assert versions_that_answer(server, "") == versions_that_answer(server, "stable") == {"1"}
        (folder / "3").mkdir()
        builders.unnamed_dims(folder / "3" / "model.onnx")
        configure(folder, "labels: {stable: 3}")
        server.wait_for_line("labels changed", "stable=3")
        assert versions_that_answer(server, "") == {"3"}
        loads = [line for line in server.lines if "model is ready" in line]
        configure(folder, "labels: {stable: 3, other: 3}")
        server.wait_for_line("labels changed", "other=3")
        assert [line for line in server.lines if "model is ready" in line] == loads


@contextmanager
def load_on(server: ServerProcess, per_s: float) -> Iterator[list[str]]:
    """Send requests without a version at a rate, half over each protocol. Yields the versions that answered."""
    answered: list[str] = []
    failures: list[Exception] = []
    stopping = threading.Event()

    def ask(library: Any, address: str) -> None:
        with library.InferenceServerClient(address) as client:
            inputs = triton_inputs(library, ONES)
            while not stopping.wait(4 / per_s):
                try:
                    response = client.infer("m", inputs).get_response()
                    answered.append(response["model_version"] if isinstance(response, dict) else response.model_version)
                except Exception as error:
                    failures.append(error)
                    return

    askers = [
        threading.Thread(target=ask, args=one) for one in ((triton_http, server.http), (triton_grpc, server.grpc)) * 2
    ]
    for asker in askers:
        asker.start()
    try:
        yield answered
    finally:
        stopping.set()
        for asker in askers:
            asker.join(LONG_S)
    assert failures == []


def test_first_stable_label_of_the_file_takes_no_request_from_a_version_that_serves(tmp_path: Path) -> None:
    folder = add_versions(tmp_path, "{}", 1, 2)
    with serving(tmp_path, *POLLED) as server, load_on(server, 200) as answered:
        configure(folder, "labels: {stable: 9}")
        server.wait_for_line("labels name versions that do not exist", "stable=9")
        assert labels_of(server) == {}
        assert versions_that_answer(server, "") == {"2"}
        configure(folder, "labels: {stable: 1}")
        server.wait_for_line("labels changed", "stable=1")
        assert versions_that_answer(server, "") == {"1"}
        configure(folder, "labels: {stable: 8}")
        server.wait_for_line("labels name versions that do not exist", "stable=8")
        assert labels_of(server) == {"stable": "1"}
    assert set(answered) <= {"1", "2"}


def test_no_request_fails_while_versions_are_promoted_and_rolled_back(labelled: ServerProcess) -> None:
    with load_on(labelled, 200) as answered:
        for _ in range(25):
            asked(labelled, "POST", "m/promote", version=2).raise_for_status()
            assert versions_that_answer(labelled, "") == {"2"}
            asked(labelled, "POST", "m/rollback").raise_for_status()
            assert versions_that_answer(labelled, "") == {"1"}
    assert set(answered) == {"1", "2"}
    assert asked(labelled, "POST", "m/promote", version=2).raise_for_status().json()["previous"] == "1"
    asked(labelled, "PUT", "m/labels", labels={"stable": None}).raise_for_status()
    assert asked(labelled, "POST", "m/rollback").status_code == 409


def test_labels_of_the_file_end_with_an_unload_and_those_of_calls_stay(tmp_path: Path) -> None:
    folder = add_versions(tmp_path, "version_policy: {specific: [1, 2]}\nlabels: {stable: 1, canary: 2}", 1, 2)
    with serving(tmp_path, *EXPLICIT) as server:
        asked(server, "PUT", "m/labels", labels={"mine": 2}).raise_for_status()
        with triton_clients(server) as (http, _):
            http.unload_model("m")
            assert labels_of(server) == {"mine": "2"}
            assert asked(server, "GET", "m/versions/canary/ready").status_code >= 400
            with pytest.raises(InferenceServerException, match="it was unloaded"):
                versions_that_answer(server, "")
            configure(folder, "version_policy: {specific: [1, 2]}\nlabels: {stable: 2}")
            http.load_model("m")
        assert labels_of(server) == {"mine": "2", "stable": "2"}
        assert versions_that_answer(server, "") == {"2"}


def test_version_that_a_call_labels_is_loaded_with_a_configuration_of_a_client(tmp_path: Path) -> None:
    """It is loaded although the configuration chooses the highest version alone."""
    add_versions(tmp_path, "version_policy: {all: true}", 1, 2)
    with serving(tmp_path, *EXPLICIT) as server, triton_clients(server) as (http, _):
        asked(server, "PUT", "m/labels", labels={"stable": 1}).raise_for_status()
        http.unload_model("m")
        http.load_model("m", config="{}")
        assert versions_that_answer(server, "") == {"1"}
        assert versions_that_answer(server, "2") == {"2"}


def test_calls_take_nothing_out_of_service_while_the_configuration_cannot_be_read(tmp_path: Path) -> None:
    options = "version_policy: {all: true}\nlabels: {stable: 1}\nrollout: {candidate: 2, mode: canary, share: 1}\n"
    folder = add_versions(tmp_path, options, 1, 2, 3)
    with serving(tmp_path, *POLLED) as server:
        configure(folder, f"{options}nonsense: 1\n")
        server.wait_for_line("the previous load keeps serving", "model=m")
        asked(server, "PUT", "m/labels", labels={"mine": 1}).raise_for_status()
        assert versions_that_answer(server, "") == {"2"}
        assert versions_that_answer(server, "3") == {"3"}
