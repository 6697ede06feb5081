"""The load over gRPC: HTTP/2 by hand on kept connections, with one request in flight on each.

Unary calls are a stream each; streamed requests share one. Not grpc.aio, which took 0.2 to 0.6 ms of CPU for a request
of 0.3 ms, so that answers waited for it.
"""

import asyncio
import ssl
from typing import Final, cast
from urllib.parse import unquote

import hpack

from ortserve.clock import monotonic_ns
from ortserve.tools.bench.plans import GrpcPlan
from ortserve.tools.bench.pool import Pool
from ortserve.tools.bench.samples import Ticket
from ortserve.tools.bench.target import NOWHERE, Sink

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_INITIAL_WINDOW: Final = 65_535
_MOST_WINDOW: Final = 2**31 - 1
_GIVE_BACK: Final = 2**29
"""Received bytes after which the window is opened again."""
_FRAME: Final = 16_384
_ANSWER: Final = 0x12
"""The tag of ``infer_response`` in ``ModelStreamInferResponse``; an error comes in field 1."""
_STATUSES: Final = (
    *("ok", "cancelled", "unknown", "invalid_argument", "timeout", "not_found", "already_exists"),
    *("permission_denied", "resource_exhausted", "failed_precondition", "aborted", "out_of_range"),
    *("unimplemented", "internal", "unavailable", "data_loss", "unauthenticated"),
)


class GrpcTarget:
    """A ``Target`` over gRPC."""

    def __init__(self, plan: GrpcPlan) -> None:
        self.plan: Final = plan
        self.sink: Sink = NOWHERE
        self._tls: ssl.SSLContext | None = None
        if plan.is_tls:
            self._tls = ssl.create_default_context(cafile=plan.ca)
            self._tls.set_alpn_protocols(["h2"])
        self._pool = Pool(self._connect, plan.most_streams, self._fail)
        method = "ModelStreamInfer" if plan.is_stream else "ModelInfer"
        fields = [
            (":method", "POST"),
            (":scheme", "https" if plan.is_tls else "http"),
            (":path", f"/inference.GRPCInferenceService/{method}"),
            (":authority", plan.authority),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *plan.metadata,
        ]
        self.head: Final = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
        self.messages: Final = [b"\0" + len(body).to_bytes(4, "big") + body for body in plan.requests]

    async def open(self, count: int) -> None:
        """As ``Target.open``."""
        await self._pool.open(count)

    def send(self, ticket: Ticket) -> None:
        """As ``Target.send``."""
        self._pool.send(ticket)

    def expire(self, sent_before_ns: int) -> None:
        """As ``Target.expire``."""
        for lane in list(self._pool.lanes):
            connection = cast("_Connection", lane)
            if connection.ticket is not None and connection.ticket.sent_ns < sent_before_ns:
                connection.fail("timeout", "no answer in time")
        self._pool.expire(sent_before_ns)

    def batches(self) -> dict[int, int]:
        """As ``Target.batches``."""
        return {}

    async def close(self) -> None:
        """As ``Target.close``."""
        self._pool.close()

    def give_back(self, connection: "_Connection") -> None:
        """A connection is idle."""
        self._pool.give_back(connection)

    def lose(self, connection: "_Connection") -> None:
        """A connection is closed."""
        self._pool.lose(connection)

    async def _connect(self) -> "_Connection":
        host, _, port = self.plan.authority.rpartition(":")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self), host.strip("[]"), int(port), ssl=self._tls
        )
        return connection

    def _fail(self, ticket: Ticket, kind: str, example: str) -> None:
        self.sink.failed(ticket, monotonic_ns(), kind, example)


