"""A device on host memory, for models on the CPU. Tests and dry runs of benchmarks use it in place of a GPU.

Copies and runs are enqueued as on a GPU; ``pace`` decides when they run. The device gives the guarantees of a real one
and no more: if the code omits an event, a late or random pace yields wrong rows. A replay runs the binding of the
capture, not the given one, as ONNX Runtime does on CUDA.
"""

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import onnxruntime as ort

from ortserve.device.protocol import BoundRun, MemoryInfo
from ortserve.engine.output_buffers import address_of

CAPTURING_RUNS: Final = 3
"""Runs with a graph id until the capture, as in ONNX Runtime before 1.26: two regular runs and one that captures."""


class Pace(Enum):
    """When enqueued work runs."""

    AT_ONCE = "at once"
    LATE = "late"
    """Only when a thread waits for it, and only the work that the thread waits for."""
    ANY = "any"
    """At random times that the events permit, drawn from a seeded generator."""


@dataclass(slots=True)
class _Stream:
    """Enqueued work, with counts of all enqueued and all completed work."""

    queue: deque[Callable[[], None]] = field(default_factory=deque)
    enqueued: int = 0
    done: int = 0


@dataclass(slots=True)
class _Event:
    stream: int = 0
    position: int = 0
    happened_ns: int = 0


@dataclass(slots=True)
class _Graph:
    runs: int = 0
    captured: ort.IOBinding | None = None


