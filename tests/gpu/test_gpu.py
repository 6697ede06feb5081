"""Properties of buffers and replay that need a GPU; cases that host memory can simulate run there too."""

import asyncio
import gc
import random
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import gpu_models
from device_models import SIZES, OnDevice, Place, batch_of, bucket_for, landed, loaded_on, on_device
from device_sequences import growing_sequence, history_sequence, one_sequence, serving_on, where
from fakes.host_device import HostDevice, Pace
from fakes.inflight import submit
from models import builders, sequences
from ortserve.batching.admission import QueueLimits
from ortserve.batching.batch_runs import BatchRuns
from ortserve.batching.batcher import Batcher
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import RequestQueue
from ortserve.batching.shared_threads import SharedThreads
from ortserve.core.batch import BatchResult
from ortserve.core.dtypes import DataType
from ortserve.core.tensor import TOLERANCES, as_float64
from ortserve.core.timing import Timing
from ortserve.device.devices import DeviceProvider, Devices
from ortserve.device.protocol import BoundRun
from ortserve.device.region import open_region
from ortserve.engine.placement import read_placement
from ortserve.engine.provider_options import CUDA
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import ServeError
from ortserve.registry.load.capture_trial import CaptureTrials, TrialRequest
from ortserve.registry.load.inputs import InputGenerator
from ortserve.registry.load.loaded_model import LoadedModel, describe_properties
from ortserve.registry.load.progress import Progress

both_ways = pytest.mark.parametrize("captures", [False, True], ids=["bound", "replayed"])


def is_near(output: np.ndarray, right: np.ndarray, datatype: DataType) -> bool:
    """Whether an output equals the CPU's within the tolerance for other algorithms and orders of summation."""
    if datatype not in TOLERANCES:
        return bool(np.array_equal(output, right))
    relative, absolute = TOLERANCES[datatype]
    values, wanted = as_float64(output, datatype), as_float64(right, datatype)
    return bool(np.allclose(values, wanted, rtol=relative, atol=max(1e-3, 10 * absolute)))


def all_sizes_are_right(made: OnDevice) -> None:
    for rows in range(1, SIZES[-1] + 1):
        inputs = InputGenerator(made.signature).generate(rows, 100 + rows)
        outputs = landed(made.start(batch_of(inputs, bucket=bucket_for(rows))))
        for spec, output, right in zip(made.signature.outputs, outputs, made.plainly(inputs), strict=True):
            assert output.shape == right.shape
            assert is_near(output, right, spec.datatype), f"{spec.name} of {rows} rows"


@pytest.mark.gpu
def test_gpu_runs_the_model(gpu: Place, tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "m.onnx")
    session = open_session(path, "m", SessionOptions(ProviderChoice(CUDA), 1))
    assert session.get_providers()[0] == CUDA
    assert set(read_placement(session)) == {CUDA}


@both_ways
@pytest.mark.parametrize("datatype", [kind for kind in DataType if kind is not DataType.BYTES], ids=lambda k: k.value)
def test_every_datatype_and_size_equals_the_cpu_result(
    place: Place, tmp_path: Path, datatype: DataType, captures: bool
) -> None:
    path = builders.identity(tmp_path / "m.onnx", datatype)
    with on_device(path, place.make(), provider=place.provider, captures=captures) as made:
        assert made.prepared.bound == SIZES
        assert made.prepared.replayed == (SIZES if captures else ()), made.prepared
        all_sizes_are_right(made)


@both_ways
@pytest.mark.parametrize("kind", ["mlp", "mlp16", "encoder", "image"])
def test_networks_of_every_size_equal_the_cpu_result(place: Place, tmp_path: Path, kind: str, captures: bool) -> None:
    path = tmp_path / "m.onnx"
    match kind:
        case "mlp":
            gpu_models.mlp(path, layers=4, width=64)
        case "mlp16":
            gpu_models.mlp(path, layers=4, width=64, dtype=np.float16)
        case "encoder":
            gpu_models.encoder(path, layers=2, hidden=64, heads=4, length=16)
        case "image":
            gpu_models.residual(path, blocks=(1, 1), width=8, size=32, classes=10)
    with on_device(path, place.make(), provider=place.provider, captures=captures, options=place.options) as made:
        assert made.prepared.bound == SIZES, made.prepared
        assert made.prepared.replayed == (SIZES if captures else ()), made.prepared
        all_sizes_are_right(made)


