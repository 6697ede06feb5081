"""Repositories in servers of S3, Azure and Google Cloud Storage, and in archives behind HTTP.

A proxy injects faults into the answers of the S3 server.
"""

import base64
import hashlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from tritonclient.utils import InferenceServerException

from apart import UnavailableError
from archives import file_site, write_archive
from azure_server import AzureServer
from encodings_of_requests import grpc_raw, rest_json
from google_server import GoogleServer
from http_wire import wait_until
from hung_folders import hung
from models import builders
from s3_server import ACCESS_KEY, SECRET_KEY, FaultyProxy, MotoServer, S3Server, s3_behind_proxy, upload
from servers import LONG_S, LOOK_S, SHORT_WARMUP, ServerProcess, read_metrics, serving, starting, triton_clients

ROW = {"x": np.array([[1, 2, 3, 4]], np.float32)}
FAST = (*SHORT_WARMUP, "--store-timeout-s", "1")
POLL = ("--model-control-mode", "poll", "--repository-poll-s", "0.1")


@dataclass
class Lab:
    s3: S3Server
    proxy: FaultyProxy
    folder: Path

    def bucket(self, name: str) -> Path:
        folder = self.s3.root / name
        folder.mkdir()
        return folder

    def flags(self, bucket: str, *more: str) -> tuple[str | Path, ...]:
        return (f"s3://{bucket}/models", "--store-cache-dir", self.folder / f"cache-{bucket}", *FAST, *more)

    def serving(self, bucket: str, *more: str) -> AbstractContextManager[ServerProcess]:
        return serving(*self.flags(bucket, *more), env=self.proxy.environment)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("stores")
    (folder / "s3").mkdir()
    with s3_behind_proxy(folder / "s3") as (s3, proxy):
        yield Lab(s3, proxy, folder)


@pytest.fixture
def lab(running: Lab) -> Iterator[Lab]:
    yield running
    running.proxy.fault, running.proxy.spoiled = "", ".onnx"
    running.proxy.paths.clear()


def model_bytes(tmp_path: Path, added: float | None = None) -> dict[str, bytes]:
    """The files of a version: y = x + added, with weights in a separate file; without ``added`` y = x."""
    if added is None:
        return {"model.onnx": builders.identity(tmp_path / "model.onnx").read_bytes()}
    content = builders.external_weights(tmp_path / "model.onnx", "weights.bin").read_bytes()
    return {"model.onnx": content, "weights.bin": np.full(4, added, np.float32).tobytes()}


def version(tmp_path: Path, model: str, number: int, added: float) -> dict[str, bytes]:
    files = model_bytes(tmp_path, added)
    return {f"models/{model}/{number}/{name}": files[name] for name in ("weights.bin", "model.onnx")}


def answer_of(server: ServerProcess, model: str = "m") -> float:
    """The first value of the answer to zeros, which must agree on both protocols."""
    zeros = {"x": np.zeros((1, 4), np.float32)}
    first = float(rest_json(server, model, zeros)["y"][0, 0])
    assert float(grpc_raw(server, model, zeros)["y"][0, 0]) == first
    return first


def wait_for_answer(server: ServerProcess, expected: float, model: str = "m") -> None:
    ends = time.monotonic() + LONG_S
    zeros = {"x": np.zeros((1, 4), np.float32)}
    while float(rest_json(server, model, zeros)["y"][0, 0]) != expected:
        assert time.monotonic() < ends, server.output
        time.sleep(LOOK_S)
    assert answer_of(server, model) == expected


def index(server: ServerProcess) -> dict[str, tuple[str, str]]:
    answer = httpx.post(f"{server.url}/v2/repository/index", timeout=LONG_S)
    return {entry["name"]: (entry.get("state", ""), entry.get("reason", "")) for entry in answer.json()}


def test_models_of_a_bucket_serve_and_a_restart_fetches_nothing(lab: Lab, tmp_path: Path) -> None:
    bucket = lab.bucket("restart")
    upload(bucket, version(tmp_path, "m", 1, 1) | version(tmp_path, "m", 2, 2))
    upload(bucket, {"models/bare.onnx": model_bytes(tmp_path)["model.onnx"], "models/README.md": b"no model"})
    with lab.serving("restart") as server:
        assert answer_of(server) == 2
        np.testing.assert_array_equal(rest_json(server, "bare", ROW)["y"], ROW["x"])
        samples = read_metrics(server)
        assert samples.value("ortserve_store_up", repository="s3://restart/models") == 1
        assert samples.value("ortserve_store_cache_bytes") > 0
    fetched = [path for path in lab.proxy.paths if "list-type" not in path]
    # Version 1 is not served, so its files are not fetched.
    assert sorted(path.removeprefix("/restart/models/") for path in fetched) == [
        "bare.onnx",
        "m/2/model.onnx",
        "m/2/weights.bin",
    ]
    lab.proxy.paths.clear()
    with lab.serving("restart") as server:
        assert answer_of(server) == 2
    assert [path for path in lab.proxy.paths if "list-type" not in path] == []


