"""Bad input over gRPC: every call gets a status in time, and never the status of a server fault."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from encodings_of_requests import grpc_raw
from fuzz.bounds import CASES, LONG_ENOUGH, MAX_S, SEED, watching_memory
from fuzz.messages import good_infer, mutate
from fuzz.mutations import INTERNAL_BY_PROTOCOL, MODELS, flip
from servers import SHORT_WARMUP, ServerProcess, read_metrics, serving

pytestmark = LONG_ENOUGH

CODES_OF_OURS: Final = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
"""Codes of server faults, which bad input must not receive."""

MODEL_INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
REQUESTS: Final = {
    f"/inference.GRPCInferenceService/{name.removesuffix('Request')}": getattr(service_pb2, name)
    for name in dir(service_pb2)
    if name.endswith("Request") and name != "ModelStreamInferRequest"
} | {
    "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest,
    "/grpc.health.v1.Health/List": health_pb2.HealthCheckRequest,  # its own message has no fields
}
"""The request message of each unary call, by path."""


@pytest.fixture(scope="module")
def server(grpc_transport: str) -> Iterator[ServerProcess]:
    flags = (f"--grpc-transport={grpc_transport}", "--max-body-bytes", "4000000", "--allow-client-shm")
    with serving("--example", *SHORT_WARMUP, *flags) as server:
        yield server


@dataclass(frozen=True)
class Call:
    """A call with its message, compressed or not."""

    path: str
    data: bytes
    compression: grpc.Compression

    def __str__(self) -> str:
        return f"{self.path} {self.data[:600]!r} {self.compression.name}"


def case(rng: random.Random) -> Call:
    """A random call, mostly inference that is almost valid."""
    compression = rng.choices((grpc.Compression.NoCompression, grpc.Compression.Gzip), (9, 1))[0]
    if rng.random() < 0.003:
        bomb = good_infer()
        bomb.raw_input_contents[0] = bytes(rng.choice((3_900_000, 5_000_000)))
        return Call(MODEL_INFER, bomb.SerializeToString(), grpc.Compression.Gzip)
    if rng.random() < 0.6:
        path, message = MODEL_INFER, good_infer()
    else:
        path = rng.choice(sorted(REQUESTS))
        message = almost_good(rng, REQUESTS[path])
    mutate(rng, message)
    data: bytes = message.SerializeToString()
    return Call(path, flip(rng, data) if rng.random() < 0.15 else data, compression)


def almost_good(rng: random.Random, kind: Any) -> Any:
    """A message with some of its texts set to names of models."""
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and not field.is_repeated and rng.random() < 0.5:
            setattr(message, field.name, rng.choice(MODELS) if field.type == FieldDescriptor.TYPE_STRING else b"x")
    return message


def check_status(described: str, code: grpc.StatusCode, details: str, took_s: float) -> None:
    """Check the status of a call with bad input: an internal error is valid only if the protocol requires it."""
    if not any(text in details for text in INTERNAL_BY_PROTOCOL):
        assert code not in CODES_OF_OURS, f"{described}: {code} {details}"
    assert code is not grpc.StatusCode.DEADLINE_EXCEEDED or took_s < MAX_S, f"{described} hangs"
    is_silent = code not in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED) and not details
    assert not is_silent, f"{described}: {code} says nothing"


def check_health(server: ServerProcess) -> None:
    """Check that no request is waiting, and that a good request is answered correctly."""
    ones = {name: np.ones((1, 16), np.int32) for name in ("INPUT0", "INPUT1")}
    assert (grpc_raw(server, "simple", ones)["OUTPUT0"] == 2).all()
    assert read_metrics(server).by_labels("ortserve_queue_rows", "model") == {}
    assert "Traceback" not in server.output


def test_bad_calls_get_statuses_in_time_and_good_calls_succeed(server: ServerProcess) -> None:
    codes: dict[grpc.StatusCode, int] = {}
    with watching_memory(server) as memory, grpc.insecure_channel(server.grpc) as channel:
        calls: dict[str, Callable[..., bytes]] = {path: channel.unary_unary(path) for path in REQUESTS}
        for number in range(CASES):
            call = case(random.Random(f"{SEED}/{number}"))
            began = time.monotonic()
            try:
                calls[call.path](call.data, timeout=MAX_S, compression=call.compression)
                code, details = grpc.StatusCode.OK, ""
            except grpc.RpcError as error:
                code, details = error.code(), error.details() or ""
            codes[code] = codes.get(code, 0) + 1
            check_status(f"case {SEED}/{number}: {call}", code, details, time.monotonic() - began)
            memory.after(f"{SEED}/{number}")
    # The cases must be varied: the server must decode many up to the model, and some must succeed.
    assert codes[grpc.StatusCode.OK] > CASES / 100
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > CASES / 5
    check_health(server)
