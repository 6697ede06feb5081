"""Instances on devices, of host memory where no GPU is needed: opened by themselves, or by the server's own loader."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from ortserve.config.model import ModelOptions
from ortserve.config.session import SessionSettings
from ortserve.core.batch import Arrays, Batch, BatchResult
from ortserve.core.signature import ModelSignature
from ortserve.engine.device.devices import Devices, OpenDevice
from ortserve.engine.device.gate import CaptureGate
from ortserve.engine.device.host import HostDevice
from ortserve.engine.device.instance import DeviceInstance
from ortserve.engine.device.lane import Lane
from ortserve.engine.device.preparation import Prepared
from ortserve.engine.device.protocol import BoundRun, Device
from ortserve.engine.model_signature import read_signature
from ortserve.engine.placement import read_operators
from ortserve.engine.plain_run import PlainRun, make_plain_run
from ortserve.engine.provider_options import CPU, CUDA, make_provider_options
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.run_options import run_options
from ortserve.engine.runtime import Runtime
from ortserve.engine.session import SessionOptions, open_session
from ortserve.registry.capture_trial import CaptureTrials
from ortserve.registry.loaded import LoadedModel
from ortserve.registry.loader import load_model
from ortserve.registry.synthetic import synthetic_inputs

SIZES = (1, 2, 4, 8)
_TELL_THE_HOST: Final = frozenset({"NonZero"})


class StrictDevice(HostDevice):
    """Host memory that captures nothing which tells the host something while it runs, as CUDA does not either."""

    def run(self, bound: BoundRun, stream: int) -> None:
        if bound.graph_id is not None and bound.graph_id not in self.captured:
            operators = frozenset().union(*read_operators(bound.session).values())
            if operators & _TELL_THE_HOST:
                raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")
        super().run(bound, stream)


STRICT_TRIAL: Final = (
    sys.executable,
    "-c",
    f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from device_models import StrictDevice
from ortserve.registry.capture_trial_child import main
main({{{CPU!r}: StrictDevice}})
""",
)
"""Starts the process in which captures are tried, with such a device for the CPU."""


@dataclass(frozen=True)
class Place:
    """Where a test runs.

    Attributes:
        provider: The execution provider, in full.
        make: Makes its device.
        times: How often to do what is done often.
        trials: Try captures there, in another process.
        options: Of the provider.
    """

    provider: str
    make: Callable[[], Device]
    times: int
    trials: CaptureTrials
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return self.provider == CUDA


@dataclass
class OnDevice:
    """An instance on a device, what became of its batch sizes, and the same model run plainly."""

    instance: DeviceInstance
    opened: OpenDevice
    prepared: Prepared
    signature: ModelSignature
    plainly: Callable[[Arrays], list[np.ndarray]]

    def start(self, batch: Batch) -> Future[BatchResult | Exception]:
        landed: Future[BatchResult | Exception] = Future()
        self.instance.start(batch, landed.set_result)
        return landed


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
) -> Iterator[OnDevice]:
    """A model on a device; ``options`` are of its execution provider, and ``wrap`` may stand before its session."""
    opened = Devices({provider: lambda _: device}).open(provider, device.device_id)
    assert isinstance(opened, OpenDevice)
    lane = Lane(opened)
    told = {**make_provider_options(provider, options), **lane.provider_options(captures=captures)}
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(provider, options=told), 1))
    signature = read_signature(session, path)
    instance = DeviceInstance(
        wrap(session),
        signature,
        lane,
        name="m/1",
        clock=time.monotonic_ns,
        run_options=run_options(SessionSettings(), captures=captures),
        captures=captures,
    )
    del session
    try:
        prepared = Prepared()
        if is_prepared:
            prepared = instance.prepare(sizes, lambda rows, seed: synthetic_inputs(signature, rows, seed))
        yield OnDevice(instance, opened, prepared, signature, on_the_cpu(path, signature))
    finally:
        instance.close()


@contextmanager
def loaded_on(
    place: Place, path: Path, trials: CaptureTrials | None = None, **options: Any
) -> Iterator[tuple[LoadedModel, OnDevice]]:
    """A model as the server's own loader makes it; ``trials`` are the place's where none are given."""
    runtime = Runtime(devices=Devices({place.provider: lambda _: place.make()}))
    wish = {place.provider: dict(place.options)}
    chosen = ModelOptions(execution_providers=(wish,), **{"warmup_s": 0.2, "intra_op_threads": 1} | options)
    loaded = load_model(path, "m/1", chosen, time.monotonic_ns, None, runtime, trials or place.trials)
    (instance,) = loaded.instances
    try:
        assert isinstance(instance, DeviceInstance)
        prepared = Prepared(loaded.on_device.sizes, loaded.on_device.replayed, loaded.on_device.no_buffers_because)
        plainly = on_the_cpu(path, loaded.signature)
        yield loaded, OnDevice(instance, instance.lane.opened, prepared, loaded.signature, plainly)
    finally:
        instance.close()


def on_the_cpu(path: Path, signature: ModelSignature) -> PlainRun:
    """The same model in a session of its own, on host arrays."""
    return make_plain_run(open_session(path, "plain", SessionOptions(ProviderChoice(CPU), 1)), signature)


def batch_of(*parts: Arrays, bucket: int = 0) -> Batch:
    """The requests ``parts``, each with its inputs, in one batch."""
    rows = sum(len(part[0]) for part in parts)
    return Batch(tuple(zip(*parts, strict=True)), rows, bucket or rows)


def wait_for_capture(gate: CaptureGate) -> None:
    """Until somebody waits to have the gate for himself."""
    ends = time.monotonic() + 30
    while not gate._waiting_alone:
        assert time.monotonic() < ends
        time.sleep(0.001)


def bucket_for(rows: int, sizes: tuple[int, ...] = SIZES) -> int:
    return next(size for size in sizes if size >= rows)


def landed(future: Future[BatchResult | Exception]) -> Arrays:
    """The outputs of a batch, or its error raised."""
    outcome = future.result(timeout=30)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome.outputs
