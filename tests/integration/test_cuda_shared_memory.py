"""GPU regions on both protocols, with host memory in place of GPUs; ``tests/gpu`` uses a real GPU."""

import base64
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from servers import LONG_S, SHORT_WARMUP, ServerProcess, serving, wire_datatype

FOLDER: Final = Path("/dev/shm")
SIZE: Final = 256


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The example models, with two GPUs on host memory."""
    host_gpus = str(Path(__file__).parents[1] / "support" / "host_gpus")
    gpus = {"PYTHONPATH": os.pathsep.join([host_gpus, *filter(None, [os.environ.get("PYTHONPATH")])])}
    with serving("--example", "--allow-client-shm", *SHORT_WARMUP, env=gpus) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def library(request: pytest.FixtureRequest) -> Any:
    return triton_http if request.param == "http" else triton_grpc


@pytest.fixture
def client(library: Any, server: ServerProcess) -> Iterator[Any]:
    made = library.InferenceServerClient(server.http if library is triton_http else server.grpc)
    yield made
    made.unregister_cuda_shared_memory()
    made.close()


@contextmanager
def owned(content: bytes) -> Iterator[tuple[bytes, Path]]:
    """Device memory of the test: its handle as clients pass it, and a view of its content."""
    path = FOLDER / f"ortserve-test-{uuid4().hex}"
    path.write_bytes(content)
    try:
        yield base64.b64encode(path.name.encode().ljust(64, b"\0")), path
    finally:
        path.unlink()


def names(client: Any) -> list[tuple[str, int, int]]:
    status = client.get_cuda_shared_memory_status()
    if isinstance(status, list):
        return [(region["name"], region["device_id"], region["byte_size"]) for region in status]
    return [(region.name, region.device_id, region.byte_size) for region in status.regions.values()]


def is_mapped(server: ServerProcess, path: Path) -> bool:
    return str(path) in Path(f"/proc/{server.pid}/maps").read_text()


def tensor(made: Any, region: str, byte_size: int, offset: int = 0) -> Any:
    made.set_shared_memory(region, byte_size, offset)
    return made


def given(library: Any, name: str, array: np.ndarray, region: str, offset: int = 0) -> Any:
    return tensor(library.InferInput(name, list(array.shape), wire_datatype(array)), region, array.nbytes, offset)


def refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments)
    return str(caught.value.message())


def test_tensors_pass_through_gpu_memory_in_both_directions(server: ServerProcess, library: Any, client: Any) -> None:
    sums = np.arange(16, dtype=np.int32).reshape(1, 16)
    ones = np.ones((1, 16), np.int32)
    with owned(sums.tobytes() + ones.tobytes() + bytes(128)) as (handle, path):
        client.register_cuda_shared_memory("on_gpu", handle, 1, SIZE)
        assert names(client) == [("on_gpu", 1, SIZE)]
        client.infer(
            "simple",
            [given(library, "INPUT0", sums, "on_gpu"), given(library, "INPUT1", ones, "on_gpu", 64)],
            outputs=[
                tensor(library.InferRequestedOutput("OUTPUT0"), "on_gpu", 64, 128),
                tensor(library.InferRequestedOutput("OUTPUT1"), "on_gpu", 64, 192),
            ],
        )
        answers = np.frombuffer(path.read_bytes()[128:], np.int32).reshape(2, 16)
        np.testing.assert_array_equal(answers, np.concatenate([sums + ones, sums - ones]))
        assert is_mapped(server, path)
        client.unregister_cuda_shared_memory("on_gpu")
        assert names(client) == []
        assert "Unable to find shared memory region: 'on_gpu'" in refusal(
            client.infer, "simple", [given(library, "INPUT0", sums, "on_gpu"), given(library, "INPUT1", ones, "on_gpu")]
        )
        client.register_system_shared_memory("on_gpu", path.name, 64)  # the name is free again, for any kind of region
        client.unregister_system_shared_memory("on_gpu")
        for _ in range(100):
            if not is_mapped(server, path):
                break
            time.sleep(0.05)
        assert not is_mapped(server, path)


def test_impossible_registration_is_rejected_with_its_reason(library: Any, client: Any) -> None:
    with owned(bytes(SIZE)) as (handle, _):
        client.register_cuda_shared_memory("taken", handle, 0, SIZE)
        unknown, short = base64.b64encode(b"none".ljust(64, b"\0")), base64.b64encode(b"none")
        begin = "failed to register CUDA shared memory region: 'r', "
        for expected_error, *arguments in (
            ("shared memory region 'taken' already in manager", "taken", handle, 0, SIZE),
            (f"{begin}expected byte_size within the 256 bytes of its memory, got 257", "r", handle, 0, 257),
            (f"{begin}failed to open CUDA IPC handle: cudaErrorInvalidValue: invalid argument", "r", unknown, 0, 8),
            (f"{begin}expected a raw_handle of 64 bytes, got 4", "r", short, 0, 8),
            (f"{begin}GPUs not supported: CUDAExecutionProvider has no device 2: there is no CUDA", "r", handle, 2, 8),
        ):
            assert refusal(client.register_cuda_shared_memory, *arguments).startswith(expected_error)
        assert [name for name, *_ in names(client)] == ["taken"]
        assert "cuda shared memory region: 'r'" in refusal(client.get_cuda_shared_memory_status, "r")
        client.unregister_cuda_shared_memory("r")


@pytest.mark.parametrize(
    ("body", "expected_error"),
    [
        (b'{"device_id": 0, "byte_size": 8}', "Unable to parse 'raw_handle': expected an object with a string 'b64'"),
        (b'{"device_id": 0, "byte_size": 8, "raw_handle": "x"}', "Unable to parse 'raw_handle': expected an object"),
        (b'{"device_id": 0, "byte_size": 8, "raw_handle": {"b64": "$"}}', "expected base64 in 'b64'"),
        (b'{"raw_handle": {"b64": ""}, "byte_size": 8}', "Unable to parse 'device_id': expected an unsigned integer"),
        (b'{"raw_handle": {"b64": ""}, "device_id": 0}', "Unable to parse 'byte_size': expected an unsigned integer"),
        (b'{"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 8}', "expected a raw_handle of 64 bytes, got 0"),
    ],
)
def test_malformed_registrations_are_rejected(server: ServerProcess, body: bytes, expected_error: str) -> None:
    url = f"http://{server.http}/v2/cudasharedmemory/region/r/register"
    came = httpx.post(url, content=body, timeout=LONG_S)
    assert came.status_code == 400
    assert expected_error in came.json()["error"]


def test_server_metadata_lists_the_extension(server: ServerProcess) -> None:
    assert "cuda_shared_memory" in httpx.get(f"{server.url}/v2", timeout=LONG_S).json()["extensions"]
