"""Instances on devices of host memory, for tests of everything about devices that needs no GPU."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnxruntime as ort

from ortserve.config.session import SessionSettings
from ortserve.core.batch import Arrays, Batch, BatchResult
from ortserve.core.signature import ModelSignature
from ortserve.engine.device.devices import Devices, OpenDevice
from ortserve.engine.device.gate import CaptureGate
from ortserve.engine.device.graph_ids import NEITHER
from ortserve.engine.device.instance import DeviceInstance
from ortserve.engine.device.lane import Lane
from ortserve.engine.device.preparation import Prepared
from ortserve.engine.device.protocol import Device
from ortserve.engine.model_signature import read_signature
from ortserve.engine.plain_run import make_plain_run
from ortserve.engine.provider_options import CPU, CUDA
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session, run_options
from ortserve.registry.synthetic import synthetic_inputs

SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Place:
    """Where a test runs: the execution provider, what makes its device, and how often to do what is done often."""

    provider: str
    make: Callable[[], Device]
    times: int

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
    told = {**options, **lane.provider_options(captures=captures)}
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(provider, options=told), 1))
    signature = read_signature(session, path)
    plain = make_plain_run(open_session(path, "plain", SessionOptions(ProviderChoice(CPU), 1)), signature)
    instance = DeviceInstance(
        wrap(session),
        signature,
        lane,
        name="m/1",
        clock=time.monotonic_ns,
        run_options=run_options(SessionSettings(), graph_id=NEITHER if captures else None),
        captures=captures,
    )
    del session
    try:
        prepared = Prepared()
        if is_prepared:
            prepared = instance.prepare(sizes, lambda rows, seed: synthetic_inputs(signature, rows, seed))
        yield OnDevice(instance, opened, prepared, signature, plain)
    finally:
        instance.close()


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
