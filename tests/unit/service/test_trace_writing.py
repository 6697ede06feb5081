"""Traces of requests that are answered, fail or are cancelled."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from fakes.encoded import AS_IS, Given
from models import builders
from ortserve.config.model import LoadOptions
from ortserve.config.option_groups import TraceFileOptions
from ortserve.core.dtypes import DataType
from ortserve.core.request import InferRequest
from ortserve.core.tensor import Tensor
from ortserve.errors import ServeError
from ortserve.registry.registry import Registry
from ortserve.service.inference import InferenceService
from ortserve.service.recorder import Recorder
from ortserve.service.trace_settings import TraceSettings, TraceWriter
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.trace_files import TraceFiles


@dataclass
class Stage:
    service: InferenceService
    settings: TraceSettings
    path: Path

    async def infer(self, protocol: str, request: InferRequest) -> None:
        await self.service.serve(self.service.receive(protocol, begun_ns=1), Given(lambda: request), AS_IS)

    async def traces(self) -> list[dict[str, Any]]:
        """All traces, after the iteration of the loop that ended the last request."""
        await asyncio.sleep(0)
        self.settings.close(30.0)
        traces: list[dict[str, Any]] = json.loads(self.path.read_bytes())
        return traces


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """Every request of the models ``double`` and ``slow`` is traced."""
    builders.unnamed_dims(tmp_path / "double.onnx")
    builders.slow(tmp_path / "slow.onnx", steps=3000)
    metrics = Metrics(CollectorRegistry())
    registry = Registry([tmp_path], LoadOptions(warmup_s=0), metrics, time.monotonic_ns)
    await registry.load_all()
    path = tmp_path / "trace.json"
    files = TraceFiles(path, max_bytes=10**6)
    settings = TraceSettings(registry, TraceFileOptions(trace_file=path, trace_level="TIMESTAMPS", trace_rate=1), files)
    accounts = Recorder(metrics, time.monotonic_ns, trace_writer=TraceWriter(settings, time.monotonic_ns))
    service = InferenceService(registry, accounts, time.monotonic_ns, max_inflight_bytes=1000)
    yield Stage(service, settings, path)
    await registry.close()


def request(model: str, columns: int = 4, *, name: str = "x") -> InferRequest:
    tensor = Tensor(name, DataType.FP32, np.ones((1, columns), np.float32))
    return InferRequest(model, "", f"to {model}", [tensor], (), {})


def names(trace: dict[str, Any]) -> list[str]:
    return [timestamp["name"] for timestamp in trace["timestamps"]]


async def test_answered_request_is_traced_from_its_head_to_its_sent_answer(stage: Stage) -> None:
    before_ns = time.monotonic_ns()
    await stage.infer("http", request("double"))
    (trace,) = await stage.traces()
    assert (trace["id"], trace["model_name"], trace["model_version"]) == (1, "double", 1)
    assert trace["request_id"] == "to double"
    assert names(trace)[0] == "HTTP_RECV_START"
    assert names(trace)[-1] == "HTTP_SEND_END"
    begun, *later = [timestamp["ns"] for timestamp in trace["timestamps"]]
    assert begun == 1
    assert later == sorted(later)
    assert before_ns <= later[0]
    assert later[-1] <= time.monotonic_ns()


async def test_failed_request_is_traced_up_to_its_failure(stage: Stage) -> None:
    with pytest.raises(ServeError):
        await stage.infer("grpc", request("double", name="other"))
    with pytest.raises(ServeError):
        await stage.infer("grpc", request("unknown"))  # without a model there is no trace
    (trace,) = await stage.traces()
    assert names(trace) == [
        "GRPC_WAITREAD_START",
        "GRPC_WAITREAD_END",
        "REQUEST_START",
        "REQUEST_END",
        "GRPC_SEND_START",
        "GRPC_SEND_END",
    ]


async def test_cancelled_request_is_traced_without_a_sent_answer(stage: Stage) -> None:
    task = asyncio.create_task(stage.infer("http", request("slow")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (trace,) = await stage.traces()
    assert trace["model_name"] == "slow"
    assert names(trace)[-1] == "REQUEST_END"


async def test_trace_of_a_cancelled_request_ends_although_its_batch_continues(stage: Stage) -> None:
    call = stage.service.receive("http")
    outcomes = list[object]()
    stage.service.start(call, Given(lambda: request("slow")), AS_IS, outcomes.append, outcomes.append)
    call.cancel()
    assert not outcomes
    # A batch may end in this iteration of the loop; the trace is encoded in the next.
    call.timing.taken_ns = call.timing.staged_ns = call.timing.computed_ns = time.monotonic_ns()
    (trace,) = await stage.traces()
    assert names(trace)[-2:] == ["QUEUE_START", "REQUEST_END"]
