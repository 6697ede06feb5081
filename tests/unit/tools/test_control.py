"""Calls about a model on a server."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest

from certificates import Secret
from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.address import parse_address
from ortserve.tools.control import Control
from ortserve.tools.encoding import Encoded


def test_grpc_server_that_lacks_an_extension_is_told_from_one_of_another_kind() -> None:
    server = grpc.server(ThreadPoolExecutor(1))  # it supports no calls
    control = Control(parse_address(f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"), "m")
    server.start()
    try:
        with pytest.raises(ServeError) as extension:
            control.register("region", 8)
        with pytest.raises(ServeError, match="expected a server of the Open Inference Protocol v2") as another:
            control.describe()
    finally:
        server.stop(None).wait()

    assert extension.value.message == f"{control.address.url}: UNIMPLEMENTED: Method not found!"
    assert extension.value.kind is another.value.kind is ErrorKind.UNSUPPORTED


def test_first_call_over_grpc_explains_a_failed_handshake(tmp_path: Path) -> None:
    """Recorders of samples infer at once, without a call for metadata before it."""
    secret, server = Secret(tmp_path / "secret"), grpc.server(ThreadPoolExecutor(1))
    pair = (secret.key.read_bytes(), secret.cert.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], secret.ca.read_bytes(), require_client_auth=True)
    url = f"grpcs://127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    try:
        with pytest.raises(ServeError, match=r"\(--ca names a file with certificates to trust\)"):
            Control(parse_address(url), "m").infer(Encoded(b"", {}))
        with pytest.raises(ServeError, match="client certificate"):
            Control(parse_address(url, ca=secret.ca), "m").infer(Encoded(b"", {}))
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("status", "seen"), [(404, "got status 404 for /v2"), (308, "got status 308, a redirect to /login")]
)
def test_http_server_of_another_kind_is_named_by_its_status(status: int, seen: str) -> None:
    with HTTPServer(("127.0.0.1", 0), partial(Other, status)) as server:
        Thread(target=server.handle_request).start()
        control = Control(parse_address(f"http://127.0.0.1:{server.server_port}"), "m")
        with pytest.raises(ServeError, match=f"expected a server of the Open Inference Protocol v2, {seen}"):
            control.describe()


class Other(BaseHTTPRequestHandler):
    """Has one status for all paths, as the metrics port has no path of the protocol."""

    def __init__(self, status: int, *given: Any) -> None:
        self.status = status
        super().__init__(*given)

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("location", "/login")
        self.end_headers()
        self.wfile.write(b'{"error":"Not Found"}')

    def log_message(self, *_: object) -> None:
        """Write no log."""
