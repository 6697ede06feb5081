"""All that is asked of a device: memory, copies that are enqueued, events that order them, and a session's run.

Streams, events and memory are integers, as CUDA has them. Nothing enqueued may be believed to have happened before an
event that was recorded behind it was waited for.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnxruntime as ort


@dataclass(frozen=True, slots=True)
class BoundRun:
    """A binding and what it is run with: always together, so that a graph's id never meets another binding.

    Attributes:
        session: That the binding is of.
        binding: Of one buffer set, for one number of rows.
        options: Carry the graph's id, or the one that a session without ids has its only graph by.
        graph_id: Of the graph that is captured and replayed; None for a run without.
    """

    session: ort.InferenceSession
    binding: ort.IOBinding
    options: ort.RunOptions
    graph_id: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of a device that nobody has, this process or others, and all it has."""

    free_bytes: int
    total_bytes: int


class Device(Protocol):
    """One device. All methods but ``use`` need the calling thread to have called that once; any of them may raise
    ``DEVICE_ERRORS`` (``failures``).

    Attributes:
        name: For operators, such as ``cuda:0``.
        ort_name: What ONNX Runtime calls its memory in bindings.
        device_id: Its number among those of its kind.
        pci_bus_id: By which other libraries know it; empty where it has none.
    """

    name: str
    ort_name: str
    device_id: int
    pci_bus_id: str

    def use(self) -> None:
        """Make it the calling thread's device."""
        ...

    def memory(self) -> MemoryInfo: ...

    def allocate(self, nbytes: int) -> int:
        """Memory of the device, at least one byte; returns its address."""
        ...

    def free(self, address: int) -> None:
        """Give back what ``allocate`` gave. Nothing enqueued may still use it."""
        ...

    def allocate_host(self, nbytes: int) -> np.ndarray:
        """Host memory that copies run beside other work with: bytes, to be freed by ``free_host`` and nothing else."""
        ...

    def free_host(self, block: np.ndarray) -> None:
        """Give back what ``allocate_host`` gave. Nobody may still see it."""
        ...

    def make_stream(self) -> int:
        """Work enqueued in one happens in its order; that in two streams in any."""
        ...

    def destroy_stream(self, stream: int) -> None: ...

    def make_event(self, *, is_timed: bool = False) -> int: ...

    def destroy_event(self, event: int) -> None: ...

    def copy_in(self, address: int, source: np.ndarray, stream: int) -> None:
        """Enqueue a copy of a contiguous array to the device; it must stay as it is until that has happened."""
        ...

    def copy_out(self, target: np.ndarray, address: int, stream: int) -> None:
        """Enqueue a copy from the device into a contiguous array, which is not to be read before that has happened."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Have the event stand for all that is enqueued in the stream by now, instead of what it stood for."""
        ...

    def make_wait(self, stream: int, event: int) -> None:
        """Have what is enqueued in the stream from now on wait for what the event stands for now."""
        ...

    def wait(self, event: int) -> None:
        """Block the calling thread, without the interpreter lock, until what the event stands for has happened."""
        ...

    def end_capture(self, stream: int) -> None:
        """End a capture that failed and may go on, on the thread that began it: no other work of the stream would
        happen. Nothing where there is none.
        """
        ...

    def open_shared(self, handle: bytes) -> int:
        """Memory that another process has and shares by this handle; returns its address."""
        ...

    def close_shared(self, address: int) -> None:
        """Give back what ``open_shared`` gave. Nothing enqueued may still use it."""
        ...

    def nbytes_from(self, address: int) -> int:
        """Bytes from here to the end of the memory that this is in."""
        ...

    def elapsed_ns(self, first: int, second: int) -> int:
        """Time between two timed events that both have happened."""
        ...

    def run(self, bound: BoundRun, stream: int) -> None:
        """Enqueue a run of a session whose compute stream is this one.

        With a graph's id the first runs capture, and those after replay what was captured, whatever the binding. A
        replay of TensorRT's is waited for, all others are enqueued.
        """
        ...
