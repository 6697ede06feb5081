"""Check that the installed ortserve is compiled, and that its server answers over REST and gRPC.

    python -I tests/support/installed_wheel.py

``make wheel`` and the release workflow run it in a fresh environment, isolated (``-I``) so that the source tree is not
on the path. It needs only the wheel and its extra ``cpu``.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Final

import grpc

import ortserve
from ortserve._pb import grpc_service_pb2 as pb

START_S: Final = 120.0
CALL_S: Final = 30.0
COMPILED: Final = (
    "ortserve.batching.latency",
    "ortserve.codecs.rest",
    "ortserve.core.batch",
    "ortserve.telemetry.metrics",
)
"""One module of each compiled package through which every inference request passes."""


def main() -> None:
    """Exit with 0, or with an error that states the expectation."""
    package = Path(ortserve.__file__).parent
    assert package.parent.name == "site-packages", f"expected an installed package, got {package}"
    for name in COMPILED:
        file = import_module(name).__file__ or ""
        assert file.endswith(".so"), f"{name}: expected a compiled module, got {file}"
    version = subprocess.run([sys.executable, "-Im", "ortserve", "version"], capture_output=True, text=True, check=True)
    assert "request path compiled" in version.stdout, version.stdout

    command = [sys.executable, "-Im", "ortserve", "serve", "--example", "--log-format", "json"]
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    with subprocess.Popen([*command, *ports], stderr=subprocess.PIPE, text=True, env=os.environ) as server:
        guard = threading.Timer(START_S, server.kill)  # ends the wait if the expected lines never appear
        guard.start()
        try:
            assert server.stderr is not None
            listening = wait_until_ready(server.stderr)
            ask_rest(f"127.0.0.1:{listening['http']}")
            ask_grpc(f"127.0.0.1:{listening['grpc']}")
            server.send_signal(signal.SIGTERM)
            rest = server.stderr.read()
            status = server.wait()
            assert status == 0, f"exit status: expected 0, got {status}\n{rest}"
        finally:
            guard.cancel()
            server.kill()
    print(version.stdout + "REST and gRPC answered, and the server drained")


def wait_until_ready(lines: Iterable[str]) -> dict[str, int]:
    """Wait until the models are loaded. Returns the port of each protocol from the server's log."""
    listening: dict[str, int] = {}
    log = ""
    for line in lines:
        log += line
        fields = json.loads(line) if line.startswith("{") else {}
        if "protocol" in fields and "port" in fields:
            listening[fields["protocol"]] = fields["port"]
        if fields.get("ready") is True:
            return listening
    raise AssertionError(f"the server did not become ready:\n{log}")


def ask_rest(address: str) -> None:
    """Send an inference request with JSON."""
    image = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [0.0] * 64}
    body = json.dumps({"inputs": [image]}).encode()
    request = urllib.request.Request(f"http://{address}/v2/models/digits/infer", body)
    with urllib.request.urlopen(request, timeout=CALL_S) as answer:
        outputs = {output["name"]: output for output in json.load(answer)["outputs"]}
    assert outputs["probabilities"]["shape"] == [1, 10], outputs


def ask_grpc(address: str) -> None:
    """Send an inference request with raw tensors."""
    request = pb.ModelInferRequest(model_name="simple")
    for name, first in (("INPUT0", 0), ("INPUT1", 1)):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        request.raw_input_contents.append(b"".join(number.to_bytes(4, "little") for number in range(first, first + 16)))
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        answer = call(request, timeout=CALL_S)
    sums = answer.raw_output_contents[0]
    expected = b"".join((2 * number + 1).to_bytes(4, "little") for number in range(16))
    assert sums == expected, f"OUTPUT0: expected the sums of the inputs, got {sums.hex()}"


if __name__ == "__main__":
    main()
