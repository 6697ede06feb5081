"""The interface of a device: memory, enqueued copies, events, the run of a session, and their errors.

Streams, events and memory addresses are integers, as in CUDA. Callers must treat enqueued work as incomplete until they
have waited for an event recorded after it. ``cuda`` implements the interface; tests implement it on host memory.
"""

import ctypes
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import onnxruntime as ort

from ortserve.engine.ort_errors import ORT_ERRORS, OUT_OF_MEMORY, run_error, without_paths
from ortserve.errors import DeviceLostError, OutOfMemoryError, ServeError

ALIGNMENT: Final = 256
"""The alignment of addresses that cudaMalloc returns, in bytes. Kernels may rely on it."""

DEVICE_ERRORS: Final = ORT_ERRORS
"""The exceptions of ONNX Runtime and of cupy, whose ``CUDARuntimeError`` is a ``RuntimeError``."""

# Errors after which every CUDA call of the process fails (CUDA runtime, cudaError: "the process must be terminated and
# relaunched"), by number and by name. Numbers from 900 on report interrupted captures; 46 reports a device that other
# processes use exclusively.
_LOST_NUMBERS: Final = (214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999)
_LOST: Final = re.compile(
    r"CUDA (?:failure|error)[ :]+(?:" + "|".join(map(str, _LOST_NUMBERS)) + r")\b|"
    r"cudaError(?:IllegalAddress|LaunchTimeout|ContextIsDestroyed|Assert|HardwareStackError|IllegalInstruction|"
    r"MisalignedAddress|InvalidAddressSpace|InvalidPc|LaunchFailure|ECCUncorrectable|NvlinkUncorrectable|"
    r"Contained|TensorMemoryLeak|MpsClientTerminated|ExternalDevice|Unknown\b)|"
    r"an illegal memory access|unspecified launch failure|device-side assert|uncorrectable ECC error"
)


@dataclass(frozen=True, slots=True)
class BoundRun:
    """A binding together with its session and run options, so that a graph's id is never used with another binding.

    Attributes:
        session: The session of the binding.
        binding: Binds one buffer set for one number of rows.
        options: Run options with the graph's id in the session.
        graph_id: The graph that is captured and replayed; None for a run without a graph.
    """

    session: ort.InferenceSession
    binding: ort.IOBinding
    options: ort.RunOptions
    graph_id: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Free and total memory of a device, over all processes."""

    free_bytes: int
    total_bytes: int


class Device(Protocol):
    """One device. A thread must call ``use`` once before it calls other methods; all may raise ``DEVICE_ERRORS``.

    Attributes:
        name: The name for operators, such as ``cuda:0``.
        ort_name: ONNX Runtime's name for the memory of the device in bindings.
        device_id: The number among the devices of its kind.
        pci_bus_id: The id in other libraries; empty if there is none.
    """

    name: str
    ort_name: str
    device_id: int
    pci_bus_id: str

    def use(self) -> None:
        """Select the device for the calling thread."""
        ...

    def memory(self) -> MemoryInfo: ...

    def allocate(self, nbytes: int) -> int:
        """Allocate ``nbytes`` bytes of device memory, at least 1, and return the address."""
        ...

    def free(self, address: int) -> None:
        """Free memory from ``allocate``. Enqueued work must no longer use it."""
        ...

    def allocate_host(self, nbytes: int) -> np.ndarray:
        """Allocate pinned host memory, as bytes. Only ``free_host`` may free it."""
        ...

    def free_host(self, block: np.ndarray) -> None:
        """Free memory from ``allocate_host``. No view of it may exist."""
        ...

    def make_stream(self) -> int:
        """Create a stream. Work in one stream runs in order; work in different streams runs in any order."""
        ...

    def destroy_stream(self, stream: int) -> None: ...

    def make_event(self, *, is_timed: bool = False) -> int: ...

    def destroy_event(self, event: int) -> None: ...

    def copy_in(self, address: int, source: np.ndarray, stream: int) -> None:
        """Enqueue a copy of a contiguous array to the device. The array must not change before the copy is complete."""
        ...

    def copy_out(self, target: np.ndarray, address: int, stream: int) -> None:
        """Enqueue a copy from the device to a contiguous array, which is valid once the copy is complete."""
        ...

    def copy_within(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from one device address to another. The ranges must not overlap."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Let the event represent all work enqueued in the stream so far. It replaces an earlier recording."""
        ...

    def make_wait(self, stream: int, event: int) -> None:
        """Let work enqueued in the stream from now on wait for the work that the event represents now."""
        ...

    def wait(self, event: int) -> None:
        """Block the calling thread until the work of the event is complete. Releases the interpreter lock."""
        ...

    def end_capture(self, stream: int) -> None:
        """End a failed capture of the stream, which would block all later work. No-op without a capture.

        The thread that began the capture must call it.
        """
        ...

    def open_shared(self, handle: bytes) -> int:
        """Open memory that another process shares by this handle, and return its address."""
        ...

    def close_shared(self, address: int) -> None:
        """Close memory from ``open_shared``. Enqueued work must no longer use it."""
        ...

    def nbytes_from(self, address: int) -> int:
        """Bytes from this address to the end of its allocation."""
        ...

    def elapsed_ns(self, first: int, second: int) -> int:
        """Nanoseconds between two timed events, both complete."""
        ...

    def run(self, bound: BoundRun, stream: int) -> None:
        """Enqueue a run of a session whose compute stream is ``stream``.

        With a graph id, the first runs capture. Later runs replay the captured graph and ignore the binding. The call
        waits for a replay by TensorRT's provider, and for a run whose options do not let it return early; all other
        runs are only enqueued.
        """
        ...


def release_all(*steps: Callable[[], object]) -> None:
    """Run each step even if others fail. Steps on a lost device fail, but the host's resources must still be freed.

    ``ExitStack`` does not fit: its errors form reference cycles, which keep the frames of all callers and the session
    alive.
    """
    for step in steps:
        with suppress(*DEVICE_ERRORS):
            step()


def never_free(owned: object) -> None:
    """Leak an object, so that its destructor never runs, even at the end of the process.

    This is for sessions with captured graphs on a lost device. ONNX Runtime's destructor of graphs throws if CUDA
    cannot destroy them (``CudaGraphSet::Clear``), and the exception would end the process in the middle of its drain.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))


def is_lost_error(error: Exception) -> bool:
    """Whether one of ``DEVICE_ERRORS`` reports that its device is lost."""
    return _LOST.search(without_paths(str(error))) is not None


def device_run_error(error: Exception, device: str) -> ServeError:
    """The error for callers of a run on ``device`` that raised one of ``DEVICE_ERRORS``."""
    text = without_paths(str(error))
    if is_lost_error(error):
        return DeviceLostError(f"{device} is lost: {text}")
    if OUT_OF_MEMORY.search(text):
        return OutOfMemoryError(f"{device} has too little memory for the batch: {text}")
    return run_error(error)
