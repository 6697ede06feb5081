"""Load requests of gRPC: parsed as protobuf parses them, but without copies of large files."""

import numpy as np
import pytest

import crafted_messages as crafted
from ortserve._pb.management_pb2 import ModelRepositoryParameter, RepositoryModelLoadRequest
from ortserve.codecs.bounds import INLINE_BYTES
from ortserve.codecs.grpc_load import parse_load
from ortserve.errors import ErrorKind, ServeError

LARGE = bytes(range(256)) * (INLINE_BYTES // 256 + 1)
PARAMETERS, KEY, VALUE = 3, 1, 2
STRING, BYTES = 3, 4


def parameter(name: bytes, content: bytes, kind: int = BYTES) -> bytes:
    return crafted.field(PARAMETERS, crafted.field(KEY, name) + crafted.field(VALUE, crafted.field(kind, content)))


def as_protobuf(data: bytes) -> dict[str, object]:
    message = RepositoryModelLoadRequest.FromString(data)
    return {name: _value(given) for name, given in message.parameters.items()}


def _value(given: ModelRepositoryParameter) -> object:
    kind = given.WhichOneof("parameter_choice")
    return None if kind is None else getattr(given, kind)


@pytest.mark.parametrize("container", [bytes, memoryview])
def test_large_files_are_views_beside_all_other_parameters(container: type[bytes] | type[memoryview]) -> None:
    message = RepositoryModelLoadRequest(repository_name="r", model_name="m")
    message.parameters["config"].string_param = "{}" + " " * INLINE_BYTES
    message.parameters["file:1/model.onnx"].bytes_param = LARGE
    message.parameters["file:1/weights"].bytes_param = LARGE[::-1]
    message.parameters["file:labels.txt"].bytes_param = b"a"
    message.parameters["config as bytes"].bytes_param = LARGE
    data = message.SerializeToString()
    request, files = parse_load(container(data))
    assert files == {"file:1/model.onnx": LARGE, "file:1/weights": LARGE[::-1]}
    for file in files.values():
        assert np.shares_memory(np.frombuffer(file, np.uint8), np.frombuffer(data, np.uint8))
    for name in files:
        del message.parameters[name]
    assert request == message


@pytest.mark.parametrize(
    "data",
    [
        parameter(b"file:a", b"x" * len(LARGE), STRING),
        crafted.field(PARAMETERS, crafted.field(VALUE, crafted.field(BYTES, LARGE)) + crafted.field(KEY, b"file:a")),
        crafted.field(PARAMETERS, crafted.field(KEY, b"file:a" + b"a" * INLINE_BYTES)) + parameter(b"file:b", LARGE),
        crafted.field(
            PARAMETERS, crafted.field(KEY, b"file:a") + crafted.field(VALUE, b"\x08\x01") + crafted.field(9, LARGE)
        ),
        parameter(b"file:a", b"first") + parameter(b"file:a", LARGE),
        crafted.field(9, LARGE) + parameter(b"file:a", LARGE) + b"\x78\x01",
    ],
    ids=["a text", "value before key", "no value", "unknown field in it", "twice", "unknown fields"],
)
def test_unusual_encodings_are_parsed_as_by_protobuf(data: bytes) -> None:
    request, files = parse_load(data)
    assert {**as_protobuf(request.SerializeToString()), **files} == as_protobuf(data)


@pytest.mark.parametrize(
    "data",
    [
        parameter(b"file:a", LARGE)[:-1],
        parameter(b"file:\xff", LARGE),
        crafted.field(PARAMETERS, crafted.field(KEY, b"file:a") + b"\x12\xff\xff\xff\x7f" + LARGE),
        b"\x1a\x00" * (16 * 1024 + 1) + parameter(b"file:a", LARGE),
    ],
    ids=["cut off", "name that is no text", "value beyond its end", "too many fields"],
)
def test_malformed_messages_are_rejected(data: bytes) -> None:
    with pytest.raises(ServeError, match="RepositoryModelLoadRequest") as caught:
        parse_load(data)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
