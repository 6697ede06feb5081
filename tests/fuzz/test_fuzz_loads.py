"""Bad load requests with configurations and files of clients: rejected in time, or loaded as sent.

The server runs in the mode ``explicit``, the only one that accepts them. Cases with files mostly test decoding: a
client that may load may send any model, and ONNX Runtime's handling of it is outside this test.
"""

import base64
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2

from encodings_of_requests import rest_json
from fuzz import messages
from fuzz.bounds import CASES, LONG_ENOUGH, SEED, watching_memory
from fuzz.mutations import INTERNAL_BY_PROTOCOL, WORDS, dumps, flip, mutate, value
from models import builders
from servers import ServerProcess, add_model, read_metrics, serving

pytestmark = LONG_ENOUGH

LOADS: Final = CASES // 20
"""Number of loads; a valid load opens sessions."""
MAX_S: Final = 10.0

LOAD: Final = "/inference.GRPCInferenceService/RepositoryModelLoad"
UNLOAD: Final = "/inference.GRPCInferenceService/RepositoryModelUnload"

FAULTS: Final = ("internal error", "unexpected error")
"""Texts with which the server reports unexpected exceptions."""

CONFIG: Final[dict[str, Any]] = {
    "platform": "onnxruntime_onnx",
    "backend": "onnxruntime",
    "version_policy": {"latest": {"num_versions": 1}},
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [4]}],
    "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
    "dynamic_batching": {
        "preferred_batch_size": [4],
        "max_queue_delay_microseconds": 100,
        "priority_levels": 2,
        "default_priority_level": 1,
        "default_queue_policy": {"timeout_action": "DELAY", "max_queue_size": 9},
        "priority_queue_policy": {"1": {"default_timeout_microseconds": 1000000, "allow_timeout_override": True}},
    },
    "optimization": {"graph": {"level": -1}},
    "parameters": {"intra_op_thread_count": {"string_value": "1"}, "execution_mode": {"string_value": "0"}},
    "model_warmup": [
        {"name": "w", "batch_size": 1, "inputs": {"x": {"data_type": "TYPE_FP32", "dims": [4], "zero_data": True}}}
    ],
    "default_model_filename": "model.onnx",
}
"""A valid configuration of the model; each case changes some of it."""

PATHS: Final = (
    "file:2/model.onnx", "file:model.onnx", "file:config.pbtxt", "file:", "file:/", "file:../m/1/model.onnx", "file:1",
    "file:/etc/model.onnx", "file:1/./model.onnx", "file:1//model.onnx", "file:1/model.onnx/x", "file:1\\model.onnx",
    f"file:{'9' * 30}/model.onnx", f"file:1/{'x' * 300}", f"file:{'a/' * 3000}b", "file:-1/model.onnx", "FILE:1/x",
    "file:1/mod\0el.onnx", "file:0/model.onnx", "file:1/é", "file:%2e%2e/x", "file:1/\r\n", "file:٣/model.onnx",
)  # fmt: skip


@dataclass(frozen=True)
class Load:
    """A request to load or unload a model, with JSON values and bytes."""

    is_load: bool
    name: str
    parameters: Mapping[str, Any]

    def __str__(self) -> str:
        shown = {key[:300]: repr(value)[:2000] for key, value in self.parameters.items()}
        return f"{'load' if self.is_load else 'unload'} {self.name[:300]!r} {shown}"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    add_model(folder, "m", builders.identity)
    return folder


