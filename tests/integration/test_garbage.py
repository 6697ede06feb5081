"""Calls leave no reference cycles, so that their memory is freed at once and without garbage collection."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from encodings_of_requests import triton_inputs
from models import builders, members, sequences
from models.members import add_ensemble
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, json_input, rest_url, serving, with_support_folder

CALLS: Final = 40
ROW: Final = np.array([[1, 2, 3, 4]], np.float32)
LONG: Final = np.ones((20_000, 4), np.float32)
"""An array with more than 64 KiB of JSON, whose answer is encoded on a thread."""
SEQUENCES: Final = """\
sequences:
  controls:
    START: {kind: start}
    READY: {kind: ready}
    END: {kind: end}
    CORRID: {kind: id}
  states:
    - {input: STATE, output: NEXT}
"""
TWO_STEPS: Final = [("double", {"a": "x"}, {"b": "t"}), ("double", {"a": "t"}, {"b": "y"})]

Calls: TypeAlias = Iterator[None]
"""Each step is one call; the first call also opens the connection."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("garbage")
    add_model(folder, "same", builders.identity)
    add_model(folder, "slow", builders.slow)
    add_model(folder, "double", members.affine, scale=2)
    cached = add_model(folder, "cached", builders.identity)
    (cached / "model.yaml").write_text("response_cache: true\n")
    add_ensemble(folder, "chain", ["x"], ["y"], TWO_STEPS)
    summed = add_model(folder, "sums", sequences.accumulate)
    (summed / "model.yaml").write_text(SEQUENCES)
    for name in ("shadowed", "tried"):
        add_model(folder, name, builders.identity)
        pair = add_model(folder, name, builders.identity, version=2)
        (pair / "model.yaml").write_text("labels: {stable: 1}\nversion_policy: {all: true}\n")
    flags = ("--cache-bytes", "1000000", *SHORT_WARMUP)
    with serving(folder, *flags, env=with_support_folder("collecting")) as process:
        for name, mode in ("shadowed", "shadow"), ("tried", "canary"):
            rollout = {"candidate": 2, "mode": mode, "share": 1.0}
            httpx.put(f"{process.url}/v2/models/{name}/rollout", json=rollout, timeout=LONG_S).raise_for_status()
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
    """Each call uses a new connection."""
    while True:
        answer = httpx.post(rest_url(server, "same"), json={"inputs": [json_input("x", ROW)]}, timeout=LONG_S)
        assert answer.status_code == 200, answer.text
        yield


def generate(server: ServerProcess) -> Calls:
    with httpx.Client(base_url=server.url, timeout=LONG_S) as client:
        while True:
            client.post("/v2/models/same/generate", json={"x": ROW.tolist()}).raise_for_status()
            yield


def sequence(server: ServerProcess) -> Calls:
    """Requests of one sequence that never ends."""
    tensor = json_input("INPUT", np.array([[1]], np.int32))
    with httpx.Client(base_url=server.url, timeout=LONG_S) as client:
        for number in count():
            body = {"inputs": [tensor], "parameters": {"sequence_id": 7, "sequence_start": number == 0}}
            client.post("/v2/models/sums/infer", json=body).raise_for_status()
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
    "shadow": rest("shadowed", ROW),
    "canary": rest("tried", ROW),
    "generate": generate,
    "sequence": sequence,
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
