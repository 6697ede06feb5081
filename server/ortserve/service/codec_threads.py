"""Threads for decoding and encoding that would block the event loop: large JSON, texts, typed integers.

Each thread starts a process for JSON (``codecs/json_process``) when it first needs one.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from ortserve.codecs.bounds import INLINE_BYTES
from ortserve.codecs.json_process import unpack_load, unpack_request
from ortserve.codecs.json_text import LoadParameter, decode_load_body
from ortserve.core.helper_process import HelperProcess
from ortserve.core.inflight import InflightRequest
from ortserve.core.large_memory import LargeMemory
from ortserve.core.request import InferRequest, JsonRequest
from ortserve.core.thread_pool import ThreadPool
from ortserve.engine.thread_priority import LONGEST_SLICE_NS, set_slice
from ortserve.errors import ErrorKind, ServeError

T = TypeVar("T")


class CodecThreads:
    """A pool of threads. Loop thread only."""

    def __init__(self, threads: int, memory: LargeMemory | None = None) -> None:
        """Create the pool; further threads start when they are needed.

        Args:
            threads: Maximum number of bodies that are decoded or encoded at one time; others wait.
            memory: Memory for the tensors of large JSON; None for a pool of its own.
        """
        self._memory = memory or LargeMemory()
        self._executor = ThreadPool(threads, "codec", set_slice, (LONGEST_SLICE_NS,))
        self._own = threading.local()

    def run(self, work: Callable[[], T], call: InflightRequest | None = None) -> asyncio.Future[T]:
        """Run ``work`` on a thread. The future holds its result or its error.

        Work of a ``call`` that is settled before a thread is free is skipped: its caller no longer waits.
        """
        return asyncio.get_running_loop().run_in_executor(self._executor, _run_unless_settled, work, call)

    def read_json(self, request: JsonRequest, call: InflightRequest) -> asyncio.Future[InferRequest]:
        """Decode a request in another process; ``call`` as for ``run``.

        The future raises ServeError as ``request.read`` does, and overloaded if the process ends meanwhile.
        """
        reader, body, arguments = request.for_process()
        return self.run(lambda: unpack_request(self._process().call((reader, arguments), body)), call)

    async def read_load(self, body: bytes | memoryview) -> dict[str, LoadParameter]:
        """Decode the body of a load request, a long one in another process.

        Raises:
            ServeError: invalid_input; overloaded, if the process ends meanwhile.
        """
        if len(body) <= INLINE_BYTES:
            return decode_load_body(body)
        return await self.run(lambda: unpack_load(self._process().call(("load", ()), body)))

    def _process(self) -> HelperProcess:
        process: HelperProcess | None = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = HelperProcess("ortserve.codecs.json_process", "reads JSON", self._memory)
        return process


def _run_unless_settled(work: Callable[[], T], call: InflightRequest | None) -> T:
    if call is not None and call.is_settled:
        raise ServeError(ErrorKind.CANCELLED, "the caller no longer waits")
    return work()
