"""Shadow and canary rollouts on real servers: wrong, slow and crashing candidates do not affect callers."""

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shared_memory
from onnx import TensorProto, helper, numpy_helper

from encodings_of_requests import triton_inputs
from held_files import held_file
from http_wire import wait_until
from models import builders
from ortserve.cli.main import main
from servers import (
    LONG_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    read_metrics,
    serving,
    triton_clients,
    wait_for_sample,
)

ONES = {"x": np.ones((1, 4), np.float32)}
ALL = "version_policy: {all: true}\n"
ALREADY = "version 2 of model 'm' is already labelled 'stable'"


def halves(path: Path) -> Path:
    """Like ``poison``, but for values up to 63: the correct result of the poisoned version."""
    model = onnx.load(builders.poison(path))
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.arange(64, dtype=np.float32) / 2, "table"))
    onnx.save(model, path)
    return path


def doubles(path: Path) -> Path:
    """Like ``identity``, but y is FP64."""
    y = helper.make_tensor_value_info("y", TensorProto.DOUBLE, ["batch", 4])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    return builders.write(path, [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.DOUBLE)], [x], [y])


def add_pair(
    repository: Path, name: str, stable: Callable[..., Path], candidate: Callable[..., Path], options: str = ""
) -> None:
    """Add version 1, which is stable, and version 2, the candidate."""
    add_model(repository, name, stable)
    folder = add_model(repository, name, candidate, version=2)
    (folder / "model.yaml").write_text("labels: {stable: 1}\n" + ALL + options)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A pair of versions for each test; the tests end their rollouts."""
    repository = tmp_path_factory.mktemp("pairs")
    for name in ("wrong", "same", "sticky", "promoted", "by_hand"):
        add_pair(repository, name, builders.identity, builders.unnamed_dims if name == "wrong" else builders.identity)
    add_pair(repository, "slower", lambda path: builders.slow(path, 150), lambda path: builders.slow(path, 5000))
    add_pair(repository, "crashing", halves, builders.poison)
    add_pair(repository, "endless", lambda path: builders.repeats(path, 1), builders.repeats, "run_timeout_s: 0.5\n")
    add_pair(repository, "other_inputs", builders.identity, builders.poison)
    add_pair(repository, "larger", builders.identity, doubles)
    for name in ("cached", "copied"):
        add_pair(repository, name, builders.identity, builders.identity, "response_cache: true\n")
    with serving(repository, "--allow-client-shm", *SHORT_WARMUP) as started:
        yield started


def asked(server: ServerProcess, method: str, path: str, **body: Any) -> httpx.Response:
    return httpx.request(method, f"{server.url}/v2/models/{path}", json=body or None, timeout=LONG_S)


def rollout_of(server: ServerProcess, model: str) -> dict[str, Any]:
    document: dict[str, Any] = asked(server, "GET", f"{model}/rollout").raise_for_status().json()
    return document


def start(server: ServerProcess, model: str, **options: Any) -> None:
    asked(server, "PUT", f"{model}/rollout", candidate=2, **options).raise_for_status()


def stable_of(server: ServerProcess, model: str) -> str:
    labels: list[dict[str, str]] = asked(server, "GET", f"{model}/labels").json()["labels"]
    return next(label["version"] for label in labels if label["name"] == "stable")


class Caller:
    """Sends requests over both protocols in turns."""

    def __init__(self, server: ServerProcess, model: str, version: str = "") -> None:
        self._libraries = (triton_http, triton_grpc)
        self._clients = (
            triton_http.InferenceServerClient(server.http),
            triton_grpc.InferenceServerClient(server.grpc),
        )
        self._model, self._version = model, version
        self._sent = 0

    def ask(
        self, tensors: dict[str, np.ndarray] = ONES, headers: dict[str, str] | None = None, **parameters: str
    ) -> tuple[str, np.ndarray]:
        """Send a request. Returns the version that answered, and y."""
        self._sent += 1
        library, client = (one[self._sent % 2] for one in (self._libraries, self._clients))
        answer = client.infer(
            self._model,
            triton_inputs(library, tensors),
            model_version=self._version,
            parameters=parameters or None,
            headers=headers,
        )
        response = answer.get_response()
        version = response["model_version"] if isinstance(response, dict) else response.model_version
        return version, answer.as_numpy("y")

    def close(self) -> None:
        for client in self._clients:
            client.close()


@contextmanager
def calling(server: ServerProcess, model: str, version: str = "") -> Iterator[Caller]:
    caller = Caller(server, model, version)
    try:
        yield caller
    finally:
        caller.close()


def ended(server: ServerProcess, model: str, caller: Caller, tensors: dict[str, np.ndarray] = ONES) -> dict[str, Any]:
    """Send requests until the rollout has ended by itself."""
    for _ in range(3000):
        caller.ask(tensors)
        if (end := rollout_of(server, model)["ended"]) is not None:
            return dict(end)
    raise AssertionError(rollout_of(server, model))


def test_shadow_stops_a_candidate_with_other_weights_and_no_caller_sees_it(server: ServerProcess) -> None:
    start(server, "wrong", share=1, rules={"min_requests": 20, "max_disagreement": 0.1})
    with calling(server, "wrong") as caller:
        for _ in range(3000):
            assert caller.ask()[0] == "1"
            if rollout_of(server, "wrong")["ended"] is not None:
                break
    seen = rollout_of(server, "wrong")
    assert seen["ended"]["result"] == "rolled_back"
    assert seen["ended"]["reason"] == "max_disagreement: expected at most 0.1, got 3 of 3 requests"
    assert (seen["rollout"], stable_of(server, "wrong")) == (None, "1")
    line = server.wait_for_line("rollout ended", "model=wrong")
    assert "got 3 of 3 requests" in line


def test_shadow_that_agrees_is_shown_and_counted(server: ServerProcess) -> None:
    start(server, "same", share=1)
    with calling(server, "same") as caller, calling(server, "same", "2") as direct:
        for _ in range(20):
            assert caller.ask()[0] == "1"
            assert direct.ask()[0] == "2"
        wait_for_sample(
            server, "ortserve_rollout_requests_total", lambda n: n >= 1, model="same", version="2", outcome="agreed"
        )
    figures = rollout_of(server, "same")["figures"]
    assert (figures["failed"], figures["disagreed"]) == (0, 0)
    assert figures["compared"] + figures["shed"] == 20
    assert rollout_of(server, "same")["worst_errors"] == {"max": 0, "relative": 0, "cosine": 0, "top1": 0}
    metrics = read_metrics(server)
    assert metrics.value("ortserve_rollout_active", model="same", version="2", mode="shadow") == 1
    assert metrics.value("ortserve_rollout_tail_seconds", model="same", version="2", side="candidate") > 0
    # Only requests of callers count.
    answered = metrics.by_labels("ortserve_request_duration_seconds_count", "model", "version", "protocol")
    assert (answered["same 2 http"], answered["same 2 grpc"]) == (10, 10)
    assert asked(server, "DELETE", "same/rollout").json()["ended"]["result"] == "stopped"
    assert asked(server, "DELETE", "same/rollout").status_code == 409


def test_answers_from_the_response_cache_are_shed_and_have_no_times(server: ServerProcess) -> None:
    with calling(server, "cached") as caller:
        caller.ask()  # ``stable`` holds its answer
        start(server, "cached", share=1)
        for _ in range(10):
            assert caller.ask()[0] == "1"
        figures = rollout_of(server, "cached")["figures"]
        assert (figures["requests"], figures["shed"], figures["stable_p99_s"]) == (0, 10, None)
        start(server, "cached", mode="canary", share=1)
        for _ in range(10):
            assert caller.ask()[0] == "2"
    figures = rollout_of(server, "cached")["figures"]
    assert (figures["requests"], figures["candidate_requests"]) == (10, 1)


def test_copies_that_hit_the_cache_do_not_lower_the_statistics_of_the_candidate(server: ServerProcess) -> None:
    hits, asked_directly = 0.0, 0
    with calling(server, "copied") as caller, calling(server, "copied", "2") as direct:
        start(server, "copied", share=1)
        while hits < 5:  # a busy server drops copies
            value = {"x": np.full((1, 4), asked_directly, np.float32)}
            direct.ask(value)
            asked_directly += 1
            caller.ask(value)
            metrics = read_metrics(server)
            hits = metrics.by_labels("nv_cache_num_hits_per_model", "model", "version").get("copied 2", 0.0)
    assert metrics.value("nv_inference_count", model="copied", version="2") == asked_directly
    statistics = asked(server, "GET", "copied/versions/2/stats").json()["model_stats"][0]
    assert statistics["inference_count"] == asked_directly


def test_p99_rule_stops_a_canary_that_is_slower(server: ServerProcess) -> None:
    start(server, "slower", mode="canary", share=0.5, rules={"min_requests": 20, "max_p99_ratio": 2})
    with calling(server, "slower") as caller:
        end = ended(server, "slower", caller)
        assert end["result"] == "rolled_back"
        assert end["reason"].startswith("max_p99_ratio: expected at most 2, got ")
        assert [caller.ask()[0] for _ in range(20)] == ["1"] * 20


def test_canary_that_crashes_on_some_inputs_is_stopped_and_no_caller_sees_an_error(server: ServerProcess) -> None:
    start(server, "crashing", mode="canary", share=0.5, rules={"min_requests": 40, "max_error_rate": 0.1})
    good, bad = ({"x": np.full((1, 4), value, np.int64)} for value in (4, 40))
    impossible = {"x": np.full((1, 4), 99, np.int64)}
    with calling(server, "crashing") as caller:
        versions = Counter(caller.ask(good)[0] for _ in range(60))
        assert set(versions) == {"1", "2"}
        for _ in range(8):  # a caller's error on both versions says nothing about the candidate
            with pytest.raises(Exception, match="Gather"):
                caller.ask(impossible)
        assert rollout_of(server, "crashing")["figures"]["failed"] == 0
        for _ in range(200):
            version, y = caller.ask(bad)
            assert (version, y[0, 0]) == ("1", 20)
        end = ended(server, "crashing", caller, good)  # its end may still be stored
        assert (end["candidate"], end["result"]) == (2, "rolled_back")
        assert end["reason"].startswith("max_error_rate: expected at most 0.1, got ")
        assert {caller.ask(good)[0] for _ in range(30)} == {"1"}


@pytest.mark.parametrize("mode", ["shadow", "canary"])
def test_candidate_whose_run_exceeds_its_time_limit_is_stopped(server: ServerProcess, mode: str) -> None:
    start(server, "endless", mode=mode, share=1, rules={"min_requests": 5, "max_error_rate": 0.1})
    with calling(server, "endless") as caller:
        version, y = caller.ask({"x": np.array([2**62])})
        assert (version, y.item()) == ("1", 1)
        wait_until(lambda: rollout_of(server, "endless")["ended"] is not None)
    end = rollout_of(server, "endless")["ended"]
    assert (end["result"], end["reason"]) == (
        "rolled_back",
        "max_error_rate: expected at most 0.1, got 1 of 1 requests",
    )


def test_candidate_that_takes_other_inputs_fails_no_caller(server: ServerProcess) -> None:
    start(server, "other_inputs", mode="canary", share=1)
    with calling(server, "other_inputs") as caller:
        assert [caller.ask()[0] for _ in range(10)] == ["1"] * 10
    assert rollout_of(server, "other_inputs")["figures"]["failed"] == 10
    asked(server, "POST", "other_inputs/rollback").raise_for_status()
    assert rollout_of(server, "other_inputs")["ended"]["result"] == "rolled_back"


def test_infinite_errors_are_shown_as_such(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    start(server, "larger", share=1)
    with calling(server, "larger") as caller:
        wait_until(lambda: caller.ask()[0] == "1" and rollout_of(server, "larger")["figures"]["disagreed"] > 0)
    assert rollout_of(server, "larger")["worst_errors"]["max"] is None
    assert main(["models", "rollout", "larger", "--url", server.url]) == 0
    assert re.search(r"worst max error +infinite", capsys.readouterr().out)


def test_candidate_whose_output_exceeds_the_region_of_its_caller_fails_no_caller(server: ServerProcess) -> None:
    start(server, "larger", mode="canary", share=1)
    name, nbytes = f"larger_{server.pid}", ONES["x"].nbytes
    region = shared_memory.create_shared_memory_region(name, f"/{name}", nbytes)
    try:
        with triton_clients(server) as clients:
            clients[0].register_system_shared_memory(name, f"/{name}", nbytes)
            for library, client in zip((triton_http, triton_grpc), clients, strict=True):
                output = library.InferRequestedOutput("y")
                output.set_shared_memory(name, nbytes)
                client.infer("larger", triton_inputs(library, ONES), outputs=[output])
                y = shared_memory.get_contents_as_numpy(region, np.float32, [1, 4])
                np.testing.assert_array_equal(y, ONES["x"])
                y[:] = 0
            clients[0].unregister_system_shared_memory(name)
    finally:
        shared_memory.destroy_shared_memory_region(region)
    with calling(server, "larger") as caller:
        assert caller.ask()[0] == "2"
    figures = rollout_of(server, "larger")["figures"]
    assert (figures["requests"], figures["failed"]) == (3, 2)


def test_equal_values_of_the_sticky_parameter_take_one_side_while_the_share_grows(server: ServerProcess) -> None:
    users = [f"user {number}" for number in range(40)]
    before: set[str] = set()
    with calling(server, "sticky") as caller, calling(server, "sticky", "1") as direct:
        for share in (0.2, 0.5, 0.9):
            start(server, "sticky", mode="canary", share=share, sticky="user")
            sides = [{user for user in users if caller.ask(user=user)[0] == "2"} for _ in range(3)]
            assert sides[0] == sides[1] == sides[2]
            assert before < sides[0] < set(users)
            before = sides[0]
            assert {direct.ask(user=user)[0] for user in users} == {"1"}


def test_equal_values_of_the_sticky_header_take_one_side_on_both_protocols(server: ServerProcess) -> None:
    users = [f"user-{number}" for number in range(40)]
    start(server, "sticky", mode="canary", share=0.5, sticky="user", sticky_header="X-User-Id")
    with calling(server, "sticky") as caller:
        sides = [{user for user in users if caller.ask(headers={"x-user-id": user})[0] == "2"} for _ in range(3)]
        caller.ask()  # from here on, each user sends over the other protocol
        sides += [{user for user in users if caller.ask(headers={"x-user-id": user})[0] == "2"}]
        sides += [{user for user in users if caller.ask(user=user)[0] == "2"}]
    assert all(side == sides[0] for side in sides)
    assert 0 < len(sides[0]) < len(users)


def test_candidate_that_keeps_the_rules_is_promoted_and_rolled_back_by_hand(server: ServerProcess) -> None:
    rules = {"min_requests": 30, "max_error_rate": 0, "max_p99_ratio": 1000, "promote_after": 40}
    start(server, "promoted", mode="canary", share=0.5, rules=rules)
    with calling(server, "promoted") as caller:
        end = ended(server, "promoted", caller)
        assert (end["result"], "requests kept the rules: 0 failed" in end["reason"]) == ("promoted", True)
        assert {caller.ask()[0] for _ in range(10)} == {"2"}
        asked(server, "POST", "promoted/rollback").raise_for_status()
        assert {caller.ask()[0] for _ in range(10)} == {"1"}


def test_rollout_is_promoted_by_hand_once(server: ServerProcess) -> None:
    start(server, "by_hand", mode="canary", share=0.5)
    statuses = sorted(asked(server, "POST", "by_hand/promote").status_code for _ in range(2))
    assert (statuses, stable_of(server, "by_hand")) == ([200, 409], "2")
    assert rollout_of(server, "by_hand")["ended"] == {"candidate": 2, "result": "promoted", "reason": "by a call"}


@pytest.mark.parametrize(
    ("model", "options", "status", "text"),
    [
        ("same", {"candidate": 1}, 409, "expected another candidate than version 1, which is labelled 'stable'"),
        ("same", {"candidate": 7}, 404, "candidate: expected a version of model 'same' that serves (1, 2), got 7"),
        ("same", {"candidate": 2, "share": 2}, 400, "rollout: share: expected number, 0 to 1, got 2"),
        (
            "same",
            {"candidate": 2, "rules": {"max_error_rate": -1}},
            400,
            "rollout: rules.max_error_rate: expected number, 0 to 1, got -1",
        ),
        ("same", {"candidate": 2, "tolerance": {"luck": 1}}, 400, "tolerance"),
        ("same", {"mode": "canary"}, 400, "candidate: expected"),
        ("nowhere", {"candidate": 2}, 404, "'nowhere' is not found"),
    ],
)
def test_impossible_rollouts_are_refused(
    server: ServerProcess, model: str, options: dict[str, Any], status: int, text: str
) -> None:
    answer = asked(server, "PUT", f"{model}/rollout", **options)
    assert (answer.status_code, text in answer.json()["error"]) == (status, True), answer.text


def test_rollout_of_the_file_begins_once_and_its_end_survives_a_restart(tmp_path: Path) -> None:
    add_model(tmp_path, "m", builders.identity)
    folder = add_model(tmp_path, "m", builders.unnamed_dims, version=2)
    add_model(tmp_path, "m", builders.identity, version=3)
    rules = "{min_requests: 10, max_disagreement: 0}"
    rollout = f"{{candidate: 2, share: 1, rules: {rules}}}"
    (folder / "model.yaml").write_text(f"version_policy: {{all: true}}\nlabels: {{stable: 1}}\nrollout: {rollout}\n")
    with serving(tmp_path, *SHORT_WARMUP) as server, calling(server, "m") as caller:
        assert "got 1 of 1 requests" in ended(server, "m", caller)["reason"]
    with serving(tmp_path, *SHORT_WARMUP) as server, calling(server, "m") as caller:
        assert rollout_of(server, "m")["rollout"] is None
        assert rollout_of(server, "m")["ended"]["result"] == "rolled_back"
        asked(server, "PUT", "m/rollout", candidate=3).raise_for_status()
        asked(server, "DELETE", "m/rollout").raise_for_status()
        assert (rollout_of(server, "m")["rollout"], caller.ask()[0]) == (None, "1")
    with serving(tmp_path, *SHORT_WARMUP) as server, calling(server, "m") as caller:
        assert rollout_of(server, "m")["rollout"] is None
        start(server, "m", mode="canary", share=1)
        assert caller.ask()[0] == "2"
    with serving(tmp_path, *SHORT_WARMUP) as server, calling(server, "m") as caller:
        assert caller.ask()[0] == "2"
        assert rollout_of(server, "m")["rollout"]["mode"] == "canary"


@pytest.mark.parametrize("mode", ["shadow", "canary"])
def test_rollout_of_the_file_begins_when_its_candidate_has_arrived(tmp_path: Path, mode: str) -> None:
    repository = tmp_path / "repository"
    folder = add_model(repository, "m", builders.identity)
    rollout = f"{{candidate: 2, mode: {mode}, share: 1, rules: {{max_error_rate: 0}}}}"
    (folder / "model.yaml").write_text(f"labels: {{stable: 1}}\nrollout: {rollout}\n")
    polled = ("--model-control-mode", "poll", "--repository-poll-s", "0.05", *SHORT_WARMUP)
    with serving(repository, *polled) as server, calling(server, "m") as caller:
        assert caller.ask()[0] == "1"
        assert "version 2 of model 'm', does not exist" in rollout_of(server, "m")["problem"]
        (add_model(tmp_path, "m", builders.identity, version=2) / "2").rename(folder / "2")
        server.wait_for_line("rollout began", "model=m candidate=2")
        assert caller.ask()[0] == ("2" if mode == "canary" else "1")
        assert rollout_of(server, "m")["ended"] is None


@pytest.mark.parametrize("next_rollout", ["", "rollout: {candidate: 3, mode: canary, share: 1}\n"])
def test_rollout_that_the_file_drops_ends_before_new_versions_are_loaded(tmp_path: Path, next_rollout: str) -> None:
    """The new file names a sample that is held, so that the loads wait until the test ends them."""
    repository = tmp_path / "repository"
    add_pair(repository, "m", builders.identity, builders.identity)
    folder = add_model(repository, "m", builders.identity, version=3)
    begun = "version_policy: {specific: [1, 2]}\nrollout: {candidate: 2, mode: canary, share: 1}\n"
    (folder / "model.yaml").write_text(f"labels: {{stable: 1}}\n{begun}")
    sample = folder / "warmup" / "row"
    sample.parent.mkdir()
    sample.write_bytes(ONES["x"].tobytes())
    polled = ("--model-control-mode", "poll", "--repository-poll-s", "0.05", *SHORT_WARMUP)
    with held_file(sample) as file, serving(repository, *polled) as server, calling(server, "m") as caller:
        assert caller.ask()[0] == "2"
        samples = "warmup_samples: [{inputs: {x: {file: row}}}]\n"
        (tmp_path / "model.yaml").write_text(f"labels: {{stable: 1}}\n{ALL}{samples}{next_rollout}")
        (tmp_path / "model.yaml").replace(folder / "model.yaml")
        wait_until(lambda: file.is_awaited and caller.ask()[0] == "1")
        document = rollout_of(server, "m")
        assert (document["rollout"] is None, document["figures"]["requests"]) == (not next_rollout, 0)
        file.release()
        server.wait_for_line("model is ready", "version=3")
        wait_until(lambda: caller.ask()[0] == ("3" if next_rollout else "1"))
    assert "rollout has no effect" not in server.output


def in_repository(server: ServerProcess, model: str, to: str) -> None:
    httpx.post(f"{server.url}/v2/repository/models/{model}/{to}", timeout=LONG_S).raise_for_status()


@pytest.mark.parametrize(("labels", "previous"), [("{stable: 2}", None), ("{}", "2"), ("{other: 1}", "2")])
def test_promotion_of_a_rollout_without_effect(tmp_path: Path, labels: str, previous: str | None) -> None:
    """It replaces the version that answers without a version, and is refused for a version that is stable already."""
    add_pair(tmp_path, "m", builders.identity, builders.identity)
    candidate = 2 if previous is None else 1
    (tmp_path / "m" / "model.yaml").write_text(f"labels: {labels}\n{ALL}rollout: {{candidate: {candidate}}}\n")
    with serving(tmp_path, *SHORT_WARMUP) as server:
        server.wait_for_line("rollout has no effect", "model=m")
        answer = asked(server, "POST", "m/promote")
        if previous is None:
            assert (answer.status_code, answer.json()["error"]) == (409, ALREADY)
            return
        assert answer.raise_for_status().json()["previous"] == previous
        asked(server, "POST", "m/rollback").raise_for_status()
        assert stable_of(server, "m") == previous


@pytest.mark.parametrize("is_from_file", [True, False])
def test_rollout_of_an_unloaded_model_ends_and_begins_anew_with_its_load(tmp_path: Path, is_from_file: bool) -> None:
    options = "rollout: {candidate: 2, mode: canary, share: 1}\n" if is_from_file else ""
    add_pair(tmp_path, "m", builders.identity, builders.identity, options)
    flags = ("--model-control-mode", "explicit", "--load-model", "*", *SHORT_WARMUP)
    with serving(tmp_path, *flags) as server, calling(server, "m") as caller:
        if not is_from_file:
            start(server, "m", mode="canary", share=1)
        caller.ask()
        assert rollout_of(server, "m")["figures"]["requests"] == 1
        in_repository(server, "m", "unload")
        document = rollout_of(server, "m")
        assert document["figures"]["requests"] == 0
        assert (document["rollout"] is None) is is_from_file
        assert document["problem"] == (
            "" if is_from_file else "rollout: expected model 'm' to serve, but it was unloaded"
        )
        assert not read_metrics(server).by_labels("ortserve_rollout_active", "model")
        in_repository(server, "m", "load")
        caller.ask()
        document = rollout_of(server, "m")
        assert (document["figures"]["requests"], document["problem"]) == (1, "")


@pytest.mark.parametrize("version", ["1", "2"])
def test_figures_begin_anew_when_files_of_a_version_are_replaced(tmp_path: Path, version: str) -> None:
    add_pair(tmp_path, "m", builders.identity, builders.identity, "rollout: {candidate: 2, mode: canary, share: 1}\n")
    flags = ("--model-control-mode", "explicit", "--load-model", "*", *SHORT_WARMUP)
    with serving(tmp_path, *flags) as server, calling(server, "m") as caller:
        caller.ask()
        in_repository(server, "m", "load")  # with the same files
        assert rollout_of(server, "m")["figures"]["requests"] == 1
        builders.unnamed_dims(tmp_path / "m" / version / "model.onnx")
        in_repository(server, "m", "load")
        assert rollout_of(server, "m")["figures"]["requests"] == 0
    assert server.output.count("rollout began") == 2


def test_decision_that_cannot_be_kept_is_shown_and_tried_again(tmp_path: Path) -> None:
    rules = "{min_requests: 10, max_disagreement: 0}"
    options = f"rollout: {{candidate: 2, share: 1, rules: {rules}}}\n"
    add_pair(tmp_path / "models", "m", builders.identity, builders.unnamed_dims, options)
    obstacle = tmp_path / "state" / ".state.json.lock"
    obstacle.mkdir(parents=True)
    flags = ("--state-dir", str(tmp_path / "state"), *SHORT_WARMUP)
    with serving(tmp_path / "models", *flags) as server, calling(server, "m") as caller:
        caller.ask()
        server.wait_for_line("cannot be stored")
        document = rollout_of(server, "m")
        assert document["ended"] is None
        assert document["problem"].startswith(
            "rollout: rolled_back by its rules (max_disagreement: expected at most 0, got 1 of 1 requests), "
            "but the result cannot be stored: state_dir: expected a folder to "
            "store the change in: state.json: "
        )
        caller.ask()
        assert rollout_of(server, "m")["figures"] == document["figures"]
        obstacle.rmdir()
        server.wait_for_line("rollout ended model=m candidate=2")
        document = rollout_of(server, "m")
        assert (document["rollout"], document["problem"], document["ended"]["result"]) == (None, "", "rolled_back")


def test_no_request_fails_while_rollouts_begin_and_end_under_load(server: ServerProcess) -> None:
    failures: list[Exception] = []
    stopping = threading.Event()

    def ask() -> None:
        try:
            with calling(server, "same") as caller:
                while not stopping.wait(0.02):
                    caller.ask()
        except Exception as error:
            failures.append(error)

    callers = [threading.Thread(target=ask) for _ in range(4)]  # 200 requests per second
    for caller in callers:
        caller.start()
    try:
        for number in range(30):
            start(server, "same", mode=("canary", "shadow")[number % 2], share=0.5)
            asked(server, "POST", "same/promote").raise_for_status()
            asked(server, "POST", "same/rollback").raise_for_status()
    finally:
        stopping.set()
        for caller in callers:
            caller.join(LONG_S)
    assert (failures, stable_of(server, "same")) == ([], "1")