@pytest.fixture(scope="module")
def server(
    repository: Path, ways: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server that must leave no client files on the disk, neither in its temporary folder nor in the repository."""
    kept = tmp_path_factory.mktemp("kept")
    lying = sorted(repository.rglob("*"))
    control = ("--model-control-mode", "explicit", "--load-model", "m", "--warmup-s", "0.02")
    flags = (*control, *ways, "--max-body-bytes", "4000000")
    with serving(repository, *flags, env={"TMPDIR": str(kept)}) as server:
        yield server
        assert list(kept.iterdir()) == []
    assert sorted(repository.rglob("*")) == lying


def any_load(rng: random.Random, model: bytes) -> Load:
    """A random load, mostly with a configuration that is almost valid, with or without files."""
    name = rng.choice(("m",) * 8 + ("sent", rng.choice(WORDS)))
    if rng.random() < 0.05:
        key = rng.choice(("unload_dependents", rng.choice(WORDS)))
        return Load(False, name, {key: value(rng)} if rng.random() < 0.5 else {})
    parameters: dict[str, Any] = {}
    if rng.random() < 0.4:
        parameters["file:1/model.onnx"] = _content(rng, model)
    if rng.random() < 0.1:
        parameters[rng.choice(PATHS)] = _content(rng, model)
    if rng.random() < 0.95:
        parameters["config"] = dumps(CONFIG).decode() if parameters and rng.random() < 0.5 else _config(rng)
    if rng.random() < 0.05:
        parameters[rng.choice(WORDS)] = value(rng)
    elif parameters and rng.random() < 0.05:
        parameters = mutate(rng, parameters)
    return Load(True, name, parameters)


def _config(rng: random.Random) -> str:
    odd = rng.random()
    if odd < 0.4:
        return dumps(mutate(rng, CONFIG)).decode()
    if odd < 0.9:
        message = json_format.ParseDict(CONFIG, model_config_pb2.ModelConfig())
        messages.mutate(rng, message)
        text: str = json_format.MessageToJson(message, preserving_proto_field_name=rng.random() < 0.5)
        return text
    if odd < 0.95:
        return flip(rng, dumps(CONFIG)).decode("utf-8", "replace")
    if odd < 0.97:
        return rng.choice(('{"input":', "[", '{"parameters":{"a":')) * rng.choice((50, 1_000, 100_000))
    return dumps(value(rng)).decode()


def _content(rng: random.Random, model: bytes) -> bytes:
    part = model[: rng.randrange(len(model))]
    changed = flip(rng, model)
    return rng.choice((model, model, changed, changed, part, b"", rng.randbytes(100)))


def by_rest(client: httpx.Client, load: Load, rng: random.Random) -> tuple[bool, str]:
    """Whether the answer reports a server fault, and its text."""
    given = {
        key: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for key, value in load.parameters.items()
    }
    document: Any = {"parameters": given}
    if rng.random() < 0.1:
        document = mutate(rng, document)
    body = dumps(document)
    if rng.random() < 0.05:
        body = flip(rng, body)
    verb = "load" if load.is_load else "unload"
    name = quote(_utf8(load.name), safe="")
    answer = client.post(f"/v2/repository/models/{name}/{verb}", content=body)
    if answer.status_code >= 400:
        assert answer.json().keys() == {"error"}, answer.text
    return answer.status_code == 500, answer.text


def by_grpc(channel: grpc.Channel, load: Load, rng: random.Random) -> tuple[bool, str]:
    """Whether the status reports a server fault, and its text."""
    kind = service_pb2.RepositoryModelLoadRequest if load.is_load else service_pb2.RepositoryModelUnloadRequest
    message = kind(model_name=_utf8(load.name))
    for key, given in load.parameters.items():
        parameter = message.parameters[_utf8(key)]
        if isinstance(given, bytes):
            parameter.bytes_param = given
        elif isinstance(given, bool):
            parameter.bool_param = given
        else:
            parameter.string_param = _utf8(given) if isinstance(given, str) else json.dumps(given)
    if rng.random() < 0.1:
        messages.mutate(rng, message)
    data: bytes = message.SerializeToString()
    if rng.random() < 0.1:
        data = flip(rng, data)
    try:
        call: Callable[..., bytes] = channel.unary_unary(LOAD if load.is_load else UNLOAD)
        call(data, timeout=MAX_S)
    except grpc.RpcError as error:
        code, text = error.code(), error.details() or ""
        assert code is not grpc.StatusCode.DEADLINE_EXCEEDED, "it hangs"
        assert text
        return code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS), text
    return False, ""


def _utf8(text: str) -> str:
    """The text without lone surrogates, which only JSON can encode."""
    return text.encode(errors="replace").decode()


def check_good_load(client: httpx.Client, server: ServerProcess) -> None:
    """Check that the model in the repository can be loaded and serves."""
    answer = client.post("/v2/repository/models/m/load")
    assert answer.status_code == 200, answer.text
    ones = np.ones((1, 4), np.float32)
    assert (rest_json(server, "m", {"x": ones})["y"] == ones).all()


def test_bad_loads_are_rejected_in_time_and_good_models_serve(server: ServerProcess, repository: Path) -> None:
    model = (repository / "m/1/model.onnx").read_bytes()
    loaded = 0
    with (
        watching_memory(server, most_peak=128 * 2**20, most_growth=300 * 2**20) as memory,
        grpc.insecure_channel(server.grpc) as channel,
        httpx.Client(base_url=server.url, timeout=MAX_S) as client,
    ):
        for number in range(LOADS):
            rng = random.Random(f"{SEED}/load/{number}")
            load = any_load(rng, model)
            described = f"case {SEED}/load/{number}: {load}"
            began = time.monotonic()
            try:
                blames_us, text = by_rest(client, load, rng) if number % 2 else by_grpc(channel, load, rng)
            except (httpx.HTTPError, ValueError, AssertionError) as error:
                raise AssertionError(f"{described}: {error!r}") from error
            took_s = time.monotonic() - began
            assert took_s < MAX_S, f"{described} took {took_s:.1f} s"
            is_wanted = any(known in text for known in INTERNAL_BY_PROTOCOL)
            assert is_wanted or not blames_us, f"{described}: {text}"
            assert not any(fault in text for fault in FAULTS), f"{described}: {text}"
            loaded += not text
            memory.after(f"{SEED}/load/{number}")
            if number % 20 == 0:
                check_good_load(client, server)
        check_good_load(client, server)
    # The cases must be varied: some must succeed.
    assert loaded > LOADS / 20
    assert read_metrics(server).by_labels("ortserve_queue_rows", "model") == {}
    assert "Traceback" not in server.output