class _Connection(asyncio.Protocol):
    """A connection with one stream at a time (RFC 9113)."""

    def __init__(self, target: GrpcTarget) -> None:
        self._target = target
        self._is_stream = target.plan.is_stream
        self._decoder = hpack.Decoder()
        self._transport: asyncio.Transport | None = None
        self.ticket: Ticket | None = None
        self._received = bytearray()
        self._stream_id = -1
        self._is_open = False
        self._to_send = b""
        self._window = self._stream_window = self._first_window = _INITIAL_WINDOW
        self._consumed = 0
        self._body = bytearray()
        self._block = bytearray()
        self._fields: dict[str, str] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit it
        settings = b"\0\2\0\0\0\0" + b"\0\4" + _MOST_WINDOW.to_bytes(4, "big")  # no push; the window of streams
        opening = _frame(_SETTINGS, 0, 0, settings) + _window_update(0, _MOST_WINDOW - _INITIAL_WINDOW)
        self._transport.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + opening)

    def send(self, ticket: Ticket) -> None:
        assert self._transport is not None
        self.ticket = ticket
        head = b""
        if not self._is_open:
            self._stream_id += 2
            self._is_open = True
            self._stream_window = self._first_window
            self._fields = {}
            head = _frame(_HEADERS, _END_HEADERS, self._stream_id, self._target.head)
        self._body.clear()
        messages = self._target.messages
        self._to_send = messages[ticket.number % len(messages)]
        self._transport.write(head + self._sendable())

    def _sendable(self) -> bytes:
        """As much of the message as the windows allow, in frames."""
        frames = []
        while self._to_send:
            size = min(len(self._to_send), self._window, self._stream_window, _FRAME)
            if size <= 0:
                break
            piece, self._to_send = self._to_send[:size], self._to_send[size:]
            self._window -= size
            self._stream_window -= size
            is_last = not self._to_send and not self._is_stream
            frames.append(_frame(_DATA, _END_STREAM if is_last else 0, self._stream_id, piece))
        return b"".join(frames)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        position = 0
        while len(received) - position >= 9:
            end = position + 9 + int.from_bytes(received[position : position + 3], "big")
            if len(received) < end:
                break
            stream_id = int.from_bytes(received[position + 5 : position + 9], "big")
            payload = bytes(received[position + 9 : end])
            kind, flags = received[position + 3], received[position + 4]
            position = end
            try:
                self._on_frame(kind, flags, stream_id, payload)
            except (hpack.HPACKError, IndexError, UnicodeDecodeError) as error:
                self.fail("malformed_answer", repr(error))
                return
        del received[:position]

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        assert self._transport is not None
        is_ours = stream_id == self._stream_id
        if kind in (_DATA, _HEADERS) and flags & _PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        if kind == _DATA:
            self._on_data(payload if is_ours else b"", len(payload))
        elif kind in (_HEADERS, _CONTINUATION):
            self._block += payload[5:] if kind == _HEADERS and flags & _PRIORITY else payload
            if flags & _END_HEADERS:
                fields = self._decoder.decode(bytes(self._block))
                self._block.clear()
                if is_ours:
                    self._fields.update((str(name), str(value)) for name, value in fields)
        elif kind == _SETTINGS and not flags & _ACK:
            self._on_settings(payload)
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            step = int.from_bytes(payload, "big")
            if stream_id == 0:
                self._window += step
            elif is_ours:
                self._stream_window += step
            self._transport.write(self._sendable())
        elif kind == _RST_STREAM and is_ours and self._is_open:
            self._fields.setdefault("grpc-message", f"the stream was reset, code {int.from_bytes(payload, 'big')}")
            self._on_end()
        elif kind == _GOAWAY:
            self.fail("connection_lost", f"the server closes the connection: {payload[8:].decode(errors='replace')}")
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM and is_ours and self._is_open:
            self._on_end()

    def _on_data(self, payload: bytes, size: int) -> None:
        assert self._transport is not None
        self._body += payload
        self._consumed += size
        if self._consumed > _GIVE_BACK:
            updates = _window_update(0, self._consumed) + _window_update(self._stream_id, self._consumed)
            self._transport.write(updates)
            self._consumed = 0
        if self._is_stream and len(self._body) >= 5 + int.from_bytes(self._body[1:5], "big"):
            self._on_message(bytes(self._body[5:]))

    def _on_message(self, message: bytes) -> None:
        """A message of a stream came whole."""
        done_ns = monotonic_ns()
        ticket, self.ticket = self.ticket, None
        self._body.clear()
        if ticket is None:
            return
        self._target.give_back(self)
        if message[:1] != bytes([_ANSWER]):
            self._target.sink.failed(ticket, done_ns, "grpc_stream_error", message[2:300].decode(errors="replace"))
            return
        body = _content(message) if ticket.wants_body else None
        self._target.sink.answered(ticket, done_ns, len(message), None, body)

    def _on_end(self) -> None:
        """The stream has ended: a unary call is answered, other streams have failed."""
        done_ns = monotonic_ns()
        self._is_open = False
        self._to_send = b""
        fields, ticket, self.ticket = self._fields, self.ticket, None
        if ticket is None:
            return
        message = bytes(self._body[5:]) if ticket.wants_body else b""
        nbytes = len(self._body)
        self._target.give_back(self)
        status = fields.get("grpc-status", "2" if fields.get(":status") == "200" else "14")
        if status == "0" and nbytes >= 5 and not self._is_stream:
            timing = fields.get("server-timing")
            told = timing.encode() if timing else None
            self._target.sink.answered(ticket, done_ns, nbytes - 5, told, message if ticket.wants_body else None)
            return
        number = int(status) if status.isdigit() and int(status) < len(_STATUSES) else 2
        kind = "timeout" if number == 4 else f"grpc_{_STATUSES[number]}"
        example = unquote(fields.get("grpc-message", "")) or f"status {fields.get(':status')}"
        self._target.sink.failed(ticket, done_ns, kind, example)

    def _on_settings(self, payload: bytes) -> None:
        assert self._transport is not None
        for position in range(0, len(payload) - 5, 6):
            name = int.from_bytes(payload[position : position + 2], "big")
            value = int.from_bytes(payload[position + 2 : position + 6], "big")
            if name == 4:  # the window of streams; it changes those that are open, too
                self._stream_window += value - self._first_window
                self._first_window = value
        self._transport.write(_frame(_SETTINGS, _ACK, 0, b"") + self._sendable())

    def connection_lost(self, exc: Exception | None) -> None:
        self._target.lose(self)
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            example = str(exc) if exc else "the server closed the connection instead of answering"
            self._target.sink.failed(ticket, monotonic_ns(), "connection_lost", example)

    def fail(self, kind: str, example: str) -> None:
        """Give up the request on this connection, and the connection."""
        ticket, self.ticket = self.ticket, None
        assert self._transport is not None
        self._transport.abort()
        self._target.lose(self)
        if ticket is not None:
            self._target.sink.failed(ticket, monotonic_ns(), kind, example)

    def close(self) -> None:
        self.ticket = None
        if self._transport is not None:
            self._transport.close()


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return b"%b%c%c%b%b" % (len(payload).to_bytes(3, "big"), kind, flags, stream_id.to_bytes(4, "big"), payload)


def _window_update(stream_id: int, step: int) -> bytes:
    return _frame(_WINDOW_UPDATE, 0, stream_id, step.to_bytes(4, "big"))


def _text(text: str) -> bytes:
    """A string of a header block, without Huffman's code (RFC 7541, section 5.2)."""
    data = text.encode()
    size = len(data)
    if size < 127:
        return bytes([size]) + data
    size -= 127
    prefix = bytearray([127])
    while size >= 128:
        prefix.append(size % 128 + 128)
        size //= 128
    prefix.append(size)
    return bytes(prefix) + data


def _content(message: bytes) -> bytes:
    """The ``ModelInferResponse`` in a stream's message."""
    position = 1
    while message[position] & 0x80:  # its length, a varint
        position += 1
    return message[position + 1 :]
