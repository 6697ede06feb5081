"""The load over gRPC: an HTTP/2 client (RFC 9113) on persistent connections with one request in flight each.

A unary call opens a stream; the requests of ``ModelStreamInfer`` share one. grpc.aio is too slow for a load generator:
it took 0.2 to 0.6 ms of CPU for a request of 0.3 ms, so answers waited for it.
"""

import asyncio
from typing import Final
from urllib.parse import unquote

import hpack

from ortserve.clock import monotonic_ns
from ortserve.tools.bench.connections import Connection, Connections
from ortserve.tools.bench.samples import Ticket
from ortserve.tools.bench.target import ServerPlan

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 0x1, 0x1, 0x4, 0x8
_INITIAL_WINDOW: Final = 65_535
_MAX_WINDOW: Final = 2**31 - 1
_GIVE_BACK: Final = 2**29
"""Received bytes after which the client updates its windows."""
_FRAME: Final = 16_384
_ANSWER: Final = 0x12
"""The tag of ``infer_response`` in ``ModelStreamInferResponse``. Field 1 holds an error instead."""
_STATUSES: Final = (
    *("ok", "cancelled", "unknown", "invalid_argument", "timeout", "not_found", "already_exists"),
    *("permission_denied", "resource_exhausted", "failed_precondition", "aborted", "out_of_range"),
    *("unimplemented", "internal", "unavailable", "data_loss", "unauthenticated"),
)


