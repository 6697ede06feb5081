"""Profile the functions of the package that the interpreter runs for each inference request.

    PYTHONPATH=server:tests/support python tests/support/calls_profile.py json|binary|grpc [--summary|--path]

It prints calls per request by function as JSON, with ``--path`` the calls of the shortest request in their order,
indented below their caller, or with ``--summary`` their number and that of their files. Longer requests were
interrupted or ran on a worker, as on a busy machine. It runs in a separate process, because a profiler and the
server's settings of logging and garbage collection affect a whole process.
"""

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import grpc
import numpy as np
import uvloop

from models import builders
from ortserve._pb import grpc_service_pb2 as pb
from ortserve.app.server import Server
from ortserve.config.options import ServerOptions
from ortserve.telemetry.logs import configure_logging
from proxies import free_ports

REQUESTS = 50
Call: TypeAlias = Callable[[], Awaitable[None]]
ROW = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64)


async def rest_caller(port: int, *, is_binary: bool) -> Call:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    tensor: dict[str, object] = {"name": "x", "shape": ROW.shape, "datatype": "FP32"}
    output: dict[str, object] = {"name": "y"}
    tail = b""
    if is_binary:
        tail = ROW.tobytes()
        tensor["parameters"] = {"binary_data_size": len(tail)}
        output["parameters"] = {"binary_data": True}
    else:
        tensor["data"] = ROW.ravel().tolist()
    document = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    head = b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(document + tail)
    if is_binary:
        head += b"Inference-Header-Content-Length: %d\r\n" % len(document)

    async def call() -> None:
        writer.write(head + b"\r\n" + document + tail)
        answered = await reader.readuntil(b"\r\n\r\n")
        assert answered.startswith(b"HTTP/1.1 200 "), answered
        sizes = [int(line[16:]) for line in answered.lower().split(b"\r\n") if line.startswith(b"content-length: ")]
        await reader.readexactly(sizes[0])

    return call


async def grpc_caller(port: int) -> Call:
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer"
    )
    request = pb.ModelInferRequest(model_name="mlp", raw_input_contents=[ROW.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=ROW.shape)
    data = request.SerializeToString()

    async def call() -> None:
        await method(data, timeout=60)

    return call


def name_of(frame: FrameType) -> str | None:
    """The name of a function of the package; None for any other function."""
    module = str(frame.f_globals.get("__name__"))  # the file name is not known for generated code
    return f"{module}.{frame.f_code.co_qualname}" if module.startswith("ortserve.") else None


def callers(frame: FrameType) -> int:
    """The number of functions of the package that wait for this one."""
    count, caller = 0, frame.f_back
    while caller is not None:
        count, caller = count + (name_of(caller) is not None), caller.f_back
    return count


async def profile(folder: Path, protocol: str) -> tuple[dict[str, float], list[str]]:
    """Serve a model and call it.

    Returns:
        Calls per request of each interpreted function, and the calls of the shortest request as indented lines.
    """
    interpreted: Counter[str] = Counter()
    paths: list[list[str]] = []

    def on_event(frame: FrameType, event: str, _: object) -> None:
        name = name_of(frame) if event == "call" else None
        if name is not None:
            interpreted[name] += 1
            paths[-1].append("  " * callers(frame) + name.removeprefix("ortserve."))

    ports = free_ports()
    options = ServerOptions(
        repositories=(folder,), http_port=ports.http, grpc_port=ports.grpc, metrics_port=ports.metrics
    )
    server = Server(options, configure_logging("error"))
    await server.start()
    await server.load()
    if protocol == "grpc":
        call = await grpc_caller(ports.grpc)
    else:
        call = await rest_caller(ports.http, is_binary=protocol == "binary")
    for _ in range(REQUESTS):
        await call()
    sys.setprofile(on_event)
    for _ in range(REQUESTS):
        paths.append([])
        await call()
    sys.setprofile(None)
    await server.stop()
    return {name: count / REQUESTS for name, count in interpreted.most_common()}, min(paths, key=len)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        (Path(temporary) / "mlp" / "1").mkdir(parents=True)
        builders.mlp(Path(temporary) / "mlp" / "1" / "model.onnx")
        calls, path = runner.run(profile(Path(temporary), sys.argv[1]))
    if "--path" in sys.argv:
        print("\n".join(path))
    elif "--summary" in sys.argv:
        names = {f"ortserve.{line.strip()}" for line in path}
        files = {max((module for module in sys.modules if name.startswith(f"{module}.")), key=len) for name in names}
        print(f"{len(path)} calls in {len(files)} files per request")
    else:
        json.dump(calls, sys.stdout)
