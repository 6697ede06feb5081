"""System shared memory on both protocols: use and misuse by the unmodified clients."""

import asyncio
import base64
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any, Final
from urllib.parse import quote
from uuid import uuid4

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

from models import builders, sequences
from models.members import add_ensemble
from ortserve.core.dtypes import DataType
from ortserve.service.shared_object import RESERVED_PREFIX
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, serving, wire_datatype

FOLDER: Final = Path("/dev/shm")
HANDLE: Final = base64.b64encode(bytes(64))
"""A handle of GPU memory in the clients' format."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The example models, ``wide`` (returns FP32 [batch, width]) and ``text`` (returns BYTES [batch, 4])."""
    repository = tmp_path_factory.mktemp("shared-memory")
    add_model(repository, "wide", builders.identity, shape=("batch", "width"))
    add_model(repository, "text", builders.identity, datatype=DataType.BYTES)
    for name, build in (("totals", sequences.totals), ("slow", sequences.slow)):
        (add_model(repository, name, build) / "model.yaml").write_text(
            "sequences: {states: [{input: STATE, output: NEXT}]}\n"
        )
    add_ensemble(repository, "through", ["INPUT"], ["TOTAL"], [("totals", {"INPUT": "INPUT"}, {"TOTAL": "TOTAL"})])
    with serving(repository, "--example", "--allow-client-shm", *SHORT_WARMUP) as server:
        yield server


class Caller:
    """One of the unmodified clients. ``status`` is the status of an error answer."""

    def __init__(self, library: Any, address: str) -> None:
        self.library = library
        self.client = library.InferenceServerClient(address)

    def input(self, name: str, array: np.ndarray, region: str, *, offset: int = 0, byte_size: int = -1) -> Any:
        made = self.library.InferInput(name, list(array.shape), wire_datatype(array))
        made.set_shared_memory(region, array.nbytes if byte_size == -1 else byte_size, offset)
        return made

    def output(self, name: str, region: str, byte_size: int, *, offset: int = 0) -> Any:
        made = self.library.InferRequestedOutput(name)
        made.set_shared_memory(region, byte_size, offset)
        return made

    def copy(self, region: str, array: np.ndarray, *, to: int) -> None:
        """Let ``wide`` copy the array from the region's beginning to the offset ``to``."""
        place = self.output("y", region, array.nbytes, offset=to)
        self.client.infer("wide", [self.input("x", array, region)], outputs=[place])

    def names(self) -> list[str]:
        status = self.client.get_system_shared_memory_status()
        return sorted(region["name"] for region in status) if isinstance(status, list) else sorted(status.regions)

    def refusal(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[str, str]:
        with pytest.raises(InferenceServerException) as caught:
            call(*arguments, **keywords)
        return caught.value.status(), caught.value.message()


@pytest.fixture(params=["http", "grpc"])
def caller(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Caller]:
    made = connect(server, request.param)
    yield made
    made.client.unregister_system_shared_memory()
    made.client.close()


def connect(server: ServerProcess, protocol: str) -> Caller:
    return Caller(triton_http, server.http) if protocol == "http" else Caller(triton_grpc, server.grpc)


@contextmanager
def owned(byte_size: int) -> Iterator[tuple[str, Any]]:
    """A shared memory object of the test: its key and the client library's handle."""
    key = f"/ortserve-test-{uuid4().hex}"
    handle = shared_memory.create_shared_memory_region("mine", key, byte_size)
    try:
        yield key, handle
    finally:
        shared_memory.destroy_shared_memory_region(handle)


def open_descriptors(server: ServerProcess) -> list[str]:
    """The shared memory objects that the server has open."""
    folder = Path(f"/proc/{server.pid}/fd")
    return [link for link in map(os.path.realpath, folder.iterdir()) if link.startswith(f"{FOLDER}/")]


def status_of(protocol: Caller, http: int, grpc: str) -> str:
    return str(http) if protocol.library is triton_http else f"StatusCode.{grpc}"


# --- use by clients


def test_tensors_pass_through_regions_in_both_directions(caller: Caller) -> None:
    sums = np.arange(16, dtype=np.int32).reshape(1, 16)
    ones = np.ones((1, 16), np.int32)
    with owned(256) as (key, handle):
        shared_memory.set_shared_memory_region(handle, [sums, ones])
        caller.client.register_system_shared_memory("whole", key, 256)
        caller.client.register_system_shared_memory("end", key[1:], 128, offset=128)
        assert caller.names() == ["end", "whole"]
        inputs = [caller.input("INPUT0", sums, "whole"), caller.input("INPUT1", ones, "whole", offset=64)]
        outputs = [caller.output("OUTPUT1", "end", 64), caller.output("OUTPUT0", "end", 64, offset=64)]
        result = caller.client.infer("simple", inputs, outputs=outputs, request_id="7")
        np.testing.assert_array_equal(shared_memory.get_contents_as_numpy(handle, np.int32, (1, 16), 128), sums - ones)
        np.testing.assert_array_equal(shared_memory.get_contents_as_numpy(handle, np.int32, (1, 16), 192), sums + ones)
        answer = result.get_response(as_json=True) if caller.library is triton_grpc else result.get_response()
        assert answer["id"] == "7"
        for output, name in zip(answer["outputs"], ["OUTPUT1", "OUTPUT0"], strict=True):
            assert output["name"] == name
            assert not {"data", "parameters", "contents"} & set(output)
        if caller.library is triton_grpc:
            assert list(result.get_response().raw_output_contents) == [b"", b""]


def test_region_and_message_share_a_request(caller: Caller) -> None:
    ones = np.ones((1, 16), np.int32)
    with owned(128) as (key, handle):
        shared_memory.set_shared_memory_region(handle, [ones * 4])
        caller.client.register_system_shared_memory("r", key, 128)
        by_message = caller.library.InferInput("INPUT1", [1, 16], "INT32")
        by_message.set_data_from_numpy(ones)
        outputs = [caller.output("OUTPUT0", "r", 64, offset=64), caller.library.InferRequestedOutput("OUTPUT1")]
        result = caller.client.infer("simple", [caller.input("INPUT0", ones, "r"), by_message], outputs=outputs)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), ones * 3)
        np.testing.assert_array_equal(shared_memory.get_contents_as_numpy(handle, np.int32, (1, 16), 64), ones * 5)


