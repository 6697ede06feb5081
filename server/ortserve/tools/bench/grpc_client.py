"""The load over gRPC: serialized messages on grpc.aio, one call each, or streams with one request in flight on each."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import grpc

from ortserve.clock import monotonic_ns
from ortserve.tools.bench.plans import GrpcPlan
from ortserve.tools.bench.pool import Pool
from ortserve.tools.bench.samples import Ticket
from ortserve.tools.bench.server import GRPC_OPTIONS, SERVICE
from ortserve.tools.bench.target import NOWHERE, Sink

_ANSWER: Final = 0x12
"""The tag of ``infer_response`` in ``ModelStreamInferResponse``; an error comes in field 1."""


def _channel(plan: GrpcPlan) -> grpc.aio.Channel:
    if not plan.is_tls:
        return grpc.aio.insecure_channel(plan.authority, GRPC_OPTIONS)
    trusted = Path(plan.ca).read_bytes() if plan.ca else None
    return grpc.aio.secure_channel(plan.authority, grpc.ssl_channel_credentials(trusted), GRPC_OPTIONS)


class GrpcCalls:
    """A ``Target`` by unary calls."""

    def __init__(self, plan: GrpcPlan) -> None:
        self._plan = plan
        self.sink: Sink = NOWHERE
        self._channel: grpc.aio.Channel | None = None
        self._method: Callable[..., Any] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def open(self, count: int) -> None:
        """As ``Target.open``."""
        if self._channel is None:
            self._channel = _channel(self._plan)
            self._method = cast("Callable[..., Any]", self._channel.unary_unary(f"{SERVICE}ModelInfer"))

    def send(self, ticket: Ticket) -> None:
        """As ``Target.send``."""
        task = asyncio.ensure_future(self._call(ticket))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call(self, ticket: Ticket) -> None:
        plan = self._plan
        assert self._method is not None
        message = plan.requests[ticket.number % len(plan.requests)]
        try:
            call = self._method(message, timeout=plan.timeout_s, metadata=plan.metadata)
            body: bytes = await call
            done_ns = monotonic_ns()
            trailing = await call.trailing_metadata()
        except grpc.aio.AioRpcError as error:
            self.sink.failed(ticket, monotonic_ns(), _kind(error.code()), error.details() or "")
            return
        timing = trailing.get("server-timing") if trailing else None
        told = timing.encode() if isinstance(timing, str) else timing
        self.sink.answered(ticket, done_ns, len(body), told, body if ticket.wants_body else None)

    def expire(self, sent_before_ns: int) -> None:
        """As ``Target.expire``; calls have their own timeout."""

    def batches(self) -> dict[int, int]:
        """As ``Target.batches``."""
        return {}

    async def close(self) -> None:
        """As ``Target.close``."""
        for call in self._calls:
            call.cancel()
        if self._channel is not None:
            await self._channel.close()


class GrpcStreams:
    """A ``Target`` by streams."""

    def __init__(self, plan: GrpcPlan) -> None:
        self.plan: Final = plan
        self.sink: Sink = NOWHERE
        self._channel: grpc.aio.Channel | None = None
        self._pool = Pool(self._open_stream, plan.most_streams, self._fail)

    async def open(self, count: int) -> None:
        """As ``Target.open``."""
        self._channel = self._channel or _channel(self.plan)
        await self._pool.open(count)

    def send(self, ticket: Ticket) -> None:
        """As ``Target.send``."""
        self._pool.send(ticket)

    def expire(self, sent_before_ns: int) -> None:
        """As ``Target.expire``."""
        for lane in list(self._pool.lanes):
            stream = cast("_Stream", lane)
            if stream.ticket is not None and stream.ticket.sent_ns < sent_before_ns:
                stream.fail("timeout", "no answer in time")
        self._pool.expire(sent_before_ns)

    def batches(self) -> dict[int, int]:
        """As ``Target.batches``."""
        return {}

    async def close(self) -> None:
        """As ``Target.close``."""
        self._pool.close()
        if self._channel is not None:
            await self._channel.close()

    def answer(self, stream: "_Stream", ticket: Ticket, message: bytes) -> None:
        """A stream received a message, and is idle."""
        done_ns = monotonic_ns()
        self._pool.give_back(stream)
        if message[0] != _ANSWER:
            self.sink.failed(ticket, done_ns, "grpc_stream_error", message[2:300].decode(errors="replace"))
            return
        self.sink.answered(ticket, done_ns, len(message), None, _content(message) if ticket.wants_body else None)

    def lose(self, stream: "_Stream", ticket: Ticket | None, kind: str, example: str) -> None:
        """A stream has ended."""
        self._pool.lose(stream)
        if ticket is not None:
            self._fail(ticket, kind, example)

    async def _open_stream(self) -> "_Stream":
        assert self._channel is not None
        method = cast("Callable[..., Any]", self._channel.stream_stream(f"{SERVICE}ModelStreamInfer"))
        call = method(metadata=self.plan.metadata)
        try:
            await call.wait_for_connection()
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(0, error.details()) from None
        return _Stream(self, call)

    def _fail(self, ticket: Ticket, kind: str, example: str) -> None:
        self.sink.failed(ticket, monotonic_ns(), kind, example)


class _Stream:
    def __init__(self, target: GrpcStreams, call: Any) -> None:
        self._target = target
        self._call = call
        self._requests = target.plan.requests
        self.ticket: Ticket | None = None
        self._has_ticket = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())

    def send(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self._has_ticket.set()

    async def _run(self) -> None:
        try:
            while True:
                await self._has_ticket.wait()
                self._has_ticket.clear()
                assert self.ticket is not None
                await self._call.write(self._requests[self.ticket.number % len(self._requests)])
                message = await self._call.read()
                if message is grpc.aio.EOF:
                    raise asyncio.InvalidStateError
                answered, self.ticket = self.ticket, None
                self._target.answer(self, answered, message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            ticket, self.ticket = self.ticket, None
            self._target.lose(self, ticket, _kind(await self._call.code()), str(await self._call.details()))

    def fail(self, kind: str, example: str) -> None:
        """Give up the request on this stream, and the stream."""
        ticket, self.ticket = self.ticket, None
        self.close()
        self._target.lose(self, ticket, kind, example)

    def close(self) -> None:
        self._task.cancel()
        self._call.cancel()


def _kind(code: grpc.StatusCode | None) -> str:
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "timeout"
    return f"grpc_{(code or grpc.StatusCode.UNKNOWN).name.lower()}"


def _content(message: bytes) -> bytes:
    """The ``ModelInferResponse`` in a stream's message."""
    position = 1
    while message[position] & 0x80:  # its length, a varint
        position += 1
    return message[position + 1 :]
