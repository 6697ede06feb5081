"""Calls that manage the server, without a server."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ortserve._pb import management_pb2 as pb
from ortserve.codecs.bounds import INLINE_BYTES
from ortserve.codecs.json_text import LoadParameter
from ortserve.frontends.grpc.management_calls import ManagementCalls
from ortserve.service.gate import BodyAdmission, BodyGate
from ortserve.service.management import Management


class Loads:
    """A repository that keeps the parameters of the last load."""

    def __init__(self) -> None:
        self.parameters: Mapping[str, LoadParameter] = {}

    async def load(self, _name: str, parameters: Mapping[str, LoadParameter]) -> None:
        self.parameters = parameters


@pytest.mark.parametrize("container", [bytes, memoryview])
async def test_large_file_of_a_load_is_not_copied(container: type[bytes] | type[memoryview]) -> None:
    """A copy holds the interpreter lock, and would delay all other callers."""
    message = pb.RepositoryModelLoadRequest(model_name="m")
    message.parameters["config"].string_param = "{}"
    message.parameters["file:1/model.onnx"].bytes_param = b"x" * 2 * INLINE_BYTES
    data = message.SerializeToString()
    loads = Loads()
    management = cast("Management", SimpleNamespace(repository=loads, statistics=None, logs=None, traces=None))
    gate = BodyGate(max_bytes=len(data))
    calls = ManagementCalls(management, BodyAdmission("grpc", gate, lambda *_: None, max_body_bytes=len(data)))
    handler: Any = calls.handlers()["RepositoryModelLoad"].unary_unary
    await handler(container(data), None)
    file = loads.parameters["file:1/model.onnx"]
    assert isinstance(file, memoryview)
    assert np.shares_memory(np.frombuffer(file, np.uint8), np.frombuffer(data, np.uint8))
    assert loads.parameters["config"] == "{}"
