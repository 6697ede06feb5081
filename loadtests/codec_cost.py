"""What does it cost to read a request and to write its answer, by encoding and size, and how often is a tensor copied?

One FP32 tensor of 1 KB, 600 KB (an image) and 16 MB in each direction through the codecs alone: bytes to
``InferRequest``, and an ``InferResponse`` with the same tensor to bytes. Figures are CPU times of the thread: medians
of interleaved rounds and their spread. A separate run counts copies: the peak memory of a call, as tracemalloc measures
it, divided by the tensor's size, because a copy allocates that size.

Expected, and checked before anything is printed:

- Reading binary tensors copies nothing, over REST and gRPC: arrays are views of the body until they are staged. So are
  floats in gRPC's typed contents.
- Writing binary tensors copies once: both servers require the body as a single bytes object.
- JSON copies are not bounded. While reading, orjson reserves 12 bytes for each byte of text, and a number becomes an
  object of 24 bytes with an 8-byte slot in a list; written, a number has at most 20 bytes of text.

The second question: would the event loop be blocked less if a thread read large bodies and wrote answers? The figure is
the longest time for which a second thread, which acquires the interpreter lock as often as it can, waits for the lock.
The switch interval is the server's. Expected: little gain for JSON. orjson holds the interpreter lock from the first
byte to the last, as does numpy while it converts a list to an array; the wait is the longest of those steps.

Engine and sockets are excluded; ``rest_throughput.py`` and ``large_requests.py`` measure them. Caveats: the body is
warm in the cache as far as it fits; JSON numbers are written as Python writes a float32, usually in 17 digits; waiting
times require an otherwise idle machine. Writes ``loadtests/results/codec_cost.md``.

    python loadtests/codec_cost.py [--rounds 11] [--seconds 0.05]
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from harness import table, write_report
from ortserve._pb.grpc_service_pb2 import ModelInferRequest
from ortserve.codecs.grpc_answer import GrpcEncoder
from ortserve.codecs.grpc_infer import GrpcRequest
from ortserve.codecs.rest import RestEncoder, RestRequest
from ortserve.core.dtypes import DataType
from ortserve.core.request import InferRequest, InferResponse, RequestedOutput
from ortserve.core.tensor import Tensor

SIZES = {"1 KB": 1_000, "600 KB": 600_000, "16 MB": 16_000_000}
SLACK_BYTES = 20_000
"""Allowance for allocations of a call besides tensors: documents, messages, objects."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One encoding at one size. ``decode_copies`` and ``encode_copies`` are upper bounds; None means unbounded."""

    name: str
    size: str
    array: np.ndarray
    decode: Callable[[], InferRequest]
    encode: Callable[[], object]
    decode_copies: int | None
    encode_copies: int | None