def test_strings_pass_through_regions_with_their_lengths(caller: Caller) -> None:
    text = np.array([["", "añb", "x" * 300, "\0"]], dtype=object)
    spelled = serialize_byte_tensor(text)
    size = len(spelled.item())
    with owned(2 * size + 10) as (key, handle):
        shared_memory.set_shared_memory_region(handle, [spelled])
        caller.client.register_system_shared_memory("r", key, 2 * size + 10)
        given = caller.input("x", text, "r", byte_size=size)
        caller.client.infer("text", [given], outputs=[caller.output("y", "r", size + 10, offset=size)])
        read = shared_memory.get_contents_as_numpy(handle, np.object_, [1, 4], size)
        assert [element.decode() for element in read.ravel()] == text.ravel().tolist()
        status, message = caller.refusal(
            caller.client.infer, "text", [given], outputs=[caller.output("y", "r", size - 1, offset=size)]
        )
        assert status == status_of(caller, 500, "INTERNAL")
        assert f"output 'y' ({size - 1} bytes) should be at least {size} bytes to hold the results" in message


def test_tensor_of_16_megabytes_passes_unchanged(caller: Caller) -> None:
    array = np.random.default_rng(0).normal(size=(1, 4 * 1024 * 1024)).astype(np.float32)
    with owned(2 * array.nbytes) as (key, handle):
        shared_memory.set_shared_memory_region(handle, [array])
        caller.client.register_system_shared_memory("large", key, 2 * array.nbytes)
        caller.copy("large", array, to=array.nbytes)
        copied = shared_memory.get_contents_as_numpy(handle, np.float32, array.shape, array.nbytes)
        assert np.array_equal(copied, array)
        del copied


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_asynchronous_clients_share_memory_too(server: ServerProcess, protocol: str) -> None:
    library, address = (triton_http_aio, server.http) if protocol == "http" else (triton_grpc_aio, server.grpc)
    array = np.arange(8, dtype=np.float32).reshape(1, 8)
    with owned(16 * array.nbytes) as (key, handle):
        shared_memory.set_shared_memory_region(handle, [array])
        async with library.InferenceServerClient(address) as client:
            await client.register_system_shared_memory("aio", key, 16 * array.nbytes)

            async def infer(place: int) -> None:
                given = library.InferInput("x", [1, 8], "FP32")
                given.set_shared_memory("aio", array.nbytes)
                wanted = library.InferRequestedOutput("y")
                wanted.set_shared_memory("aio", array.nbytes, place * array.nbytes)
                await client.infer("wide", [given], outputs=[wanted])

            await asyncio.gather(*map(infer, range(1, 16)))
            copied = shared_memory.get_contents_as_numpy(handle, np.float32, (16, 8))
            np.testing.assert_array_equal(copied, np.repeat(array, 16, axis=0))
            assert await client.get_system_shared_memory_status("aio")
            await client.unregister_system_shared_memory("aio")
            with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 'aio'"):
                await client.get_system_shared_memory_status("aio")


