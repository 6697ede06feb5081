"""An answer's memory is leased until it is encoded, or as long as the encoder holds it, and no longer.

Model, batcher and worker thread are real. At the start of each run all memory that it may write is filled with 0xFF, so
that a read of released memory yields NaN.
"""

import asyncio
import contextlib
import gc
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from encodings_of_requests import ENCODINGS
from fakes.encoded import EncodedBy, Given
from interpreted import interpreted_only
from models import builders
from ortserve.codecs.binary_tensor import encode_binary_tensor
from ortserve.codecs.grpc_answer import GrpcEncoder
from ortserve.codecs.rest import RestEncoder
from ortserve.config.model import LoadOptions
from ortserve.core.batch import Batch, BatchResult
from ortserve.core.dtypes import DataType
from ortserve.core.request import InferRequest, InferResponse
from ortserve.core.tensor import Tensor
from ortserve.engine.host_binding import HostBinding
from ortserve.engine.output_buffers import OutputBuffers
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.registry import Registry
from ortserve.service.inference import InferenceService
from ortserve.service.recorder import Recorder
from ortserve.telemetry.metrics import Metrics
from servers import add_model, serving

pytestmark = interpreted_only


@dataclass
class Stage:
    """A service, its models' answers to single requests, and the bound memory of its instances."""

    service: InferenceService
    oracle: onnxruntime.InferenceSession
    bindings: set[HostBinding] = field(default_factory=set)
    bound_runs: int = 0

    def sets(self) -> list[OutputBuffers]:
        return [buffers for binding in self.bindings if binding.pool for buffers in binding.pool.sets]

    async def ask(
        self, rows: np.ndarray, encode: Callable[[InferRequest, InferResponse], object], *, binary: bool = False
    ) -> object:
        request = InferRequest("mlp", "", "", [Tensor("x", DataType.FP32, rows)], [], {}, binary)
        return await self.service.serve(self.service.receive("http"), Given(lambda: request), EncodedBy(encode))

    async def become_free(self) -> None:
        """Wait until no answer is held any more.

        This takes one more iteration of asyncio and of the worker, which hold the last result until then.
        """
        for _ in range(100_000):
            if all(buffers.is_free for buffers in self.sets()):
                return
            await asyncio.sleep(0)
        pytest.fail("an answer is still held without a reader")

    def right(self, rows: np.ndarray) -> np.ndarray:
        answer: np.ndarray = self.oracle.run(None, {"x": rows})[0]
        return answer


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Disable garbage collection, because leases must end without it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest_asyncio.fixture(params=["", "intra_op_threads: 2\n", "buckets: [8, 64]\n"], ids=["plain", "two", "buckets"])
async def stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, without_gc: None
) -> AsyncIterator[Stage]:
    folder = add_model(tmp_path, "mlp", builders.mlp)
    (folder / "model.yaml").write_text(request.param)
    metrics = Metrics(CollectorRegistry())
    registry = Registry([tmp_path], LoadOptions(warmup_s=0.2), metrics, time.monotonic_ns)
    service = InferenceService(
        registry, Recorder(metrics, time.monotonic_ns), time.monotonic_ns, max_inflight_bytes=2**30
    )
    session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    stage = Stage(service, session)
    run = HostBinding.run

    def run_poisoned(binding: HostBinding, batch: Batch) -> BatchResult | None:
        stage.bindings.add(binding)
        for buffers in binding.pool.sets if binding.pool else ():
            if buffers.is_free:
                buffers._block.fill(0xFF)
        result = run(binding, batch)
        stage.bound_runs += result is not None
        return result

    await registry.load_all()
    monkeypatch.setattr(HostBinding, "run", run_poisoned)
    yield stage
    await registry.close()


def keep_bytes(_request: InferRequest, response: InferResponse) -> object:
    """An encoder that leaves the concatenation of head and tensors to the socket."""
    (output,) = response.outputs
    return encode_binary_tensor(output.array, output.datatype)


def as_grpc(request: InferRequest, response: InferResponse) -> object:
    return GrpcEncoder().encode(request, response)


def refuse(_request: InferRequest, _response: InferResponse) -> object:
    raise invalid_input("too large to say")


def check(kept: list[tuple[np.ndarray, object]]) -> None:
    for right, seen in kept:
        assert isinstance(seen, memoryview)
        # A copy, because numpy's assertions create reference cycles that hold the compared arrays.
        np.testing.assert_allclose(np.array(seen).view(np.float32).reshape(right.shape), right, rtol=1e-4, atol=1e-6)


ENCODERS: Final[list[Callable[[InferRequest, InferResponse], object]]] = [
    keep_bytes,
    keep_bytes,
    RestEncoder().encode,
    as_grpc,
    refuse,
]


@pytest.mark.parametrize("seed", range(3))
async def test_encoded_answers_keep_their_bytes(stage: Stage, seed: int) -> None:
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    kept: list[tuple[np.ndarray, object]] = []

    async def call() -> None:
        rows = numbers.standard_normal((draw.randint(1, 4), 64), np.float32)
        encode = draw.choice(ENCODERS)
        asked = asyncio.ensure_future(stage.ask(rows, encode))
        if draw.random() < 0.2:
            for _ in range(draw.randint(0, 4)):
                await asyncio.sleep(0)
            asked.cancel()
        try:
            answer = await asked
        except (asyncio.CancelledError, ServeError):
            return
        if encode is keep_bytes:
            kept.append((stage.right(rows), answer))

    for _ in range(60):
        await asyncio.gather(*[call() for _ in range(draw.randint(1, 24))])
        check(kept)
        draw.shuffle(kept)
        del kept[draw.choice([0, 0, 4, 12]) :]
    assert stage.bound_runs > 20
    kept.clear()
    await stage.become_free()


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("encode", [RestEncoder().encode, as_grpc, refuse])
async def test_lease_ends_at_encode_in_every_encoding_and_when_encoding_fails(
    stage: Stage, encode: Callable[[InferRequest, InferResponse], object], binary: bool
) -> None:
    rows = np.ones((1, 64), np.float32)
    encoded = []
    for _ in range(40):
        with pytest.raises(ServeError, match="too large") if encode is refuse else contextlib.nullcontext():
            encoded.append(await stage.ask(rows, encode, binary=binary))
        await stage.become_free()
    assert stage.bound_runs == 40


async def test_disconnected_requests_hold_no_lease(stage: Stage) -> None:
    rows = np.ones((1, 64), np.float32)
    for turns in range(6):
        calls = [asyncio.ensure_future(stage.ask(rows, as_grpc)) for _ in range(8)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await stage.ask(rows, as_grpc)
    del calls, call
    assert stage.bound_runs
    await stage.become_free()


def test_batched_answers_are_those_of_each_request_alone_in_all_encodings(tmp_path: Path) -> None:
    """512 floats per row, so that answers cannot be equal by chance; each is compared bit for bit."""
    add_model(tmp_path, "identity", builders.identity, shape=("batch", 512))
    draw = np.random.default_rng(0)
    sent = [draw.standard_normal((1 + number % 5, 512), np.float32) for number in range(400)]

    with serving(tmp_path, "--warmup-s", "0.5") as server, ThreadPoolExecutor(12) as pool:

        def ask(number: int) -> np.ndarray:
            return ENCODINGS[number % len(ENCODINGS)](server, "identity", {"x": sent[number]})["y"]

        for number, answer in enumerate(pool.map(ask, range(len(sent)))):
            assert answer.tobytes() == sent[number].tobytes()
