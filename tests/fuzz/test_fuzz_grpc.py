"""Bad input over gRPC: every call gets a status, in time, and never one that blames the server."""

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc
import numpy as np
import psutil
import pytest
from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import service_pb2

from encodings_of_requests import grpc_raw
from fuzz.mutations import HUGE, INTERNAL_BY_PROTOCOL, MODELS, WORDS, flip
from servers import SHORT_WARMUP, ServerProcess, read_metrics, serving

CASES: Final = int(os.environ.get("ORTSERVE_TEST_FUZZ_CASES", "10000"))
SEED: Final = int(os.environ.get("ORTSERVE_TEST_FUZZ_SEED", "1"))
MOST_S: Final = 5.0
MOST_GROWTH: Final = 200 * 2**20

CODES_OF_OURS: Final = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
"""Codes that blame the server, which bad input must not get."""

REQUESTS: Final = {
    name.removesuffix("Request"): getattr(service_pb2, name)
    for name in dir(service_pb2)
    if name.endswith("Request") and name != "ModelStreamInferRequest"
}
"""By call, of those that take one message: the message."""


@pytest.fixture(scope="module")
def server(grpc_transport: str) -> Iterator[ServerProcess]:
    flags = (f"--grpc-transport={grpc_transport}", "--max-body-bytes", "4000000", "--allow-client-shm")
    with serving("--example", *SHORT_WARMUP, *flags) as server:
        yield server


def good_infer() -> Any:
    """A good request for ``simple``."""
    request = service_pb2.ModelInferRequest(model_name="simple", id="1")
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        request.raw_input_contents.append(bytes(64))
    request.outputs.add(name="OUTPUT0")
    return request


def mutate(rng: random.Random, message: Any, depth: int = 0) -> None:
    """Change one to three fields of a message, at any depth."""
    for _ in range(rng.randrange(1, 4)):
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = rng.choice(fields)
        present = message.ListFields()
        if present and rng.random() < 0.6:
            field = rng.choice(present)[0]
        if rng.random() < 0.15:
            message.ClearField(field.name)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            _mutate_map(rng, getattr(message, field.name), field)
        elif field.is_repeated:
            _mutate_repeated(rng, getattr(message, field.name), field, depth)
        elif field.message_type is not None:
            if depth < 4:
                mutate(rng, getattr(message, field.name), depth + 1)
        else:
            setattr(message, field.name, _scalar(rng, field))


def _mutate_map(rng: random.Random, entries: Any, field: Any) -> None:
    key, value = field.message_type.fields
    for _ in range(rng.randrange(1, 3)):
        named = rng.choice(PARAMETERS) if key.type == FieldDescriptor.TYPE_STRING and rng.random() < 0.7 else None
        name = named or _scalar(rng, key)
        if value.message_type is not None:
            mutate(rng, entries[name], 3)
        else:
            entries[name] = _scalar(rng, value)


PARAMETERS: Final = (
    "priority", "timeout", "classification", "binary_data_size", "binary_data_output", "shared_memory_region",
    "shared_memory_offset", "shared_memory_byte_size", "sequence_id", "sequence_start", "sequence_end", "headers",
    "config", "triton_enable_empty_final_response", "file:1/model.onnx", "unload_dependents",
)  # fmt: skip


def _mutate_repeated(rng: random.Random, entries: Any, field: Any, depth: int) -> None:
    kind = rng.randrange(4)
    if kind == 0 and len(entries):
        del entries[rng.randrange(len(entries))]
    elif field.message_type is not None:
        if kind == 1 and len(entries):
            entries.add().CopyFrom(rng.choice(entries))
        else:
            mutate(rng, rng.choice(entries) if len(entries) and kind == 2 else entries.add(), depth + 1)
    else:
        for _ in range(rng.choice((1, 1, 2, 17, 300))):
            entries.append(_scalar(rng, field))


def _scalar(rng: random.Random, field: Any) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = rng.choice(WORDS + MODELS).replace("\ud800", "")
        return text if field.type == FieldDescriptor.TYPE_STRING else rng.randbytes(rng.choice((0, 1, 3, 64, 64, 1000)))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice((0.0, -0.0, 1.5, float("nan"), float("inf"), 1e30))
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    bits = 32 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    is_signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
    return max(low, min(high, rng.choice((0, 1, -1, 16, 2, *HUGE))))


def case(rng: random.Random) -> tuple[str, bytes]:
    """A call and its message: mostly inference that is almost right."""
    if rng.random() < 0.6:
        call, message = "ModelInfer", good_infer()
    else:
        call = rng.choice(sorted(REQUESTS))
        message = REQUESTS[call]()
        for field in message.DESCRIPTOR.fields:
            if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and not field.is_repeated and rng.random() < 0.5:
                setattr(message, field.name, rng.choice(MODELS) if field.type == FieldDescriptor.TYPE_STRING else b"x")
    mutate(rng, message)
    data: bytes = message.SerializeToString()
    return call, flip(rng, data) if rng.random() < 0.15 else data


def test_bad_calls_get_statuses_in_time_and_harm_nobody(server: ServerProcess) -> None:
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    codes: dict[grpc.StatusCode, int] = {}
    with grpc.insecure_channel(server.grpc) as channel:
        calls: dict[str, Callable[..., bytes]] = {
            call: channel.unary_unary(f"/inference.GRPCInferenceService/{call}") for call in REQUESTS
        }
        for number in range(CASES):
            call, data = case(random.Random(f"{SEED}/{number}"))
            began = time.monotonic()
            try:
                calls[call](data, timeout=MOST_S)
                code, told = grpc.StatusCode.OK, ""
            except grpc.RpcError as error:
                code, told = error.code(), error.details() or ""
            took_s = time.monotonic() - began
            codes[code] = codes.get(code, 0) + 1
            described = f"case {SEED}/{number}: {call} {data[:600]!r}"
            if not any(text in told for text in INTERNAL_BY_PROTOCOL):
                assert code not in CODES_OF_OURS, f"{described}: {code} {told}"
            assert code is not grpc.StatusCode.DEADLINE_EXCEEDED or took_s < MOST_S, f"{described} hangs"
            is_silent = code not in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED) and not told
            assert not is_silent, f"{described}: {code} says nothing"
    grown = process.memory_info().rss - before
    assert grown < MOST_GROWTH, f"the server grew by {grown / 2**20:.0f} MiB"
    # Else the cases are no test: many are taken apart down to the model, and some are even right.
    assert codes[grpc.StatusCode.OK] > CASES / 100
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > CASES / 5
    ones = {name: np.ones((1, 16), np.int32) for name in ("INPUT0", "INPUT1")}
    assert (grpc_raw(server, "simple", ones)["OUTPUT0"] == 2).all()
    assert read_metrics(server).by_labels("ortserve_queue_rows", "model") == {}
    assert "Traceback" not in server.output
