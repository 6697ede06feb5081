"""grpc.aio's server, whose port survives a ``:path`` that is not UTF-8.

grpc.aio takes calls and decodes their paths in one loop, and shuts its server down when that loop raises: one malformed
call ended the port. Here the two halves are servers of their own. A ``_Listener`` has the port and takes calls; a
``_Dispatcher``, which listens nowhere, decodes their paths and starts their handlers. When its loop raises, the call
that it was at is cancelled and another dispatcher goes on with the next one. Calls that were started are not affected.

This relies on names of ``grpc._cython`` that are not public; ``tests/integration/test_grpc_paths.py`` shows whether
they still do what they are used for.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc
from grpc import _compression
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # it is compiled

from ortserve.telemetry.logs import log_event, log_fault

logger: Final = logging.getLogger(__name__)

_AioServer: Final[Any] = cygrpc.AioServer
_RequestCallError: Final[Any] = cygrpc._RequestCallError
"""Ends the wait for a call of a server that shuts down."""


class _Listener(_AioServer):  # type: ignore[misc]  # Any: it has no stubs
    def __init__(self, options: Sequence[tuple[str, Any]], calls: "asyncio.Queue[Any]") -> None:
        self._events = asyncio.get_running_loop()
        super().__init__(self._events, None, (), None, options, None)
        self._calls = calls

    def _make_request_call_future(self, *_: object) -> "asyncio.Task[None]":
        """Instead of the next call, a task that hands all of them on. It ends with the server."""
        return self._events.create_task(self._hand_on())

    async def _hand_on(self) -> None:
        while True:
            self._calls.put_nowait(await self._request_call())


class _Dispatcher(_AioServer):  # type: ignore[misc]  # as above
    def __init__(
        self,
        handlers: Sequence[grpc.GenericRpcHandler],
        next_call: Callable[[], Awaitable[Any]],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._events = asyncio.get_running_loop()
        super().__init__(self._events, None, handlers, None, (), None)
        self._next_call = next_call
        self._on_crash = on_crash
        self._stopping = self._events.create_future()

    def _make_request_call_future(self, *_: object) -> "asyncio.Task[Any]":
        return self._events.create_task(self._next_or_stop())

    async def _next_or_stop(self) -> Any:
        call = asyncio.ensure_future(self._next_call())
        await asyncio.wait((call, self._stopping), return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            return call.result()
        call.cancel()
        raise _RequestCallError

    def _serving_task_crash_handler(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_crash(error)

    async def close(self) -> None:
        """Free what it has, after its loop has raised, too: that is raised once more by the first attempt."""
        if not self._stopping.done():
            self._stopping.set_result(None)
        with suppress(Exception):
            await self.shutdown(None)
        await self.shutdown(None)


class AioServer:
    """As much of ``grpc.aio.Server`` as is used. Loop thread only."""

    def __init__(
        self,
        handler: grpc.GenericRpcHandler,
        options: Sequence[tuple[str, Any]],
        compression: grpc.Compression,
    ) -> None:
        self._handler = handler
        self._calls: asyncio.Queue[Any] = asyncio.Queue()
        self._listener = _Listener((*options, *_compression.create_channel_option(compression)), self._calls)
        self._dispatcher: _Dispatcher | None = None
        self._replacing: set[asyncio.Task[None]] = set()

    def add_port(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        """Bind an address; 0 where that fails. May raise RuntimeError instead."""
        port: int
        if credentials is None:
            port = self._listener.add_insecure_port(address.encode())
        else:
            port = self._listener.add_secure_port(address.encode(), credentials)
        return port

    async def start(self) -> None:
        await self._start_dispatcher()
        await self._listener.start()

    async def stop(self, grace_s: float | None) -> None:
        """As ``grpc.aio.Server.stop``."""
        await self._listener.shutdown(grace_s)
        while self._replacing:
            await asyncio.wait(self._replacing)
        if self._dispatcher is not None:
            await self._dispatcher.close()

    async def _start_dispatcher(self) -> None:
        self._dispatcher = _Dispatcher((self._handler,), self._calls.get, self._on_crash)
        await self._dispatcher.start()

    def _on_crash(self, error: BaseException) -> None:
        if isinstance(error, UnicodeDecodeError):
            log_event(logger, logging.DEBUG, "a gRPC call was cancelled", reason="its path is not UTF-8")
        else:
            log_fault(logger, "a gRPC call could not be started", error)
        task = asyncio.get_running_loop().create_task(self._replace_dispatcher())
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace_dispatcher(self) -> None:
        old = self._dispatcher
        await self._start_dispatcher()
        if old is not None:
            await old.close()
