"""Versions that crash or hang ONNX Runtime while they load, with ``trial_load``: the server and its models go on."""

import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from encodings_of_requests import rest_json
from held_files import held_file
from http_wire import wait_until
from models import builders, interfaces
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, serving, starting

crashing = partial(interfaces.zipmap_classifier, classes=("a",), is_tree=True)
"""A model that ONNX Runtime 1.31.1 opens, and whose first run ends the process."""
ROW = {"x": np.array([[1, 2, 3, 4]], np.float32)}
REASON = f"trial_load: the process that loaded it ended with signal {int(signal.SIGABRT)}"
EXPLICIT = ("--model-control-mode", "explicit", *SHORT_WARMUP)


def versions(server: ServerProcess) -> dict[tuple[str, str], tuple[str, str]]:
    """State and reason by model and version."""
    index = httpx.post(f"{server.url}/v2/repository/index", timeout=LONG_S).json()
    return {(one["name"], one.get("version", "")): (one.get("state", ""), one.get("reason", "")) for one in index}


def change(server: ServerProcess, model: str, to: str) -> None:
    httpx.post(f"{server.url}/v2/repository/models/{model}/{to}", timeout=LONG_S).raise_for_status()


def trials(server: psutil.Process) -> list[psutil.Process]:
    return [child for child in server.children() if "child_process" in " ".join(child.cmdline())]


def test_version_that_crashes_ends_a_server_without_a_trial(tmp_path: Path) -> None:
    add_model(tmp_path, "m", crashing)
    with starting(tmp_path, *SHORT_WARMUP) as server:
        assert server.wait() == -signal.SIGABRT


def test_crashing_version_fails_and_the_other_one_serves(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "good", builders.identity)
    poll = ("--model-control-mode", "poll", "--repository-poll-s", "0.05")
    with starting(tmp_path, "--trial-load", *poll, *SHORT_WARMUP) as server:
        server.wait_for_line("model is ready", "model=good ")
        (folder / ".2").mkdir()
        crashing(folder / ".2" / "model.onnx")
        (folder / ".2").rename(folder / "2")
        assert REASON in server.wait_for_line("model cannot be served", "model=good version=2")
        np.testing.assert_array_equal(rest_json(server, "good", ROW)["y"], ROW["x"])
        found = versions(server)
        assert found["good", "1"] == ("READY", "")
        assert found["good", "2"][0] == "UNAVAILABLE"
        assert found["good", "2"][1].startswith(REASON)
        server.stop()


def test_version_is_tried_again_only_if_it_has_changed(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m", builders.identity)
    (folder / "model.yaml").write_text("trial_load: true\n")
    add_model(tmp_path, "plain", builders.identity)
    with serving(tmp_path, *EXPLICIT) as server:
        for model in ("m", "plain"):
            change(server, model, "load")
            change(server, model, "unload")
        change(server, "m", "load")
        builders.denoted(folder / "1" / "model.onnx")
        change(server, "m", "load")
    tried = [line for line in server.lines if "trial load passed" in line]
    assert [" model=m version=1 " in line for line in tried] == [True, True]


def test_file_that_replaces_the_tried_one_is_not_loaded_untried(tmp_path: Path) -> None:
    """The trial waits for a sample, which it reads after it has opened the model."""
    folder = add_model(tmp_path, "m", builders.identity)
    sample = folder / "warmup" / "row"
    sample.parent.mkdir()
    sample.write_bytes(ROW["x"].tobytes())
    (folder / "model.yaml").write_text("trial_load: true\nwarmup_samples: [{inputs: {x: {file: row}}}]\n")
    with held_file(sample) as hold, serving(tmp_path, *EXPLICIT) as server, ThreadPoolExecutor(1) as clients:
        loading = clients.submit(httpx.post, f"{server.url}/v2/repository/models/m/load", timeout=LONG_S)
        wait_until(lambda: hold.is_awaited)
        crashing(tmp_path / "new.onnx").replace(folder / "1" / "model.onnx")
        hold.release()
        answer = loading.result()
        assert "trial_load: model.onnx changed after" in answer.json()["error"]
        server.wait_for_line("trial load passed")


def test_trial_reports_the_error_of_the_load(tmp_path: Path) -> None:
    (add_model(tmp_path, "m", builders.not_onnx) / "model.yaml").write_text("trial_load: true\n")
    with serving(tmp_path, *EXPLICIT) as server:
        answer = httpx.post(f"{server.url}/v2/repository/models/m/load", timeout=LONG_S)
        assert "ONNX Runtime cannot load the model" in answer.json()["error"]


@pytest.mark.parametrize("ending", ["unload", "stop"])
def test_hanging_trial_ends_with_its_load_or_its_server(tmp_path: Path, ending: str) -> None:
    file = builders.identity(tmp_path / "m.onnx")
    poll = ("--model-control-mode", "poll", "--repository-poll-s", "0.05")
    with held_file(file) as hold, starting(tmp_path, "--trial-load", *poll, *SHORT_WARMUP) as server:
        wait_until(lambda: hold.is_awaited)
        (child,) = trials(psutil.Process(server.pid))
        if ending == "stop":
            server.stop()
        else:
            builders.identity(tmp_path / "m.new").replace(tmp_path / "m.onnx")
            server.wait_for_line("model is ready", "model=m ")
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