class HostDevice:
    """Host memory in place of device memory. Thread-safe."""

    ort_name = "cpu"
    pci_bus_id = ""

    def __init__(
        self,
        device_id: int = 0,
        *,
        total_bytes: int = 2**40,
        pace: Pace = Pace.AT_ONCE,
        seed: int = 0,
        one_graph_per_session: bool = False,
    ) -> None:
        """``total_bytes`` bounds allocations; ``seed`` is for the pace ``ANY``.

        With ``one_graph_per_session`` a session keeps a single graph from its first run with an id, whatever the id,
        and also replays it in runs without an id, as TensorRT's provider does.
        """
        self.name = f"host:{device_id}"
        self.device_id = device_id
        self._total_bytes = total_bytes
        self._pace = pace
        self.one_graph_per_session: Final = one_graph_per_session
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._memory: dict[int, np.ndarray] = {}
        self._host: dict[int, int] = {}
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, _Event] = {}
        self._shared = 0
        self._capturing: set[int] = set()
        self._graphs: WeakKeyDictionary[ort.InferenceSession, dict[int, _Graph]] = WeakKeyDictionary()
        self._computed: WeakSet[ort.IOBinding] = WeakSet()
        """Existing bindings whose outputs may be in memory that ONNX Runtime has allocated."""
        self._handles = 0

    @property
    def allocated_bytes(self) -> int:
        """Allocated device memory, without host memory."""
        return sum(block.nbytes for block in self._memory.values())

    @property
    def handles(self) -> int:
        """Number of streams, events, host blocks and shared memory that are not released yet."""
        return len(self._streams) + len(self._events) + len(self._host) + self._shared

    @property
    def captured(self) -> set[int]:
        """Ids of all captured graphs in all sessions."""
        return {
            number for graphs in self._graphs.values() for number, graph in graphs.items() if graph.captured is not None
        }

    def use(self) -> None: ...

    def memory(self) -> MemoryInfo:
        return MemoryInfo(self._total_bytes - self.allocated_bytes, self._total_bytes)

    def allocate(self, nbytes: int) -> int:
        with self._lock:
            if nbytes > self.memory().free_bytes:
                raise RuntimeError(f"out of memory: {nbytes} bytes of {self.memory().free_bytes} free")
            block = np.zeros(nbytes, np.uint8)
            address = address_of(block)
            self._memory[address] = block
            return address

    def free(self, address: int) -> None:
        with self._lock:
            del self._memory[address]

    def allocate_host(self, nbytes: int) -> np.ndarray:
        block = np.empty(nbytes, np.uint8)
        with self._lock:
            self._host[address_of(block)] = nbytes
        return block

    def free_host(self, block: np.ndarray) -> None:
        with self._lock:
            del self._host[address_of(block)]

    def make_stream(self) -> int:
        with self._lock:
            self._handles += 1
            self._streams[self._handles] = _Stream()
            return self._handles

    def destroy_stream(self, stream: int) -> None:
        with self._lock:
            del self._streams[stream]

    def make_event(self, *, is_timed: bool = False) -> int:
        with self._lock:
            self._handles += 1
            self._events[self._handles] = _Event()
            return self._handles

    def destroy_event(self, event: int) -> None:
        with self._lock:
            del self._events[event]

    def copy_in(self, address: int, source: np.ndarray, stream: int) -> None:
        target = self._bytes_at(address, source.nbytes)
        self._enqueue(stream, lambda: np.copyto(target, source.reshape(-1).view(np.uint8)))

    def copy_out(self, target: np.ndarray, address: int, stream: int) -> None:
        source = self._bytes_at(address, target.nbytes)
        self._enqueue(stream, lambda: np.copyto(target.reshape(-1).view(np.uint8), source))

    def copy_within(self, target: int, source: int, nbytes: int, stream: int) -> None:
        to, read = self._bytes_at(target, nbytes), self._bytes_at(source, nbytes)
        self._enqueue(stream, lambda: np.copyto(to, read))

    def record(self, event: int, stream: int) -> None:
        with self._lock:
            marked = self._events[event]

            def happen() -> None:
                marked.happened_ns = time.monotonic_ns()

            marked.stream, marked.position = stream, self._streams[stream].enqueued + 1
            self._enqueue(stream, happen)

    def make_wait(self, stream: int, event: int) -> None:
        with self._lock:
            marked = self._events[event]
            if marked.position:  # an unrecorded event is complete
                other, position = marked.stream, marked.position
                self._enqueue(stream, lambda: self._advance(other, position))

    def wait(self, event: int) -> None:
        with self._lock:
            marked = self._events[event]
            if marked.position:
                self._advance(marked.stream, marked.position)

    def handle_of(self, address: int) -> bytes:
        """The handle by which ``open_shared`` opens memory of ``allocate``."""
        return address.to_bytes(64, "little")

    def leave_capturing(self, stream: int) -> None:
        """Leave a stream in capture mode, as after a failed capture that was not ended."""
        self._capturing.add(stream)

    def end_capture(self, stream: int) -> None:
        self._capturing.discard(stream)

    def open_shared(self, handle: bytes) -> int:
        address = int.from_bytes(handle, "little")
        with self._lock:
            if len(handle) != 64 or address not in self._memory:
                raise RuntimeError("cudaErrorInvalidValue: invalid argument")
            self._shared += 1
        return address

    def close_shared(self, address: int) -> None:
        with self._lock:
            self._shared -= 1

    def nbytes_from(self, address: int) -> int:
        return self._memory[address].nbytes

    def elapsed_ns(self, first: int, second: int) -> int:
        return self._events[second].happened_ns - self._events[first].happened_ns

    def run(self, bound: BoundRun, stream: int) -> None:
        binding = self._choose_binding(bound)

        def compute() -> None:
            bound.session.run_with_iobinding(binding, bound.options)
            self._computed.add(binding)

        self._enqueue(stream, compute)

    def _choose_binding(self, bound: BoundRun) -> ort.IOBinding:
        number = bound.graph_id
        if self.one_graph_per_session and (number is not None or bound.session in self._graphs):
            number = 0
        if number is None:
            return bound.binding
        graph = self._graphs.setdefault(bound.session, {}).setdefault(number, _Graph())
        if graph.captured is not None:
            return graph.captured
        graph.runs += 1
        if graph.runs == CAPTURING_RUNS:
            graph.captured = bound.binding
        return bound.binding

    def _bytes_at(self, address: int, nbytes: int) -> np.ndarray:
        with self._lock:
            for start, block in self._memory.items():
                if start <= address and address + nbytes <= start + block.nbytes:
                    return block[address - start : address - start + nbytes]
            for value in [value for binding in self._computed for value in binding.get_outputs()]:
                start = value.data_ptr()
                if start <= address and address + nbytes <= start + value.tensor_size_in_bytes():
                    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)
        raise RuntimeError(f"an illegal memory access: {nbytes} bytes at {address:#x}")

    def _enqueue(self, stream: int, work: Callable[[], None]) -> None:
        with self._lock:
            if stream in self._capturing:
                raise RuntimeError("CUDA failure 901: operation failed due to a previous error during capture")
            own = self._streams[stream]
            own.queue.append(work)
            own.enqueued += 1
            if self._pace is Pace.AT_ONCE:
                self._advance(stream, own.enqueued)
            elif self._pace is Pace.ANY:
                number = self._random.choice(list(self._streams))
                chosen = self._streams[number]
                self._advance(number, self._random.randint(chosen.done, chosen.enqueued))

    def _advance(self, stream: int, position: int) -> None:
        """Run the work of a stream up to a position, and the work on which it depends."""
        own = self._streams[stream]
        while own.done < position:
            work = own.queue.popleft()
            own.done += 1  # before the run, so that failed work is not repeated
            work()


class LosableDevice(HostDevice):
    """A device whose runs fail with CUDA's error of a lost device once the test has set ``is_lost``."""

    is_lost = False

    def run(self, bound: BoundRun, stream: int) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA failure 719: unspecified launch failure")
        super().run(bound, stream)