def test_start_without_the_store_serves_from_the_cache(lab: Lab, tmp_path: Path) -> None:
    upload(lab.bucket("away"), version(tmp_path, "m", 1, 1))
    with lab.serving("away"):
        pass
    lab.proxy.fault = "down"
    with lab.serving("away", *POLL) as server:
        assert answer_of(server) == 1
        server.wait_for_line("using the models of the cache, according to the last listing of the store")
        assert read_metrics(server).value("ortserve_store_up", repository="s3://away/models") == 0
        lab.proxy.fault = ""
        server.wait_for_line("the store can be listed again")
        upload(lab.s3.root / "away", version(tmp_path, "m", 2, 2))
        wait_for_answer(server, 2)


def test_metrics_are_answered_while_the_disk_of_the_cache_hangs(lab: Lab, tmp_path: Path) -> None:
    upload(lab.bucket("silent"), version(tmp_path, "m", 1, 1))
    with lab.serving("silent") as server:
        nbytes = read_metrics(server).value("ortserve_store_cache_bytes")
        assert nbytes > 0
        try:
            with hung(lab.folder / "cache-silent"):
                assert read_metrics(server).value("ortserve_store_cache_bytes") == nbytes
        except UnavailableError as error:
            pytest.skip(str(error))


def test_model_is_unloaded_and_the_server_ends_while_the_disk_of_the_cache_hangs(lab: Lab, tmp_path: Path) -> None:
    upload(lab.bucket("mute"), version(tmp_path, "m", 1, 1))
    explicit = ("--model-control-mode", "explicit", "--load-model", "m")
    with lab.serving("mute", *explicit) as server:
        try:
            with hung(lab.folder / "cache-mute"):
                httpx.post(f"{server.url}/v2/repository/models/m/unload", timeout=LONG_S).raise_for_status()
                answer = httpx.get(f"{server.url}/v2/models/m/ready", timeout=LONG_S)
                assert answer.status_code == 400
                assert "the files of a model are still being released" in server.output
                server.stop()
        except UnavailableError as error:
            pytest.skip(str(error))


def test_damaged_cache_is_fetched_again(lab: Lab, tmp_path: Path) -> None:
    upload(lab.bucket("damaged"), version(tmp_path, "m", 1, 1))
    with lab.serving("damaged"):
        pass
    for content in (lab.folder / "cache-damaged" / "contents").iterdir():
        if content.stat().st_size == 16:
            content.chmod(0o600)
            content.write_bytes(np.full(4, 9, np.float32).tobytes())
    with lab.serving("damaged") as server:
        assert answer_of(server) == 1


def test_folder_beside_a_store_is_loaded_from_while_the_store_is_down(lab: Lab, tmp_path: Path) -> None:
    upload(lab.bucket("beside"), version(tmp_path, "m", 1, 1))
    folder = tmp_path / "folder"
    upload(folder, {"local/1/model.onnx": model_bytes(tmp_path)["model.onnx"]})
    flags = (*lab.flags("beside", "--model-control-mode", "explicit", "--load-model", "m"), folder)
    with serving(*flags, env=lab.proxy.environment) as server, triton_clients(server) as (http, _):
        lab.proxy.fault = "down"
        http.load_model("local")
        np.testing.assert_array_equal(rest_json(server, "local", ROW)["y"], ROW["x"])
        with pytest.raises(InferenceServerException, match=r"failed to load 'm'.*a repository cannot be read"):
            http.load_model("m")
        assert answer_of(server) == 1


def test_start_without_store_and_cache_ends_with_the_reason(lab: Lab) -> None:
    lab.proxy.fault = "down"
    with starting(*lab.flags("nothing"), env=lab.proxy.environment) as server:
        assert server.wait() == 1
        assert "the server cannot start" in server.output
        assert "repository s3://nothing/models" in server.output


