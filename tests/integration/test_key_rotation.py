"""Keys change while the server is under load: no request with a valid key is rejected."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from models import builders
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, json_input, rest_url, serving

OLD, NEW = "the-old-key-0123456789", "the-new-key-0123456789"
ROW = np.zeros((1, 4), np.float32)


class Secret:
    """A mounted Kubernetes Secret: its files are links into a folder that is replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._versions = 0
        folder.mkdir()
        (folder / "infer").symlink_to("..data/infer")

    @property
    def file(self) -> Path:
        return self._folder / "infer"

    def put(self, *keys: str) -> None:
        self._versions += 1
        version = self._folder / f"..{self._versions}"
        version.mkdir()
        (version / "infer").write_text("\n".join(keys))
        link = self._folder / "..new"
        link.symlink_to(version.name)
        link.replace(self._folder / "..data")


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    secret = Secret(tmp_path / "secret")
    secret.put(OLD)
    return secret


@pytest.fixture
def server(tmp_path: Path, secret: Secret, ways: tuple[str, ...]) -> Iterator[ServerProcess]:
    add_model(tmp_path / "models", "identity", builders.identity)
    flags = ("--infer-keys-file", secret.file, "--keys-poll-s", "0.02")
    with serving(tmp_path / "models", *SHORT_WARMUP, *ways, *flags) as server:
        yield server


class Caller:
    """Sends requests over REST and gRPC in turns with the current key, and records failures."""

    def __init__(self, server: ServerProcess) -> None:
        self.key = OLD
        self.answers = 0
        self.failures: list[object] = []
        self._server = server

    def ask(self, http: httpx.Client, channel: grpc.Channel) -> None:
        value = f"Bearer {self.key}"
        document = {"inputs": [json_input("x", ROW)]}
        answer = http.post(rest_url(self._server, "identity"), json=document, headers={"authorization": value})
        if answer.status_code != 200:
            self.failures.append((answer.status_code, answer.text))
        request = service_pb2.ModelInferRequest(model_name="identity")
        request.inputs.add(name="x", datatype="FP32", shape=ROW.shape)
        request.raw_input_contents.append(ROW.tobytes())
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        try:
            call(request.SerializeToString(), metadata=(("authorization", value),), timeout=LONG_S)
        except grpc.RpcError as error:
            self.failures.append(error)
        self.answers += 1

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Send requests while the ``with`` block runs."""
        is_over = threading.Event()

        def go_on() -> None:
            with httpx.Client(timeout=LONG_S) as http, grpc.insecure_channel(self._server.grpc) as channel:
                while not is_over.is_set():
                    self.ask(http, channel)

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(LONG_S)


def test_keys_rotate_under_load_without_a_rejection(server: ServerProcess, secret: Secret) -> None:
    caller = Caller(server)

    def wait_for_some() -> None:
        seen = caller.answers
        while caller.answers < seen + 5 and not caller.failures:
            pass  # each poll is a separate request

    with caller.asking():
        wait_for_some()
        secret.put(OLD, NEW)
        server.wait_for_line("keys have changed", "keys=2 added=1 gone=0")
        wait_for_some()
        caller.key = NEW
        wait_for_some()
        secret.put(NEW)
        server.wait_for_line("keys have changed", "keys=1 added=0 gone=1")
        wait_for_some()
        secret.put("")
        server.wait_for_line("the new keys cannot be used; the old keys stay valid", "group=infer", "got none")
        wait_for_some()
    assert not caller.failures
    assert caller.answers >= 25
    refused = httpx.post(rest_url(server, "identity"), headers={"authorization": f"Bearer {OLD}"}, timeout=LONG_S)
    assert refused.status_code == 401
    assert OLD not in server.output
    assert NEW not in server.output
