"""Trace files of a real server, switched by Triton's clients and readable by Triton's summary script.

The script (qa/common/trace_summary.py of triton-inference-server/server) groups objects by id, recognises HTTP and gRPC
by a trace's first timestamp, and computes spans between named timestamps; none may end before it begins.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from encodings_of_requests import grpc_raw, rest_json
from models import builders, members
from models.members import add_ensemble
from servers import LONG_S, SHORT_WARMUP, add_model, rest_url, serving, starting, triton_clients

SPANS = {
    "HTTP": ("HTTP_RECV_START", "HTTP_SEND_END"),
    "HTTP_RECV": ("HTTP_RECV_START", "HTTP_RECV_END"),
    "HTTP_SEND": ("HTTP_SEND_START", "HTTP_SEND_END"),
    "GRPC": ("GRPC_WAITREAD_START", "GRPC_SEND_END"),
    "GRPC_WAITREAD": ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"),
    "GRPC_SEND": ("GRPC_SEND_START", "GRPC_SEND_END"),
    "REQUEST": ("REQUEST_START", "REQUEST_END"),
    "QUEUE": ("QUEUE_START", "COMPUTE_START"),
    "COMPUTE": ("COMPUTE_START", "COMPUTE_END"),
    "COMPUTE_INPUT": ("COMPUTE_START", "COMPUTE_INPUT_END"),
    "COMPUTE_INFER": ("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
    "COMPUTE_OUTPUT": ("COMPUTE_OUTPUT_START", "COMPUTE_END"),
}


@dataclass
class Trace:
    """One request, as a reader of the file reconstructs it."""

    model: str
    version: int
    request_id: str
    spans: dict[str, int]


def read(path: Path) -> list[Trace]:
    """The traces of a file, in the order of their ids."""
    by_id: dict[int, dict[str, Any]] = {}
    for entry in json.loads(path.read_bytes()):
        whole = by_id.setdefault(entry["id"], {"timestamps": []})
        whole["timestamps"] += entry.pop("timestamps", [])
        whole.update(entry)
    return [_trace(by_id[number]) for number in sorted(by_id)]


def _trace(whole: dict[str, Any]) -> Trace:
    at = {timestamp["name"]: timestamp["ns"] for timestamp in whole["timestamps"]}
    spans = {name: at[end] - at[begin] for name, (begin, end) in SPANS.items() if begin in at and end in at}
    assert min(spans.values()) >= 0, at
    return Trace(whole["model_name"], whole["model_version"], whole.get("request_id", ""), spans)


@dataclass
class Written:
    """The results of the requests that ``written`` sends."""

    folder: Path
    extensions: list[str]
    settings: list[dict[str, Any]]


def infer(client: Any, triton: Any, model: str, request_id: str, columns: int = 4) -> None:
    given = triton.InferInput("x", [1, columns], "FP32")
    given.set_data_from_numpy(np.ones((1, columns), np.float32))
    client.infer(model, [given], request_id=request_id)


@pytest.fixture(scope="module")
def written(ways: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Written:
    repository, folder = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("traces")
    for name in ("identity", "other"):
        add_model(repository, name, builders.identity)
    settings: list[dict[str, Any]] = []
    with (
        serving(repository, "--trace-file", folder / "trace.json", *SHORT_WARMUP, *ways) as server,
        triton_clients(server) as (http, grpc),
    ):
        extensions = http.get_server_metadata()["extensions"]
        infer(http, triton_http, "identity", "before")
        # Three traces per file.
        on = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "log_frequency": "3"}
        settings.append(http.update_trace_settings(settings=on))
        for number in range(2):
            infer(http, triton_http, "identity", f"http {number}")
            infer(grpc, triton_grpc, "other", f"grpc {number}")
        # One file; the traces collected for the earlier files are written.
        grpc.update_trace_settings(settings={"log_frequency": None})
        with pytest.raises(InferenceServerException):
            infer(http, triton_http, "identity", "mistaken", columns=5)
        grpc_raw(server, "identity", {"x": np.ones((2, 4), np.float32)})
        rest_json(server, "identity", {"x": np.ones((200, 4), np.float32)})
        url = rest_url(server, "identity").replace("infer", "generate")
        answer = httpx.post(url, json={"x": [1, 2, 3, 4], "id": "g"}, timeout=LONG_S)
        assert answer.status_code == 200, answer.text
        # Two more traces, and then no others.
        grpc.update_trace_settings(settings={"trace_count": "2"})
        for number in range(4):
            infer(grpc, triton_grpc, "identity", f"counted {number}")
        settings.append(http.get_trace_settings())
        # Traces of one model only, for every second request.
        http.update_trace_settings(settings={"trace_level": ["OFF"], "trace_count": None})
        settings.append(http.update_trace_settings("other", {"trace_level": ["TIMESTAMPS"], "trace_rate": 2}))
        for number in range(4):
            infer(http, triton_http, "identity", f"of identity {number}")
            infer(http, triton_http, "other", f"of other {number}")
        with pytest.raises(InferenceServerException, match="trace file location can not be updated") as refused:
            http.update_trace_settings(settings={"trace_file": str(folder / "elsewhere.json")})
        assert refused.value.status() == "501"
    return Written(folder, extensions, settings)


def test_metadata_lists_tracing_and_its_settings_are_readable(written: Written) -> None:
    assert "trace" in written.extensions
    started, counted, of_model = written.settings
    assert started == {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": "1",
        "trace_count": "-1",
        "log_frequency": "3",
        "trace_file": "trace.json",
        "trace_mode": "triton",
    }
    assert counted == {**started, "trace_count": "0", "log_frequency": "0"}
    assert of_model == {**started, "trace_rate": "2", "log_frequency": "0"}


def test_trace_files_follow_the_settings(written: Written) -> None:
    assert sorted(path.name for path in written.folder.iterdir()) == [
        "trace.json",
        *(f"trace.json.{number}" for number in range(3)),
    ]
    ids = {path.name: [trace.request_id for trace in read(path)] for path in written.folder.iterdir()}
    assert ids["trace.json.0"] == ["http 0", "grpc 0", "http 1"]
    assert ids["trace.json.1"] == ["grpc 1"]
    assert ids["trace.json.2"] == ["counted 0", "counted 1"]
    assert ids["trace.json"] == ["mistaken", "", "", "g", "of other 1", "of other 3"]


def test_trace_files_contain_the_expected_spans(written: Written) -> None:
    http, grpc, _ = read(written.folder / "trace.json.0")
    assert (http.model, http.version, grpc.model) == ("identity", 1, "other")
    common = {"REQUEST", "QUEUE", "COMPUTE", "COMPUTE_INPUT", "COMPUTE_INFER", "COMPUTE_OUTPUT"}
    assert set(http.spans) == common | {"HTTP", "HTTP_RECV", "HTTP_SEND"}
    assert set(grpc.spans) == common | {"GRPC", "GRPC_WAITREAD", "GRPC_SEND"}
    for trace, side, reading in ((http, "HTTP", "HTTP_RECV"), (grpc, "GRPC", "GRPC_WAITREAD")):
        spans = trace.spans
        assert spans["REQUEST"] > spans["QUEUE"] + spans["COMPUTE"] > 0
        assert spans[side] == spans[reading] + spans["REQUEST"] + spans[f"{side}_SEND"]
        assert spans["COMPUTE"] == spans["COMPUTE_INPUT"] + spans["COMPUTE_INFER"] + spans["COMPUTE_OUTPUT"]


def test_rejected_request_has_no_compute_timestamps(written: Written) -> None:
    mistaken, *_ = read(written.folder / "trace.json")
    assert set(mistaken.spans) == {"HTTP", "HTTP_RECV", "HTTP_SEND", "REQUEST"}


def test_trace_options_apply_from_the_start(tmp_path: Path) -> None:
    add_model(tmp_path / "models", "identity", builders.identity)
    options = ("--trace-level", "TIMESTAMPS", "--trace-rate", "2", "--trace-count", "1", "--trace-file")
    with (
        serving(tmp_path / "models", *SHORT_WARMUP, *options, tmp_path / "trace") as server,
        triton_clients(server) as (http, _),
    ):
        for number in range(5):
            infer(http, triton_http, "identity", str(number))
        assert http.get_trace_settings()["trace_count"] == "0"
    assert [trace.request_id for trace in read(tmp_path / "trace.0")] == ["1"]


def test_steps_of_an_ensemble_have_traces_of_their_own_that_name_their_parent(tmp_path: Path) -> None:
    root = tmp_path / "models"
    add_model(root, "plus", members.affine, offset=1)
    add_ensemble(root, "inner", ["x"], ["y"], [("plus", {"a": "x"}, {"b": "y"})])
    add_ensemble(root, "outer", ["x"], ["y"], [("inner", {"x": "x"}, {"y": "t"}), ("plus", {"a": "t"}, {"b": "y"})])
    file = tmp_path / "traces"
    options = (f"--trace-file={file}", "--trace-rate=1", "--trace-level=TIMESTAMPS")
    with serving(root, *SHORT_WARMUP, *options) as server, triton_clients(server) as (client, _):
        infer(client, triton_http, "outer", "it", columns=2)
    found = {entry["id"]: entry for entry in json.loads(file.read_bytes())}
    parents = {number: (entry["model_name"], entry.get("parent_id")) for number, entry in found.items()}
    assert parents == {1: ("outer", None), 2: ("inner", 1), 3: ("plus", 2), 4: ("plus", 1)}
    outer, inner, plus, last = read(file)
    assert {trace.request_id for trace in (outer, inner, plus, last)} == {"it"}
    assert plus.spans["REQUEST"] <= inner.spans["REQUEST"] <= outer.spans["REQUEST"]
    assert {"QUEUE", "COMPUTE", "COMPUTE_INFER"} <= last.spans.keys()
    assert "HTTP" not in last.spans


def test_unwritable_trace_file_stops_the_start() -> None:
    with starting("--example", "--trace-file", "/nowhere/trace.json") as server:
        assert server.wait() == 1
        assert "trace_file: expected a regular file or a new name in a writable folder" in server.output
