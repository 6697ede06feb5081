"""The shown state of a model that takes long to load, for operators and clients."""

import re
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from encodings_of_requests import triton_inputs
from held_files import held_file
from models import builders
from ortserve.engine.process_limits import cpu_budget
from servers import starting, triton_clients

WAITING_FOR_FILE = r"waiting for its file, for \d+ s"
ONES = {"x": np.ones((1, 4), np.float32)}


def test_long_load_reports_its_step_on_both_protocols_and_in_the_log(tmp_path: Path) -> None:
    file = builders.identity(tmp_path / "m.onnx")
    flags = ("--warmup-s", "0", "--intra-op-threads", "1")
    with held_file(file) as hold, starting(tmp_path, *flags) as server:
        line = server.wait_for_line("model is still loading", "waiting for its file")
        assert re.search(rf' model=m version=1 doing="{WAITING_FOR_FILE}" seconds=1\d\.\d+$', line)
        with triton_clients(server) as (http, grpc):
            (entry,) = http.get_model_repository_index()
            assert (entry["name"], entry["version"], entry["state"]) == ("m", "1", "LOADING")
            assert re.fullmatch(WAITING_FOR_FILE, entry["reason"])
            (listed,) = grpc.get_model_repository_index().models
            assert (listed.name, listed.version, listed.state) == ("m", "1", "LOADING")
            assert re.fullmatch(WAITING_FOR_FILE, listed.reason)
            for client, library in ((http, triton_http), (grpc, triton_grpc)):
                with pytest.raises(InferenceServerException, match=rf"LOADING \({WAITING_FOR_FILE}\)"):
                    client.infer("m", triton_inputs(library, ONES))
            hold.release()
            server.wait_until_loaded()
            assert http.get_model_repository_index() == [{"name": "m", "version": "1", "state": "READY"}]
            http.infer("m", triton_inputs(triton_http, ONES))
        server.stop()


@pytest.mark.skipif(cpu_budget() < 2, reason="loads are as many as processors")
def test_slow_model_delays_no_other_load_and_no_shutdown(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    slow = builders.identity(repository / "a_slow.onnx")
    (repository / "b_broken.onnx").write_bytes(b"no model")
    names = [f"m{number}" for number in range(8)]
    for name in names:
        builders.identity(repository / f"{name}.onnx")
    with held_file(slow), starting(repository, "--warmup-s", "0.5") as server:
        for name in names:
            server.wait_for_line("model is ready", f"model={name} ")
        with triton_clients(server) as (http, grpc):
            states = {entry["name"]: entry["state"] for entry in http.get_model_repository_index()}
            assert states == {"a_slow": "LOADING", "b_broken": "UNAVAILABLE"} | dict.fromkeys(names, "READY")
            for name in names:
                for client, library in ((http, triton_http), (grpc, triton_grpc)):
                    answer = client.infer(name, triton_inputs(library, ONES))
                    np.testing.assert_array_equal(answer.as_numpy("y"), ONES["x"])
        server.stop()
