"""The gRPC port served by grpcio (``grpc_transport=grpcio``).

grpc.aio accepts calls and decodes their paths in one loop, and shuts its server down if this loop raises. So one call
whose ``:path`` is not UTF-8 would close the port. Here two grpc.aio servers divide the work. A ``_Listener`` owns the
port and accepts calls. A ``_Dispatcher``, which has no port, decodes their paths and starts their handlers. If its loop
raises, the current call is cancelled, and a new dispatcher continues with the next call; running calls continue.

The two classes use names of ``grpc._cython`` that are not public; ``tests/integration/test_grpc_paths.py`` fails if a
release of grpcio changes them.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc
from grpc import _compression
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # it is compiled

from ortserve.codecs.grpc_answer import MAX_MESSAGE_BYTES
from ortserve.config.options import ServerOptions
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.calls import Context, Handler, abort, check_key, status_of, unary
from ortserve.frontends.grpc.router import SMALL_MESSAGE_BYTES, Router, is_small, rejecting, too_large
from ortserve.frontends.grpc.streams import Streams
from ortserve.telemetry.logs import log_event, log_fault

logger: Final = logging.getLogger(__name__)

_COMPRESSIONS: Final = {
    "none": grpc.Compression.NoCompression,
    "deflate": grpc.Compression.Deflate,
    "gzip": grpc.Compression.Gzip,
}
"""Compression by the value of ``grpc_response_compression``."""

_MAX_METADATA_BYTES: Final = 16 * 1024
"""Maximum size of the metadata of a call, counting 32 bytes more for each entry, as in the native transport."""

_MAX_PENDING: Final = 100_000
"""Maximum number of calls that were received and not started, some kilobytes each. No more arrive within a second."""

_MAX_MS: Final = 2**31 - 2
"""grpc stores an int, whose highest value means "never"."""


class GrpcioServer:
    """Serves one address from ``start`` to ``stop``, both on the event loop that runs the calls."""

    def __init__(
        self,
        router: Router,
        streams: Streams,
        options: ServerOptions,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """Store the parameters; ``start`` opens the port.

        Args:
            router: Finds the handlers.
            streams: The open streams of those handlers; ``stop`` drains them.
            options: The address, limits of connections and messages, and the compression of answers.
            credentials: TLS credentials; None for plain text.
        """
        self._router = router
        self._streams = streams
        self._options = options
        self._credentials = credentials
        self._server: _Server | None = None

    async def start(self) -> int:
        """Listen and serve.

        Returns:
            The bound port.

        Raises:
            ServeError: conflict if the address cannot be bound; the message names the option.
        """
        options = self._options
        arguments = channel_arguments(options, has_tls=self._credentials is not None)
        server = _Server(_Handlers(self._router), arguments, _COMPRESSIONS[options.grpc_response_compression])
        host = f"[{options.host}]" if ":" in options.host else options.host
        try:
            port = server.add_port(f"{host}:{options.grpc_port}", self._credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            await server.stop(None)
            raise _bind_failure(options.host, options.grpc_port)
        logging.getLogger(cygrpc.__name__).addFilter(_is_no_lost_call)
        await server.start()
        self._server = server
        return port

    async def stop(self, grace_s: float) -> bool:
        """Reject new calls (GOAWAY), finish running calls, and stop reading requests of streams.

        Returns when every call has ended. Calls that run longer than ``grace_s`` are cancelled. Does nothing before
        ``start`` or after the first ``stop``.

        Returns:
            True; grpcio does not say whether it cancelled calls.
        """
        server, self._server = self._server, None
        if server is not None:
            self._streams.begin_drain()
            await server.stop(grace_s)
        return True


def channel_arguments(options: ServerOptions, *, has_tls: bool = False) -> tuple[tuple[str, int], ...]:
    """Return the options of the port under grpc's names, with times in milliseconds. Omits bounds that are None."""
    max_calls = options.grpc_max_connection_calls
    times_s = {
        "grpc.max_connection_age_ms": options.grpc_max_connection_age_s,
        "grpc.max_connection_age_grace_ms": options.grpc_max_connection_age_grace_s,
        "grpc.max_connection_idle_ms": options.grpc_max_connection_idle_s,
        "grpc.server_handshake_timeout_ms": options.tls_handshake_timeout_s if has_tls else None,
    }
    return (
        # grpc rejects a longer message while it reads or decompresses it, with RESOURCE_EXHAUSTED, before it stores the
        # whole message.
        ("grpc.max_receive_message_length", options.max_body_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Above the soft limit, 8 KiB by default, grpc rejects some calls at random.
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        # Calls of all connections that were received and not started. By default grpc cancels some at random above
        # 1,000. The loop starts all of them in its next turn, and then the queues of the models limit them.
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
        # On by default: two servers would share a port by accident, and each would get some of the connections.
        ("grpc.so_reuseport", int(options.reuse_port)),
        ("grpc.max_allowed_incoming_connections", options.grpc_max_connections),
        ("grpc.keepalive_time_ms", _ms(options.grpc_keepalive_time_s)),
        ("grpc.keepalive_timeout_ms", _ms(options.grpc_keepalive_timeout_s)),
        ("grpc.keepalive_permit_without_calls", int(options.grpc_keepalive_permit_without_calls)),
        ("grpc.http2.max_pings_without_data", options.grpc_http2_max_pings_without_data),
        (
            "grpc.http2.min_ping_interval_without_data_ms",  # on a server: of received pings
            _ms(options.grpc_http2_min_recv_ping_interval_without_data_s),
        ),
        ("grpc.http2.max_ping_strikes", options.grpc_http2_max_ping_strikes),
        *([] if max_calls is None else [("grpc.max_concurrent_streams", max_calls)]),
        *((name, _ms(time_s)) for name, time_s in times_s.items() if time_s is not None),
    )


def _ms(seconds: float) -> int:
    return min(round(seconds * 1000), _MAX_MS)


def _is_no_lost_call(record: logging.LogRecord) -> bool:
    """Whether a line of grpcio is worth logging: not an answer that could not be sent, because its call was cancelled.

    grpcio logs each with a traceback: any caller could fill the disk.
    """
    return record.exc_info is None or not isinstance(record.exc_info[1], cygrpc.ExecuteBatchError)


def _bind_failure(host: str, port: int) -> ServeError:
    """Bind once more to find the reason, which grpc writes to its own log only."""
    reason = "grpc could not bind it"
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
    return ServeError(ErrorKind.CONFLICT, f"grpc_port: cannot listen on {host}:{port}: {reason}")


class _Handlers(grpc.GenericRpcHandler):
    """Finds the handlers of calls, and applies the limit of small messages: grpcio has one limit for the whole server.

    A message over the limit is rejected after it has arrived and before it is parsed.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._limited = {path: _limited(handler) for path, handler in router.handlers.items() if is_small(path)}

    def service(self, details: grpc.HandlerCallDetails) -> Handler:
        """Return the handler of a call. grpcio calls this after the headers and before the first message."""
        guard = self._router.guards.get(details.method)
        if guard is not None and (error := check_key(guard, details.invocation_metadata)) is not None:
            return rejecting(error)
        return self._limited.get(details.method) or self._router.find(details.method)


def _limited(handler: Handler) -> Handler:
    """Wrap a handler so that messages over ``SMALL_MESSAGE_BYTES`` are rejected before they are parsed."""
    any_handler: Any = handler
    if handler.unary_unary is None:

        async def stream(messages: object, context: Context) -> None:
            await any_handler.stream_stream(messages, _LimitedContext(context))

        return grpc.stream_stream_rpc_method_handler(stream)

    async def call(data: bytes | memoryview, context: Context) -> bytes:
        size = len(data)
        answering = any_handler.unary_unary(data, context) if size <= SMALL_MESSAGE_BYTES else None
        del data  # see ``abort``
        if answering is None:
            await abort(context, status_of(too_large(SMALL_MESSAGE_BYTES, size)))
        answer: bytes = await answering
        return answer

    return unary(call)


class _LimitedContext:
    """The context of a stream whose messages must be small."""

    def __init__(self, context: Context) -> None:
        self._context: Any = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """Return the next message. Raises ServeError: too_large."""
        data = await self._context.read()
        if isinstance(data, bytes) and len(data) > SMALL_MESSAGE_BYTES:
            raise too_large(SMALL_MESSAGE_BYTES, len(data))
        return data


_AioServer: Final[Any] = cygrpc.AioServer
_RequestCallError: Final[Any] = cygrpc._RequestCallError
"""Exception that ends the wait for a call in a server that shuts down."""


class _Listener(_AioServer):  # type: ignore[misc]  # Any: it has no stubs
    def __init__(self, options: Sequence[tuple[str, Any]], calls: "asyncio.Queue[Any]") -> None:
        self._events = asyncio.get_running_loop()
        super().__init__(self._events, None, (), None, options, None)
        self._calls = calls

    def _make_request_call_future(self, *_: object) -> "asyncio.Task[None]":
        """Return a task that enqueues all calls, instead of a task for the next call. It ends with the server."""
        return self._events.create_task(self._enqueue_calls())

    async def _enqueue_calls(self) -> None:
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
        """Free the resources. If the loop has raised, the first ``shutdown`` raises that error again."""
        if not self._stopping.done():
            self._stopping.set_result(None)
        with suppress(Exception):
            await self.shutdown(None)
        await self.shutdown(None)


class _Server:
    """The listener and the current dispatcher. Loop thread only."""

    def __init__(
        self, handler: grpc.GenericRpcHandler, options: Sequence[tuple[str, Any]], compression: grpc.Compression
    ) -> None:
        self._handler = handler
        self._calls: asyncio.Queue[Any] = asyncio.Queue()
        self._listener = _Listener((*options, *_compression.create_channel_option(compression)), self._calls)
        self._dispatcher: _Dispatcher | None = None
        self._replacing: set[asyncio.Task[None]] = set()

    def add_port(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        """Bind an address. Returns 0 or raises RuntimeError on failure."""
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
        """Stop, as ``grpc.aio.Server.stop``."""
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
