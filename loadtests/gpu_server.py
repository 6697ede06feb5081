"""The whole server in a separate process, on a GPU or on the host: a section of ``gpu_figures``.

It needs only packages that the server needs: grpcio, protobuf and onnxruntime, and on a GPU cupy and nvidia-ml-py. It
does not use ``harness``, which needs psutil.
"""

import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
import numpy as np
import onnxruntime as ort

from ortserve._pb import grpc_service_pb2, management_pb2, shared_memory_pb2
from ortserve.core.dtypes import DATATYPES
from ortserve.engine.provider_options import CPU
from ortserve.example import repository_path

LEDGER_GOAL: Final = 0.9
"""Goal for a model's memory by the ledger and by the driver: the smaller figure divided by the larger."""
_CALL_S: Final = 60.0
_LOAD_S: Final = 240.0
_NAMES: Final = {str(datatype.numpy): name for name, datatype in DATATYPES.items() if name not in ("BYTES", "BF16")}

# A client with its tensors on the GPU. It fills an input with the numbers of its argument and prints the handles of the
# input and of an output. After it reads a line, it prints the numbers of the output.
_CLIENT: Final = """
import sys
import numpy as np
from cupy.cuda import runtime

given = np.array(list(map(float, sys.argv[1].split(","))), np.float32)
taken = np.zeros(int(sys.argv[2]), np.float32)
there = [runtime.malloc(max(array.nbytes, 1 << 21)) for array in (given, taken)]
runtime.memcpy(there[0], given.ctypes.data, given.nbytes, runtime.memcpyHostToDevice)
print(*(runtime.ipcGetMemHandle(address).hex() for address in there), flush=True)
sys.stdin.readline()
runtime.memcpy(taken.ctypes.data, there[1], taken.nbytes, runtime.memcpyDeviceToHost)
print(*taken.tolist(), sep=",", flush=True)
"""

_Answer = TypeVar("_Answer")


class Server:
    """A running server."""

    def __init__(self, ports: dict[str, int]) -> None:
        self._http = f"http://127.0.0.1:{ports['http']}"
        self._metrics = f"http://127.0.0.1:{ports['metrics']}/metrics"
        self._channel = grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}")

    def call(self, method: str, request: Any, answer: type[_Answer], timeout_s: float = _CALL_S) -> _Answer:
        """Make a gRPC call."""
        path = f"/inference.GRPCInferenceService/{method}"
        parse: Callable[[bytes], _Answer] = answer.FromString  # type: ignore[attr-defined]
        call = self._channel.unary_unary(path, type(request).SerializeToString, parse)
        found: _Answer = call(request, timeout=timeout_s)
        return found

    def infer_rest(self, model: str, x: np.ndarray, name: str) -> np.ndarray:
        """Infer with REST JSON. Returns the first output."""
        tensor = {"name": name, "shape": x.shape, "datatype": _NAMES[str(x.dtype)], "data": x.ravel().tolist()}
        body = json.dumps({"inputs": [tensor]}).encode()
        with urllib.request.urlopen(f"{self._http}/v2/models/{model}/infer", body, _CALL_S) as response:
            output = json.load(response)["outputs"][0]
        return np.array(output["data"], DATATYPES[output["datatype"]].numpy).reshape(output["shape"])

    def infer_grpc(self, model: str, x: np.ndarray, name: str) -> np.ndarray:
        """Infer with gRPC. Returns the first output."""
        request = grpc_service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[x.tobytes()])
        request.inputs.add(name=name, shape=x.shape, datatype=_NAMES[str(x.dtype)])
        answer = self.call("ModelInfer", request, grpc_service_pb2.ModelInferResponse)
        output = answer.outputs[0]
        dtype = DATATYPES[output.datatype].numpy
        return np.frombuffer(answer.raw_output_contents[0], dtype).reshape(list(output.shape))

    def load(self, model: str) -> None:
        """Load a model."""
        request = management_pb2.RepositoryModelLoadRequest(model_name=model)
        self.call("RepositoryModelLoad", request, management_pb2.RepositoryModelLoadResponse, _LOAD_S)

    def register(self, name: str, handle: bytes, nbytes: int) -> None:
        """Register memory of the first GPU."""
        request = shared_memory_pb2.CudaSharedMemoryRegisterRequest(name=name, raw_handle=handle, byte_size=nbytes)
        self.call("CudaSharedMemoryRegister", request, shared_memory_pb2.CudaSharedMemoryRegisterResponse)

    def ledger_bytes(self, model: str) -> float:
        """Device memory that the server's ledger assigns to a model."""
        with urllib.request.urlopen(self._metrics, timeout=_CALL_S) as response:
            lines = response.read().decode().splitlines()
        own = [line for line in lines if re.match(rf'ortserve_device_ledger_bytes{{.*owner="{model}[/"]', line)]
        return sum(float(line.rpartition(" ")[2]) for line in own)


