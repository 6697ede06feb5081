"""Threads for decoding and encoding that would block the event loop: large JSON, texts, typed integers.

Each thread starts a process for JSON (``codecs/json_process``) when it first needs one.
"""

import asyncio
import os
import pickle
import socket
import struct
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
from ortserve.engine.thread_priority import LONGEST_SLICE_NS, set_slice
from ortserve.errors import ErrorKind, ServeError

T = TypeVar("T")

_TIMEOUT_S: Final = 60
"""For each part that is sent to a process or received from it. A process decodes 64 MB in 2 s."""


class CodecThreads:
    """A pool of threads. Loop thread only."""

    def __init__(self, threads: int, memory: LargeMemory | None = None) -> None:
        """Create the pool; threads start when they are needed.

        Args:
            threads: Maximum number of bodies that are decoded or encoded at one time; others wait.
            memory: For the tensors of large JSON; None for separate memory.
        """
        self._memory = memory or LargeMemory()
        self._executor = ThreadPoolExecutor(
            threads, thread_name_prefix="codec", initializer=set_slice, initargs=(LONGEST_SLICE_NS,)
        )
        self._own = threading.local()

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``work`` on a thread. The future gets its result or its error."""
        return asyncio.get_running_loop().run_in_executor(self._executor, work)

    def read_json(self, request: JsonRequest) -> asyncio.Future[InferRequest]:
        """Decode a request in another process.

        The future raises ServeError as ``request.read`` does, and overloaded if the process ends meanwhile.
        """
        reader, body, arguments = request.for_process()
        return self.run(lambda: unpack_request(self._process().read(reader, body, arguments)))

    async def read_load(self, body: bytes | memoryview) -> dict[str, LoadParameter]:
        """Decode the body of a load request, a long one in another process.

        Raises:
            ServeError: invalid_input; overloaded, if the process ends meanwhile.
        """
        if len(body) <= INLINE_BYTES:
            return decode_load_body(body)
        return await self.run(lambda: unpack_load(self._process().read("load", body, ())))

    def read(self, request: EncodedRequest) -> asyncio.Future[InferRequest]:
        """Decode a request on a thread. The future raises ServeError as ``request.read`` does."""
        return self.run(request.read)

    def _process(self) -> "JsonProcess":
        process: JsonProcess | None = getattr(self._own, "process", None)
        if process is None or not process.is_running:
            process = self._own.process = JsonProcess(self._memory)
        return process


class JsonProcess:
    """A process that decodes JSON. Used by one thread at a time."""

    def __init__(self, memory: LargeMemory) -> None:
        """Start the process; its tensors are received in ``memory``.

        Raises:
            ServeError: overloaded, if the process cannot be started.
        """
        ours, theirs = socket.socketpair()
        # Limits of the system's calls, each of which moves a whole part without the interpreter lock. With a timeout of
        # Python's each would move only what a buffer of 200 KB holds.
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", _TIMEOUT_S, 0))
        self._connection = ours
        self._memory = memory
        # Not with ``-m``, which does not run compiled modules.
        start = "from ortserve.codecs.json_process import main; main()"
        command = [sys.executable, "-c", start, str(theirs.fileno())]
        # The process does no linear algebra, and numpy's threads would reserve address space.
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
        """Decode a body in the process.

        Args:
            reader: Name of a reader of ``codecs/json_process``.
            body: The JSON.
            arguments: Further arguments of the reader.

        Returns:
            The parts of the packed result.

        Raises:
            ServeError: overloaded, if the process ends meanwhile, mostly for lack of memory.
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