CLIENT: Final = """
import sys
import numpy as np
import tritonclient.{protocol} as library
from tritonclient.utils import shared_memory
address, seed = sys.argv[1], int(sys.argv[2])
rng, name = np.random.default_rng(seed), f"client-{{seed}}"
client = library.InferenceServerClient(address)
size = 4 * 500_000
handle = shared_memory.create_shared_memory_region(name, f"/ortserve-test-{{name}}", 2 * size)
try:
    client.register_system_shared_memory(name, f"/ortserve-test-{{name}}", 2 * size)
    for _ in range(20):
        array = rng.normal(size=(1, 500_000)).astype(np.float32)
        shared_memory.set_shared_memory_region(handle, [array])
        given = library.InferInput("x", array.shape, "FP32")
        given.set_shared_memory(name, size)
        wanted = library.InferRequestedOutput("y")
        wanted.set_shared_memory(name, size, size)
        client.infer("wide", [given], outputs=[wanted])
        copied = shared_memory.get_contents_as_numpy(handle, np.float32, array.shape, size)
        assert np.array_equal(copied, array)
        del copied
    client.unregister_system_shared_memory(name)
finally:
    shared_memory.destroy_shared_memory_region(handle)
"""


def test_client_processes_do_not_disturb_each_other(server: ServerProcess) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENT.format(protocol=protocol), address, str(seed)], stderr=subprocess.PIPE
        )
        for seed, (protocol, address) in enumerate([("http", server.http), ("grpc", server.grpc)])
    ]
    for process in running:
        _, errors = process.communicate(timeout=LONG_S)
        assert process.returncode == 0, errors.decode()


# --- rejections


def test_duplicate_region_name_is_rejected_on_both_protocols(caller: Caller) -> None:
    with owned(64) as (key, _):
        caller.client.register_system_shared_memory("r", key, 64)
        status, message = caller.refusal(caller.client.register_system_shared_memory, "r", key, 64)
        assert status == status_of(caller, 400, "ALREADY_EXISTS")
        assert message == "shared memory region 'r' already in manager"


def test_impossible_regions_are_rejected(caller: Caller) -> None:
    register = caller.client.register_system_shared_memory
    with owned(4096) as (key, _):
        for asked, size, offset, status, text in (
            ("/ortserve-test-absent", 8, 0, (500, "INTERNAL"), "Unable to open shared memory region: '/ortserve-test"),
            ("/../etc/passwd", 8, 0, (400, "INVALID_ARGUMENT"), "failed to register shared memory region 'r': invalid"),
            (key, 4097, 0, (400, "INVALID_ARGUMENT"), "failed to register shared memory region 'r': invalid args"),
            (key, 8, 4089, (400, "INVALID_ARGUMENT"), "failed to register shared memory region 'r': invalid args"),
            (key, 0, 0, (400, "INVALID_ARGUMENT"), "failed to register shared memory region 'r': invalid args"),
            (key, 2**64 - 1, 1, (400, "INVALID_ARGUMENT"), "failed to register shared memory region 'r': invalid args"),
        ):
            came = caller.refusal(register, "r", asked, size, offset)
            assert (came[0], came[1][: len(text)]) == (status_of(caller, *status), text)
    assert caller.names() == []