@pytest.mark.parametrize("mode", ["poll", "explicit"])
def test_new_versions_are_followed(lab: Lab, tmp_path: Path, mode: str) -> None:
    bucket = lab.bucket(mode)
    upload(bucket, version(tmp_path, "m", 1, 1) | version(tmp_path, "other", 1, 5))
    flags = POLL if mode == "poll" else ("--model-control-mode", "explicit", "--load-model", "m")
    with lab.serving(mode, *flags) as server:
        assert answer_of(server) == 1
        upload(bucket, version(tmp_path, "m", 2, 2))
        if mode == "explicit":
            assert not any("/other/" in path for path in lab.proxy.paths)
            assert set(index(server)) == {"m", "other"}
            with triton_clients(server) as (http, _):
                http.load_model("m")
                http.load_model("other")
                assert answer_of(server, "other") == 5
                http.unload_model("other")
                http.load_model("m", config=json.dumps({"version_policy": {"specific": {"versions": [1]}}}))
                assert answer_of(server) == 1
                http.load_model("m")
        wait_for_answer(server, 2)
        assert sum("/m/1/" in path for path in lab.proxy.paths) == 2  # each of its files once


def test_labelled_versions_are_fetched_though_the_policy_leaves_them_out(lab: Lab, tmp_path: Path) -> None:
    bucket = lab.bucket("labels")
    for number in (1, 2, 3):
        upload(bucket, version(tmp_path, "m", number, number))
    options = b"version_policy: {latest: 2}\nlabels: {stable: 1}\n"
    upload(bucket, {"models/m/model.yaml": options})
    state = ("--state-dir", str(tmp_path / "state"))
    with lab.serving("labels", *state) as server:
        assert answer_of(server) == 1
        labels = f"{server.url}/v2/models/m/labels"
        assert httpx.put(labels, json={"labels": {"old": 2}}, timeout=LONG_S).status_code == 200
    upload(bucket, {"models/m/model.yaml": options.replace(b"2", b"1")})
    with lab.serving("labels", *state) as server:
        assert answer_of(server) == 1
        answer = httpx.get(f"{server.url}/v2/models/m/versions/old/ready", timeout=LONG_S)
        assert answer.status_code == 200, answer.text


def test_version_is_not_loaded_before_the_files_in_its_list_of_digests_are_there(lab: Lab, tmp_path: Path) -> None:
    bucket = lab.bucket("sums")
    files = version(tmp_path, "m", 1, 1) | version(tmp_path, "m", 2, 2)
    sums = "".join(
        f"{hashlib.sha256(content).hexdigest()}  {path.removeprefix('models/m/')}\n" for path, content in files.items()
    )
    upload(bucket, {"models/m/SHA256SUMS": sums.encode()} | version(tmp_path, "m", 1, 1))
    with lab.serving("sums", *POLL) as server:
        assert answer_of(server) == 1
        upload(bucket, {"models/m/2/model.onnx": files["models/m/2/model.onnx"]})
        server.wait_for_line("keeps serving", "SHA256SUMS lists 2/weights.bin, which the store does not have")
        upload(bucket, {"models/m/2/weights.bin": np.full(4, 7, np.float32).tobytes()})
        server.wait_for_line("keeps serving", "m/2/weights.bin: expected the SHA-256 digest")
        assert answer_of(server) == 1
        upload(bucket, {"models/m/2/weights.bin": files["models/m/2/weights.bin"]})
        wait_for_answer(server, 2)
        assert index(server)["m"] == ("READY", "")


FAULTS = {
    "cut": "its content ended early",
    "corrupt": "expected the MD5 digest",
    "stall": "its content ended early",
    "error": "503 Service Unavailable",
}


@pytest.mark.timeout(300)
def test_failed_loads_keep_the_old_versions_and_leak_nothing(lab: Lab, tmp_path: Path) -> None:
    """100 failed loads of five kinds by four concurrent clients, with requests in between.

    The time limit leaves the fetches that must succeed enough time on a busy machine.
    """
    bucket = lab.bucket("faults")
    models = [f"m{number}" for number in range(4)]
    for model in models:
        upload(bucket, version(tmp_path, model, 1, 1))
    flags = ("--model-control-mode", "explicit", "--load-model", ",".join(models), "--store-timeout-s", "2")
    with lab.serving("faults", *flags) as server, ThreadPoolExecutor(len(models)) as clients:

        def load(model: str) -> tuple[int, str]:
            answer = httpx.post(f"{server.url}/v2/repository/models/{model}/load", timeout=LONG_S)
            return answer.status_code, answer.text

        for model in models:
            upload(bucket, version(tmp_path, model, 2, 2))
        process = psutil.Process(server.pid)
        kinds = [*FAULTS, "down"]
        for turn in range(25):
            kind = kinds[turn % len(kinds)]
            # A stalled load takes the time limit twice, so stalls occur only once before and once after the first look.
            fault = lab.proxy.fault = "cut" if kind == "stall" and turn not in (2, 17) else kind
            for model, (status, text) in zip(models, clients.map(load, models), strict=True):
                reason = f"its files cannot be fetched: {model}/2/model.onnx: {FAULTS.get(fault)}"
                reason = "a repository cannot be read" if fault == "down" else reason
                assert status == 500
                assert f"failed to load '{model}', failed to poll from model repository: {reason}" in text
            assert answer_of(server, models[turn % len(models)]) == 1
            if turn == 14:
                before = process.num_fds(), process.num_threads(), process.memory_info().rss
        after = process.num_fds(), process.num_threads(), process.memory_info().rss
        assert after[0] <= before[0] + 4
        assert after[1] <= before[1] + 2  # the event loop starts its threads one by one
        assert after[2] <= before[2] * 1.02
        lab.proxy.fault = ""
        views = lab.folder / "cache-faults" / "views"
        assert not [path for path in views.rglob("*") if path.match("2/*.*")]
        assert [load(model)[0] for model in models] == [200] * len(models)
        assert {answer_of(server, model) for model in models} == {2}


