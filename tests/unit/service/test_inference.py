"""Requests through the service with real models: their answers and their metrics."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import orjson
import pytest
import pytest_asyncio
from onnx import TensorProto, helper
from prometheus_client import CollectorRegistry

from fakes.encoded import AS_IS, EncodedBy, Given
from http_wire import wait_until
from models import builders
from ortserve._pb.grpc_service_pb2 import ModelInferRequest
from ortserve.codecs.bounds import INLINE_BYTES, INLINE_CHARACTERS, INLINE_ELEMENTS, INLINE_OUTPUTS, INLINE_TEXTS
from ortserve.codecs.generate import GenerateEncoder
from ortserve.codecs.grpc_answer import GrpcEncoder
from ortserve.codecs.grpc_infer import GrpcRequest
from ortserve.codecs.rest import RestEncoder, RestRequest
from ortserve.config.model import LoadOptions
from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import InflightRequest
from ortserve.core.large_memory import LargeMemory
from ortserve.core.region import RegionInput, RegionSpan, RegionUse
from ortserve.core.request import AnswerEncoder, DecodingPlace, InferRequest, InferResponse, Parameter, RequestedOutput
from ortserve.core.tensor import Tensor
from ortserve.core.timing import PHASES, Timing
from ortserve.errors import ContentsError, ErrorKind, ServeError, invalid_input
from ortserve.registry.catalog import ON_DEMAND
from ortserve.registry.registry import Registry
from ortserve.registry.rollout import Headers, Rollout
from ortserve.registry.served_version import ServedVersion
from ortserve.service.call import Call
from ortserve.service.codec_threads import CodecThreads
from ortserve.service.gate import Reservation
from ortserve.service.inference import InferenceService
from ortserve.service.recorder import Recorder
from ortserve.service.region_transfer import RegionTransfer
from ortserve.service.shared_memory import SharedMemory
from ortserve.service.shared_object import FOLDER
from ortserve.telemetry.metrics import Metrics


@dataclass
class Stage:
    service: InferenceService
    registry: Registry
    prometheus: CollectorRegistry
    shared_memory: SharedMemory

    async def infer(self, request: InferRequest, timeout_ns: int | None = None) -> InferResponse:
        return await self.service.serve(self.service.receive("http", timeout_ns), Given(lambda: request), AS_IS)

    async def refusal(self, request: InferRequest, timeout_ns: int | None = None) -> ServeError:
        with pytest.raises(ServeError) as caught:
            await self.infer(request, timeout_ns)
        return caught.value

    def counts(self) -> dict[tuple[str, str, str, str], float]:
        """Requests by model, version, protocol and outcome."""
        return {
            (labels["model"], labels["version"], labels["protocol"], labels["outcome"]): value
            for name, labels, value in self._samples()
            if name == "ortserve_request_duration_seconds_count" and value
        }

    def rejected(self) -> dict[tuple[str, str], float]:
        return {
            (labels["model"], labels["reason"]): value
            for name, labels, value in self._samples()
            if name == "ortserve_rejected_requests_total" and value
        }

    def _samples(self) -> list[tuple[str, dict[str, str], float]]:
        return [
            (sample.name, sample.labels, sample.value)
            for family in self.prometheus.collect()
            for sample in family.samples
        ]


def two_outputs(path: Path) -> None:
    """Y = -x, z = |x|, of FP32 [batch, 4]."""
    x, y, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xyz")
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["z"])]
    graph = helper.make_graph(nodes, "two", [x], [y, z])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", builders.OPSET)], ir_version=10)
    path.write_bytes(model.SerializeToString())


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """Models ``double``, ``poison``, ``slow``, ``text``, ``broken``, and ``two`` and ``labelled`` with two outputs."""
    builders.unnamed_dims(tmp_path / "double.onnx")
    folder = tmp_path / "poison" / "1"
    folder.mkdir(parents=True)
    builders.poison(folder / "model.onnx")
    (tmp_path / "poison" / "model.yaml").write_text("max_rows: 32")
    two_outputs(tmp_path / "two.onnx")
    folder = tmp_path / "labelled" / "1"
    folder.mkdir(parents=True)
    two_outputs(folder / "model.onnx")
    (tmp_path / "labelled" / "model.yaml").write_text("outputs: {z: {labels: [a, b, c]}}")
    builders.identity(tmp_path / "text.onnx", DataType.BYTES, ("batch", 1))
    builders.not_onnx(tmp_path / "broken.onnx")
    folder = tmp_path / "slow" / "3"
    folder.mkdir(parents=True)
    builders.slow(folder / "model.onnx", steps=3000)
    (tmp_path / "slow" / "model.yaml").write_text("max_rows: 2\nwarmup_s: 0\nbatched: true\nmax_queue_rows: 2")
    prometheus = CollectorRegistry()
    metrics = Metrics(prometheus)
    registry = Registry([tmp_path], LoadOptions(warmup_s=0.05), metrics, time.monotonic_ns)
    await registry.load_all()
    shared_memory = SharedMemory(is_allowed=True)
    service = InferenceService(
        registry,
        Recorder(metrics, time.monotonic_ns),
        time.monotonic_ns,
        max_inflight_bytes=1000,
        shared_memory=shared_memory,
    )
    yield Stage(service, registry, prometheus, shared_memory)
    await registry.close()


def request(
    model: str = "double",
    array: np.ndarray | None = None,
    *,
    version: str = "",
    request_id: str = "",
    outputs: tuple[str, ...] = (),
    datatype: DataType = DataType.FP32,
    parameters: Mapping[str, Parameter] | None = None,
) -> InferRequest:
    array = np.ones((1, 4), datatype.numpy) if array is None else array
    return InferRequest(
        model,
        version,
        request_id,
        [Tensor("x", datatype, array)],
        [RequestedOutput(name) for name in outputs],
        dict(parameters or {}),
    )


def poisoned(request_id: str = "") -> InferRequest:
    array = np.full((1, 4), builders.POISON)
    return request("poison", array, datatype=DataType.INT64, request_id=request_id)


async def test_answer_has_the_model_the_version_and_the_id(stage: Stage) -> None:
    response = await stage.infer(request(request_id="42", outputs=("y",)))
    assert (response.model_name, response.model_version, response.id) == ("double", "1", "42")
    (tensor,) = response.outputs
    assert (tensor.name, tensor.datatype) == ("y", DataType.FP32)
    assert tensor.array.tolist() == [[2, 2, 2, 2]]
    assert (await stage.infer(request("slow"))).model_version == "3"


async def test_each_outcome_is_counted_once_with_its_labels(stage: Stage) -> None:
    def fail_to_decode() -> InferRequest:
        raise ServeError(ErrorKind.INVALID_INPUT, "no JSON")

    def crash() -> InferRequest:
        raise ZeroDivisionError

    await stage.infer(request())
    await stage.service.serve(stage.service.receive("grpc"), Given(request), AS_IS)
    await stage.refusal(request("none"))
    await stage.refusal(request(version="7"))
    await stage.refusal(request("broken"))
    await stage.refusal(request(datatype=DataType.INT32))
    await stage.refusal(request("slow", np.ones((3, 4), np.float32)))
    await stage.refusal(poisoned())
    for decode in (fail_to_decode, crash):
        with pytest.raises(ServeError):
            await stage.service.serve(stage.service.receive("http"), Given(decode), AS_IS)

    assert stage.counts() == {
        ("double", "1", "http", "ok"): 1,
        ("double", "1", "grpc", "ok"): 1,
        ("double", "1", "http", "invalid_input"): 1,
        ("slow", "3", "http", "invalid_input"): 1,
        ("poison", "1", "http", "rejected_by_model"): 1,
        ("", "", "http", "not_found"): 2,
        ("", "", "http", "not_ready"): 1,
        ("", "", "http", "invalid_input"): 1,
        ("", "", "http", "internal"): 1,
    }
    # A failed run is not a rejection, because it started.
    assert stage.rejected() == {
        ("", "not_found"): 1,
        ("double", "not_found"): 1,
        ("broken", "not_ready"): 1,
        ("double", "invalid_input"): 1,
        ("slow", "invalid_input"): 1,
        ("", "invalid_input"): 1,
        ("", "internal"): 1,
    }


async def test_full_queue_is_counted_as_overloaded(stage: Stage) -> None:
    two = request("slow", np.ones((2, 4), np.float32))
    tasks = [asyncio.create_task(stage.infer(two)) for _ in range(2)]
    await asyncio.sleep(0)
    error = await stage.refusal(two)
    assert error.kind is ErrorKind.OVERLOADED
    assert error.retry_after_s is not None
    assert error.retry_after_s > 0
    assert error.message.startswith("[request id: <id_unknown>] Exceeds maximum queue size")
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, ServeError)]
    assert stage.counts()["slow", "3", "http", "overloaded"] == 1 + len(refused)
    assert stage.counts()["slow", "3", "http", "ok"] == 2 - len(refused) >= 1


async def test_cancelled_call_is_counted_as_cancelled_and_not_as_rejected(stage: Stage) -> None:
    task = asyncio.create_task(stage.infer(request("slow")))
    await asyncio.sleep(0)  # it is queued and would be dispatched in the next iteration
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stage.counts() == {("slow", "3", "http", "cancelled"): 1}
    assert stage.rejected() == {}


async def test_fault_in_encoding_is_an_internal_error_without_details(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    def encode(request: InferRequest, response: InferResponse) -> bytes:
        raise KeyError("/secret/path")

    with pytest.raises(ServeError) as caught:
        await stage.service.serve(
            stage.service.receive("http"), Given(lambda: request(request_id="9")), EncodedBy(encode)
        )
    assert caught.value.kind is ErrorKind.INTERNAL
    assert caught.value.message == "[request id: 9] internal error"
    assert stage.counts() == {("double", "1", "http", "internal"): 1}
    assert stage.rejected() == {}
    assert "/secret/path" in caplog.text


async def test_classes_are_answered_in_the_place_of_an_output_beside_others(stage: Stage) -> None:
    asked = replace(
        request("two", np.array([[1, -2, 3, 0], [0, 5, 0, 9]], np.float32)),
        outputs=[RequestedOutput("z", classes=2), RequestedOutput("y")],
    )
    response = await stage.infer(asked)
    classes, plain = response.outputs
    assert (classes.name, classes.datatype) == ("z", DataType.BYTES)
    assert classes.array.tolist() == [["3.000000:2", "2.000000:1"], ["9.000000:3", "5.000000:1"]]
    assert plain.array.tolist() == [[-1, 2, -3, 0], [0, -5, 0, -9]]
    response = await stage.infer(replace(asked, model_name="labelled"))
    assert response.outputs[0].array.tolist() == [["3.000000:2:c", "2.000000:1:b"], ["9.000000:3", "5.000000:1:b"]]


async def test_many_classes_are_the_same_off_the_loop(stage: Stage) -> None:
    rows = np.random.default_rng(0).permutation(4 * 2000).reshape(2000, 4).astype(np.float32)
    asked = replace(request("two", rows), outputs=[RequestedOutput("z", classes=1)])
    answer = (await stage.infer(asked)).outputs[0].array
    assert answer.tolist() == [[f"{row.max():f}:{row.argmax()}"] for row in rows]


async def test_cancelled_call_with_classes_is_counted_once_and_leaves_the_queue(stage: Stage) -> None:
    asked = replace(request("slow"), outputs=[RequestedOutput("y", classes=1)])
    for steps in (0, 2):  # before and after the start of the task for the classes
        call, outcomes = stage.service.receive("http"), list[object]()
        stage.service.start(call, Given(lambda: asked), AS_IS, outcomes.append, outcomes.append)
        for _ in range(steps):
            await asyncio.sleep(0)
        assert call.cancel()
        assert not call.cancel()
        assert not outcomes
    assert stage.counts() == {("slow", "3", "http", "cancelled"): 2}
    await stage.infer(asked)
    learned = stage.registry.find("slow", "").learned()
    assert learned.queued_rows == 0
    assert learned.decisions.batches <= 2  # the last one, and the first, which may have started before its cancellation


async def test_failed_run_with_classes_is_counted_and_reported_like_any_other(stage: Stage) -> None:
    error = await stage.refusal(replace(poisoned("7"), outputs=[RequestedOutput("y", classes=1)]))
    assert error.kind is ErrorKind.REJECTED_BY_MODEL
    assert error.message.startswith("[request id: 7] ")
    assert stage.counts() == {("poison", "1", "http", "rejected_by_model"): 1}


async def test_request_decoded_on_a_thread_is_answered_and_counted_like_any_other(stage: Stage) -> None:
    on_thread = Given(lambda: request(request_id="1"), DecodingPlace.THREAD)
    response = await stage.service.serve(stage.service.receive("grpc"), on_thread, AS_IS)
    assert (response.id, response.outputs[0].array.tolist()) == ("1", [[2, 2, 2, 2]])
    assert stage.counts() == {("double", "1", "grpc", "ok"): 1}
    assert Reservation(stage.service.gate, 1000).size == 1000  # no bytes are held any more


async def test_views_that_are_decoded_on_a_thread_take_no_memory(stage: Stage) -> None:
    given = Given(request, DecodingPlace.THREAD)
    serving = asyncio.ensure_future(stage.service.serve(stage.service.receive("http"), given, AS_IS))
    while not serving.done():
        assert stage.service.gate.held_bytes == 0
        await asyncio.sleep(0)
    assert serving.result().outputs[0].array.tolist() == [[2, 2, 2, 2]]


async def test_errors_of_a_request_decoded_on_a_thread_are_counted_with_their_labels(stage: Stage) -> None:
    def fail() -> InferRequest:
        raise ServeError(ErrorKind.INVALID_INPUT, "no JSON")

    def fail_in_contents() -> InferRequest:
        raise ContentsError(ServeError(ErrorKind.INVALID_INPUT, "too short"), "9", "double", "")

    def crash() -> InferRequest:
        raise ZeroDivisionError

    messages = []
    for decode in (fail, fail_in_contents, crash, lambda: request("none"), poisoned):
        with pytest.raises(ServeError) as caught:
            await stage.service.serve(stage.service.receive("http"), Given(decode, DecodingPlace.THREAD), AS_IS)
        messages.append(caught.value.message)
    assert messages[:3] == ["no JSON", "[request id: 9] too short", "internal error"]
    assert stage.counts() == {
        ("", "", "http", "invalid_input"): 1,
        ("double", "1", "http", "invalid_input"): 1,
        ("", "", "http", "internal"): 1,
        ("", "", "http", "not_found"): 1,
        ("poison", "1", "http", "rejected_by_model"): 1,
    }


async def test_body_of_a_request_with_malformed_contents_is_freed_although_nothing_collects_cycles(
    stage: Stage,
) -> None:
    """The frames of the error that another one replaced refer to the body, and to the call."""
    freed = threading.Event()

    def read() -> InferRequest:
        body = threading.Event()
        weakref.finalize(body, freed.set)
        try:
            raise invalid_input("too short")
        except ServeError as error:
            raise ContentsError(error, "9", "double", "") from None

    gc.disable()
    try:
        with pytest.raises(ServeError, match="too short"):
            await stage.service.serve(stage.service.receive("http"), Given(read, DecodingPlace.THREAD), AS_IS)
        assert await asyncio.to_thread(freed.wait, 5)
    finally:
        gc.enable()


async def test_json_beyond_the_bound_and_reading_without_room_are_rejected(stage: Stage) -> None:
    for encoded, kind, word in (
        (
            Given(request, DecodingPlace.THREAD, json_bytes=30),
            ErrorKind.TOO_LARGE,
            "max_json_bytes: expected at most 29",
        ),
        (Given(request, DecodingPlace.THREAD, growth_bytes=901), ErrorKind.OVERLOADED, "max_inflight_bytes"),
    ):
        with Reservation(stage.service.gate, 501), pytest.raises(ServeError, match=word) as caught:
            await stage.service.serve(stage.service.receive("http"), encoded, AS_IS)
        assert caught.value.kind is kind
    with Reservation(stage.service.gate, 500):  # texts reserve at most the other half
        await stage.service.serve(stage.service.receive("http"), Given(request, DecodingPlace.THREAD, 29, 900), AS_IS)


@pytest.mark.parametrize(("growth_bytes", "body_bytes"), [(900, 1), (0, 900)], ids=["texts", "views"])
async def test_memory_of_a_cancelled_call_is_held_until_the_thread_has_decoded(
    stage: Stage, growth_bytes: int, body_bytes: int
) -> None:
    begun, release = threading.Event(), threading.Event()

    def read() -> InferRequest:
        begun.set()
        release.wait(60)
        return request()

    call, outcomes = stage.service.receive("http"), list[object]()
    given = Given(read, DecodingPlace.THREAD, growth_bytes=growth_bytes, body_bytes=body_bytes)
    stage.service.start(call, given, AS_IS, outcomes.append, outcomes.append)
    await asyncio.to_thread(begun.wait, 60)
    call.cancel()
    for _ in range(4):
        await asyncio.sleep(0)
    with Reservation(stage.service.gate, 0) as reservation:
        try:
            with pytest.raises(ServeError, match="max_inflight_bytes"):
                reservation.grow(501)
        finally:
            release.set()
        while reservation.size == 0:
            await asyncio.sleep(0)
            with suppress(ServeError):
                reservation.grow(501)


async def test_cancelled_call_that_waits_for_memory_does_not_keep_its_body(stage: Stage) -> None:
    """Until the decoding before it ended it kept the body, whose reservation its protocol had released."""
    release, body = threading.Event(), Bytes()
    hidden = weakref.ref(body)

    def wait() -> InferRequest:
        release.wait(60)
        return request()

    def start(read: Callable[[], InferRequest]) -> Call:
        call = stage.service.receive("http")
        stage.service.start(call, Given(read, DecodingPlace.THREAD, growth_bytes=900), AS_IS, str, str)
        return call

    with Reservation(stage.service.gate, 1):
        start(wait)
        waiting = start(partial(_read, body))
        del body
        await asyncio.sleep(0)
        waiting.cancel()
        try:
            for _ in range(8):
                await asyncio.sleep(0)
            assert hidden() is None
        finally:
            release.set()
        await asyncio.to_thread(wait_until, lambda: stage.service.gate.held_bytes == 1)


class Bytes:
    """A body that weak references can refer to."""


def _read(_body: Bytes) -> InferRequest:
    return request()


async def test_texts_of_a_call_past_its_deadline_are_reserved_until_they_are_measured(stage: Stage) -> None:
    service, release = service_with(stage, CodecThreads(1)), threading.Event()
    texts = np.array([["x"]] * (INLINE_TEXTS + 1), object)
    decoded = Given(lambda: request("text", texts, datatype=DataType.BYTES), DecodingPlace.THREAD, growth_bytes=400)

    def wait() -> InferRequest:
        release.wait(60)
        return request()

    timed = asyncio.create_task(service.serve(service.receive("http", 500_000_000), decoded, AS_IS))
    blocking = asyncio.create_task(service.serve(service.receive("http"), Given(wait, DecodingPlace.THREAD), AS_IS))
    try:
        with pytest.raises(ServeError, match="deadline"):
            await timed
        held_bytes = service.gate.held_bytes
    finally:
        release.set()
    await blocking
    await asyncio.to_thread(wait_until, lambda: service.gate.held_bytes == 0)
    assert held_bytes == 400


@pytest.mark.parametrize(("character", "served"), [("x", 6), ("😀", 2)])
async def test_texts_that_are_decoded_together_stay_within_the_limit(stage: Stage, character: str, served: int) -> None:
    """Each text of an emoji takes four times its bytes, which was known only after it was decoded."""
    size = 200_000
    text = (character + size * "x").encode()
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(text) + 4}}
    head = orjson.dumps({"inputs": [tensor]})
    body = head + len(text).to_bytes(4, "little") + text
    service = service_with(stage, CodecThreads(4), max_inflight_bytes=13 * size)
    calls = [
        asyncio.create_task(
            service.serve(service.receive("http"), RestRequest(body, len(head), "text", ""), RestEncoder())
        )
        for _ in range(6)
    ]
    most = 0
    while not all(call.done() for call in calls):
        most = max(most, service.gate.held_bytes)
        await asyncio.sleep(0)
    errors = [error.kind for call in calls if isinstance(error := call.exception(), ServeError)]
    assert size < most <= 13 * size
    assert len(calls) - len(errors) >= served
    assert set(errors) <= {ErrorKind.OVERLOADED}
    assert service.gate.held_bytes == 0


@pytest.mark.parametrize("count", [4, INLINE_TEXTS + 1])
async def test_texts_are_reserved_with_the_size_of_their_characters(stage: Stage, count: int) -> None:
    """One emoji makes each character of its text take four bytes."""
    texts = np.array([["😀" + "x" * 1000]] * count, object)
    given = Given(lambda: request("text", texts, datatype=DataType.BYTES), DecodingPlace.THREAD, growth_bytes=1)
    serving = asyncio.ensure_future(stage.service.serve(stage.service.receive("http"), given, AS_IS))
    most = 0
    while not serving.done():
        most = max(most, stage.service.gate.held_bytes)
        await asyncio.sleep(0)
    assert serving.result().outputs[0].array.tolist() == texts.tolist()
    assert 4_000 * count < most < 4_300 * count
    assert stage.service.gate.held_bytes == 0


def service_with(stage: Stage, threads: CodecThreads, *, max_inflight_bytes: int = 1000) -> InferenceService:
    recorder = Recorder(Metrics(CollectorRegistry()), time.monotonic_ns)
    return InferenceService(
        stage.registry,
        recorder,
        time.monotonic_ns,
        max_inflight_bytes=max_inflight_bytes,
        codec_threads=threads,
    )


async def test_request_past_its_deadline_is_answered_before_a_thread_is_free_and_never_decoded(stage: Stage) -> None:
    service = service_with(stage, CodecThreads(1))
    release, decoded = threading.Event(), list[str]()

    def read(name: str) -> InferRequest:
        release.wait(60)
        decoded.append(name)
        return request()

    def serve(name: str, timeout_ns: int | None = None) -> Coroutine[Any, Any, InferResponse]:
        given = Given(partial(read, name), DecodingPlace.THREAD)
        return service.serve(service.receive("http", timeout_ns), given, AS_IS)

    try:
        first = asyncio.create_task(serve("first"))
        cancelled = asyncio.create_task(serve("cancelled"))
        await asyncio.sleep(0)
        cancelled.cancel()
        raw = InferRequest("text", "", "", (), (), {}, raw_input=b"x" * (INLINE_BYTES + 1))
        raw_call = service.receive("http", 1_000_000)
        for late in (serve("late", timeout_ns=1_000_000), service.serve(raw_call, Given(lambda: raw), AS_IS)):
            with pytest.raises(ServeError, match="it passed before the request was decoded") as caught:
                await late
            assert caught.value.kind is ErrorKind.DEADLINE
        held_bytes = service.gate.held_bytes
    finally:
        release.set()
    await first
    await serve("last")
    assert (held_bytes, service.gate.held_bytes) == (500, 0)  # the work of a thread refers to the texts
    assert decoded == ["first", "last"]


class NoThreads(CodecThreads):
    """The system refuses to start these threads."""

    def run(self, work: Callable[[], Any], call: InflightRequest | None = None) -> asyncio.Future[Any]:
        raise RuntimeError("can't start new thread")


async def test_memory_of_a_request_that_no_thread_can_decode_is_released(stage: Stage) -> None:
    service = service_with(stage, NoThreads(1))
    with pytest.raises(ServeError, match="internal error"):
        await service.serve(service.receive("http"), Given(request, DecodingPlace.THREAD, growth_bytes=900), AS_IS)
    assert Reservation(service.gate, 1000).size == 1000  # no bytes are held any more


async def test_long_answer_is_encoded_on_a_thread(stage: Stage) -> None:
    loop_thread = threading.get_ident()
    rows = np.ones((INLINE_ELEMENTS // 4 + 1, 4), np.float32)
    asked = Given(lambda: request("two", rows))
    encoder = EncodedBy(lambda _, response: (threading.get_ident(), response), takes_long=True)
    thread, response = await stage.service.serve(stage.service.receive("http"), asked, encoder)
    assert thread != loop_thread
    assert response.outputs[1].array.tolist() == rows.tolist()
    assert stage.counts() == {("two", "1", "http", "ok"): 1}

    def fail(_: InferRequest, response: InferResponse) -> None:
        raise KeyError("/secret/path")

    with pytest.raises(ServeError, match="internal error"):
        await stage.service.serve(stage.service.receive("http"), asked, EncodedBy(fail, takes_long=True))
    assert stage.counts() == {("two", "1", "http", "ok"): 1, ("two", "1", "http", "internal"): 1}


class ThreadOf:
    """An encoder whose answer is the thread on which it was called."""

    def __init__(self, encoder: AnswerEncoder[Any]) -> None:
        self.is_long = encoder.is_long

    def encode(self, request: InferRequest, response: InferResponse, memory: LargeMemory | None = None) -> int:
        return threading.get_ident()


@pytest.mark.parametrize("encoder", [RestEncoder(), GenerateEncoder(is_stream=False), GrpcEncoder()], ids=type)
async def test_few_long_texts_and_many_short_outputs_are_encoded_on_a_thread(
    stage: Stage, encoder: AnswerEncoder[Any]
) -> None:
    async def is_on_loop(asked: InferRequest) -> bool:
        call = stage.service.receive("http")
        return await stage.service.serve(call, Given(lambda: asked), ThreadOf(encoder)) == threading.get_ident()

    def texts(text: str) -> InferRequest:
        return request("text", np.array([[text]], object), datatype=DataType.BYTES)

    assert await is_on_loop(texts("short"))
    assert not await is_on_loop(texts("ä" * 2**20))
    # Binary texts count by their size; in JSON, characters may have to be escaped.
    assert await is_on_loop(texts("\x01" * (INLINE_CHARACTERS + 1))) == isinstance(encoder, GrpcEncoder)
    assert await is_on_loop(request("two"))
    rows = np.ones((INLINE_ELEMENTS // 4, 4), np.float32)
    # Two outputs, each of the maximum length. Binary outputs count by their size.
    assert await is_on_loop(request("two", rows)) == isinstance(encoder, GrpcEncoder)


async def test_answer_with_many_outputs_is_encoded_on_a_thread(stage: Stage, tmp_path: Path) -> None:
    count = INLINE_OUTPUTS + 1
    builders.many_tensors(tmp_path / "many.onnx", count)
    await stage.registry.load("many")
    row = np.ones((1, 1), np.float32)

    def asked() -> InferRequest:
        tensors = [Tensor(f"x{number}", DataType.FP32, row) for number in range(count)]
        return InferRequest("many", "", "", tensors, [], {})

    call = stage.service.receive("http")
    assert await stage.service.serve(call, Given(asked), ThreadOf(GrpcEncoder())) != threading.get_ident()


async def test_error_in_encoding_keeps_its_kind(stage: Stage) -> None:
    def encode(request: InferRequest, response: InferResponse) -> bytes:
        raise ServeError(ErrorKind.TOO_LARGE, "answer too large")

    with pytest.raises(ServeError, match="answer too large") as caught:
        await stage.service.serve(stage.service.receive("grpc"), Given(request), EncodedBy(encode))
    assert caught.value.kind is ErrorKind.TOO_LARGE
    assert stage.counts() == {("double", "1", "grpc", "too_large"): 1}


async def test_phases_of_answered_requests_sum_to_their_duration(stage: Stage) -> None:
    model = stage.registry.find("double", "").metrics
    await asyncio.gather(*(stage.infer(request()) for _ in range(20)))
    await stage.refusal(request(datatype=DataType.INT32))
    assert len(model.phases) == len(PHASES)
    assert sum(phase.total for phase in model.phases) == model.answered["http"].total
    assert [sum(phase.counts) for phase in model.phases] == [20] * len(PHASES)
    assert all(phase.total >= 0 for phase in model.phases)


@pytest.mark.parametrize(("request_id", "spelled"), [("", "<id_unknown>"), ("42", "42")])
async def test_error_of_a_request_whose_model_is_known_begins_with_its_id(
    stage: Stage, request_id: str, spelled: str
) -> None:
    wrong_type = await stage.refusal(request(datatype=DataType.INT32, request_id=request_id))
    assert wrong_type.message == (
        f"[request id: {spelled}] inference input 'x' data-type is 'INT32', but model 'double' expects 'FP32'"
    )
    failed = await stage.refusal(poisoned(request_id))
    assert failed.message.startswith(f"[request id: {spelled}] the model rejected the inputs: ")
    unknown = await stage.refusal(request("none", request_id=request_id))
    assert unknown.message == "Request for unknown model: 'none' is not found"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "[request id: 7] input byte size mismatch for input 'x' for model 'double'. Expected 8, got 4"),
        ({"model_name": "none"}, "Request for unknown model: 'none' is not found"),
        ({"model_version": "9"}, "Request for unknown model: 'double' version 9 is not found"),
    ],
)
async def test_unknown_model_is_reported_before_malformed_tensors(
    stage: Stage, body: dict[str, Any], text: str
) -> None:
    message = ModelInferRequest(**{"model_name": "double", "id": "7"} | body)
    message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    message.raw_input_contents.append(bytes(4))
    errors: list[ServeError] = []
    encoded = GrpcRequest(message.SerializeToString())
    stage.service.start(stage.service.receive("grpc"), encoded, AS_IS, lambda _: None, errors.append)
    assert [error.message for error in errors] == [text]
    outcome = "not_found" if body else "invalid_input"
    assert stage.counts() == {("", "", "grpc", outcome) if body else ("double", "1", "grpc", outcome): 1}


async def test_error_of_a_run_has_the_version_that_ran(stage: Stage) -> None:
    assert (await stage.refusal(poisoned("1"))).version == "1"
    assert (await stage.refusal(request("none"))).version == ""


class AlwaysCandidate(Rollout):
    """A canary rollout in which version 2 answers every request."""

    is_canary = True

    def candidate_for(self, request: InferRequest, headers: Headers) -> str:
        return "2"

    def observe(self, request: InferRequest, headers: Headers, outputs: Arrays, timing: Timing) -> None:
        pass

    def candidate_answered(self, timing: Timing) -> None:
        pass

    def candidate_failed(self, error: Exception) -> None:
        pass


async def test_request_whose_candidate_ran_and_that_stable_rejects_is_counted_as_rejected(
    stage: Stage, tmp_path: Path
) -> None:
    for version, build in ((1, builders.unnamed_dims), (2, builders.poison)):
        folder = tmp_path / "tried" / str(version)
        folder.mkdir(parents=True)
        build(folder / "model.onnx")
    (tmp_path / "tried" / "model.yaml").write_text("labels: {stable: 1}\nversion_policy: {all: true}")
    await stage.registry.load("tried")
    stage.registry.set_rollout("tried", AlwaysCandidate())

    error = await stage.refusal(replace(poisoned(), model_name="tried"))

    assert (error.kind, error.version) == (ErrorKind.INVALID_INPUT, "1")  # the candidate has other datatypes
    assert stage.rejected() == {("tried", "invalid_input"): 1}


async def test_request_whose_candidate_fails_waits_for_stable_that_left_memory_meanwhile(
    stage: Stage, tmp_path: Path
) -> None:
    for version, build in ((1, partial(builders.identity, datatype=DataType.INT64)), (2, builders.poison)):
        folder = tmp_path / "tried" / str(version)
        folder.mkdir(parents=True)
        build(folder / "model.onnx")
    (tmp_path / "tried" / "model.yaml").write_text("labels: {stable: 1}\nversion_policy: {all: true}")
    await stage.registry.load("tried")

    class LeavesMemory(AlwaysCandidate):
        def candidate_for(self, request: InferRequest, headers: Headers) -> str:
            asyncio.get_running_loop().call_soon(stage.registry._draining.evict, "tried")  # during the run
            return "2"

    stage.registry.set_rollout("tried", LeavesMemory())
    response = await stage.infer(replace(poisoned(), model_name="tried"))
    assert (response.model_version, response.outputs[0].array.tolist()) == ("1", [[builders.POISON] * 4])


async def test_candidate_that_is_not_in_memory_is_loaded_while_stable_answers(stage: Stage, tmp_path: Path) -> None:
    for version in (1, 2):
        folder = tmp_path / "tried" / str(version)
        folder.mkdir(parents=True)
        builders.identity(folder / "model.onnx")
    (tmp_path / "tried" / "model.yaml").write_text("labels: {stable: 1}\nversion_policy: {all: true}")
    await stage.registry.load("tried")
    candidate = next(record for record in stage.registry.records_of("tried") if record.version == 2)
    stage.registry._draining.drain(candidate, ON_DEMAND)
    stage.registry.set_rollout("tried", AlwaysCandidate())
    tried = replace(request("none"), model_name="tried")
    assert (await stage.infer(tried)).model_version == "1"
    await asyncio.gather(*stage.registry._tasks)
    assert (await stage.infer(tried)).model_version == "2"


class Shadow(AlwaysCandidate):
    """Records the requests that a shadow rollout would copy."""

    is_canary = False

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []

    def observe(self, request: InferRequest, headers: Headers, outputs: Arrays, timing: Timing) -> None:
        self.requests.append(request)


async def test_a_copy_of_a_request_with_a_long_raw_text_is_not_decoded_again(stage: Stage, tmp_path: Path) -> None:
    folder = tmp_path / "texts" / "1"
    folder.mkdir(parents=True)
    builders.identity(folder / "model.onnx", datatype=DataType.BYTES, shape=("batch", 1))
    (tmp_path / "texts" / "model.yaml").write_text("labels: {stable: 1}")
    await stage.registry.load("texts")
    shadow = Shadow()
    stage.registry.set_rollout("texts", shadow)
    text = b"x" * 100_000
    await stage.infer(InferRequest("texts", "", "", [], (), {}, raw_input=text))
    (copied,) = shadow.requests
    assert copied.raw_input is None
    assert [tensor.array.item() for tensor in copied.inputs] in ([text], [text.decode()])


async def test_requests_of_one_failed_batch_get_separate_errors(stage: Stage) -> None:
    # So many failing requests that the search ends before each has run alone.
    ids = [str(number) for number in range(32)]
    outcomes = await asyncio.gather(*(stage.infer(poisoned(one)) for one in ids), return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, ServeError)]
    assert [error.message.split("]")[0] for error in errors] == [f"[request id: {one}" for one in ids]
    assert all(error.message.count("[request id") == 1 for error in errors)


async def test_request_rejected_before_its_body_is_complete_is_counted(stage: Stage) -> None:
    stage.service.recorder.body_rejected("http", ErrorKind.TOO_LARGE, time.monotonic_ns(), None)
    assert stage.counts() == {("", "", "http", "too_large"): 1}
    assert stage.rejected() == {("", "too_large"): 1}


async def test_unknown_model_names_are_no_labels(stage: Stage) -> None:
    for name in ("made", "up", "x" * 1000):
        await stage.refusal(request(name))
        await stage.refusal(request(name, version="1"))
    assert stage.counts() == {("", "", "http", "not_found"): 6}
    assert stage.rejected() == {("", "not_found"): 6}


async def test_answers_do_not_change_when_the_model_runs_again(stage: Stage) -> None:
    first = (await stage.infer(request())).outputs[0].array
    kept = first.copy()
    await asyncio.gather(*(stage.infer(request(array=np.full((1, 4), value, np.float32))) for value in range(9)))
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize(
    ("asked", "answered"),
    [((), ["y", "z"]), (("z", "y"), ["z", "y"]), (("z",), ["z"])],
)
async def test_outputs_have_the_requested_order(stage: Stage, asked: tuple[str, ...], answered: list[str]) -> None:
    response = await stage.infer(request("two", outputs=asked))
    assert [tensor.name for tensor in response.outputs] == answered
    values = {"y": [[-1] * 4], "z": [[1] * 4]}
    assert [tensor.array.tolist() for tensor in response.outputs] == [values[name] for name in answered]


async def test_passed_deadline_is_rejected_and_counted(stage: Stage) -> None:
    error = await stage.refusal(request(request_id="7"), timeout_ns=0)
    assert (error.kind, error.retry_after_s) == (ErrorKind.DEADLINE, None)
    assert error.message.startswith("[request id: 7] deadline cannot be met: 0.0 ms are left")
    assert stage.counts() == {("double", "1", "http", "deadline"): 1}
    assert stage.rejected() == {("double", "deadline"): 1}


async def test_long_id_leaves_room_for_the_error(stage: Stage) -> None:
    error = await stage.refusal(request(request_id="7" * 5000, datatype=DataType.INT32))
    assert error.message.startswith(f"[request id: {'7' * 200}…] inference input 'x' data-type is 'INT32'")
    shown = await stage.refusal(request(request_id="7" * 200, datatype=DataType.INT32))
    assert shown.message.startswith(f"[request id: {'7' * 200}] inference input 'x' data-type is 'INT32'")


async def test_timeout_counts_from_when_the_body_was_complete(stage: Stage) -> None:
    call = stage.service.receive("http", timeout_ns=1_000_000)
    call.timing.received_ns -= 2_000_000
    with pytest.raises(ServeError) as caught:
        await stage.service.serve(call, Given(request), AS_IS)
    assert caught.value.kind is ErrorKind.DEADLINE
    assert (await stage.infer(request(), timeout_ns=60 * 10**9)).model_name == "double"


async def test_parameter_timeout_bounds_the_wait_in_microseconds(stage: Stage) -> None:
    running = [asyncio.create_task(stage.infer(request("slow", np.ones((2, 4), np.float32))))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = asyncio.create_task(stage.infer(request("slow", parameters={"timeout": 1})))
    error = (await asyncio.gather(late, *running, return_exceptions=True))[0]
    assert isinstance(error, ServeError)
    assert error.kind is ErrorKind.DEADLINE
    assert "its timeout passed in the queue" in error.message
    assert (await stage.infer(request("slow", parameters={"timeout": 60_000_000}))).model_name == "slow"
    assert (await stage.infer(request("slow", parameters={"timeout": 0}))).model_name == "slow", "0 is no bound"


@pytest.mark.parametrize("name", ["priority", "timeout"])
@pytest.mark.parametrize("value", ["1", -1, 1.5, True, ""])
async def test_error_of_an_invalid_parameter_names_it(stage: Stage, name: str, value: Parameter) -> None:
    error = await stage.refusal(request(parameters={name: value}))
    assert error.kind is ErrorKind.INVALID_INPUT
    assert error.message == (
        f"[request id: <id_unknown>] parameter '{name}': expected an unsigned integer, got {value!r}"
    )


@pytest.mark.parametrize("priority", [0, 1, 7, 2**63])
async def test_priority_that_the_model_does_not_have_is_its_default(stage: Stage, priority: int) -> None:
    assert (await stage.infer(request(parameters={"priority": priority}))).model_name == "double"


async def test_bodies_are_admitted_up_to_the_limit(stage: Stage) -> None:
    with Reservation(stage.service.gate, 900):
        with pytest.raises(ServeError) as caught:
            Reservation(stage.service.gate, 200)
        assert caught.value.kind is ErrorKind.OVERLOADED
        with Reservation(stage.service.gate, 100):
            pass
    with Reservation(stage.service.gate, 200):
        pass


async def test_answered_call_has_the_time_of_each_phase(stage: Stage) -> None:
    call = stage.service.receive("http")
    await stage.service.serve(call, Given(request), AS_IS)
    timing = call.timing
    points = [
        timing.received_ns,
        timing.queued_ns,
        timing.taken_ns,
        timing.staged_ns,
        timing.computed_ns,
        timing.done_ns,
    ]
    assert points == sorted(points)
    assert points[0] > 0


@pytest.fixture
def region(stage: Stage) -> Iterator[str]:
    """A region of 64 bytes: the four ones of an input, and zeros."""
    path = FOLDER / f"ortserve-test-{uuid4().hex}"
    path.write_bytes(np.ones(4, np.float32).tobytes() + bytes(48))
    stage.shared_memory.register("r", path.name, 0, 64)
    yield "r"
    path.unlink()


def in_region(model: str, region: str) -> InferRequest:
    """A request with the input x at the start of the region and the output y after it."""
    given = RegionInput("x", DataType.FP32, (1, 4), RegionSpan(region, 0, 16))
    use = RegionUse([given], {"y": RegionSpan(region, 16, 16)})
    return InferRequest(model, "", "", (), [RequestedOutput("y")], {}, regions=use)


async def test_request_in_regions_is_answered_timed_and_counted_as_any_other(stage: Stage, region: str) -> None:
    call = stage.service.receive("grpc")
    response = await stage.service.serve(call, Given(lambda: in_region("two", region)), AS_IS)
    assert set(response.in_regions) == {"y"}
    assert stage.counts() == {("two", "1", "grpc", "ok"): 1}
    assert all(end >= begin > 0 for begin, end in pairwise(astuple(call.timing)[:6]))
    leases = stage.shared_memory.lease([RegionSpan(region, 16, 16)])
    written = leases.memory(RegionSpan(region, 16, 16)).read(16, 16)
    leases.release()
    assert np.frombuffer(written, np.float32).tolist() == [-1.0] * 4


async def test_request_whose_model_is_evicted_while_its_inputs_are_copied_waits_for_the_model(
    stage: Stage, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_inputs = RegionTransfer.read_inputs

    async def read_slowly(transfer: RegionTransfer, model: str) -> list[Tensor]:
        stage.registry._draining.evict(model)
        await stage.registry._draining.wait(model)
        return await read_inputs(transfer, model)

    monkeypatch.setattr(RegionTransfer, "read_inputs", read_slowly)
    response = await stage.infer(in_region("two", region))
    assert response.model_name == "two"


async def test_request_in_regions_that_fails_is_counted_once_and_holds_nothing(stage: Stage, region: str) -> None:
    unknown = await stage.refusal(in_region("two", "other"))
    assert unknown.kind is ErrorKind.NOT_FOUND
    assert unknown.message == "[request id: <id_unknown>] Unable to find shared memory region: 'other'"
    poisoned = await stage.refusal(replace(in_region("two", region), outputs=[RequestedOutput("none")]))
    assert poisoned.kind is ErrorKind.INVALID_INPUT
    assert stage.counts() == {("two", "1", "http", "not_found"): 1, ("two", "1", "http", "invalid_input"): 1}
    with Reservation(stage.service.gate, 1000):  # the whole limit, so no other bytes are held
        pass


async def test_version_that_became_ready_during_the_copy_of_inputs_answers(
    stage: Stage, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, ready = stage.registry.find("double", ""), stage.registry.find("two", "")

    async def wait_for(*_: object) -> ServedVersion:
        return ready

    monkeypatch.setattr(stage.registry, "find", lambda *_: before)
    monkeypatch.setattr(stage.registry, "wait_for", wait_for)
    response = await stage.infer(in_region("double", region))
    assert response.model_name == "two"
    assert stage.counts() == {("two", "1", "http", "ok"): 1}


async def test_version_that_became_ready_while_a_long_text_was_decoded_answers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = stage.registry.find("text", "")
    await stage.registry.load("text", config='{"max_batch_size": 8}')
    found = [replaced, stage.registry.find("text", "")]
    assert found[1] is not replaced

    async def wait_for(*_: object) -> ServedVersion:
        return found.pop(0)

    monkeypatch.setattr(stage.registry, "find", lambda *_: replaced)
    monkeypatch.setattr(stage.registry, "wait_for", wait_for)
    text = b"x" * (INLINE_BYTES + 1)
    response = await stage.infer(InferRequest("text", "", "", (), (), {}, raw_input=text))
    assert response.outputs[0].array.tolist() == [[text.decode()]]
