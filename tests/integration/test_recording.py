"""Recorded requests: inputs of every protocol are in files that the tools read, within the operator's bounds."""

import stat
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException, shared_memory

from models import builders
from ortserve.core.dtypes import DataType
from ortserve.tools.inputs import FileInputs, read_inputs
from ortserve.tools.opening import open_model
from ortserve.tools.subject import find_model
from servers import (
    LONG_S,
    SHORT_WARMUP,
    Samples,
    ServerProcess,
    add_model,
    json_input,
    rest_url,
    serving,
    wire_datatype,
)

CORPUS = Path(__file__).parents[1] / "rows" / "corpus"
ODD = "größe 1%.#"
ALL = "record: {share: 1}"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that record every request, except ``plain``, which records none, and ``bounded`` and ``half``."""
    folder = tmp_path_factory.mktemp("recorded")
    made = {
        "wide": add_model(folder, "wide", builders.identity, shape=("batch", "width")),
        ODD: add_model(folder, ODD, builders.identity),
        "text": add_model(folder, "text", builders.identity, datatype=DataType.BYTES),
        "brain": add_model(folder, "brain", builders.identity, datatype=DataType.BF16),
        "mixed": add_model(folder, "mixed", builders.row_mixer),
        "alone": add_model(folder, "alone", builders.refuses_synthetic, is_proven=False),
    }
    made["time_first"] = folder / "time_first"
    (made["time_first"] / "1").mkdir(parents=True)
    (made["time_first"] / "1" / "model.onnx").symlink_to(CORPUS / "torch_lstm_time_first.onnx")
    for path in made.values():
        (path / "model.yaml").write_text(ALL)
    add_model(folder, "plain", builders.identity)
    bounded = add_model(folder, "bounded", builders.identity)
    (bounded / "model.yaml").write_text("record: {share: 1, max_bytes: 12288}")
    half = add_model(folder, "half", builders.identity)
    (half / "model.yaml").write_text("record: {share: 0.5}")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "requests"


def post(server: ServerProcess, model: str, **inputs: np.ndarray) -> int:
    body = {"inputs": [json_input(name, array) for name, array in inputs.items()]}
    return httpx.post(rest_url(server, quote(model, safe="")), json=body, timeout=LONG_S).status_code


def infer(library: Any, address: str, model: str, name: str, array: np.ndarray) -> None:
    """Infer with one of the unmodified clients; the HTTP client sends binary tensors."""
    with library.InferenceServerClient(address) as client:
        tensor = library.InferInput(name, list(array.shape), wire_datatype(array))
        tensor.set_data_from_numpy(array)
        client.infer(model, [tensor])


def read(repository: Path, folder: Path, model: str) -> FileInputs:
    return read_inputs(folder / model / "1", open_model(find_model(str(repository / model)), threads=1).signature)


def sent(*arrays: np.ndarray) -> list[list[object]]:
    return [row.tolist() for array in arrays for row in array]


def recorded(inputs: FileInputs) -> list[list[object]]:
    """The only input of each sample, in the order of the files."""
    found = {int(positions[0]): arrays[0] for positions, arrays in inputs.each()}
    return [(array[0] if inputs.is_batched else array).tolist() for _, array in sorted(found.items())]


def property_of(server: ServerProcess, model: str) -> str | None:
    metadata = httpx.get(f"{server.url}/v2/models/{model}", timeout=LONG_S).json()
    return next((str(value) for name, value in metadata["properties"].items() if name == "recording"), None)


def test_requests_of_all_protocols_are_read_back_as_sent(repository: Path, folder: Path) -> None:
    floats = [
        np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
        for seed, (rows, width) in enumerate([(1, 3), (2, 5), (3, 3), (70, 7)])
    ]
    texts = np.array([["", "é", "long " * 20, "x\0y"], ["a", "b", "c", "d"]], object)
    with serving(repository, "--record-dir", folder, "--allow-client-shm", *SHORT_WARMUP) as server:
        assert post(server, "wide", x=floats[0]) == 200
        infer(triton_http, server.http, "wide", "x", floats[1])
        infer(triton_grpc, server.grpc, "wide", "x", floats[2])
        share(server, floats[3])
        assert post(server, "wide", x=np.zeros((1, 2, 2), np.float32)) == 400
        assert post(server, "wide", x=np.zeros((0, 2), np.float32)) == 200
        infer(triton_http, server.http, "text", "x", np.char.encode(texts.astype(str), "utf-8").astype(object))
        infer(triton_grpc, server.grpc, ODD, "x", np.ones((2, 4), np.float32))
        infer(triton_grpc, server.grpc, "mixed", "x", np.ones((2, 4), np.float32))
        infer(triton_http, server.http, "alone", "x", np.arange(4, 12).reshape(2, 4))
        assert post(server, "alone", x=np.zeros((1, 4), np.int64)) == 400
        infer(triton_grpc, server.grpc, "plain", "x", np.ones((1, 4), np.float32))
        infer(triton_grpc, server.grpc, "brain", "x", np.array([[1, -2, 0.5, 3]] * 2, ml_dtypes.bfloat16))
        spec = open_model(find_model(str(repository / "time_first")), threads=1).signature.inputs[0]
        series = np.random.default_rng(9).normal(size=[3, 2, spec.shape[2]]).astype(np.float32)
        infer(triton_grpc, server.grpc, "time_first", spec.name, series)
        assert property_of(server, "plain") is None
        shown = property_of(server, "wide")

    assert shown is not None
    assert shown.startswith("1 of the requests; ")
    wide = read(repository, folder, "wide")
    assert recorded(wide) == sent(*floats)
    assert (wide.samples, len(wide.groups)) == (76, 3)
    assert recorded(read(repository, folder, "text")) == texts.tolist()
    assert recorded(read(repository, folder, ODD)) == [[1.0] * 4] * 2
    assert recorded(read(repository, folder, "mixed")) == [[1.0] * 4] * 2
    assert recorded(read(repository, folder, "alone")) == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert recorded(read(repository, folder, "brain")) == [[0x3F80, 0xC000, 0x3F00, 0x4040]] * 2
    ((_, (first,)), (_, (second,))) = read(repository, folder, "time_first").each()
    assert np.array_equal(np.concatenate([first, second]), np.moveaxis(series, 1, 0))
    assert not (folder / "plain").exists()
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def share(server: ServerProcess, array: np.ndarray) -> None:
    """Send an array to ``wide`` in shared memory, and overwrite it after the answer."""
    key = f"/ortserve-test-{uuid4().hex}"
    handle = shared_memory.create_shared_memory_region("mine", key, array.nbytes)
    try:
        shared_memory.set_shared_memory_region(handle, [array])
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            client.register_system_shared_memory("mine", key, array.nbytes)
            tensor = triton_grpc.InferInput("x", list(array.shape), "FP32")
            tensor.set_shared_memory("mine", array.nbytes)
            client.infer("wide", [tensor])
            shared_memory.set_shared_memory_region(handle, [np.zeros_like(array)])
            client.unregister_system_shared_memory("mine")
    finally:
        shared_memory.destroy_shared_memory_region(handle)


def test_bounds_hold_under_load_and_across_restarts(repository: Path, folder: Path) -> None:
    arrays = [np.full((1 + number % 3, 4), number, np.float32) for number in range(200)]
    with serving(repository, "--record-dir", folder, *SHORT_WARMUP) as server:
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda array: post(server, ODD, x=array), arrays)) == {200}
            assert set(pool.map(lambda array: post(server, "half", x=array), arrays)) == {200}
        assert [post(server, "bounded", x=arrays[0]) for _ in range(6)] == [200] * 6
        server.wait_for_line("recording has ended", "record.max_bytes", "model=bounded")
        assert (property_of(server, "bounded") or "").startswith("off: record.max_bytes: the files have 12288 bytes")
        counts = Samples(httpx.get(f"http://{server.metrics}/metrics").text).by_labels(
            "ortserve_recorded_requests_total", "model", "outcome"
        )
    assert counts["bounded recorded"] == 3
    assert len(list((folder / "bounded" / "1").iterdir())) == 3
    # Requests of equal values are in one file, and each is complete: none is torn, lost or duplicated.
    found = sorted(recorded(read(repository, folder, ODD)))
    assert found == sorted(sent(*arrays))
    assert 60 <= len(list((folder / "half" / "1").iterdir())) <= 140

    with serving(repository, "--record-dir", folder, *SHORT_WARMUP) as server:
        assert [post(server, "bounded", x=arrays[0]) for _ in range(2)] == [200] * 2
        server.wait_for_line("recording has ended", "record.max_bytes")
        assert post(server, "half", x=arrays[0]) == 200
    assert len(list((folder / "bounded" / "1").iterdir())) == 3


def test_full_disk_ends_recording_and_fails_no_request(repository: Path, folder: Path) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))"
    through = (sys.executable, "-c", f"import os, resource, sys; {limit}; os.execv(sys.argv[1], sys.argv[1:])")
    with serving(repository, "--record-dir", folder, *SHORT_WARMUP, through=through) as server:
        assert post(server, "wide", x=np.zeros((1, 4), np.float32)) == 200
        assert [post(server, "wide", x=np.zeros((1, 4000), np.float32)) for _ in range(3)] == [200] * 3
        server.wait_for_line("recording has ended", "File too large")
        assert post(server, "wide", x=np.zeros((1, 4), np.float32)) == 200
        assert sum("recording has ended" in line for line in server.lines) == 1
        assert (property_of(server, "wide") or "").startswith("off: File too large; 1 recorded")
    assert [path.name for path in (folder / "wide" / "1").iterdir()] == ["00000001.npz"]


@pytest.fixture
def explicit(repository: Path) -> Iterator[ServerProcess]:
    arguments = ("--model-control-mode", "explicit", "--load-model", "wide", *SHORT_WARMUP)
    with serving(repository, *arguments) as server:
        yield server


def test_record_without_a_folder_is_warned_of(explicit: ServerProcess) -> None:
    explicit.wait_for_line("option has no effect", "record: the server has no record_dir", "model=wide")
    assert post(explicit, "wide", x=np.ones((1, 4), np.float32)) == 200
    assert property_of(explicit, "wide") is None


def test_clients_cannot_make_the_server_record(repository: Path, folder: Path) -> None:
    arguments = ("--model-control-mode", "explicit", "--load-model", "plain", "--record-dir", folder, *SHORT_WARMUP)
    content = builders.identity(folder.parent / "model.onnx").read_bytes()
    with serving(repository, *arguments) as server, triton_grpc.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match='no field named "record"'):
            client.load_model("plain", config='{"record": {"share": 1}}')
        # The server ignores unknown parameters, as Triton does.
        client.load_model("plain", config='{"parameters": {"record": {"string_value": "{share: 1}"}}}')
        client.load_model("fresh", config="{}", files={"file:1/model.onnx": content})
        client.load_model("wide", config="{}")
        for model in ("plain", "fresh", "wide"):
            infer(triton_grpc, server.grpc, model, "x", np.ones((1, 4), np.float32))
            assert property_of(server, model) is None
    assert list(folder.rglob("*")) == []