@pytest.mark.parametrize("model", ["totals", "through"])
def test_a_sequence_ends_if_an_output_does_not_fit_its_region(caller: Caller, model: str) -> None:
    """Its state includes the request, so that a second try would add it twice."""
    value = caller.library.InferInput("INPUT", [1, 1], "FP32")
    value.set_data_from_numpy(np.ones((1, 1), np.float32))
    with owned(64) as (key, handle):
        caller.client.register_system_shared_memory("r", key, 64)

        def ask(byte_size: int, *, is_start: bool = False) -> float:
            outputs = [caller.output("TOTAL", "r", byte_size)]
            caller.client.infer(model, [value], outputs=outputs, sequence_id=7, sequence_start=is_start)
            return float(shared_memory.get_contents_as_numpy(handle, np.float32, (1,))[0])

        assert [ask(4, is_start=True), ask(4)] == [1, 2]
        assert "should be at least 4 bytes" in caller.refusal(ask, 3)[1]
        assert "must specify the START flag" in caller.refusal(ask, 4)[1]
        assert ask(4, is_start=True) == 1


def test_a_sequence_that_has_begun_again_outlives_an_output_that_does_not_fit(server: ServerProcess) -> None:
    """The next start is under way when the output of a request before it does not fit its region."""
    caller = connect(server, "grpc")
    answers: Queue[Any] = Queue()
    value = caller.library.InferInput("INPUT", [1, 1], "INT32")
    value.set_data_from_numpy(np.ones((1, 1), np.int32))
    with owned(64) as (key, _), caller.client as client:
        client.register_system_shared_memory("r", key, 64)
        client.start_stream(callback=lambda result, error: answers.put(error or int(result.as_numpy("TOTAL")[0, 0])))
        outputs = [caller.output("TOTAL", "r", 3)]
        client.async_stream_infer("slow", [value], outputs=outputs, sequence_id=9, sequence_start=True)
        for is_start in (True, False):
            client.async_stream_infer("slow", [value], sequence_id=9, sequence_start=is_start)
        found = [answers.get(timeout=LONG_S) for _ in range(3)]
        client.async_stream_infer("slow", [value], sequence_id=9, sequence_end=True)
        assert "should be at least 4 bytes" in str(found[0])
        assert [*found[1:], answers.get(timeout=LONG_S)] == [1, 2, 3]
        client.unregister_system_shared_memory()


def test_requests_outside_their_region_are_rejected(caller: Caller) -> None:
    array = np.zeros((1, 4), np.float32)
    with owned(64) as (key, _):
        caller.client.register_system_shared_memory("r", key, 64)
        for given, status, text in (
            (caller.input("x", array, "other"), (404, "NOT_FOUND"), "Unable to find shared memory region: 'other'"),
            (caller.input("x", array, "r", offset=65), (400, "INVALID_ARGUMENT"), "Invalid offset for shared memory"),
            (caller.input("x", array, "r", offset=60), (400, "INVALID_ARGUMENT"), "Invalid offset + byte size for"),
            (caller.input("x", array, "r", byte_size=15), (400, "INVALID_ARGUMENT"), "Expected 16, got 15"),
        ):
            came = caller.refusal(caller.client.infer, "wide", [given])
            assert came[0] == status_of(caller, *status)
            assert text in came[1]
            assert came[1].startswith("[request id: <id_unknown>] ")


def test_gpu_regions_are_rejected_and_their_other_calls_answered(caller: Caller) -> None:
    client = caller.client
    client.unregister_cuda_shared_memory()
    client.unregister_cuda_shared_memory("none")
    status = client.get_cuda_shared_memory_status()
    assert status == [] or not status.regions
    came = caller.refusal(client.get_cuda_shared_memory_status, "none")
    assert came == (status_of(caller, 404, "NOT_FOUND"), "Unable to find cuda shared memory region: 'none'")
    came = caller.refusal(client.register_cuda_shared_memory, "r", HANDLE, 0, 64)
    assert came[0] == status_of(caller, 400, "INVALID_ARGUMENT")
    assert came[1].startswith("failed to register CUDA shared memory region: 'r', GPUs not supported: ")


