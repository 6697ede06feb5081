"""Instances on devices, opened directly or by the server's loader; without a GPU the device is host memory."""

import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from fakes.host_device import HostDevice
from ortserve.config.model import ModelOptions
from ortserve.config.session import SessionSettings
from ortserve.core.batch import Arrays, Batch, BatchResult
from ortserve.core.signature import ModelSignature
from ortserve.device.binding import InstanceParts
from ortserve.device.buffers import InstanceStreams
from ortserve.device.capture_lock import CaptureLock
from ortserve.device.cuda import CudaDevice
from ortserve.device.devices import DEVICE_PROVIDERS, DeviceProvider, DeviceRuntime, Devices, OpenDevice
from ortserve.device.graph_sessions import InstanceSessions
from ortserve.device.instance import DeviceInstance
from ortserve.device.instance_batches import InstanceBatches
from ortserve.device.preparation import PreparedBuffers
from ortserve.device.protocol import BoundRun, Device
from ortserve.engine.model_signature import read_signature
from ortserve.engine.placement import read_operators
from ortserve.engine.provider_options import CPU, make_provider_options
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.runs import PlainRun, run_options
from ortserve.engine.session import SessionOptions, open_session
from ortserve.model_file.reading import read_model
from ortserve.registry.load.capture_trial import CaptureTrial, CaptureTrials, TrialRequest
from ortserve.registry.load.inputs import InputGenerator
from ortserve.registry.load.loaded_model import LoadedModel
from ortserve.registry.load.pipeline import load_model

SIZES = (1, 2, 4, 8)
_TELL_THE_HOST: Final = frozenset({"NonZero"})


class StrictDevice(HostDevice):
    """Host memory that, like CUDA, cannot capture operations that report to the host during a run."""

    def run(self, bound: BoundRun, stream: int) -> None:
        if bound.graph_id is not None and bound.graph_id not in self.captured:
            operators = frozenset().union(*read_operators(bound.session).values())
            if operators & _TELL_THE_HOST:
                raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")
        super().run(bound, stream)


def strict_trials(*, one_graph_per_session: bool = False) -> CaptureTrials:
    """Capture trials on a ``StrictDevice`` for the CPU. Their process must be able to import this module."""
    return CaptureTrials(partial(_make_strict_trial, one_graph_per_session), timeout_s=60)


def _make_strict_trial(one_graph_per_session: bool, request: TrialRequest) -> CaptureTrial:
    device = StrictDevice(one_graph_per_session=one_graph_per_session)
    return CaptureTrial(request, {CPU: provider_of(CPU, device)})


@dataclass(frozen=True)
class Place:
    """The device on which a test runs.

    Attributes:
        provider: The full name of the execution provider.
        make: Creates its device.
        times: Number of repetitions in tests that repeat an operation.
        trials: Runs capture trials for this device in another process.
        options: Options of the provider.
    """

    provider: str
    make: Callable[[], Device]
    times: int
    trials: CaptureTrials
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return self.provider != CPU


@dataclass
class OnDevice:
    """An instance on a device, the outcome of its preparation, and a plain run of the same model."""

    instance: DeviceInstance
    opened: OpenDevice
    prepared: PreparedBuffers
    signature: ModelSignature
    plainly: Callable[[Arrays], list[np.ndarray]]

    def start(self, batch: Batch) -> Future[BatchResult | Exception]:
        landed: Future[BatchResult | Exception] = Future()
        self.instance.start(batch, landed.set_result)
        return landed


def provider_of(provider: str, device: Device) -> DeviceProvider:
    """The provider's use of this device: as in the server, or for host memory as the device states."""
    if isinstance(device, HostDevice):
        return DeviceProvider(lambda number: device, one_graph_per_session=device.one_graph_per_session)
    return replace(DEVICE_PROVIDERS.get(provider, DeviceProvider(CudaDevice)), make=lambda number: device)


def run_script(script: str, *arguments: str | Path) -> str:
    """Run a script in a separate process and return its output. It must exit with 0; it may corrupt its own process."""
    process = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@contextmanager
