"""HTTP/2 programs without gRPC support, curl and h2load, if they are installed."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ortserve._pb import grpc_service_pb2 as pb
from servers import LONG_S, SHORT_WARMUP, ServerProcess, serving


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("--example", *SHORT_WARMUP, "--grpc-transport=native") as server:
        yield server


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def infer_request() -> bytes:
    request = pb.ModelInferRequest(model_name="simple", raw_input_contents=[bytes(64), bytes(64)])
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    return framed(request.SerializeToString())


def curl(server: ServerProcess, folder: Path, *arguments: str, body: bytes | None = None) -> tuple[str, bytes]:
    """Run curl. Returns headers and trailers as text, and the body."""
    if body is not None:
        (folder / "body").write_bytes(body)
        arguments = (*arguments, "--data-binary", f"@{folder / 'body'}")
    command = [program("curl"), "-sS", "--http2-prior-knowledge", "-D", str(folder / "head"), *arguments]
    method = f"http://{server.grpc}/inference.GRPCInferenceService/ModelInfer"
    answer = subprocess.run([*command, method], capture_output=True, timeout=LONG_S, check=False)
    # 92: the server answered and reset the stream before the body was sent, which this version of curl reports as an
    # error.
    assert answer.returncode in (0, 92), answer.stderr
    return (folder / "head").read_text(), answer.stdout


GRPC = ("-H", "content-type: application/grpc", "-H", "te: trailers")


def test_curl_infers(server: ServerProcess, tmp_path: Path) -> None:
    head, body = curl(server, tmp_path, *GRPC, body=infer_request())
    assert "HTTP/2 200" in head
    assert "grpc-status: 0" in head
    assert pb.ModelInferResponse.FromString(body[5:]).model_name == "simple"


def test_curl_reads_the_status_of_a_rejected_call(server: ServerProcess, tmp_path: Path) -> None:
    head, body = curl(server, tmp_path, *GRPC, body=framed(b"\xff"))
    assert "grpc-status: 3" in head
    assert body == b""


def test_curl_without_grpc_gets_a_status_of_http(server: ServerProcess, tmp_path: Path) -> None:
    assert "HTTP/2 405" in curl(server, tmp_path)[0]
    assert "HTTP/2 415" in curl(server, tmp_path, "-X", "POST")[0]  # the body may arrive after the answer


@pytest.mark.parametrize("streams", [1, 32, 100])
def test_h2load_counts_every_call_as_answered(server: ServerProcess, tmp_path: Path, streams: int) -> None:
    (tmp_path / "body").write_bytes(infer_request())
    method = f"http://{server.grpc}/inference.GRPCInferenceService/ModelInfer"
    command = [program("h2load"), "-n5000", "-c4", f"-m{streams}", "-d", str(tmp_path / "body"), *GRPC, method]
    output = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=True).stdout
    assert re.search(r"5000 total, .*5000 succeeded, 0 failed, 0 errored, 0 timeout", output), output