def test_reason_of_each_fault_is_logged_once_and_shown(lab: Lab, tmp_path: Path) -> None:
    bucket = lab.bucket("reasons")
    upload(bucket, version(tmp_path, "m", 1, 1))
    with lab.serving("reasons", *POLL) as server:
        for number, (fault, reason) in enumerate(FAULTS.items(), 2):
            lab.proxy.fault, lab.proxy.spoiled = fault, f"/{number}/model.onnx"
            upload(bucket, version(tmp_path, "m", number, number))
            server.wait_for_line("the previous load keeps serving", f"m/{number}/model.onnx", reason)
            assert answer_of(server) == 1
            state, shown = index(server)["m"]
            assert state == "READY"
            assert reason in shown
        assert sum("the previous load keeps serving" in line for line in server.lines) == len(FAULTS)
        lab.proxy.fault = ""
        upload(bucket, version(tmp_path, "m", 9, 9))  # a new upload is fetched at once, without the delay of a retry
        wait_for_answer(server, 9)
        assert index(server)["m"] == ("READY", "")


def test_expired_credentials_keep_what_serves_and_are_never_shown(lab: Lab, tmp_path: Path) -> None:
    upload(lab.bucket("expired"), version(tmp_path, "m", 1, 1))
    with lab.serving("expired", *POLL) as server:
        lab.s3.stop()
        lab.s3.start(secret_key="ANOTHERSECRETKEY")
        try:
            server.wait_for_line("the store cannot be listed; its loaded models keep serving", "SignatureDoesNotMatch")
            assert answer_of(server) == 1
            metrics = httpx.get(f"http://{server.metrics}/metrics", timeout=LONG_S).text
            assert 'ortserve_store_up{repository="s3://expired/models"} 0' in metrics
        finally:
            lab.s3.stop()
            lab.s3.start()
        server.wait_for_line("the store can be listed again")
        shown = server.output + metrics + json.dumps(index(server))
        assert SECRET_KEY not in shown
        assert ACCESS_KEY not in shown


def test_two_servers_share_a_cache_whose_bound_evicts_only_unused_files(lab: Lab, tmp_path: Path) -> None:
    upload(lab.bucket("shared"), version(tmp_path, "m", 1, 1))
    size = sum(map(len, model_bytes(tmp_path, 1).values()))
    most = 2 * size + 20
    bound = ("--store-cache-bytes", str(most))
    with lab.serving("shared", *POLL, *bound) as first, lab.serving("shared", *POLL, *bound) as second:
        assert (answer_of(first), answer_of(second)) == (1, 1)
        for number in (2, 3, 4, 5):  # more than the cache can hold
            upload(lab.s3.root / "shared", version(tmp_path, "m", number, number))
            wait_for_answer(first, number)
            wait_for_answer(second, number)
        upload(lab.s3.root / "shared", {"models/large.onnx": bytes(most)})
        first.wait_for_line("its files cannot be fetched", "store_cache_bytes: expected")
        assert answer_of(first) == 5
    contents = list((lab.folder / "cache-shared" / "contents").iterdir())
    assert sum(content.stat().st_size for content in contents) <= most
    assert not list((lab.folder / "cache-shared" / "views").iterdir())