def test_run_with_the_id_of_another_shape_replays_that_shape(place: Place, tmp_path: Path) -> None:
    """Documents a behaviour of ONNX Runtime: because of it an id encodes only the bound rows and the buffer set."""
    path = builders.identity(tmp_path / "m.onnx")
    with on_device(path, place.make(), provider=place.provider, captures=True) as made:
        binding = made.instance.binding
        assert binding is not None

        def run_four_rows_as_two() -> np.ndarray:
            buffers = binding.sets[0]
            two, four = (binding.bind(rows, buffers, is_graph=True) for rows in (2, 4))
            wrong = BoundRun(four.session, four.binding, two.options, two.graph_id)
            x = np.arange(16, dtype=np.float32).reshape(4, 4) + 1
            binding.poison(buffers, [x])
            return binding.finish(binding.enqueue(batch_of((x,)), buffers, wrong)).outputs[0].copy()

        y = made.instance.call(run_four_rows_as_two)
        x = np.arange(16, dtype=np.float32).reshape(4, 4) + 1
        assert np.array_equal(y[:2], x[:2])
        assert not np.array_equal(y[2:], x[2:]), "rows that the captured graph does not have"
        all_sizes_are_right(made)


@contextmanager
def other_set_poisoned(made: OnDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Overwrite the buffers of the other set before each run: the inputs always, the outputs two times in three.

    The writes are enqueued between the copies of a batch to the device and its run, each as soon as the overwritten
    data has been read. Two batches therefore stay in flight: rows are copied in during the previous run and, if its
    outputs are spared, answers are copied out during the next run.
    """
    streams, binding = made.instance.streams, made.instance.binding
    assert binding is not None
    device, record, (first, second), turn = streams.device, streams.device.record, binding.sets, count()
    others = {first.copied_in: second, second.copied_in: first}
    nbytes = first.staging[0].nbytes  # also of the output, because the model returns its input
    # A copy from pageable memory would wait for the stream.
    poison = made.instance.call(lambda: device.allocate_host(nbytes))
    poison.fill(0xFF)

    def record_behind_poison(event: int, stream: int) -> None:
        other = others.get(event)
        if other is not None:
            device.make_wait(stream, other.computed)
            device.copy_in(other.inputs[0], poison, stream)
            if next(turn) % 3:
                device.make_wait(stream, other.copied_out)
                device.copy_in(other.outputs[0], poison, stream)
        record(event, stream)

    with monkeypatch.context() as patched:
        patched.setattr(device, "record", record_behind_poison)
        try:
            yield
        finally:
            made.instance.call(lambda: device.free_host(poison))


def mixed_rows(made: OnDevice, requests: int) -> int:
    """Send random requests, one or two per batch with two batches in flight. Returns the number of wrong answers."""
    drawn, wrong, sent = random.Random(0), 0, 0
    waiting: deque[tuple[list[np.ndarray], Future[BatchResult | Exception]]] = deque()

    def land() -> int:
        parts, future = waiting.popleft()
        (y,) = landed(future)
        ends = np.cumsum([len(part) for part in parts])[:-1]
        return sum(not np.array_equal(got, part) for got, part in zip(np.split(y, ends), parts, strict=True))

    while sent < requests:
        parts = []
        for _ in range(min(drawn.randint(1, 2), requests - sent)):
            rows = np.arange(drawn.randint(1, SIZES[-1] // 2), dtype=np.float32)[:, None] / 16
            parts.append(np.full((len(rows), 4), sent, np.float32) + rows)
            sent += 1
        if len(waiting) == 2:
            wrong += land()
        batch = batch_of(*[(part,) for part in parts], bucket=bucket_for(sum(map(len, parts))))
        waiting.append((parts, made.start(batch)))
    while waiting:
        wrong += land()
    return wrong


def test_overlapping_buffer_sets_never_mix_rows(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = builders.identity(tmp_path / "m.onnx")
    with on_device(path, place.make(), provider=place.provider, captures=True) as made:
        with other_set_poisoned(made, monkeypatch):
            assert mixed_rows(made, place.times) == 0
        counts = made.instance.counts
        assert counts.replayed > place.times / 2
        assert (counts.bound, counts.plain) == (0, {})


def test_rows_of_the_other_set_are_detected_on_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Crossed(HostDevice):
        """A device that sometimes replays the graph of the other set."""

        is_crossed = False
        replays = 0

        def _choose_binding(self, bound: BoundRun) -> ort.IOBinding:
            self.replays += 1
            if not self.is_crossed or bound.graph_id is None or self.replays % 50:
                return super()._choose_binding(bound)
            return self._graphs[bound.session][bound.graph_id ^ 1].captured

    device = Crossed(pace=Pace.ANY)
    with on_device(builders.identity(tmp_path / "m.onnx"), device, captures=True) as made:
        device.is_crossed = True
        with other_set_poisoned(made, monkeypatch):
            assert mixed_rows(made, 500) > 0


def served_without_replay(loaded: LoadedModel, made: OnDevice) -> str:
    """Check that a model whose requested capture failed is served without replay. Returns the reported reason."""
    why = loaded.on_device.no_replay_because
    assert why
    assert describe_properties(loaded, SIZES[-1])["graph_replay"] == f"none: {why}"
    assert (loaded.on_device.sizes, loaded.on_device.replayed) == (SIZES, ())
    all_sizes_are_right(made)
    counts = made.instance.counts
    assert (counts.captured, counts.replayed) == (0, 0)
    assert counts.bound >= SIZES[-1]
    assert not made.instance.lost
    return why


@pytest.mark.parametrize(
    ("build", "expected_reason"),
    [
        (gpu_models.counting, "capture failed|trial"),
        (partial(builders.slow, steps=3), "Loop|control flow"),
    ],
    ids=["NonZero", "Loop"],
)
def test_model_whose_trial_capture_fails_is_served_without_replay(
    place: Place, tmp_path: Path, build: Callable[[Path], Path], expected_reason: str
) -> None:
    path = build(tmp_path / "m.onnx")
    with loaded_on(place, path, buckets=SIZES, graph_replay=True, batched=True) as (loaded, made):
        assert re.search(expected_reason, served_without_replay(loaded, made))


def test_capture_failure_after_its_trial_on_host_memory_is_served(host: Place, tmp_path: Path) -> None:
    """The failure occurs in the server's own process, where on a GPU it might end the process."""

    class Careless(CaptureTrials):
        def why_not(self, request: TrialRequest, progress: Progress) -> str:
            return ""

    path = gpu_models.counting(tmp_path / "m.onnx")
    with loaded_on(host, path, Careless(), buckets=SIZES, graph_replay=True, batched=True) as (loaded, made):
        why = served_without_replay(loaded, made)
        assert why.startswith("1: its capture failed: CUDA failure 900: operation not permitted when stream is")
        assert made.instance.counts.not_captured == {"failed": len(SIZES)}


def test_model_whose_trial_capture_succeeds_is_replayed(place: Place, tmp_path: Path) -> None:
    path = gpu_models.mlp(tmp_path / "m.onnx", layers=4, width=64)
    with loaded_on(place, path, buckets=SIZES, graph_replay=True) as (loaded, made):
        assert loaded.on_device.replayed == SIZES, loaded.on_device
        all_sizes_are_right(made)
        assert made.instance.counts.replayed >= SIZES[-1]


@both_ways
def test_provider_with_one_graph_per_session_returns_each_request_its_rows(
    one_graph_per_session: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    place = one_graph_per_session
    # TensorRT decides about the use of TF32.
    path = gpu_models.mlp(tmp_path / "n.onnx", layers=4, width=64, dtype=np.float16)
    with loaded_on(place, path, buckets=SIZES, graph_replay=captures) as (loaded, made):
        assert loaded.on_device.sizes == SIZES, loaded.on_device
        assert loaded.on_device.replayed == (SIZES if captures else ()), loaded.on_device
        all_sizes_are_right(made)
    with loaded_on(place, builders.identity(tmp_path / "m.onnx"), buckets=SIZES, graph_replay=captures) as (_, made):
        with other_set_poisoned(made, monkeypatch):
            assert mixed_rows(made, place.times) == 0
        counts = made.instance.counts
        assert (counts.replayed if captures else counts.bound) > place.times / 2


class Cramped:
    """A session that runs out of memory above a number of rows, with the error of ONNX Runtime's arena."""

    def __init__(self, session: ort.InferenceSession, most_rows: int) -> None:
        self._session = session
        self._most_rows = most_rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, names: Sequence[str], feeds: Mapping[str, np.ndarray], options: Any = None) -> Any:
        (x,) = feeds.values()
        if len(x) > self._most_rows:
            raise RuntimeError(
                f"BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size {x.nbytes}"
            )
        return self._session.run(names, feeds, options)


def test_batch_that_runs_out_of_memory_is_halved_for_good(place: Place, tmp_path: Path) -> None:
    """A batcher runs batches above the sizes with buffers, for which ONNX Runtime allocates memory.

    On a GPU 8,192 rows of 4 KiB take at least 104 MiB (input, two layers, weights), a quarter of the rows 32 MiB.
    """
    width, most_rows, requests = (1024 if place.is_gpu else 16), 8192, 8
    path = gpu_models.mlp(tmp_path / "m.onnx", layers=2, width=width)
    options = {**place.options, "gpu_mem_limit": str(80 * 2**20)} if place.is_gpu else {}

    def cramp(session: ort.InferenceSession) -> Any:
        return session if place.is_gpu else Cramped(session, most_rows // 4)

    with on_device(path, place.make(), provider=place.provider, options=options, wrap=cramp) as made:
        shape = (most_rows // requests, width)
        parts = [np.random.default_rng(seed).standard_normal(shape).astype(np.float32) for seed in range(requests)]

        async def offer() -> None:
            batcher = batcher_of(made, BatchPolicy(most_rows, buckets=(1024, 2048, 4096, 8192)))

            async def all_are_answered() -> None:
                asked = [submit(batcher, (x,), len(x), None, Timing(time.monotonic_ns())) for x in parts]
                for x, (y,) in zip(parts, await asyncio.gather(*asked), strict=True):
                    assert is_near(y, made.plainly((x,))[0], DataType.FP32)

            await all_are_answered()
            failed = batcher.learned().decisions.out_of_memory
            assert failed
            assert batcher.learned().decisions.retries >= 2
            assert batcher.max_rows in (1024, 2048, 4096)
            await all_are_answered()
            assert batcher.learned().decisions.out_of_memory == failed, "batches that are small enough find memory"
            await batcher.close()

        asyncio.run(offer())
        all_sizes_are_right(made)
        assert not made.instance.lost


def batcher_of(made: OnDevice, policy: BatchPolicy) -> Batcher:
    """A batcher for the running loop, created as the server does."""
    loop = asyncio.get_running_loop()
    runs = BatchRuns(
        [made.instance],
        policy,
        RequestQueue([], []),
        shared=SharedThreads(made.instance.depth, loop),
        threads=1,
        inline=None,
        loop=loop,
        clock=time.monotonic_ns,
        observe_batch=lambda *_: None,
        depth=made.instance.depth,
    )
    return Batcher(runs, QueueLimits(2**20, 2**32), time.monotonic_ns)


EXPORTER = """
import sys

import numpy as np
from cupy.cuda import runtime

content = np.arange(4096, dtype=np.uint8)
address = runtime.malloc(4096)
runtime.memcpy(address, content.ctypes.data, 4096, runtime.memcpyHostToDevice)
print(runtime.ipcGetMemHandle(address).hex(), flush=True)
sys.stdin.readline()
runtime.memcpy(content.ctypes.data, address, 4096, runtime.memcpyDeviceToHost)
print(content.tobytes().hex(), flush=True)
"""


@pytest.mark.gpu
def test_memory_of_another_process_is_accessed_within_its_bounds(gpu: Place) -> None:
    devices = Devices({CUDA: DeviceProvider(lambda _: gpu.make())})
    content = bytes(range(256)) * 16
    with subprocess.Popen(
        [sys.executable, "-c", EXPORTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        handle = bytes.fromhex(owner.stdout.readline())
        region = open_region(devices, "r", handle, 0, 4096)
        assert region.read(100, 200) == content[100:300]
        region.write(4000, b"x" * 96)
        with pytest.raises(ServeError, match=r"expected byte_size within the \d+ bytes of its memory, got"):
            open_region(devices, "all", handle, 0, 2**40)
        region.close()
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert bytes.fromhex(owner.stdout.readline()) == content[:4000] + b"x" * 96
    with pytest.raises(ServeError, match="failed to open CUDA IPC handle"):
        open_region(devices, "none", b"\1" * 64, 0, 8)


@pytest.mark.gpu
@both_ways
@pytest.mark.parametrize("strategy", ["oldest", "direct"])
def test_states_of_sequences_stay_on_the_gpu(gpu: Place, tmp_path: Path, strategy: str, captures: bool) -> None:
    path = sequences.accumulate(tmp_path / "m.onnx")
    draw = random.Random(0)
    chosen: dict[str, Any] = {"execution_providers": ["cuda"], "graph_replay": captures}

    async def send() -> None:
        async with serving_on(None, path, strategy=strategy, **chosen) as served:
            assert where(served) == "on cuda:0"
            for first in (1, 101):
                await asyncio.gather(*[one_sequence(served, first + each, 20, draw) for each in range(32)])

    asyncio.run(send())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("build", "live", "first"),
    [(sequences.growing, growing_sequence, [0]), (sequences.history, history_sequence, [0, 4])],
    ids=["kernels", "copies"],
)
@pytest.mark.parametrize("strategy", ["oldest", "direct"])
def test_growing_states_stay_on_the_gpu(
    gpu: Place, tmp_path: Path, strategy: str, build: Any, live: Any, first: list[int]
) -> None:
    states = [{"input": "PAST", "output": "PRESENT", "initial_dims": first}]
    chosen: dict[str, Any] = {"execution_providers": ["cuda"], "states": states, "controls": {}, "instances": 2}
    draw = random.Random(0)

    async def send() -> None:
        async with serving_on(None, build(tmp_path / "m.onnx"), strategy=strategy, **chosen) as served:
            assert where(served) == "on cuda:0"
            await asyncio.gather(*[live(served, name, draw.randint(1, 60), draw) for name in range(1, 33)])

    asyncio.run(send())


@pytest.mark.gpu
def test_hundred_loads_leave_no_memory_allocated(gpu: Place, tmp_path: Path) -> None:
    path = gpu_models.mlp(tmp_path / "m.onnx", layers=8, width=1024)  # 32 MiB of weights
    device = gpu.make()
    device.use()
    free: list[int] = []
    for number in range(100):
        with on_device(path, device, provider=CUDA, sizes=(8,), captures=number % 2 == 1):
            pass
        gc.collect()
        free.append(device.memory().free_bytes)
    assert free[5] - free[-1] < 32 * 2**20, [f"{size >> 20} MiB" for size in free]
