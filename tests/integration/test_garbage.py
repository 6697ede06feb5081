"""Calls leave no reference cycles: their memory is free at once, and no time goes into collecting garbage."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from encodings_of_requests import triton_inputs
from models import builders, members
from models.members import add_ensemble
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, json_input, rest_url, serving, with_support_folder

CALLS: Final = 40
ROW: Final = np.array([[1, 2, 3, 4]], np.float32)
LONG: Final = np.ones((20_000, 4), np.float32)
"""As JSON over 64 KiB, and an answer that is encoded on a thread."""
TWO_STEPS: Final = [("double", {"a": "x"}, {"b": "t"}), ("double", {"a": "t"}, {"b": "y"})]

Calls: TypeAlias = Iterator[None]
"""Each step is one call, after a first one that the connection begins with."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("garbage")
    add_model(folder, "same", builders.identity)
    add_model(folder, "slow", builders.slow)
    add_model(folder, "double", members.affine, scale=2)
    cached = add_model(folder, "cached", builders.identity)
    (cached / "model.yaml").write_text("response_cache: true\n")
    add_ensemble(folder, "chain", ["x"], ["y"], TWO_STEPS)
    flags = ("--cache-bytes", "1000000", *SHORT_WARMUP)
    with serving(folder, *flags, env=with_support_folder("collecting")) as process:
        yield process


def rest(model: str, values: np.ndarray, status: int = 200) -> Callable[[ServerProcess], Calls]:
    def calls(server: ServerProcess) -> Calls:
        body = json.dumps({"inputs": [json_input("x", values)]})
        with httpx.Client(base_url=server.url, timeout=LONG_S) as client:
            while True:
                answer = client.post(f"/v2/models/{model}/infer", content=body)
                assert answer.status_code == status, answer.text
                yield

    return calls


def connections(server: ServerProcess) -> Calls:
    """Each call on a connection of its own."""
    while True:
        answer = httpx.post(rest_url(server, "same"), json={"inputs": [json_input("x", ROW)]}, timeout=LONG_S)
        assert answer.status_code == 200, answer.text
        yield


def rpc(
    model: str,
    values: np.ndarray,
    failure: str = "",
    *,
    is_typed: bool = False,
    timeout_s: float = LONG_S,
    compression: grpc.Compression = grpc.Compression.NoCompression,
) -> Callable[[ServerProcess], Calls]:
    def calls(server: ServerProcess) -> Calls:
        request = service_pb2.ModelInferRequest(model_name=model)
        tensor = request.inputs.add(name="x", datatype="FP32", shape=values.shape)
        if is_typed:
            tensor.contents.fp32_contents.extend(values.ravel().tolist())
        else:
            request.raw_input_contents.append(values.tobytes())
        with grpc.insecure_channel(server.grpc) as channel:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
            while True:
                code = ""
                try:
                    call(request, timeout=timeout_s, compression=compression)
                except grpc.RpcError as error:
                    code = error.code().name
                assert code == failure
                yield

    return calls


def stream(server: ServerProcess) -> Calls:
    """Messages of one stream."""
    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        while True:
            client.async_stream_infer("same", triton_inputs(triton_grpc, {"x": ROW}))
            _, error = answers.get(timeout=LONG_S)
            assert error is None
            yield


CASES: Final[Mapping[str, Callable[[ServerProcess], Calls]]] = {
    "json": rest("same", ROW),
    "connections": connections,
    "long json": rest("same", LONG),
    "wrong shape over rest": rest("same", ROW[0], 400),
    "unknown model over rest": rest("none", ROW, 404),
    "cached": rest("cached", ROW),
    "ensemble": rest("chain", ROW[:, :2]),
    "raw": rpc("same", ROW),
    "typed": rpc("same", ROW, is_typed=True),
    "long typed": rpc("same", LONG, is_typed=True),
    "wrong shape over grpc": rpc("same", ROW[0], "INVALID_ARGUMENT"),
    "unknown model over grpc": rpc("none", ROW, "NOT_FOUND"),
    "late over grpc": rpc("slow", ROW, "DEADLINE_EXCEEDED", timeout_s=0.01),
    "ensemble over grpc": rpc("chain", ROW[:, :2]),
    "compressed": rpc("same", ROW, compression=grpc.Compression.Gzip),
    "stream": stream,
}


@pytest.mark.parametrize("name", CASES)
def test_calls_leave_nothing_to_the_garbage_collector(server: ServerProcess, name: str) -> None:
    calls = CASES[name](server)
    next(calls)
    number = sum("measurement" in line for line in server.lines) + 1
    server.send(signal.SIGUSR1)
    server.wait_for_line(f"measurement {number} begins")
    for _ in range(CALLS):
        next(calls)
    server.send(signal.SIGUSR2)
    found = json.loads(server.wait_for_line(f"garbage {number}: ").partition(": ")[2])
    assert {kind: objects for kind, objects in found.items() if objects >= CALLS // 2} == {}