REGISTER: Final = "v2/systemsharedmemory/region/r/register"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 400, "Unable to parse 'byte_size': expected an unsigned integer, got None"),
        (b'{"byte_size": 8}', 400, "Unable to parse 'key': expected a string, got None"),
        (b'{"byte_size": true, "key": "/k"}', 400, "Unable to parse 'byte_size'"),
        (b'{"byte_size": 8, "key": "/k", "offset": -1}', 400, "Unable to parse 'offset'"),
        (b'{"byte_size": 1e30, "key": "/k"}', 400, "Unable to parse 'byte_size'"),
        (b"[]", 400, "expected a JSON object, got list"),
        (b"key=%2Fk&byte_size=8", 400, "failed to parse the request JSON buffer"),
        (b" " * 60_000, 400, "failed to parse the request JSON buffer"),
        (b" " * 70_000, 413, "expected a body of at most 65536 bytes for this call, got more"),
    ],
)
@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded"])
def test_malformed_rest_registration_is_rejected_under_any_content_type(
    server: ServerProcess, body: bytes, status: int, text: str, content_type: str | None
) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    came = httpx.post(f"http://{server.http}/{REGISTER}", content=body, headers=headers, timeout=LONG_S)
    assert came.status_code == status
    assert text in came.json()["error"]


def test_shared_memory_is_off_by_default_and_regions_end_with_the_server(tmp_path: Path) -> None:
    add_model(tmp_path, "wide", builders.identity, shape=("batch", "width"))
    array = np.zeros((1, 4), np.float32)
    with owned(64) as (key, _):
        with serving(tmp_path, "--allow-client-shm", *SHORT_WARMUP) as server:
            connect(server, "http").client.register_system_shared_memory("r", key, 64)
            assert connect(server, "grpc").names() == ["r"]
        with serving(tmp_path, *SHORT_WARMUP) as server:
            for protocol in ("http", "grpc"):
                caller = connect(server, protocol)
                assert caller.names() == []
                caller.client.unregister_system_shared_memory()
                caller.client.unregister_cuda_shared_memory()
                for call, arguments in (
                    (caller.client.register_system_shared_memory, ("r", key, 64)),
                    (caller.client.register_cuda_shared_memory, ("r", HANDLE, 0, 64)),
                    (caller.client.infer, ("wide", [caller.input("x", array, "r")])),
                ):
                    status, message = caller.refusal(call, *arguments)
                    assert status == status_of(caller, 501, "UNIMPLEMENTED")
                    assert "Client shared memory is disabled. Start the server with '--allow-client-shm'" in message


# --- changes of the memory by callers during use


def test_truncated_object_is_an_error_and_keeps_the_server_running(caller: Caller) -> None:
    array = np.zeros((1, 1024 * 1024), np.float32)
    key = f"/ortserve-test-{uuid4().hex}"
    path = FOLDER / key[1:]
    path.write_bytes(bytes(2 * array.nbytes))
    try:
        caller.client.register_system_shared_memory("r", key, 2 * array.nbytes)
        os.truncate(path, array.nbytes + 8)
        status, message = caller.refusal(caller.copy, "r", array, to=array.nbytes)  # the input is unchanged
        assert status == status_of(caller, 400, "INVALID_ARGUMENT")
        assert f"was shortened to {array.nbytes + 8} bytes" in message
        assert path.stat().st_size == array.nbytes + 8
        os.truncate(path, 0)
        assert caller.refusal(caller.copy, "r", array, to=array.nbytes)[0] == status
        assert caller.client.is_server_live()
    finally:
        path.unlink()


def test_repeatedly_truncated_object_never_crashes_the_server(caller: Caller) -> None:
    array = np.zeros((1, 1024 * 1024), np.float32)
    key = f"/ortserve-test-{uuid4().hex}"
    path = FOLDER / key[1:]
    path.write_bytes(bytes(2 * array.nbytes))
    is_over = threading.Event()

    def shorten() -> None:
        while not is_over.is_set():
            os.truncate(path, 0)
            os.truncate(path, 2 * array.nbytes)

    owner = threading.Thread(target=shorten)
    try:
        caller.client.register_system_shared_memory("r", key, 2 * array.nbytes)
        owner.start()
        refusals: list[str] = []
        for _ in range(40):
            try:
                caller.copy("r", array, to=array.nbytes)
            except InferenceServerException as error:
                refusals.append(error.message())
        assert all("was shortened" in refusal for refusal in refusals), refusals
        assert caller.client.is_server_live()
    finally:
        is_over.set()
        owner.join()
        path.unlink()


