"""Models on a hub, fetched with the hub's own client from a local server with the two calls that it needs."""

import hashlib
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from certificates import Secret
from ortserve.config.repository_url import RepositoryUrl, parse_repository
from ortserve.registry.stores.hub import HubStore, plan_paths
from ortserve.registry.stores.objects import FILES_SIDE_BY_SIDE, StoreError
from servers import LONG_S

COMMIT = "c" * 40
FILES = {
    "onnx/model.onnx": b"model",
    "onnx/model.onnx_data": b"weights",
    "README.md": b"read me",
    "model.yaml": b"instances: 1",
}
TRICKLES = bytes(1000)
"""A content that the server sends at 20 bytes per second."""
TRICKLING_HEADERS = b"headers"
"""A content whose headers the server sends at 20 bytes per second."""
TOKEN = "hf_secret_of_the_test"


class Hub(BaseHTTPRequestHandler):
    is_over = threading.Event()
    """Ends what trickles."""
    is_slow = threading.Event()
    """While it is set, listings trickle."""
    is_left = threading.Event()
    """Set when a client has ended the connection of what trickles."""

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, b"no")
        elif self.is_slow.is_set():
            self._answer(200, TRICKLES)
        elif self.path.startswith("/api/models/org/digits/revision/v1"):
            siblings = [
                {"rfilename": name, "size": len(content), "blobId": _git_digest(content)}
                | ({} if name == "model.yaml" else {"lfs": _lfs(content)})
                for name, content in FILES.items()
            ]
            self._answer(200, json.dumps({"id": "org/digits", "sha": COMMIT, "siblings": siblings}).encode())
        elif (name := self.path.removeprefix(f"/org/digits/resolve/{COMMIT}/")) in FILES:
            self._answer(200, FILES[name])
        else:
            self._answer(404, b"no")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if body == TRICKLING_HEADERS:
            self.flush_headers()
            body = b"X-Trickles: " + b"a" * 1000
        else:
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
        step = 1 if len(body) >= len(TRICKLES) else max(1, len(body))
        try:
            for place in range(0, len(body), step):
                self.wfile.write(body[place : place + step])
                if step < len(body) and self.is_over.wait(0.05):
                    break
        except ConnectionError:  # the client gives up what trickles
            self.is_left.set()

    def log_message(self, *arguments: object) -> None:
        pass


def _git_digest(content: bytes) -> str:
    """The digest that ``git hash-object`` prints."""
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content), usedforsecurity=False).hexdigest()


def _lfs(content: bytes) -> dict[str, object]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    Hub.is_over.clear()
    Hub.is_left.clear()
    yield address
    Hub.is_over.set()
    server.shutdown()
    server.server_close()
    thread.join()


def store_of(text: str, timeout_s: float = 5) -> HubStore:
    url = parse_repository(text)
    assert isinstance(url, RepositoryUrl)
    return HubStore(url, timeout_s)


def test_revision_is_a_repository_of_one_model(endpoint: str) -> None:
    store = store_of("hf://org/digits@v1")
    found = {known.path: known for known in store.list({})}
    assert set(found) == {"digits/1/model.onnx", "digits/1/model.onnx_data", "digits/model.yaml"}
    assert found["digits/1/model.onnx"].sha256 == hashlib.sha256(b"model").hexdigest()
    assert b"".join(store.read(found["digits/1/model.onnx_data"])) == b"weights"


