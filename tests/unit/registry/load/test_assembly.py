"""Served models share the host's processors; runs on other devices neither occupy nor wait for them."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from fakes.host_device import HostDevice
from fakes.inflight import submit_to
from models import builders, sequences
from ortserve.config.model import ModelOptions
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import NO_TERMS, InflightRequest
from ortserve.core.sequence import SequencePart
from ortserve.core.timing import Timing
from ortserve.device.devices import DeviceProvider, DeviceRuntime, Devices
from ortserve.device.protocol import BoundRun
from ortserve.engine.provider_options import CPU
from ortserve.registry.load.assembly import Assembly
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.repository.configuration import Configuration
from ortserve.registry.served_model import ServedModel
from ortserve.telemetry.metrics import Metrics

X = np.ones((1, 4), np.float32)


class HeldDevice(HostDevice):
    """Runs last until the test releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.runs = threading.Semaphore(0)

    def run(self, bound: BoundRun, stream: int) -> None:
        if not self.may_go_on.is_set():
            self.runs.release()
            self.may_go_on.wait(30)
        super().run(bound, stream)


class FullDevice(HostDevice):
    """The next ``failing`` runs find too little memory."""

    failing = 0

    def run(self, bound: BoundRun, stream: int) -> None:
        if self.failing:
            self.failing -= 1
            raise RuntimeError("CUDA failure 2: out of memory")
        super().run(bound, stream)


def serve(
    assembly: Assembly, path: Path, device: HostDevice | None, metrics: Metrics | None = None, **chosen: Any
) -> ServedModel:
    runtime = (
        DeviceRuntime(devices=Devices({CPU: DeviceProvider(lambda number: device)})) if device else DeviceRuntime()
    )
    options = ModelOptions(**{"warmup_s": 0.1, "max_rows": 1, "intra_op_threads": 1} | chosen)
    loaded = load_model(path, path.stem, options, None, runtime)
    metrics = metrics or Metrics(CollectorRegistry())
    return assembly.serve(loaded, Configuration(options), metrics.model(path.stem, "1"))


async def test_runs_on_a_device_hold_and_await_no_processor(tmp_path: Path) -> None:
    assembly = Assembly(asyncio.get_running_loop(), time.monotonic_ns, processors=1)
    device = HeldDevice()
    on_device = serve(assembly, builders.identity(tmp_path / "device.onnx"), device, instances=2)
    on_host = serve(assembly, builders.identity(tmp_path / "host.onnx"), None)
    device.may_go_on.clear()
    held = [submit_to(on_device, (X,), 1), submit_to(on_device, (X,), 1)]
    for _ in held:
        assert await asyncio.to_thread(device.runs.acquire, timeout=10), "both instances run, with one processor"
    await asyncio.wait_for(submit_to(on_host, (X,), 1), 10)
    assert not any(future.done() for future in held)
    device.may_go_on.set()
    for (y,) in await asyncio.gather(*held):
        np.testing.assert_array_equal(y, X)
    for served in (on_device, on_host):
        await served.close()


async def test_requested_replay_is_counted_for_a_model_without_buffers(tmp_path: Path) -> None:
    assembly = Assembly(asyncio.get_running_loop(), time.monotonic_ns, processors=1)
    chosen: dict[str, Any] = {"graph_replay": True, "instances": 2}
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for name, device, has_buffers in [("off", HostDevice(), False), ("host", None, True)]:
        options = {**chosen, "device_buffers": has_buffers}
        served = serve(assembly, builders.identity(tmp_path / f"{name}.onnx"), device, metrics, **options)
        await submit_to(served, (X,), 1)
        await submit_to(served, (X,), 1)
        await served.close()

    def counted(model: str, name: str, **label: str) -> float | None:
        return registry.get_sample_value(f"ortserve_device_{name}_total", {"model": model, "version": "1"} | label)

    assert counted("off", "captures", result="no_buffers") == 2
    assert counted("off", "batches", way="plain_unbound") == 2
    # A model on the CPU has no graphs and no device buffers.
    assert counted("host", "captures", result="no_buffers") is None
    assert counted("host", "batches", way="plain_unbound") is None


