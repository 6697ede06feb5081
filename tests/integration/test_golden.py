"""Golden samples and the speed gate on real servers: candidates are stopped before they answer a caller."""

import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from models import builders, members
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, json_input, rest_url, serving, triton_clients

POLL = ("--model-control-mode", "poll", "--repository-poll-s", "0.1", *SHORT_WARMUP)
ROW = np.linspace(-1, 1, 64, dtype=np.float32)[np.newaxis]


def add_golden(version: Path, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
    (version / "golden").mkdir()
    arrays: dict[str, Any] = {f"input.{name}": array for name, array in inputs.items()}
    arrays |= {f"output.{name}": array for name, array in outputs.items()}
    np.savez(version / "golden" / "a.npz", **arrays)


def computed(model: Path, x: np.ndarray) -> np.ndarray:
    """The result of a model without the server."""
    (y,) = ReferenceEvaluator(onnx.load(model)).run(None, {"x": x})
    return np.asarray(y)


def smaller_table(path: Path) -> Path:
    """``poison`` that fails for values from 8 on."""
    model = onnx.load(builders.poison(path))
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.arange(8, dtype=np.float32) / 2, "table"))
    onnx.save(model, path)
    return path


def add_version(model: Path, number: int, file: Path) -> None:
    """Publish a version with the golden samples of version 1 atomically."""
    staged = model.parent / ".staged"
    shutil.copytree(model / "1", staged)
    shutil.copyfile(file, staged / "model.onnx")
    staged.rename(model / str(number))


@contextmanager
def calling(server: ServerProcess, bodies: dict[str, Any]) -> Iterator[dict[str, Counter[str]]]:
    """Call each model repeatedly. Counts the answering versions and the errors, by model."""
    seen: dict[str, Counter[str]] = {name: Counter() for name in bodies}
    over = threading.Event()

    def call(name: str, body: Any) -> None:
        with httpx.Client(timeout=LONG_S) as client:
            while not over.is_set():
                answer = client.post(rest_url(server, name), json=body)
                seen[name][answer.json()["model_version"] if answer.status_code == 200 else answer.text] += 1
                over.wait(0.01)

    with ThreadPoolExecutor(len(bodies)) as pool:
        callers = [pool.submit(call, name, body) for name, body in bodies.items()]
        try:
            yield seen
        finally:
            over.set()
        for caller in callers:
            caller.result()


def test_bad_candidates_are_stopped_and_good_ones_serve_without_a_failed_request(tmp_path: Path) -> None:
    repository, made = tmp_path / "repository", tmp_path / "made.onnx"
    for name in ("weights", "equal"):
        model = add_model(repository, name, builders.mlp)
        add_golden(model / "1", {"x": ROW}, {"y": computed(model / "1" / "model.onnx", ROW)})
        (model / "model.yaml").write_text("golden_required: true\nmax_slowdown: 1.5\n")
    slow = add_model(repository, "slow", builders.heavy, steps=20, width=512)
    (slow / "model.yaml").write_text("max_slowdown: 1.5\nintra_op_threads: 1\n")
    crash = add_model(repository, "crash", builders.poison)
    ids = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    add_golden(crash / "1", {"x": ids}, {"y": (ids / 2).astype(np.float32)})
    floats = {"inputs": [json_input("x", ROW)]}
    bodies = dict.fromkeys(("weights", "equal", "slow"), floats) | {"crash": {"inputs": [json_input("x", ids)]}}

    with serving(repository, *POLL) as server, calling(server, bodies) as seen:
        add_version(repository / "weights", 2, builders.mlp(made, seed=1))
        wrong = server.wait_for_line("model cannot be served", "model=weights")
        add_version(crash, 2, smaller_table(made))
        fails = server.wait_for_line("model cannot be served", "model=crash")
        add_version(slow, 2, builders.heavy(made, steps=60, width=512))
        late = server.wait_for_line("model cannot be served", "model=slow")
        add_version(repository / "equal", 2, builders.mlp(made))
        server.wait_for_line("model is ready", "model=equal", "version=2")
        with triton_clients(server) as (http, _):
            index = {(one["name"], one["version"]): one for one in http.get_model_repository_index()}
            shown = http.get_model_metadata("equal")["properties"]["golden"]

    assert "output 'y': relative error at most 0.001 expected, got " in wrong
    assert "a.npz sample 1 alone fails: " in fails
    assert "times the" in late
    assert "max_slowdown: a batch of" in late
    for name in ("weights", "slow", "crash"):
        assert index[name, "1"]["state"] == "READY"
        assert index[name, "2"]["state"] == "UNAVAILABLE"
        assert seen[name].keys() == {"1"}, "no caller saw the candidate, and no request failed"
    assert seen["equal"].keys() <= {"1", "2"}
    assert shown.startswith("1 sample agrees: alone 'y' relative ")


def test_samples_of_an_ensemble_run_through_its_members(tmp_path: Path) -> None:
    add_model(tmp_path, "double", members.affine, scale=2)
    a = np.arange(8, dtype=np.float32).reshape(4, 2)
    for name, factor in (("right", 2), ("wrong", 3)):
        members.add_ensemble(tmp_path, name, ["a"], ["b"], [("double", {"a": "a"}, {"b": "b"})])
        add_golden(tmp_path / name / "1", {"a": a}, {"b": factor * a})

    with serving(tmp_path, *SHORT_WARMUP) as server:
        line = server.wait_for_line("model cannot be served", "model=wrong")
        with triton_clients(server) as (http, _):
            shown = http.get_model_metadata("right")["properties"]["golden"]

    assert "output 'b': relative error at most 0.001 expected, got 0.333" in line
    assert shown == "4 samples agree: alone 'b' relative 0 of 0.001; in batches of up to 4 'b' relative 0 of 0.001"


def test_equal_models_pass_the_speed_gate_each_time(tmp_path: Path) -> None:
    """Batches of one row take about 1 ms, ten times the ignored difference."""
    model = add_model(tmp_path, "m", builders.heavy, steps=20, width=512)
    (model / "model.yaml").write_text("max_slowdown: 1.5\nintra_op_threads: 1\n")
    with (
        serving(tmp_path, "--model-control-mode", "explicit", "--load-model", "m", *SHORT_WARMUP) as server,
        calling(server, {"m": {"inputs": [json_input("x", ROW)]}}) as seen,
        triton_clients(server) as (http, _),
    ):
        for _ in range(5):
            file = model / "1" / "model.onnx"
            file.write_bytes(file.read_bytes())
            http.load_model("m")

    assert seen["m"].keys() == {"1"}


def test_versions_are_compared_with_the_one_that_is_stable(tmp_path: Path) -> None:
    """Version 3 takes 4.5 times as long as version 1, and 2.25 times as long as version 2, which passes."""
    for version, steps in ((1, 20), (2, 40)):
        model = add_model(tmp_path, "m", builders.heavy, version=version, steps=steps, width=512)
    options = "labels: {stable: 1}\nversion_policy: {all: true}\nmax_slowdown: 3\nintra_op_threads: 1\n"
    (model / "model.yaml").write_text(options)
    with serving(tmp_path, "--model-control-mode", "explicit", "--load-model", "m", *SHORT_WARMUP) as server:
        server.wait_for_line("model is ready", "version=2")
        add_version(model, 3, builders.heavy(tmp_path / "made", steps=90, width=512))
        answer = httpx.post(f"{server.url}/v2/repository/models/m/load", timeout=LONG_S)
    assert answer.status_code == 500, answer.text
    assert "expected at most 3 times (version 1)" in answer.json()["error"]