def test_small_file_of_another_revision_is_an_error(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Git itself stores the files without a SHA-256 digest."""
    store = store_of("hf://org/digits@v1")
    (options,) = (known for known in store.list({}) if known.path == "digits/model.yaml")
    assert b"".join(store.read(options)) == b"instances: 1"
    monkeypatch.setitem(FILES, "model.yaml", b"instances: 2")
    with pytest.raises(StoreError, match=f"expected the git digest {options.tag}"):
        list(store.read(options))


def test_file_that_trickles_is_an_error(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "model.yaml", TRICKLES)
    store = store_of("hf://org/digits@v1", timeout_s=1)
    (options,) = (known for known in store.list({}) if known.path == "digits/model.yaml")
    with pytest.raises(StoreError, match="too slow: expected 1024 bytes per second over 1 s"):
        list(store.read(options))


def test_files_whose_headers_trickle_are_errors_and_delay_no_other(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FILES, "model.yaml", TRICKLING_HEADERS)
    store = store_of("hf://org/digits@v1", timeout_s=0.5)
    found = {known.path: known for known in store.list({})}

    def read(path: str) -> bytes:
        return b"".join(store.read(found[path]))

    with ThreadPoolExecutor(FILES_SIDE_BY_SIDE) as threads:
        for reading in [threads.submit(read, "digits/model.yaml") for _ in range(FILES_SIDE_BY_SIDE)]:
            with pytest.raises(StoreError, match=r"expected an answer within 0.5 s \(store_timeout_s\)"):
                reading.result()
    assert read("digits/1/model.onnx") == b"model"


def test_fetch_over_tls_that_is_given_up_reads_from_no_other_connection(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL knows a connection by its file descriptor, which the next connection of the process gets."""
    secret = Secret(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(secret.cert, secret.key)
    is_given_up = threading.Event()

    class Client(type(huggingface_hub.get_session())):  # type: ignore[misc]
        def __init__(self, **options: object) -> None:
            super().__init__(verify=False, **options)

    def trickle(listener: socket.socket) -> None:
        with suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nname: ")
            is_given_up.wait(LONG_S)
            connection.sendall(b"value")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads, ExitStack() as others:
        serving = threads.submit(trickle, listener)
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/"
        monkeypatch.setattr(huggingface_hub, "hf_hub_url", lambda *_, **__: url)
        monkeypatch.setattr(huggingface_hub, "get_session", Client)
        store = store_of("hf://org/digits@v1", LONG_S)
        found = {known.path: known for known in store.list({})}
        store._timeout_s = 0.5
        with pytest.raises(StoreError, match=r"expected an answer within 0.5 s"):
            list(store.read(found["digits/model.yaml"]))
        pairs = [[others.enter_context(each) for each in socket.socketpair()] for _ in range(8)]
        for ours, theirs in pairs:
            theirs.sendall(b"GET / HTTP/1.1")
            ours.setblocking(False)
        is_given_up.set()
        store._opening_threads.shutdown()
        assert {ours.recv(100) for ours, _ in pairs} == {b"GET / HTTP/1.1"}
        serving.result(LONG_S)


def test_listing_that_trickles_is_ended_and_the_next_one_begins_anew(endpoint: str) -> None:
    store = store_of("hf://org/digits@v1", timeout_s=0.5)
    Hub.is_slow.set()
    try:
        with pytest.raises(StoreError, match=r"expected an answer within 2 s \(4 times store_timeout_s\)"):
            store.list({})
    finally:
        Hub.is_slow.clear()
    assert Hub.is_left.wait(LONG_S), "the connection is ended"
    store._timeout_s = LONG_S
    assert len(store.list({})) == 3


def test_missing_revision_and_wrong_token_are_errors_without_secrets(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="404"):
        store_of("hf://org/digits@v2").list({})
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}_wrong")
    with pytest.raises(StoreError, match="401") as caught:
        store_of("hf://org/digits@v1").list({})
    assert TOKEN not in caught.value.message
    assert endpoint not in caught.value.message


def test_only_files_of_models_are_fetched_from_a_revision() -> None:
    assert plan_paths("m", ["model.onnx", "model.yaml", "model_int8.onnx", "config.json"]) == {
        "m/1/model.onnx": "model.onnx",
        "m/model.yaml": "model.yaml",
    }
    assert plan_paths("m", ["a/1/model.onnx", "a/labels.txt"]) == {
        "a/1/model.onnx": "a/1/model.onnx",
        "a/labels.txt": "a/labels.txt",
    }
    with pytest.raises(StoreError, match="neither"):
        plan_paths("m", ["weights.safetensors"])