async def test_text_bytes_of_a_run_are_bounded(tmp_path: Path) -> None:
    builders.identity(tmp_path / "texts.onnx", DataType.BYTES, ("batch", 1))
    assembly = Assembly(asyncio.get_running_loop(), time.monotonic_ns, processors=1)
    metrics = Metrics(CollectorRegistry())
    served = serve(assembly, tmp_path / "texts.onnx", None, metrics, max_rows=64)
    try:
        long = np.full((64, 1), "a" * 256 * 1024, object)  # 16 MiB
        timings = [Timing(time.monotonic_ns()) for _ in range(2)]
        (one,), (other,) = await asyncio.gather(*[submit_to(served, (long,), 64, timing) for timing in timings])
        assert (one == long).all()
        assert (other == long).all()
        batches = dict(metrics.model("texts", "1").batches)
        assert max(batches) <= 2, "rows of 256 KiB, of which a run takes 512 KiB"
        assert sum(rows * series.count for rows, series in batches.items()) == 128
        short = np.full((64, 1), "a", object)
        (answer,) = await submit_to(served, (short,), 64, timings[0])
        assert (answer == short).all()
        assert metrics.model("texts", "1").batches[64].count == 1
    finally:
        await served.close()


@pytest.mark.parametrize(
    ("build", "chosen", "is_checked"),
    [
        (builders.mlp, {}, False),
        (builders.mlp, {"row_checks": True}, True),
        (builders.mlp, {"row_checks": True, "max_rows": 1}, False),
        (builders.quantized_counts, {"batched": True}, True),
        (builders.quantized_counts, {"batched": True, "row_checks": False}, False),
        (builders.quantized_counts, {"row_checks": True}, False),
    ],
    ids=["proven", "asked for", "single rows", "configured", "refused", "not batched"],
)
async def test_rows_are_checked_if_unproven_or_configured(
    tmp_path: Path, build: Callable[[Path], Path], chosen: dict[str, Any], is_checked: bool
) -> None:
    assembly = Assembly(asyncio.get_running_loop(), time.monotonic_ns, processors=1)
    metrics = Metrics(CollectorRegistry())
    path = build(tmp_path / "model.onnx")
    served = serve(assembly, path, None, metrics, **{"max_rows": 4} | chosen)
    assert bool(metrics.model("model", "1").batching.read().row_checks) is is_checked
    await served.close()


async def test_a_maximum_of_rows_that_warm_up_underestimated_is_corrected(tmp_path: Path) -> None:
    """As after a warm-up beside other work. A run of 64 rows of this model takes about as long as one of 2."""
    assembly = Assembly(asyncio.get_running_loop(), time.monotonic_ns, processors=1)
    options = ModelOptions(warmup_s=0.1, intra_op_threads=1)
    loaded = load_model(builders.heavy(tmp_path / "heavy.onnx", steps=1), "heavy", options)
    loaded = replace(loaded, warm_up=replace(loaded.warm_up, max_rows=1))
    served = assembly.serve(loaded, Configuration(options), Metrics(CollectorRegistry()).model("heavy", "1"))
    rows = np.random.default_rng(0).standard_normal((200, 1, 64)).astype(np.float32)
    assert served.properties["batching"].startswith("up to 1 rows run together")
    async with asyncio.timeout(60):
        while served.max_rows < 4:
            answers = await asyncio.gather(*(submit_to(served, (row,), 1) for row in rows))
    for (answer,), (again,) in zip(answers, [await submit_to(served, (row,), 1) for row in rows], strict=True):
        np.testing.assert_allclose(answer, again, rtol=1e-3, atol=1e-4)
    assert served.properties["batching"].startswith(f"up to {served.max_rows} rows run together, proven")
    assert served.learned().max_rows == served.max_rows
    await served.close()


async def test_rows_of_direct_sequences_keep_their_places_after_a_lack_of_memory(tmp_path: Path) -> None:
    assembly = Assembly(asyncio.get_running_loop(), time.monotonic_ns, processors=1)
    device = FullDevice()
    direct: dict[str, Any] = {
        "strategy": "direct",
        "controls": {"READY": {"kind": "ready"}},
        "states": [{"input": "STATE", "output": "NEXT"}],
    }
    options: dict[str, Any] = {"batched": True, "max_rows": 4, "row_checks": False, "sequences": direct}
    served = serve(assembly, sequences.whole_batch(tmp_path / "whole.onnx"), device, **options)
    places = []
    for is_start in (True, False):
        requests = [InflightRequest(Timing(0), (np.array([[7]], np.int32),), 1) for _ in range(3)]
        for name, request in enumerate(requests, start=1):
            served.submit_part(request, NO_TERMS, SequencePart(name, is_start))
        places.append([[int(output[0, 0]) for output in await request] for request in requests])
        device.failing = 1
    assert places == [[[7, 4, 1110, 7770]] * 3, [[14, 1, 10, 70], [14, 2, 100, 700], [14, 3, 1000, 7000]]]
    await served.close()
