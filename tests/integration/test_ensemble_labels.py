"""Ensembles follow the labels of their members."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http as triton_http
from onnx import helper
from tritonclient.utils import InferenceServerException

from encodings_of_requests import triton_inputs
from http_wire import wait_until
from models import builders
from models.members import add_ensemble, ensemble_text
from servers import LONG_S, SHORT_WARMUP, add_model, serving, triton_clients

EVERY = "version_policy: {all: true}\n"
ONES = {"x": np.ones((1, 4), np.float32)}


def other_output(path: Path) -> Path:
    """A model that doubles x into an output with another name than those of the other models."""
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("Add", ["x", "x"], ["z"])]
    return builders.write(path, nodes, [value("x", 1, ["batch", 4])], [value("z", 1, ["batch", 4])])


def test_ensembles_follow_labels_even_while_a_version_of_the_model_loads(tmp_path: Path) -> None:
    add_model(tmp_path, "m", builders.identity)
    folder = add_model(tmp_path, "m", builders.unnamed_dims, version=2)
    (folder / "model.yaml").write_text(f"{EVERY}labels: {{stable: 1}}")
    add_ensemble(tmp_path, "e", ["x"], ["y"], [("m", {"x": "x"}, {"y": "y"})])
    with (
        serving(tmp_path, "--model-control-mode", "explicit", "--load-model", "e", *SHORT_WARMUP) as server,
        triton_clients(server) as (http, grpc),
        ThreadPoolExecutor(1) as threads,
    ):

        def answer() -> float:
            return float(http.infer("e", triton_inputs(triton_http, ONES)).as_numpy("y")[0, 0])

        (folder / "model.yaml").write_text(f"{EVERY}labels: {{stable: 2}}")
        http.load_model("m")
        assert answer() == 2
        (folder / "model.yaml").write_text(f"{EVERY}labels: {{stable: 1}}")
        add_model(tmp_path, "m", builders.slow, version=3, steps=1_000_000)
        loading = threads.submit(grpc.load_model, "m")
        wait_until(lambda: answer() == 1)
        body = {"labels": {"stable": 2}}
        httpx.put(f"{server.url}/v2/models/m/labels", json=body, timeout=LONG_S).raise_for_status()
        wait_until(lambda: answer() == 2)
        assert not loading.done()
        http.unload_model("m")
        with pytest.raises(InferenceServerException, match="unload"):
            loading.result()


def test_ensemble_that_is_changed_with_its_member_stays_in_service(tmp_path: Path) -> None:
    """One poll finds a label on a version with another output, the ensemble that reads it, and a version that loads."""
    add_model(tmp_path, "m", builders.identity)
    folder = add_model(tmp_path, "m", other_output, version=2)
    (folder / "model.yaml").write_text(f"{EVERY}labels: {{stable: 1}}")
    ensemble = add_ensemble(tmp_path, "e", ["x"], ["y"], [("m", {"x": "x"}, {"y": "y"})])
    flags = ("--model-control-mode", "poll", "--repository-poll-s", "1", *SHORT_WARMUP)
    with serving(tmp_path, *flags) as server, triton_clients(server) as (http, _):
        answers = [float(http.infer("e", triton_inputs(triton_http, ONES)).as_numpy("y")[0, 0])]
        add_model(tmp_path, "m", builders.slow, version=3, steps=60_000)
        (ensemble / "model.yaml").write_text(ensemble_text(["x"], ["y"], [("m", {"x": "x"}, {"z": "y"})]))
        (folder / "model.yaml").write_text(f"{EVERY}labels: {{stable: 2}}")
        while answers[-1] != 2:
            answers.append(float(http.infer("e", triton_inputs(triton_http, ONES)).as_numpy("y")[0, 0]))
    assert set(answers) == {1, 2}
