"""Threads for reading and writing what would hold up the event loop: large JSON, texts, typed integers.

Each thread starts a process of its own for JSON (``codecs/json_process``) when it first needs one.
"""

import asyncio
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from ortserve.codecs.bounds import INLINE_BYTES
from ortserve.codecs.json_process import receive_parts, send_parts, unpack_load, unpack_request
from ortserve.codecs.json_text import LoadParameter, decode_load_body
from ortserve.core.encoded import EncodedRequest, JsonRequest
from ortserve.core.large_memory import LargeMemory
from ortserve.core.request import InferRequest
from ortserve.errors import ErrorKind, ServeError

T = TypeVar("T")

_TIMEOUT_S: Final = 60.0
"""For each part of a body that goes to a process, or comes back. A process reads 64 MB in 2 s."""


class CodecThreads:
    """A pool of threads. Loop thread only."""

    def __init__(self, threads: int, memory: LargeMemory | None = None) -> None:
        """Start nothing yet.

        Args:
            threads: How many bodies are read or written at one time; the others wait.
            memory: For the tensors of large JSON; None for some of its own.
        """
        self._memory = memory or LargeMemory()
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="codec")
        self._own = threading.local()

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Have a thread do something, whose errors the future has."""
        return asyncio.get_running_loop().run_in_executor(self._executor, work)

    def read_json(self, request: JsonRequest) -> asyncio.Future[InferRequest]:
        """Have another process read a request.

        The future raises ServeError as ``request.read`` does, and overloaded where the process ended meanwhile.
        """
        reader, body, arguments = request.for_process()
        return self.run(lambda: unpack_request(self._process().read(reader, body, arguments)))

    async def read_load(self, body: bytes | memoryview) -> dict[str, LoadParameter]:
        """Read the body of a load, a long one in another process.

        Raises:
            ServeError: invalid_input; overloaded, where the process ended meanwhile.
        """
        if len(body) <= INLINE_BYTES:
            return decode_load_body(body)
        return await self.run(lambda: unpack_load(self._process().read("load", body, ())))

    def read(self, request: EncodedRequest) -> asyncio.Future[InferRequest]:
        """Have a thread read a request. The future raises ServeError as ``request.read`` does."""
        return self.run(request.read)

    def _process(self) -> "JsonProcess":
        process: JsonProcess | None = getattr(self._own, "process", None)
        if process is None or not process.is_running:
            process = self._own.process = JsonProcess(self._memory)
        return process


class JsonProcess:
    """A process that reads JSON. Used by one thread at a time."""

    def __init__(self, memory: LargeMemory) -> None:
        """Start it; tensors come to ``memory``.

        Raises:
            ServeError: overloaded, when there is no memory, or no process, to be had.
        """
        ours, theirs = socket.socketpair()
        ours.settimeout(_TIMEOUT_S)
        self._connection = ours
        self._memory = memory
        # Not by ``-m``, which a compiled module does not know.
        start = "from ortserve.codecs.json_process import main; main()"
        command = [sys.executable, "-c", start, str(theirs.fileno())]
        # numpy's threads would reserve address space, and have nothing to do there.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(  # noqa: S603 - of this package
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
            )
        except OSError as error:
            ours.close()
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"the process that reads JSON cannot be started: {error.strerror}",
                retry_after_s=1,
            ) from error
        finally:
            theirs.close()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def read(self, reader: str, body: bytes | memoryview, arguments: tuple[Any, ...]) -> list[memoryview]:
        """Have a body read there, by a reader of ``codecs/json_process``; returns what is to be unpacked.

        Raises:
            ServeError: overloaded, where the process ended meanwhile, mostly for want of memory.
        """
        try:
            send_parts(self._connection, [pickle.dumps((reader, arguments)), body])
            return receive_parts(self._connection, self._memory)
        except (EOFError, OSError, MemoryError) as error:
            self._process.kill()
            status = self._process.wait()
            self._connection.close()
            text = f"the process that reads JSON ended with status {status} while it read a body of {len(body)} bytes"
            raise ServeError(ErrorKind.OVERLOADED, text, retry_after_s=1) from error
