"""The node's part of ``kubernetes_api``: commands, ports and logs of pods, from real processes on this machine."""

import asyncio
import base64
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import web

import spdy
from kubernetes_objects import Document, RefusedError, containers_of
from servers import LONG_S

EXEC: Final = "v5.channel.k8s.io"
PORT_FORWARD: Final = "SPDY/3.1+portforward.k8s.io"
"""Protocols inside the WebSockets of ``kubectl``, by the names that it requests."""
_STDOUT, _STDERR, _STATUS = b"\x01", b"\x02", b"\x03"

Read = Callable[[str, str], Document]
"""Reads an object by kind and name in the pod's namespace."""


@dataclass(frozen=True, slots=True)
class Kubelet:
    """The kubelet of all pods. They share one real server: ``ports`` maps container ports to its ports."""

    ports: Mapping[int, int]
    environment: Mapping[str, str]
    logs: Mapping[str, str]
    previous_logs: Mapping[str, str]

    def log(self, pod: Document, container: str, *, is_previous: bool) -> str:
        """The log of a container. The container must exist and, for its previous log, have ended before."""
        where = f'in pod "{pod["metadata"]["name"]}"'
        if container not in {known["name"] for known in containers_of(pod)}:
            raise RefusedError(400, "BadRequest", f"container {container} is not valid {where}")
        ended = {status["name"] for status in pod["status"]["containerStatuses"] if "lastState" in status}
        if is_previous and container not in ended:
            raise RefusedError(400, "BadRequest", f'previous terminated container "{container}" {where} not found')
        return (self.previous_logs if is_previous else self.logs)[container]

    async def execute(self, socket: web.WebSocketResponse, pod: Document, command: Sequence[str], read: Read) -> None:
        """Run a command with the server's variables and mounted files. Its output is sent after it has ended."""
        done = await asyncio.to_thread(self._run, pod, command, read)
        await socket.send_bytes(_STDOUT + done.stdout)
        await socket.send_bytes(_STDERR + done.stderr)
        await socket.send_bytes(_STATUS + json.dumps(exit_status(done.returncode)).encode())

    def _run(self, pod: Document, command: Sequence[str], read: Read) -> subprocess.CompletedProcess[bytes]:
        with tempfile.TemporaryDirectory() as folder:
            mounted = tuple(mount_volumes(pod, read, Path(folder)))

            def placed(word: str) -> str:
                return f"{folder}{word}" if word.startswith(mounted) else word

            server = pod["spec"]["containers"][0]
            variables: dict[str, str] = {}
            for source in server["envFrom"]:
                variables |= read("ConfigMap", source["configMapRef"]["name"])["data"]
            environment = {name: placed(value) for name, value in variables.items()} | dict(self.environment)
            words = [placed(word) for word in command]
            return subprocess.run(words, env=environment, capture_output=True, check=False, timeout=LONG_S)

    async def forward_ports(self, socket: web.WebSocketResponse) -> None:
        """Forward ports until the client disconnects."""
        await _PortForward(socket, self.ports).run()


class _PortForward:
    """Joins the client's streams to connections to real ports; each has an error stream and a data stream."""

    def __init__(self, socket: web.WebSocketResponse, ports: Mapping[int, int]) -> None:
        self._socket = socket
        self._ports = ports
        self._connection = spdy.Connection()
        self._errors: dict[str, int] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as answers:
            try:
                async for message in self._socket:
                    for event in self._connection.receive(message.data):
                        await self._take(event, answers)
                    await self._flush()
            finally:
                for writer in self._writers.values():
                    writer.close()

    async def _take(self, event: spdy.Opened | spdy.Received, answers: asyncio.TaskGroup) -> None:
        match event:
            case spdy.Opened(stream, {"streamtype": "error", "requestid": request}):
                self._errors[request] = stream
            case spdy.Opened(stream, {"streamtype": "data", "requestid": request, "port": port}):
                reader, self._writers[stream] = await asyncio.open_connection("127.0.0.1", self._ports[int(port)])
                answers.create_task(self._answer(reader, stream, self._errors[request]))
            case spdy.Received(stream, b"") if stream in self._writers:
                self._writers[stream].write_eof()
            case spdy.Received(stream, data) if stream in self._writers:
                self._writers[stream].write(data)

    async def _answer(self, reader: asyncio.StreamReader, data: int, errors: int) -> None:
        with suppress(ConnectionError):  # the client has disconnected
            while received := await reader.read(65536):
                self._connection.send(data, received)
                await self._flush()
            for stream in (data, errors):
                self._connection.send(stream, b"", is_last=True)
            await self._flush()

    async def _flush(self) -> None:
        if outgoing := self._connection.take_outgoing():
            await self._socket.send_bytes(outgoing)


def mount_volumes(pod: Document, read: Read, folder: Path) -> Iterator[str]:
    """Write the server's Secrets and ConfigMaps as the kubelet does, as links through ``..data``.

    Yields mount paths.
    """
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    for mount in pod["spec"]["containers"][0]["volumeMounts"]:
        match volumes[mount["name"]]:
            case {"secret": {"secretName": name}}:
                files = {key: base64.b64decode(text) for key, text in read("Secret", name)["data"].items()}
            case {"configMap": {"name": name}}:
                files = {key: text.encode() for key, text in read("ConfigMap", name)["data"].items()}
            case _:
                continue
        target = folder / mount["mountPath"].lstrip("/")
        (target / "..1").mkdir(parents=True)
        (target / "..data").symlink_to("..1")
        for key, content in files.items():
            (target / "..1" / key).write_bytes(content)
            (target / key).symlink_to(Path("..data") / key)
        yield mount["mountPath"]


def exit_status(status: int) -> dict[str, Any]:
    """The exit of a command in the form that ``kubectl`` expects."""
    if status == 0:
        return {"status": "Success"}
    causes = [{"reason": "ExitCode", "message": str(status)}]
    return {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
