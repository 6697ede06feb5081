"""Calls that manage the server, without a server."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ortserve._pb import management_pb2 as pb
from ortserve.codecs.bounds import INLINE_BYTES
from ortserve.codecs.json_text import LoadParameter
from ortserve.frontends.grpc.management_calls import ManagementCalls
from ortserve.service.gate import BodyAdmission, BodyGate
from ortserve.service.management import Management, ModelStatistics
from ortserve.telemetry.statistics import Duration, InferStatistics, VersionStatistics


class Loads:
    """A repository that keeps the parameters of the last load. Loads end when ``may_end`` is set, as it is at first."""

    def __init__(self) -> None:
        self.parameters: Mapping[str, LoadParameter] = {}
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def load(self, _name: str, parameters: Mapping[str, LoadParameter]) -> None:
        self.parameters = parameters
        self.has_begun.set()
        await self.may_end.wait()


def load_message() -> bytes:
    message = pb.RepositoryModelLoadRequest(model_name="m")
    message.parameters["config"].string_param = "{}"
    message.parameters["file:1/model.onnx"].bytes_param = b"x" * 2 * INLINE_BYTES
    return message.SerializeToString()


def load_call(loads: Loads, gate: BodyGate) -> Any:
    """The handler of load calls, whose messages may take the whole memory of ``gate``."""
    management = cast("Management", SimpleNamespace(repository=loads, statistics=None, logs=None, traces=None))
    calls = ManagementCalls(management, BodyAdmission("grpc", gate, lambda *_: None, max_body_bytes=gate.max_bytes))
    return calls.handlers()["RepositoryModelLoad"].unary_unary


class Statistics:
    async def statistics(self, _name: str, _version: str) -> AsyncIterator[ModelStatistics]:
        for number in range(3):
            inference = InferStatistics(*[Duration(number, 5) for _ in fields(InferStatistics)])
            yield ModelStatistics(7, VersionStatistics(f"m{number}", "1", 4, 3, 0, inference, {}, ()))


async def test_statistics_of_several_models_are_one_message() -> None:
    management = cast("Management", SimpleNamespace(repository=None, statistics=Statistics(), logs=None, traces=None))
    calls = ManagementCalls(management, cast("BodyAdmission", None))
    handler: Any = calls.handlers()["ModelStatistics"].unary_unary
    answer = await handler(pb.ModelStatisticsRequest().SerializeToString(), None)
    found = pb.ModelStatisticsResponse.FromString(answer).model_stats
    assert [(one.name, one.last_inference, one.inference_stats.queue.count) for one in found] == [
        (f"m{number}", 7, number) for number in range(3)
    ]


@pytest.mark.parametrize("container", [bytes, memoryview])
async def test_large_file_of_a_load_is_not_copied(container: type[bytes] | type[memoryview]) -> None:
    """A copy holds the interpreter lock, and would delay all other callers."""
    data, loads = load_message(), Loads()
    await load_call(loads, BodyGate(max_bytes=len(data)))(container(data), None)
    file = loads.parameters["file:1/model.onnx"]
    assert isinstance(file, memoryview)
    assert np.shares_memory(np.frombuffer(file, np.uint8), np.frombuffer(data, np.uint8))
    assert loads.parameters["config"] == "{}"


async def test_memory_of_a_load_is_reserved_until_its_end_even_if_the_caller_has_left() -> None:
    """The load goes on, with views of the message. Callers that leave could otherwise fill the memory."""
    data, loads = load_message(), Loads()
    gate = BodyGate(max_bytes=len(data))
    loads.may_end.clear()
    call = asyncio.ensure_future(load_call(loads, gate)(data, None))
    await loads.has_begun.wait()
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    assert gate.held_bytes == len(data)
    loads.may_end.set()
    for _ in range(5):  # turns of the loop, in which the load ends
        await asyncio.sleep(0)
    assert gate.held_bytes == 0