def arms_of(size: str, nbytes: int) -> list[Arm]:
    """All encodings of a tensor of ``nbytes``."""
    array = np.random.default_rng(0).integers(0, 1000, (1, nbytes // 4)).astype(np.float32) / 100
    entry = {"name": "x", "shape": list(array.shape), "datatype": "FP32"}
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    by_json = json.dumps({"inputs": [entry | {"data": array.ravel().tolist()}]}).encode()
    head = json.dumps(
        {"inputs": [entry | {"parameters": {"binary_data_size": array.nbytes}}], "outputs": outputs}
    ).encode()
    by_binary = head + array.tobytes()
    message = ModelInferRequest(model_name="m", raw_input_contents=[array.tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=array.shape)
    by_grpc = message.SerializeToString()
    message.ClearField("raw_input_contents")
    message.inputs[0].contents.fp32_contents.extend(array.ravel())
    by_typed_grpc = message.SerializeToString()
    response = InferResponse("m", "1", "", [Tensor("y", DataType.FP32, array)])

    request = InferRequest("m", "", "", [], [], {})

    def grpc() -> object:
        return GrpcEncoder().encode(request, response)

    def rest(*, binary: bool) -> Callable[[], object]:
        request = InferRequest("m", "", "", [], [RequestedOutput("y", binary)], {})
        return lambda: RestEncoder().encode(request, response)

    return [
        Arm(
            "REST JSON",
            size,
            array,
            lambda: RestRequest(by_json, None, "m", "").read(),
            rest(binary=False),
            None,
            None,
        ),
        Arm(
            "REST binary",
            size,
            array,
            lambda: RestRequest(by_binary, len(head), "m", "").read(),
            rest(binary=True),
            0,
            1,
        ),
        Arm("gRPC raw", size, array, lambda: GrpcRequest(by_grpc).read(), grpc, 0, 1),
        Arm(
            "gRPC typed",
            size,
            array,
            lambda: GrpcRequest(by_typed_grpc).read(),
            grpc,
            0,
            1,
        ),
    ]


def check(arm: Arm) -> tuple[float, float]:
    """Compare the tensor and count its copies.

    Returns:
        The number of copies made by reading and by writing.

    Raises:
        SystemExit: The tensor differs, or was copied too often.
    """
    (tensor,) = arm.decode().inputs
    if not np.array_equal(tensor.array, arm.array):
        raise SystemExit(f"{arm.name}, {arm.size}: the tensor came wrong; the figures mean nothing")
    counted = []
    for step, allowed in ((arm.decode, arm.decode_copies), (arm.encode, arm.encode_copies)):
        tracemalloc.start()
        result = step()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del result
        if allowed is not None and peak > allowed * arm.array.nbytes + SLACK_BYTES:
            raise SystemExit(f"{arm.name}, {arm.size}: {peak} bytes were allocated for {allowed} copies")
        counted.append(max(0, peak - SLACK_BYTES) / arm.array.nbytes)
    return counted[0], counted[1]


def cpu_us(step: Callable[[], object], seconds: float) -> float:
    """CPU microseconds per call, over calls that together take at least ``seconds``."""
    calls = 0
    began = time.thread_time()
    while (taken := time.thread_time() - began) < seconds:
        step()
        calls += 1
    return taken / calls * 1e6


@dataclass(frozen=True, slots=True)
class Wait:
    """One call on a thread: its duration, and the longest wait of another thread meanwhile, in ms."""

    took: float
    longest: float


def wait(step: Callable[[], object]) -> Wait:
    """Run ``step`` in a thread while this thread repeatedly acquires the interpreter lock."""
    took = 0.0

    def call() -> None:
        nonlocal took
        began = time.perf_counter()
        step()
        took = time.perf_counter() - began

    thread = threading.Thread(target=call)
    longest, last = 0.0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        time.sleep(0)  # releases the lock, as an event loop does when it polls its sockets
    return Wait(took * 1e3, max(longest, time.perf_counter() - last) * 1e3)


@contextmanager
def server_switch_interval() -> Iterator[None]:
    """Use the switch interval of ``app``: a waiting thread requests the lock after 50 µs and gets it at a bytecode."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.00005)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def spell(samples: Sequence[float]) -> str:
    """Median and range, with a decimal below 100."""
    digits = 1 if statistics.median(samples) < 100 else 0
    median, low, high = (f"{value:,.{digits}f}" for value in (statistics.median(samples), min(samples), max(samples)))
    return f"{median} ({low} to {high})"


def costs(arms: Sequence[Arm], rounds: int, seconds: float) -> str:
    """The table of CPU and copies."""
    copies = [check(arm) for arm in arms]
    reading: list[list[float]] = [[] for _ in arms]
    writing: list[list[float]] = [[] for _ in arms]
    for _ in range(rounds):
        for index, arm in enumerate(arms):
            reading[index].append(cpu_us(arm.decode, seconds))
            writing[index].append(cpu_us(arm.encode, seconds))
    return table(
        ("encoding", "tensor", "read, CPU µs", "written, CPU µs", "copies read", "copies written"),
        [
            (arm.name, arm.size, spell(read), spell(written), f"{copied_in:.1f}", f"{copied_out:.1f}")
            for arm, read, written, (copied_in, copied_out) in zip(arms, reading, writing, copies, strict=True)
        ],
    )


def waits(arms: Sequence[Arm], rounds: int) -> str:
    """The table of the event loop's waits, with and without a thread."""
    rows = []
    for arm in arms:
        for what, step in (("read", arm.decode), ("written", arm.encode)):
            alone, took, longest = (float("inf"),) * 3
            for _ in range(rounds):
                began = time.perf_counter()
                step()
                alone = min(alone, (time.perf_counter() - began) * 1e3)
                threaded = wait(step)
                took, longest = min(took, threaded.took), min(longest, threaded.longest)
            rows.append((arm.name, arm.size, what, f"{alone:.1f}", f"{took:.1f}", f"{longest:.1f}"))
    return table(
        ("encoding", "tensor", "", "on the loop, ms", "on a thread, ms", "longest wait of the loop meanwhile, ms"), rows
    )


_COPIES = """\
A copy is memory of the tensor's size. Other memory of a call is left out; at 1 KB of binary it is all there is. A
binary tensor is read as a view of the body and staged from there, as are floats in typed contents over 2 KiB; protobuf
reads smaller contents. A binary tensor is written with one copy, which joins it with the head, because the servers of
both protocols take an answer as one piece. The copies of JSON are the text, the objects of its numbers, and above all
the memory that orjson allocates before it reads: 12 bytes for each byte of text, of which it touches only a part.
Answers to typed contents are raw, like all answers."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each arm's half in a round")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--report", type=Path, default=Path(__file__).parent / "results" / "codec_cost.md")
    options = parser.parse_args(arguments)

    load = os.getloadavg()[0]
    arms = [arm for size in options.sizes for arm in arms_of(size, SIZES[size])]
    measured = costs(arms, options.rounds, options.seconds)
    with server_switch_interval():
        waited = waits([arm for arm in arms if SIZES[arm.size] > SIZES["1 KB"]], options.rounds)
    libraries = ", ".join(f"{name} {version(name)}" for name in ("orjson", "protobuf"))
    write_report(
        options.report,
        "CPU of reading a request and writing its answer",
        f"{libraries}. Load average at the beginning: {load:.1f} (0 means an idle machine).",
        "One FP32 tensor each way.",
        "## CPU of the thread, and copies",
        f"Medians of {options.rounds} rounds in which all arms took turns, and their range.",
        measured,
        _COPIES,
        "## Time that a thread would save the event loop",
        f"The lowest of {options.rounds} rounds, which other work on the machine disturbs least.",
        waited,
    )


if __name__ == "__main__":
    main()
