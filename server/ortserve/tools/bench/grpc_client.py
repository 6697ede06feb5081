"""The load over gRPC: an HTTP/2 client (RFC 9113) on persistent connections with one request in flight each.

A unary call opens a stream; the requests of ``ModelStreamInfer`` share one. grpc.aio is too slow for a load generator:
it took 0.2 to 0.6 ms of CPU for a request of 0.3 ms, so answers waited for it.
"""

import asyncio
import struct
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote

import hpack

from ortserve.clock import monotonic_ns
from ortserve.tools.bench.connections import Connection, Connections
from ortserve.tools.bench.outcomes import Ticket
from ortserve.tools.bench.target import ServerPlan

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 0x1, 0x1, 0x4, 0x8
_INITIAL_WINDOW: Final = 65_535
_MAX_WINDOW: Final = 2**31 - 1
_GIVE_BACK: Final = 2**29
"""Received bytes after which the client updates its windows."""
_FRAME: Final = 16_384
_FRAME_HEAD: Final = struct.Struct(">BHBBI")
"""The length in its upper 8 and lower 16 bits, type, flags, and stream."""
_TIMING: Final = b"\0\x0dserver-timing"
"""The beginning of a literal field. Texts contain no zero byte."""
_KEPT_BLOCKS: Final = 64
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
        self._header_reader = HeaderReader()
        self._rest = b""
        self._stream_id = -1
        self._is_open = self._is_last = self._is_leaving = False
        self._to_send = b""
        self._window = self._stream_window = self._first_window = _INITIAL_WINDOW
        self._consumed = 0
        self._body = bytearray()
        self._block = b""
        self._fields: dict[str, str] = {}
        self._timing: bytes | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        settings = b"\0\2\0\0\0\0" + b"\0\4" + _MAX_WINDOW.to_bytes(4, "big")  # no push; the initial window of streams
        opening = _frame(_SETTINGS, 0, 0, settings) + _window_update(0, _MAX_WINDOW - _INITIAL_WINDOW)
        self.transport.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + opening)

    def _release(self, *, is_usable: bool) -> Ticket | None:
        return super()._release(is_usable=is_usable and not self._is_leaving)

    def send(self, ticket: Ticket) -> None:
        self.ticket = ticket
        head = b""
        if not self._is_open:
            self._stream_id += 2
            self._is_open, self._stream_window, self._fields, self._timing = True, self._first_window, {}, None
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
        received = self._rest + data
        position, size = 0, len(received)
        try:
            while size - position >= 9:
                high, low, kind, flags, stream_id = _FRAME_HEAD.unpack_from(received, position)
                end = position + 9 + (high << 16) + low
                if size < end:
                    break
                self._on_frame(kind, flags, stream_id, received[position + 9 : end])
                position = end
        except (hpack.HPACKError, IndexError, struct.error, UnicodeDecodeError) as error:
            self.failed("malformed_answer", repr(error))
        self._rest = received[position:]

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        is_ours = stream_id == self._stream_id  # other ids: the connection itself, or streams that have ended
        if kind not in (_DATA, _HEADERS, _CONTINUATION):
            self._on_control_frame(kind, flags, stream_id, payload)
            return
        if flags & _PADDED and kind != _CONTINUATION:
            payload = payload[1 : len(payload) - payload[0]]
        if kind != _CONTINUATION:  # the flag of HEADERS holds after the frames that continue them
            self._is_last = bool(flags & _END_STREAM)
        if kind == _DATA:
            self._on_data(payload if is_ours else b"", len(payload))
        else:
            self._block += payload
            if not flags & _END_HEADERS:
                return
            block, self._block = self._block, b""
            fields, timing = self._header_reader.read(block)  # those of other streams change the table, too
            if is_ours:
                self._fields.update(fields)
                self._timing = timing or self._timing
        if self._is_last and is_ours and self._is_open:
            self._on_end()

    def _on_control_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        is_ours = stream_id == self._stream_id
        if kind == _SETTINGS and not flags & _ACK:
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
            last_stream_id, code = struct.unpack_from(">II", payload)
            self._is_leaving = True
            if self.ticket is None or code or last_stream_id < self._stream_id:
                reason = payload[8:].decode(errors="replace")
                self.failed("connection_lost", f"the server closes the connection: {reason}")

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
            body = bytes(self._body[5:]) if ticket.wants_body else None
            self.answered(nbytes - 5, self._timing, body)
            return
        number = int(status) if status.isdigit() and int(status) < len(_STATUSES) else 2
        kind = "timeout" if number == 4 else f"grpc_{_STATUSES[number]}"
        example = unquote(fields.get("grpc-message", "")) or f"status {fields.get(':status')}"
        self.failed(kind, example, is_usable=True)


class HeaderReader:
    """Decodes the header blocks of a connection.

    A block with known bytes is not decoded again until the table changes. ``server-timing`` is read before, because it
    differs from answer to answer. Otherwise decoding would be the largest part of the client's time.
    """

    def __init__(self) -> None:
        self._decoder = hpack.Decoder()
        self._kept: dict[bytes, dict[str, str]] = {}

    def read(self, block: bytes) -> tuple[Mapping[str, str], bytes | None]:
        """The fields of a block, and ``server-timing``. Raises HPACKError, IndexError or UnicodeDecodeError."""
        before, mark, after = block.partition(_TIMING)
        timing = None
        if mark and after[0] < 0x7F:  # its length, of text that has no Huffman code
            end = 1 + after[0]
            timing, block = after[1:end], before + after[end:]
        fields = self._kept.get(block)
        if fields is None:
            table = self._decoder.header_table
            state = [table.maxsize, *table.dynamic_entries]
            fields = {str(name): str(value) for name, value in self._decoder.decode(block)}
            if state != [table.maxsize, *table.dynamic_entries] or len(self._kept) >= _KEPT_BLOCKS:
                self._kept.clear()
            else:
                self._kept[block] = fields
        if timing is None and "server-timing" in fields:
            timing = fields["server-timing"].encode()
        return fields, timing


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
    size = len(payload)
    return _FRAME_HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def _window_update(stream_id: int, step: int) -> bytes:
    return _frame(_WINDOW_UPDATE, 0, stream_id, step.to_bytes(4, "big"))


def _content(message: bytes) -> bytes:
    """The ``ModelInferResponse`` in a ``ModelStreamInferResponse``."""
    position = 1
    while message[position] & 0x80:  # skip the length, a varint
        position += 1
    return message[position + 1 :]
