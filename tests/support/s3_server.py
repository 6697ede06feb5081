"""A real S3 server on a folder (rclone), and a TCP proxy in front that cuts, delays, truncates and corrupts answers.

A second server, in memory (moto), takes keys that no file can have.

Without keys it also serves clients of Google Cloud Storage, whose XML interface equals that of S3.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Final
from urllib.parse import quote

from apart import installed_apart
from servers import LONG_S, LOOK_S

ACCESS_KEY: Final = "TESTACCESSKEY"
SECRET_KEY: Final = "TESTSECRETKEY-never-in-logs"
_MOTO: Final = "5.2.5"
_PIECE_BYTES: Final = 65536
_TRICKLE_S: Final = 0.2


class S3Server:
    """``rclone serve s3``: each folder of ``root`` is a bucket. Objects are files, their ETags MD5 digests."""

    def __init__(self, root: Path, secret_key: str = SECRET_KEY) -> None:
        self.root = root
        self.port = 0
        self._process: subprocess.Popen[str] | None = None
        self.start(secret_key)

    def start(self, secret_key: str = SECRET_KEY, access_key: str = ACCESS_KEY) -> None:
        """Start the server on a new port. An empty secret key disables authentication."""
        program = shutil.which("rclone", path=str(Path(sys.executable).parent)) or "rclone"
        flags = ["--auth-key", f"{access_key},{secret_key}"] if secret_key else []
        flags += [
            "--addr",
            "127.0.0.1:0",
            "--vfs-cache-mode",
            "off",
            "--dir-cache-time",
            "0s",
            "--poll-interval",
            "0s",
            "--config",
            os.devnull,
        ]
        self._process = subprocess.Popen(
            [program, "serve", "s3", *flags, str(self.root)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/", line):
                self.port = int(found[1])
                break
        self._reader = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._reader.start()

    @property
    def google_environment(self) -> dict[str, str]:
        """Variables that direct a client of Google Cloud Storage to this server, without keys."""
        account = {"gcs_base_url": f"http://127.0.0.1:{self.port}", "disable_oauth": True}
        account |= {"client_email": "", "private_key": "", "private_key_id": ""}
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account), "GOOGLE_ALLOW_HTTP": "true"}

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(LONG_S)
        self._reader.join(LONG_S)
        assert self._process.stderr is not None
        self._process.stderr.close()


class MotoServer:
    """S3 in memory, with one bucket. Its keys need not be paths of files."""

    def __init__(self, bucket: str) -> None:
        """Start the server.

        Raises:
            UnavailableError: pip cannot install moto.
        """
        packages = installed_apart(f"moto-{_MOTO}", f"moto[s3]=={_MOTO}", "flask", "flask-cors")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-p", "0"],
            env=dict(os.environ, PYTHONPATH=str(packages)),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        found = next(filter(None, (re.search(r"http://127\.0\.0\.1:(\d+)", line) for line in self._process.stderr)))
        self._address = "127.0.0.1", int(found[1])
        self._reader = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._reader.start()
        self._bucket = bucket
        self._call("PUT", "")

    @property
    def environment(self) -> dict[str, str]:
        """Variables that direct a client to this server."""
        return client_environment(self._address[1])

    def put(self, key: str, content: bytes) -> None:
        self._call("PUT", key, content)

    def delete(self, key: str) -> None:
        self._call("DELETE", key)

    def clear(self) -> None:
        """Delete all keys."""
        connection = HTTPConnection(*self._address, timeout=LONG_S)
        connection.request("POST", "/moto-api/reset")
        assert connection.getresponse().status == 200
        connection.close()
        self._call("PUT", "")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(LONG_S)
        self._reader.join(LONG_S)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _call(self, method: str, key: str, content: bytes = b"") -> None:
        """Send a request whose key no client changes. The server checks no signature."""
        connection = HTTPConnection(*self._address, timeout=LONG_S)
        account = f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20260101/us-east-1/s3/aws4_request"
        signed = {"Authorization": f"{account}, SignedHeaders=host, Signature=none"}
        connection.request(method, f"/{self._bucket}/{quote(key)}", content, signed)
        assert connection.getresponse().status < 300
        connection.close()


class FaultyProxy:
    """Passes connections to ``target`` and applies a fault to answers for ``spoiled`` paths.

    Attributes:
        fault: ``""``; ``down`` (connections are closed at once); ``cut`` (the connection ends in the middle of an
            object); ``corrupt`` (bytes of an object are changed); ``stall`` (an object stops in the middle, its
            connection stays open); ``pause`` (an object stops in the middle until the fault is another one);
            ``trickle`` (its second half arrives at five bytes per second); ``error`` (503).
        spoiled: Part of the paths to which faults apply; ``down`` applies to all.
        paths: The paths of requests so far.
    """

    def __init__(self, server: S3Server) -> None:
        self.fault = ""
        self.spoiled = ".onnx"
        self.paths: list[str] = []
        self.target = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that direct a client to this proxy."""
        return client_environment(self.port)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Answer one request and close the connection."""
        with client, suppress(OSError):
            if self.fault == "down":
                return
            client.settimeout(LONG_S)
            head = b""
            while b"\r\n\r\n" not in head:
                if not (piece := client.recv(_PIECE_BYTES)):
                    return
                head += piece
            path = head.split(b" ", 2)[1].decode()
            self.paths.append(path)
            fault = self.fault if self.spoiled in path.partition("?")[0] else ""
            if fault == "error":
                client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            with socket.create_connection(("127.0.0.1", self.target.port)) as server:
                server.sendall(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
                self._answer(server, client, fault)

    def _answer(self, server: socket.socket, client: socket.socket, fault: str) -> None:
        answer = b""
        while piece := server.recv(_PIECE_BYTES):
            answer += piece
        head, _, body = answer.partition(b"\r\n\r\n")
        middle = len(body) // 2
        rest = b""
        if fault == "corrupt":
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        elif fault in ("cut", "stall", "pause", "trickle"):
            body, rest = body[:middle], body[middle:]
        client.sendall(head + b"\r\n\r\n" + body)
        if fault == "stall":
            client.recv(1)  # returns when the client gives up
        elif fault == "pause":
            while self.fault == "pause":
                time.sleep(LOOK_S)
            client.sendall(rest)
        elif fault == "trickle":
            for place in range(len(rest)):
                client.sendall(rest[place : place + 1])
                time.sleep(_TRICKLE_S)


def client_environment(port: int) -> dict[str, str]:
    """Variables that direct a client to the S3 server at this port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    }


@contextmanager
def s3_behind_proxy(root: Path) -> Iterator[tuple[S3Server, FaultyProxy]]:
    """Start a server of ``root`` with the proxy in front."""
    server = S3Server(root)
    proxy = FaultyProxy(server)
    try:
        yield server, proxy
    finally:
        proxy.close()
        server.stop()


def upload(root: Path, files: Mapping[str, bytes]) -> None:
    """Write objects, each in one piece."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f".{path.name}.part")
        written.write_bytes(content)
        written.replace(path)