def test_server_that_is_killed_in_a_fetch_leaves_what_others_use_in_a_shared_cache(lab: Lab, tmp_path: Path) -> None:
    bucket = lab.bucket("killed")
    upload(bucket, version(tmp_path, "m", 1, 1))
    views = lab.folder / "cache-killed" / "views"
    slow = (*POLL, "--store-timeout-s", "60")
    with lab.serving("killed", *slow) as first:
        with starting(*lab.flags("killed", *slow), env=lab.proxy.environment) as second:
            second.wait_until_loaded()
            lab.proxy.fault = "pause"
            upload(bucket, version(tmp_path, "m", 2, 2))
            # Both servers fetch the same file.
            wait_until(lambda: lab.proxy.paths.count("/killed/models/m/2/model.onnx") >= 2)
        assert len(list(views.iterdir())) == 4, "two views and their locks"
        lab.proxy.fault = "cut"
        upload(bucket, version(tmp_path, "m", 3, 3))
        first.wait_for_line("its files cannot be fetched", "its content ended early")
        lab.proxy.fault = ""
        upload(bucket, version(tmp_path, "m", 4, 4))
        wait_for_answer(first, 4)
        lab.proxy.paths.clear()
        with lab.serving("killed", *slow) as third:
            assert (answer_of(first), answer_of(third)) == (4, 4)
            assert len(list(views.iterdir())) == 4
        assert [path for path in lab.proxy.paths if "list-type" not in path] == []
    assert not list(views.iterdir())


CHAIN = """
inputs: {IN: {}}
outputs: {OUT: {}}
ensemble:
  steps:
    - {model: m, inputs: {x: IN}, outputs: {y: between}}
    - {model: MEMBER, inputs: {x: between}, outputs: {y: OUT}}
"""


@pytest.mark.parametrize("budget", [(), ("--memory-budget-bytes", "1000000000")])
def test_start_loads_each_model_when_its_files_have_arrived(lab: Lab, tmp_path: Path, budget: tuple[str, ...]) -> None:
    """A model that a store lists, too, waits, and so does an ensemble until the files of all members are there."""
    bucket = "spent-dawn" if budget else "dawn"
    folder, slow, quick = tmp_path / "folder", lab.bucket(bucket), lab.bucket(f"quick-{bucket}")
    for model, place in {"large": slow, "twin": slow, "m": quick, "local": folder}.items():
        upload(place, version(tmp_path, model, 1, 1))
    upload(folder, version(tmp_path, "twin", 1, 2))
    for ensemble, member in {"early": "local", "late": "large"}.items():
        configuration = CHAIN.replace("MEMBER", member).encode()
        upload(folder, {f"models/{ensemble}/model.yaml": configuration, f"models/{ensemble}/1/.keep": b""})
    lab.proxy.fault, lab.proxy.spoiled = "pause", f"/{bucket}/models/"
    flags = (*lab.flags(bucket), f"s3://quick-{bucket}/models", folder / "models", "--store-timeout-s", "60", *budget)
    with starting(*flags, env=lab.proxy.environment) as server:
        server.wait_for_line("listening", "metrics")
        wait_for_path(lab.proxy, "/large/1/")
        server.wait_for_line("model is ready", "model=early")
        assert answer_of(server, "m") == answer_of(server, "local") == 1
        assert {name for name, (state, _) in index(server).items() if state} == {"m", "local", "early"}
        assert httpx.get(f"{server.url}/v2/health/ready", timeout=LONG_S).status_code == 400
        lab.proxy.fault = ""
        server.wait_until_loaded()
        assert answer_of(server, "large") == 1
        states = index(server)
        assert "two models of this name" in states.pop("twin")[1]
        assert states == dict.fromkeys(("m", "local", "early", "large", "late"), ("READY", ""))
        loads = [line for line in server.lines if "model is ready" in line]
        assert len(loads) == len(states), loads
        server.stop()