def test_unlinked_object_stays_usable(caller: Caller, server: ServerProcess) -> None:
    array = np.arange(4, dtype=np.float32).reshape(1, 4)
    key = f"/ortserve-test-{uuid4().hex}"
    path = FOLDER / key[1:]
    with path.open("wb+") as mine:
        mine.write(array.tobytes() + bytes(16))
        mine.flush()
        caller.client.register_system_shared_memory("r", key, 32)
        path.unlink()
        caller.copy("r", array, to=16)
        mine.seek(16)
        assert mine.read() == array.tobytes()


def test_regions_can_be_unregistered_during_use(caller: Caller, server: ServerProcess) -> None:
    array = np.arange(800_000, dtype=np.float32).reshape(1, -1)
    protocol = "http" if caller.library is triton_http else "grpc"
    with owned(2 * array.nbytes) as (key, handle):
        shared_memory.set_shared_memory_region(handle, [array])
        is_over = threading.Event()

        def come_and_go() -> None:
            other = connect(server, protocol)
            while not is_over.is_set():
                other.client.register_system_shared_memory("r", key, 2 * array.nbytes)
                other.client.unregister_system_shared_memory("r")
            other.client.close()

        def use() -> set[str]:
            """Outcomes of copies, until some succeeded and some failed."""
            mine = connect(server, protocol)
            seen: set[str] = set()
            for _ in range(5000):
                try:
                    mine.copy("r", array, to=array.nbytes)
                    seen.add("copied")
                except InferenceServerException as error:
                    seen.add(error.message().removeprefix("[request id: <id_unknown>] "))
                if len(seen) == 2:
                    break
            mine.client.close()
            return seen

        with ThreadPoolExecutor() as threads:
            coming = threads.submit(come_and_go)
            users = [threads.submit(use) for _ in range(3)]
            try:
                for user in users:
                    assert user.result(LONG_S) == {"copied", "Unable to find shared memory region: 'r'"}
            finally:
                is_over.set()
            coming.result(LONG_S)
        copied = shared_memory.get_contents_as_numpy(handle, np.float32, array.shape, array.nbytes)
        assert np.array_equal(copied, array)
        del copied
    caller.client.unregister_system_shared_memory()
    expect_nothing_open(server)


def expect_nothing_open(server: ServerProcess) -> None:
    """Poll until the server has closed all objects; a thread closes them."""
    for _ in range(100_000):
        if not open_descriptors(server):
            return
    raise AssertionError(open_descriptors(server))


KEYS: Final = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["/", "..", "/../dev/shm/x", "/dev/shm", "//", "\0", "a" * 300, f"/{RESERVED_PREFIX}"]),
)
SIZES: Final = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 100))


@settings(max_examples=100)
@given(name=st.text(min_size=1, max_size=10), key=KEYS, offset=SIZES, byte_size=SIZES, is_real=st.booleans())
def test_any_registration_is_accepted_or_rejected_cleanly(
    object_of_64_bytes: str,
    rest: httpx.Client,
    rpc: Any,
    server: ServerProcess,
    name: str,
    key: str,
    offset: int,
    byte_size: int,
    is_real: bool,
) -> None:
    key = object_of_64_bytes if is_real else key
    fits = is_real and byte_size > 0 and offset + byte_size <= 64
    path = f"/region/{quote(name, safe='')}/register"
    answer = rest.post(path, json={"key": key, "offset": offset, "byte_size": byte_size})
    if "/" not in name and name not in (".", ".."):  # these names are other paths
        assert (answer.status_code == 200) == fits, answer.text
        assert answer.status_code in (200, 400, 500)
        assert answer.headers["content-type"] == "application/json"
        assert "internal error" not in answer.text
    rest.post("/unregister").raise_for_status()
    assert rest.get("/status").json() == []
    request = service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=byte_size)
    call = rpc.SystemSharedMemoryRegister.future(request)
    assert (call.exception() is None) == fits
    assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
    assert "internal error" not in (call.details() or "")
    rpc.SystemSharedMemoryUnregister(service_pb2.SystemSharedMemoryUnregisterRequest())
    expect_nothing_open(server)


@pytest.fixture(scope="module")
def object_of_64_bytes() -> Iterator[str]:
    with owned(64) as (key, _):
        yield key


@pytest.fixture(scope="module")
def rest(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http}/v2/systemsharedmemory", timeout=LONG_S) as client:
        yield client


@pytest.fixture(scope="module")
def rpc(server: ServerProcess) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)