class GrpcConnection(Connection):
    """A connection with one stream at a time. The body of an answer is an encoded ``ModelInferResponse``."""

    def __init__(self, owner: Connections) -> None:
        super().__init__(owner)
        self._messages = owner.plan.requests
        self._is_stream = owner.plan.is_stream
        self._head = _head(owner.plan)
        self._decoder = hpack.Decoder()
        self._received = bytearray()
        self._stream_id = -1
        self._is_open = False
        self._to_send = b""
        self._window = self._stream_window = self._first_window = _INITIAL_WINDOW
        self._consumed = 0
        self._body = bytearray()
        self._block = b""
        self._fields: dict[str, str] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        settings = b"\0\2\0\0\0\0" + b"\0\4" + _MAX_WINDOW.to_bytes(4, "big")  # no push; the initial window of streams
        opening = _frame(_SETTINGS, 0, 0, settings) + _window_update(0, _MAX_WINDOW - _INITIAL_WINDOW)
        self.transport.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + opening)

    def send(self, ticket: Ticket) -> None:
        self.ticket = ticket
        head = b""
        if not self._is_open:
            self._stream_id += 2
            self._is_open, self._stream_window, self._fields = True, self._first_window, {}
            head = _frame(_HEADERS, _END_HEADERS, self._stream_id, self._head)
        self._body.clear()
        self._to_send = self._messages[ticket.request]
        self.transport.write(head + self._sendable())

    def _sendable(self) -> bytes:
        """Frames with as much of the message as the windows allow."""
        frames = []
        while (size := min(len(self._to_send), self._window, self._stream_window, _FRAME)) > 0:
            piece, self._to_send = self._to_send[:size], self._to_send[size:]
            self._window -= size
            self._stream_window -= size
            is_last = not self._to_send and not self._is_stream
            frames.append(_frame(_DATA, _END_STREAM if is_last else 0, self._stream_id, piece))
        return b"".join(frames)

    def data_received(self, data: bytes) -> None:
        self.came_ns = monotonic_ns()
        received = self._received
        received += data
        position = 0
        try:
            while len(received) - position >= 9:
                start, kind, flags = position + 9, received[position + 3], received[position + 4]
                end = start + int.from_bytes(received[position : position + 3], "big")
                if len(received) < end:
                    break
                stream_id = int.from_bytes(received[position + 5 : start], "big")
                position = end
                self._on_frame(kind, flags, stream_id, bytes(received[start:end]))
        except (hpack.HPACKError, IndexError, UnicodeDecodeError) as error:
            self.failed("malformed_answer", repr(error))
        del received[:position]

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        is_ours = stream_id == self._stream_id  # other ids: the connection itself, or streams that have ended
        if kind in (_DATA, _HEADERS) and flags & _PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        if kind == _DATA:
            self._on_data(payload if is_ours else b"", len(payload))
        elif kind in (_HEADERS, _CONTINUATION):
            self._block += payload
            if flags & _END_HEADERS:
                block, self._block = self._block, b""
                fields = self._decoder.decode(block)  # headers of other streams update the shared table, too
                self._fields.update((str(name), str(value)) for name, value in fields if is_ours)
        elif kind == _SETTINGS and not flags & _ACK:
            self._on_settings(payload)
        elif kind == _PING and not flags & _ACK:
            self.transport.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            step = int.from_bytes(payload, "big")
            self._window += 0 if stream_id else step
            self._stream_window += step if is_ours else 0
            self.transport.write(self._sendable())
        elif kind == _RST_STREAM and is_ours and self._is_open:
            self._fields.setdefault("grpc-message", f"the stream was reset, code {int.from_bytes(payload, 'big')}")
            self._on_end()
        elif kind == _GOAWAY:
            self.failed("connection_lost", f"the server closes the connection: {payload[8:].decode(errors='replace')}")
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM and is_ours and self._is_open:
            self._on_end()

    def _on_settings(self, payload: bytes) -> None:
        for position in range(0, len(payload) - 5, 6):
            if payload[position : position + 2] == b"\0\4":  # the initial window; it changes that of open streams, too
                value = int.from_bytes(payload[position + 2 : position + 6], "big")
                self._stream_window += value - self._first_window
                self._first_window = value
        self.transport.write(_frame(_SETTINGS, _ACK, 0, b"") + self._sendable())

    def _on_data(self, payload: bytes, size: int) -> None:
        self._body += payload
        self._consumed += size
        if self._consumed > _GIVE_BACK:
            updates = _window_update(0, self._consumed) + _window_update(self._stream_id, self._consumed)
            self.transport.write(updates)
            self._consumed = 0
        if self._is_stream and len(self._body) >= 5 + int.from_bytes(self._body[1:5], "big"):
            self._on_message(bytes(self._body[5:]))

    def _on_message(self, message: bytes) -> None:
        """Handle a complete message of ``ModelStreamInfer``."""
        self._body.clear()
        if message[:1] != bytes([_ANSWER]):
            self.failed("grpc_stream_error", message[2:300].decode(errors="replace"), is_usable=True)
        elif self.ticket is not None:
            body = _content(message) if self.ticket.wants_body else None
            self.answered(len(message), None, body)

    def _on_end(self) -> None:
        """The stream has ended: a unary call is complete, ``ModelStreamInfer`` has failed."""
        self._is_open = False
        self._to_send = b""
        fields, ticket, nbytes = self._fields, self.ticket, len(self._body)
        if ticket is None:
            return
        status = fields.get("grpc-status", "2" if fields.get(":status") == "200" else "14")
        if status == "0" and nbytes >= 5 and not self._is_stream:
            timing = fields.get("server-timing")
            body = bytes(self._body[5:]) if ticket.wants_body else None
            self.answered(nbytes - 5, timing.encode() if timing else None, body)
            return
        number = int(status) if status.isdigit() and int(status) < len(_STATUSES) else 2
        kind = "timeout" if number == 4 else f"grpc_{_STATUSES[number]}"
        example = unquote(fields.get("grpc-message", "")) or f"status {fields.get(':status')}"
        self.failed(kind, example, is_usable=True)


def _head(plan: ServerPlan) -> bytes:
    """The header block of all requests (RFC 7541). It adds no entries to the table, so it can be sent again."""
    address, method = plan.address, "ModelStreamInfer" if plan.is_stream else "ModelInfer"
    fields = {
        ":method": "POST",
        ":scheme": "https" if address.is_tls else "http",
        ":path": f"/inference.GRPCInferenceService/{method}",
        ":authority": address.authority,
        "content-type": "application/grpc",
        "te": "trailers",
        **address.headers,
    }
    entries = [hpack.NeverIndexedHeaderTuple(name, value) for name, value in fields.items()]
    return bytes(hpack.Encoder().encode(entries, huffman=False))


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return b"%b%c%c%b%b" % (len(payload).to_bytes(3, "big"), kind, flags, stream_id.to_bytes(4, "big"), payload)


def _window_update(stream_id: int, step: int) -> bytes:
    return _frame(_WINDOW_UPDATE, 0, stream_id, step.to_bytes(4, "big"))


def _content(message: bytes) -> bytes:
    """The ``ModelInferResponse`` in a ``ModelStreamInferResponse``."""
    position = 1
    while message[position] & 0x80:  # skip the length, a varint
        position += 1
    return message[position + 1 :]
