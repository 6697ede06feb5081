"""What does it cost to read a request and to write its answer, by encoding and size, and how often is a tensor copied?

One FP32 tensor each way, of 1 KB, 600 KB (an image) and 16 MB, through the codecs alone: bytes to ``InferRequest``, and
an ``InferResponse`` of the same tensor to bytes. CPU time of the thread, the medians of interleaved rounds and their
spread. A tensor is as good as copied whenever memory of its size is allocated, so copies are counted in a run apart:
the most memory that a call had allocated at one time, as tracemalloc sees it, divided by the tensor's size.

Expected, and checked before anything is printed:

- Reading binary tensors copies nothing, over REST and gRPC: arrays are views on the body until they are staged.
- Writing them copies once: the body is one piece of bytes, because both servers take it as one.
- JSON has no bound worth a check. A number is an object of 24 to 32 bytes and an 8-byte place in a list while it is
  read, and at most 20 bytes of text when it is written.

Engine and sockets are not in it; those are in ``rest_throughput.py``. Caveats: the body is warm in the cache as far as
it fits, and the numbers of JSON are of few digits.

    PYTHONPATH=server python loadtests/codec_cost.py [--rounds 11] [--seconds 0.05]
"""

import argparse
import json
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

from ortserve._pb.grpc_service_pb2 import ModelInferRequest
from ortserve.codecs.grpc_infer import decode_request, encode_response
from ortserve.codecs.rest import decode_rest_request, encode_rest_response
from ortserve.core.dtypes import DataType
from ortserve.core.request import InferRequest, InferResponse, RequestedOutput
from ortserve.core.tensor import Tensor

SIZES = {"1 KB": 1_000, "600 KB": 600_000, "16 MB": 16_000_000}
SLACK_BYTES = 20_000
"""What a call allocates besides tensors: documents, messages, objects."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One encoding at one size; the copies are bounds, None for none."""

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
    response = InferResponse("m", "1", "", [Tensor("y", DataType.FP32, array)])

    def rest(*, binary: bool) -> Callable[[], object]:
        request = InferRequest("m", "", "", [], [RequestedOutput("y", binary)], {})
        return lambda: encode_rest_response(request, response)

    return [
        Arm(
            "REST JSON",
            size,
            array,
            lambda: decode_rest_request(by_json, None, "m", ""),
            rest(binary=False),
            None,
            None,
        ),
        Arm(
            "REST binary",
            size,
            array,
            lambda: decode_rest_request(by_binary, len(head), "m", ""),
            rest(binary=True),
            0,
            1,
        ),
        Arm("gRPC raw", size, array, lambda: decode_request(by_grpc), lambda: encode_response(response), 0, 1),
    ]


def check(arm: Arm) -> tuple[float, float]:
    """Fail where the tensor came wrong or was copied too often.

    Returns:
        The copies of reading and of writing.
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
    """CPU microseconds a call, over calls that take at least ``seconds`` in all."""
    calls = 0
    began = time.thread_time()
    while (taken := time.thread_time() - began) < seconds:
        step()
        calls += 1
    return taken / calls * 1e6


def spell(samples: list[float]) -> str:
    return f"{statistics.median(samples):11.1f}  ({min(samples):.1f} to {max(samples):.1f})"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each arm's half in a round")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    options = parser.parse_args(arguments)

    arms = [arm for size in options.sizes for arm in arms_of(size, SIZES[size])]
    copies = [check(arm) for arm in arms]
    reading: list[list[float]] = [[] for _ in arms]
    writing: list[list[float]] = [[] for _ in arms]
    for _ in range(options.rounds):
        for index, arm in enumerate(arms):
            reading[index].append(cpu_us(arm.decode, options.seconds))
            writing[index].append(cpu_us(arm.encode, options.seconds))

    libraries = ", ".join(f"{name} {version(name)}" for name in ("orjson", "protobuf", "numpy"))
    print(
        f"Python {platform.python_version()}, {libraries}, {platform.machine()}; CPU µs a call, {options.rounds} rounds"
    )
    print(f"{'':20}{'read':>11}{'':26}{'write':>11}{'':26}copies read, written")
    for arm, read, written, (copied_in, copied_out) in zip(arms, reading, writing, copies, strict=True):
        print(f"{arm.name:12}{arm.size:8}{spell(read):37}{spell(written):37}{copied_in:.1f}, {copied_out:.1f}")


if __name__ == "__main__":
    main()