def test_server_whose_start_waits_for_a_store_stops(lab: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    upload(lab.bucket("dusk"), version(tmp_path, "large", 1, 1))
    upload(folder, version(tmp_path, "m", 1, 1))
    lab.proxy.fault = "stall"
    flags = (*lab.flags("dusk"), folder / "models", "--store-timeout-s", "60")
    with starting(*flags, env=lab.proxy.environment) as server:
        server.wait_for_line("model is ready", "model=m")
        assert answer_of(server) == 1
        server.stop()


def test_slow_fetch_delays_no_other_model(lab: Lab, tmp_path: Path) -> None:
    """Neither those of the same store, nor of other stores and folders, nor calls."""
    slow, quick, folder = lab.bucket("slow"), lab.bucket("quick"), tmp_path / "folder"
    places = {"m": slow, "other": quick, "local": folder}

    def publish(number: int) -> None:
        for model, place in places.items():
            upload(place, version(tmp_path, model, number, number))

    upload(slow, version(tmp_path, "large", 1, 1))
    publish(1)
    flags = (*lab.flags("slow"), "s3://quick/models", folder / "models", *POLL, "--store-timeout-s", "60")
    with serving(*flags, env=lab.proxy.environment) as server:
        lab.proxy.fault, lab.proxy.spoiled = "stall", "/slow/models/large/2/"
        upload(slow, version(tmp_path, "large", 2, 2))
        wait_for_path(lab.proxy, "/large/2/")
        for number in (2, 3):
            publish(number)
            for model in places:
                wait_for_answer(server, number, model)
        assert set(index(server)) == {"large", *places}
        assert answer_of(server, "large") == 1


def test_newer_files_end_the_fetch_of_an_object_that_trickles(lab: Lab, tmp_path: Path) -> None:
    """The time limit of the connection would end the fetch only later. The log reports its progress."""
    bucket = lab.bucket("trickle")
    upload(bucket, version(tmp_path, "m", 1, 1))
    with lab.serving("trickle", *POLL, "--store-timeout-s", "60") as server:
        lab.proxy.fault, lab.proxy.spoiled = "trickle", "/m/2/data.bin"
        upload(bucket, version(tmp_path, "m", 2, 2) | {"models/m/2/data.bin": bytes(100_000)})
        wait_for_path(lab.proxy, "/m/2/data.bin")
        server.wait_for_line("models are being fetched", "trickle")
        upload(bucket, version(tmp_path, "m", 3, 3))
        wait_for_answer(server, 3)


def test_object_or_listing_that_trickles_fails_and_is_tried_again(lab: Lab, tmp_path: Path) -> None:
    """Its connection is never silent for the time limit, but would hold a fetching thread for days."""
    bucket = lab.bucket("rill")
    upload(bucket, version(tmp_path, "m", 1, 1))
    with lab.serving("rill", *POLL) as server:
        lab.proxy.fault, lab.proxy.spoiled = "trickle", "/m/2/data.bin"
        upload(bucket, version(tmp_path, "m", 2, 2) | {"models/m/2/data.bin": bytes(1000)})
        line = server.wait_for_line("its content is too slow")
        assert "m/2/data.bin: its content is too slow: expected 1024 bytes per second over 1 s" in line
        assert len([path for path in lab.proxy.paths if "/m/2/data.bin" in path]) == 2
        assert answer_of(server) == 1
        lab.proxy.spoiled = "/rill"
        server.wait_for_line("the store cannot be listed", "Timeout")
        lab.proxy.fault = ""
        wait_for_answer(server, 2)


@pytest.mark.parametrize("key", ["m//2/model.onnx", "m/2/../model.onnx", "m/2/a\x7f"])
def test_key_that_no_file_can_have_fails_its_model_alone(moto: MotoServer, tmp_path: Path, key: str) -> None:
    for path, content in (version(tmp_path, "m", 1, 1) | version(tmp_path, "other", 1, 1)).items():
        moto.put(path, content)
    flags = ("s3://bucket/models", "--store-cache-dir", tmp_path / "cache", *FAST, *POLL)
    with serving(*flags, env=moto.environment) as server:
        assert (answer_of(server), answer_of(server, "other")) == (1, 1)
        moto.put(f"models/{key}", b"")
        server.wait_for_line("the previous load keeps serving", "expected names that are not empty")
        assert server.output.count("each listing takes a request for each model") == 1
        for path, content in version(tmp_path, "other", 2, 2).items():
            moto.put(path, content)
        wait_for_answer(server, 2, "other")
        assert answer_of(server) == 1
        state, reason = index(server)["m"]
        assert (state, repr(key)[1:-1] in reason) == ("READY", True), reason
        moto.delete(f"models/{key}")
        for path, content in version(tmp_path, "m", 3, 3).items():
            moto.put(path, content)
        wait_for_answer(server, 3)


@pytest.mark.parametrize("key", ["/m/1/model.onnx", "../m/1/model.onnx", "m\\1\\model.onnx"])
def test_key_that_no_model_can_have_is_left_out_with_a_warning(moto: MotoServer, tmp_path: Path, key: str) -> None:
    for path, content in version(tmp_path, "m", 1, 1).items():
        moto.put(path, content)
    moto.put(f"models/{key}", b"")
    flags = ("s3://bucket/models", "--store-cache-dir", tmp_path / "cache", *FAST)
    with serving(*flags, env=moto.environment) as server:
        assert answer_of(server) == 1
        server.wait_for_line("objects are left out: no model can have their name", "objects=1")
        assert ("models whose names begin with" in server.output) == ("\\" not in key)
        assert set(index(server)) == {"m"}


def test_loads_by_clients_do_not_wait_for_other_stores(lab: Lab, tmp_path: Path) -> None:
    buckets, folder = [lab.bucket("stuck"), lab.bucket("loads")], tmp_path / "folder"
    upload(buckets[0], version(tmp_path, "m", 1, 1))
    upload(buckets[1], version(tmp_path, "other", 1, 1))
    upload(folder, version(tmp_path, "local", 1, 1))
    explicit = ("--model-control-mode", "explicit", "--load-model", "m,other", "--store-timeout-s", "60")
    flags = (*lab.flags("stuck"), "s3://loads/models", folder / "models", *explicit)
    with serving(*flags, env=lab.proxy.environment) as server, triton_clients(server) as (http, _):
        lab.proxy.fault, lab.proxy.spoiled = "stall", "/stuck"  # its listings, too
        upload(buckets[1], version(tmp_path, "other", 2, 2))
        http.load_model("other")
        assert answer_of(server, "other") == 2
        http.load_model("local")
        assert answer_of(server, "local") == 1
        assert set(index(server)) == {"m", "other", "local"}


@pytest.mark.parametrize("stalled", ["/models/", ""], ids=["fetch", "listing"])
@pytest.mark.parametrize("because", ["the model is unloaded", "the server stops"])
def test_load_ends_at_once_though_its_store_stalls(lab: Lab, tmp_path: Path, stalled: str, because: str) -> None:
    name = tmp_path.name.replace("_", "-")
    bucket = lab.bucket(name)
    upload(bucket, version(tmp_path, "m", 1, 1))
    explicit = ("--model-control-mode", "explicit", "--load-model", "m", "--store-timeout-s", str(2 * LONG_S))
    with lab.serving(name, *explicit) as server, ThreadPoolExecutor(1) as clients:

        def call(what: str) -> httpx.Response:
            return httpx.post(f"{server.url}/v2/repository/models/m/{what}", timeout=LONG_S)

        lab.proxy.paths.clear()
        lab.proxy.fault, lab.proxy.spoiled = "stall", f"/{name}{stalled}"
        upload(bucket, version(tmp_path, "m", 2, 2))
        load = clients.submit(call, "load")
        wait_for_path(lab.proxy, lab.proxy.spoiled)
        if because == "the server stops":
            server.stop()
            assert "drain timed out" not in server.output
        else:
            assert call("unload").status_code == 200
            assert index(server)["m"] == ("UNAVAILABLE", "unloaded")
        assert f"its load was cancelled: {because}" in load.result().text


def wait_for_path(proxy: FaultyProxy, part: str) -> None:
    """Wait until a path with this part was requested."""
    ends = time.monotonic() + LONG_S
    while not any(part in path for path in proxy.paths):
        assert time.monotonic() < ends
        time.sleep(LOOK_S)


def test_archive_serves_and_is_fetched_again_only_if_it_changed(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    with file_site(folder) as address:
        check_archive(folder, address, tmp_path)


def check_archive(folder: Path, address: str, tmp_path: Path) -> None:
    files = {f"m/1/{name}": content for name, content in model_bytes(tmp_path, 3).items()}
    digest = write_archive(folder / "models.tar.gz", files.items())
    flags = (f"{address}/models.tar.gz#sha256={digest}", "--store-cache-dir", tmp_path / "cache", *FAST)
    with serving(*flags) as server:
        assert answer_of(server) == 3
        console = httpx.get(f"{server.url}/v2/console/server").raise_for_status().json()
    shown = {setting["name"]: setting["value"] for setting in console["settings"]}
    assert shown["repositories"] == f'["{address.removeprefix("http://")}"]'
    changed = folder / "models.tar.gz"
    stamp = changed.stat()
    changed.write_bytes(bytes(stamp.st_size))  # Equal size and time, so that only a fetch would reveal the change.
    os.utime(changed, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with serving(*flags) as server:
        assert answer_of(server) == 3


@pytest.fixture(scope="module")
def running_moto() -> Iterator[MotoServer]:
    try:
        server = MotoServer("bucket")
    except UnavailableError as error:
        pytest.skip(str(error))
    yield server
    server.stop()


@pytest.fixture
def moto(running_moto: MotoServer) -> MotoServer:
    running_moto.clear()
    return running_moto


@pytest.fixture(scope="module")
def azure() -> Iterator[AzureServer]:
    try:
        server = AzureServer("models")
    except UnavailableError as error:
        pytest.skip(str(error))
    yield server
    server.stop()


def test_models_of_an_azure_container_serve_and_are_polled(azure: AzureServer, tmp_path: Path) -> None:
    azure.upload(version(tmp_path, "m", 1, 1))
    flags = ("az://models/models", "--store-cache-dir", tmp_path / "cache", *FAST, *POLL)
    with serving(*flags, env=azure.environment()) as server:
        assert answer_of(server) == 1
        azure.upload(version(tmp_path, "m", 2, 2))
        wait_for_answer(server, 2)
        assert read_metrics(server).value("ortserve_store_up", repository="az://models/models") == 1
    other = base64.b64encode(b"another key".ljust(64)).decode()
    with serving(*flags, env=azure.environment(other)) as server:
        assert answer_of(server) == 2
        line = server.wait_for_line("the store cannot be listed; its loaded models keep serving")
        assert "403 Forbidden: AuthorizationFailure" in line
        assert other not in server.output


def test_key_of_azure_that_no_model_can_have_keeps_only_new_models_out(azure: AzureServer, tmp_path: Path) -> None:
    """Azure cannot begin a listing after a given key."""
    place = "keys"

    def publish(model: str, number: int) -> None:
        azure.upload({f"{place}/{path}": content for path, content in version(tmp_path, model, number, number).items()})

    publish("m", 1)
    single = builders.identity(tmp_path / "single.onnx").read_bytes()
    azure.upload({f"{place}/models/single.onnx": single})
    flags = (f"az://models/{place}/models", "--store-cache-dir", tmp_path / "cache", *FAST, *POLL)
    with serving(*flags, env=azure.environment()) as server:
        azure.put_key(f"{place}/models//m/1/x")
        server.wait_for_line("a key is not the path of a file; new models are left out", "'/m/1/x'")
        publish("new", 1)
        publish("m", 2)
        wait_for_answer(server, 2)
        assert {name: state for name, (state, _) in index(server).items()} == {"m": "READY", "single": "READY"}
        azure.delete_key(f"{place}/models//m/1/x")
        server.wait_for_line("model is ready", "model=new")


def test_models_of_a_google_bucket_serve_and_are_polled(tmp_path: Path) -> None:
    root = tmp_path / "buckets"
    upload(root / "bucket", version(tmp_path, "m", 1, 1))
    google = S3Server(root, secret_key="")
    try:
        flags = ("gs://bucket/models", "--store-cache-dir", tmp_path / "cache", *FAST, *POLL)
        with serving(*flags, env=google.google_environment) as server:
            assert answer_of(server) == 1
            upload(root / "bucket", version(tmp_path, "m", 2, 2))
            wait_for_answer(server, 2)
            google.stop()
            server.wait_for_line("the store cannot be listed")
            assert answer_of(server) == 2
    finally:
        google.stop()


@pytest.fixture(scope="module")
def google() -> Iterator[GoogleServer]:
    try:
        server = GoogleServer("bucket")
    except UnavailableError as error:
        pytest.skip(str(error))
    yield server
    server.stop()


@pytest.mark.parametrize("source", ["GOOGLE_SERVICE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST"])
def test_credentials_of_google_are_used(google: GoogleServer, tmp_path: Path, source: str) -> None:
    google.tokens_given = 0
    prefix = source.lower()
    google.upload({f"{prefix}/{path}": content for path, content in version(tmp_path, "m", 1, 1).items()})
    account = google.write_account(tmp_path / "account.json")
    given = google.address if source == "GCE_METADATA_HOST" else str(account)
    where = {"GOOGLE_BASE_URL": f"http://{google.address}", "GOOGLE_ALLOW_HTTP": "true"}
    flags = (f"gs://bucket/{prefix}/models", "--store-cache-dir", tmp_path / "cache", *FAST, *POLL)
    with serving(*flags, env={**where, source: given}) as server:
        assert answer_of(server) == 1
        google.upload({f"{prefix}/{path}": content for path, content in version(tmp_path, "m", 2, 2).items()})
        wait_for_answer(server, 2)
    assert (google.tokens_given > 0) == (source == "GCE_METADATA_HOST")


def test_service_account_with_another_key_is_refused_without_showing_it(google: GoogleServer, tmp_path: Path) -> None:
    google.upload(version(tmp_path, "m", 1, 1))
    account = google.write_account(tmp_path / "account.json", rsa.generate_private_key(65537, 2048))
    where = {"GOOGLE_BASE_URL": f"http://{google.address}", "GOOGLE_ALLOW_HTTP": "true"}
    flags = ("gs://bucket/models", "--store-cache-dir", tmp_path / "cache", *FAST)
    with starting(*flags, env={**where, "GOOGLE_SERVICE_ACCOUNT": str(account)}) as server:
        line = server.wait_for_line("the store cannot be listed")
        assert "401 Unauthorized: AuthenticationRequired: no access" in line
        assert json.loads(account.read_text())["private_key"].splitlines()[1] not in server.output