def on_device(
    path: Path,
    device: Device,
    *,
    provider: str = CPU,
    sizes: tuple[int, ...] = SIZES,
    captures: bool = False,
    is_prepared: bool = True,
    options: Mapping[str, str] = MappingProxyType({}),
    wrap: Callable[[ort.InferenceSession], ort.InferenceSession] = lambda session: session,
    use: DeviceProvider | None = None,
    shrink_arenas: Sequence[str] = (),
) -> Iterator[OnDevice]:
    """A model on a device. ``options`` are options of its execution provider; ``wrap`` may wrap its sessions.

    ``use`` overrides the server's use of the device.
    """
    use = use or provider_of(provider, device)
    opened = Devices({provider: use}).open(provider, device.device_id)
    assert isinstance(opened, OpenDevice)
    streams = InstanceStreams(opened, use)

    def open_one(*, captures: bool) -> ort.InferenceSession:
        passed_on = {**make_provider_options(provider, options), **streams.provider_options(captures=captures)}
        return wrap(open_session(path, "m/1", SessionOptions(ProviderChoice(provider, options=passed_on), 1)))

    one_each = captures and use.one_graph_per_session
    session = open_one(captures=captures and not one_each)
    signature = read_signature(session, read_model(path))
    open_for_graph = partial(open_one, captures=True) if one_each else None
    parts = InstanceParts(
        InstanceSessions(session, captures=captures and not one_each, open_for_graph=open_for_graph),
        signature,
        streams,
        opened.ledger.open("m/1"),
        time.monotonic_ns,
        run_options(SessionSettings()),
        shrink_arenas=shrink_arenas,
    )
    instance = DeviceInstance(InstanceBatches(parts), "m/1")
    del session
    try:
        prepared = PreparedBuffers()
        if is_prepared:
            prepared = instance.prepare(sizes, InputGenerator(signature).generate)
        yield OnDevice(instance, opened, prepared, signature, on_the_cpu(path, signature))
    finally:
        instance.close()


@contextmanager
def loaded_on(
    place: Place, path: Path, trials: CaptureTrials | None = None, **options: Any
) -> Iterator[tuple[LoadedModel, OnDevice]]:
    """A model from the server's own loader; ``trials`` override those of the place."""
    runtime = DeviceRuntime(devices=Devices({place.provider: provider_of(place.provider, place.make())}))
    wish = {place.provider: dict(place.options)}
    chosen = ModelOptions(execution_providers=(wish,), **{"warmup_s": 0.2, "intra_op_threads": 1} | options)
    loaded = load_model(path, "m/1", chosen, None, runtime, trials or place.trials)
    (instance,) = loaded.instances
    try:
        assert isinstance(instance, DeviceInstance)
        prepared = PreparedBuffers(
            loaded.on_device.sizes, loaded.on_device.replayed, loaded.on_device.no_buffers_because
        )
        plainly = on_the_cpu(path, loaded.signature)
        yield loaded, OnDevice(instance, instance.streams.opened, prepared, loaded.signature, plainly)
    finally:
        instance.close()


def on_the_cpu(path: Path, signature: ModelSignature) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """Returns a plain run of the same model in a separate session on host arrays."""
    return PlainRun(open_session(path, "plain", SessionOptions(ProviderChoice(CPU), 1)), signature).run


def batch_of(*parts: Arrays, bucket: int = 0) -> Batch:
    """One batch of the requests ``parts``, each with its inputs."""
    rows = sum(len(part[0]) for part in parts)
    return Batch(tuple(zip(*parts, strict=True)), rows, bucket or rows)


def wait_for_capture(lock: CaptureLock) -> None:
    """Wait until a thread requests the exclusive lock."""
    ends = time.monotonic() + 30
    while not lock._exclusive_requests:
        assert time.monotonic() < ends
        time.sleep(0.001)


def bucket_for(rows: int, sizes: tuple[int, ...] = SIZES) -> int:
    return next(size for size in sizes if size >= rows)


def landed(future: Future[BatchResult | Exception]) -> Arrays:
    """Wait for the outputs of a batch, or raise its error."""
    outcome = future.result(timeout=30)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome.outputs


def numbered(rows: int, first: int, width: int = 4) -> np.ndarray:
    """Distinct rows that identify their request ``first``."""
    return np.arange(first * 1000, first * 1000 + rows * width, dtype=np.float32).reshape(rows, width)


def stream_of_requests(made: OnDevice, requests: int, seed: int = 0) -> int:
    """Keep two batches of one or two requests in flight. Returns the number of wrong rows."""
    drawn, wrong = random.Random(seed), 0
    waiting: deque[tuple[list[np.ndarray], Future[BatchResult | Exception]]] = deque()

    def land() -> int:
        parts, future = waiting.popleft()
        (outputs,) = landed(future)
        return int((outputs != np.concatenate(parts)).any(axis=1).sum())

    for number in range(requests):
        parts = [numbered(drawn.randint(1, 4), 2 * number + part) for part in range(drawn.randint(1, 2))]
        rows = sum(map(len, parts))
        batch = batch_of(*[(part,) for part in parts], bucket=bucket_for(rows))
        if len(waiting) == 2:
            wrong += land()
        waiting.append((parts, made.start(batch)))
    while waiting:
        wrong += land()
    return wrong