@contextmanager
def serving(repository: Path, *flags: str) -> Iterator[Server]:
    """Start a server on free ports and wait for the end of its initial loading."""
    ports = [part for name in ("http", "grpc", "metrics") for part in (f"--{name}-port", "0")]
    command = [sys.executable, "-m", "ortserve", "serve", str(repository), *ports, *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found: dict[str, int] = {}
            said: list[str] = []
            for line in process.stderr:
                said.append(line)
                if "listening" in line:
                    fields = dict(re.findall(r"(\w+)=(\S+)", line))
                    found[fields["protocol"]] = int(fields["port"])
                if "initial loading has ended" in line:
                    break
            if not said or "failed=0" not in said[-1]:
                raise RuntimeError(f"the server did not start: {' '.join(said[-3:])}")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield Server(found)
        finally:
            process.terminate()


def used_bytes() -> int:
    """Used memory of the first GPU, as the driver counts it."""
    import pynvml

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    return int(pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2).used)  # excludes reserved memory


def one_row(spec: ort.NodeArg, seed: int) -> np.ndarray:
    """Random numbers for an FP32 input, or tokens for an INT64 input."""
    shape, random = [size if isinstance(size, int) else 1 for size in spec.shape], np.random.default_rng(seed)
    return random.random(shape, np.float32) if "float" in spec.type else random.integers(0, 8, shape, np.int64)


def follow_requests(
    server: Server, model: str, path: Path, requests: int, is_near: Callable[[np.ndarray, np.ndarray], bool]
) -> Iterator[str]:
    """Send requests one after the other and compare their answers with the CPU's. Yields lines of results."""
    session = ort.InferenceSession(str(path), providers=[CPU])
    spec = session.get_inputs()[0]
    for protocol, infer in (("REST", server.infer_rest), ("gRPC", server.infer_grpc)):
        taken_ms = []
        for number in range(requests):
            x = one_row(spec, number)
            began = time.perf_counter()
            answer = infer(model, x, spec.name)
            taken_ms.append((time.perf_counter() - began) * 1e3)
            right = session.run(None, {spec.name: x})[0]
            if not is_near(answer, right):
                raise RuntimeError(f"{model}: an answer by {protocol} differs from the CPU's")
        p50, p99 = np.percentile(taken_ms[requests // 10 :], [50, 99])
        yield f"- {model}, {protocol}: {requests} answers right; one at a time p50 {p50:.2f} ms, p99 {p99:.2f} ms"


def share_memory(server: Server, path: Path, is_near: Callable[[np.ndarray, np.ndarray], bool]) -> str:
    """Send a request whose input and output are in GPU memory of another process. Returns a line of results."""
    session = ort.InferenceSession(str(path), providers=[CPU])
    spec, output = session.get_inputs()[0], session.get_outputs()[0].name
    name, x = spec.name, one_row(spec, 0)
    (right,) = session.run([output], {name: x})
    given = ",".join(map(str, x.ravel().tolist()))
    with subprocess.Popen(
        [sys.executable, "-c", _CLIENT, given, str(right.size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        handles = client.stdout.readline().split()
        request = grpc_service_pb2.ModelInferRequest(model_name="digits")
        tensors: tuple[tuple[Any, str, np.ndarray], ...] = (
            (request.inputs.add(name=name, shape=x.shape, datatype="FP32"), "given", x),
            (request.outputs.add(name=output), "taken", right),
        )
        for handle, (tensor, region, array) in zip(handles, tensors, strict=True):
            server.register(region, bytes.fromhex(handle), array.nbytes)
            tensor.parameters["shared_memory_region"].string_param = region
            tensor.parameters["shared_memory_byte_size"].int64_param = array.nbytes
        server.call("ModelInfer", request, grpc_service_pb2.ModelInferResponse)
        answer, _ = client.communicate("\n", timeout=_CALL_S)
    if not is_near(np.array(list(map(float, answer.split(","))), np.float32).reshape(right.shape), right):
        raise RuntimeError("the output in the memory of another process differs from the CPU's")
    return "- CUDA shared memory: the input was read from, and the output written to, memory of another process"


def whole_server(
    device: str, folder: Path, large: Path, requests: int, is_near: Callable[[np.ndarray, np.ndarray], bool]
) -> Iterator[str]:
    """Serve the example of digits and a large model.

    Args:
        device: ``cuda``, or ``host`` for the CPU.
        folder: Empty folder for the repository.
        large: File of the large model.
        requests: Number of requests to each model over each protocol.
        is_near: Whether an answer is close enough to the CPU's.

    Yields:
        Lines of results.

    Raises:
        Exception: Any failure of a step.
    """
    is_gpu = device == "cuda"
    shutil.copytree(repository_path() / "digits", folder / "digits")
    path = folder / "large" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    shutil.copy(large, path)
    flags = ["--execution-providers", "cuda" if is_gpu else "cpu", "--allow-client-shm"]
    with serving(folder, *flags, "--model-control-mode", "explicit", "--load-model", "digits") as server:
        before = used_bytes() if is_gpu else 0
        server.load("large")
        if is_gpu:
            grown, ledger = used_bytes() - before, server.ledger_bytes("large")
            agreement = min(grown, ledger) / max(grown, ledger, 1)
            verdict = "met" if agreement >= LEDGER_GOAL else "missed"
            yield (
                f"- memory of the large model: {ledger / 1e6:,.2f} MB in the ledger, {grown / 1e6:,.2f} MB by the "
                f"driver, {agreement:.2f}, goal ≥ {LEDGER_GOAL:.2f}: {verdict}"
            )
        digits = folder / "digits" / "1" / "model.onnx"
        for model, file in (("digits", digits), ("large", path)):
            yield from follow_requests(server, model, file, requests, is_near)
        if is_gpu:
            yield share_memory(server, digits, is_near)
