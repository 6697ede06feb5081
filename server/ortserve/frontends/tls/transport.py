"""TLS between a socket and the protocol served over it (HTTP or gRPC).

``TlsTransport`` is the protocol of the socket and the transport of the served protocol. It has no buffer of its own:
decrypted bytes go on at once, and encrypted ones to the transport of the socket, which has the only write buffer,
limits and pauses. So a protocol behaves the same with and without TLS. A slow reader gets the whole last response
before the connection closes. A connection closes at once whether or not its peer sends close_notify. The TLS transports
of asyncio and uvloop wait ``ssl_shutdown_timeout`` for close_notify, and drop unsent bytes at the same timeout: either
idle clients delay a drain, or slow ones lose the end of their responses.

This module also limits the bytes of one peer that are decrypted in a loop turn. ``RecordBudget`` limits the bytes
without data that a peer sends. No limit of a protocol covers these.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, Final, cast

from ortserve.clock import Clock, monotonic_ns
from ortserve.frontends.idle_connections import has_unread_bytes
from ortserve.frontends.long_reads import LONG_READ_BYTES, pause_for_turn
from ortserve.frontends.tls.record_budget import RecordBudget
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_PLAINTEXT_BYTES: Final = 16 * 1024
"""Maximum plaintext of a record (RFC 8446, section 5.1), so that one ``SSLObject.read`` returns a whole record."""

_JOINED_BYTES: Final = 64 * 1024
"""Parts up to this total size are joined and encrypted together: a copy is cheaper than a record for each part."""

_PIECE_BYTES: Final = 256 * 1024
"""Bytes that are encrypted at a time, so that a large response is not held twice."""

_SLICE_BYTES: Final = 32 * 1024
"""Bytes that are decrypted between two checks of the record budget. Smaller slices would slow uploads."""

_HINT: Final = b'{"error":"this port uses TLS: expected https:// in the address, got a plain HTTP request"}'
_PLAIN_HTTP: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_HINT), _HINT)
)
"""The answer to plain HTTP, which the client shows instead of a lost connection."""

_CANDIDATES: Final = 16
"""Number of the oldest handshakes of which one may be aborted for a new one."""

_UNREAD_BYTES: Final = 64 * 1024
"""Size of the write buffer above which the peer counts as not reading."""


class TlsPort:
    """State that all TLS sessions of one port share. Loop thread only."""

    def __init__(
        self,
        context: Callable[[], ssl.SSLContext],
        *,
        port: str,
        handshake_timeout_s: float,
        max_handshakes: int,
        alpn: str | None = None,
        clock: Clock = monotonic_ns,
    ) -> None:
        """Store the parameters.

        Args:
            context: Returns the context of the next session.
            port: Name of the port, for the log.
            handshake_timeout_s: Time from the beginning of a connection to the end of its handshake.
            max_handshakes: Number of concurrent handshakes. A further one replaces the oldest whose client is silent.
            alpn: Protocol that a client must negotiate; None for any.
            clock: Clock of the record budgets.
        """
        self.context: Final = context
        self.port: Final = port
        self.handshake_timeout_s: Final = handshake_timeout_s
        self.max_handshakes: Final = max_handshakes
        self.alpn: Final = alpn
        self.clock: Final = clock
        self.is_closed = False
        self.handshakes: Final[dict[TlsTransport, None]] = {}
        """The unfinished handshakes, oldest first."""

    def wrap(self, make: Callable[..., asyncio.Protocol]) -> Callable[..., asyncio.Protocol]:
        """Return a protocol factory for a listener. It calls ``make`` with the same arguments after the handshake."""
        return lambda *args, **kwargs: TlsTransport(self, lambda: make(*args, **kwargs))

    def has_room(self) -> bool:
        """Whether a handshake may begin. At the limit, aborts one of the oldest whose client is silent."""
        if len(self.handshakes) < self.max_handshakes:
            return True
        oldest = islice(self.handshakes, _CANDIDATES)
        silent = next((each for each in oldest if not has_unread_bytes(each.get_extra_info("socket"))), None)
        if silent is not None:
            del self.handshakes[silent]
            silent.abort()
        return silent is not None

    def close(self) -> None:
        """Accept no more connections, and abort unfinished handshakes: their clients have sent no requests."""
        self.is_closed = True
        for session in list(self.handshakes):
            session.abort()


class TlsTransport(asyncio.Protocol, asyncio.Transport):
    """The TLS session of one socket. It creates the protocol when the handshake is complete."""

    def __init__(self, port: TlsPort, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        super().__init__()
        self._port = port
        self._make_protocol = make_protocol
        self._protocol: asyncio.Protocol | None = None
        self._receiver: asyncio.BufferedProtocol | None = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._session: ssl.SSLObject | None = None
        self._budget: RecordBudget | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._has_ended = False
        self._is_dropping = False
        self._is_paused = False

    # Events of the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)
        port = self._port
        if port.is_closed or not port.has_room():
            self.abort()
            return
        port.handshakes[self] = None
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(port.handshake_timeout_s, self.abort)

    def data_received(self, data: bytes) -> None:
        if self._is_closing or self._is_dropping or self._has_ended:
            return
        parts: list[bytes] = []
        if len(data) <= _SLICE_BYTES:
            self._take(data, parts)
        else:
            view = memoryview(data)
            for begin in range(0, len(data), _SLICE_BYTES):
                self._take(view[begin : begin + _SLICE_BYTES], parts)
                if self._is_closing or self._has_ended:
                    break
        if not self._is_closing:
            self._pass_on(parts)
        if len(data) >= LONG_READ_BYTES:
            pause_for_turn(self._socket, self.is_reading)

    def eof_received(self) -> bool | None:
        """Return whether the socket stays open for responses. The protocol decides this once."""
        if self._protocol is None or self._is_closing or self._has_ended:
            return self._has_ended and not self._is_closing
        self._has_ended = True
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._end_handshake()
        protocol, self._protocol = self._protocol, None  # breaks a reference cycle
        self._receiver = None
        if protocol is not None:
            protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    # Calls of the protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or not data:
            return
        session, outgoing = self._session, self._outgoing
        assert session is not None
        try:
            sent = session.write(data)
            if sent < len(data):
                view = memoryview(data)
                while sent < len(data):
                    if outgoing.pending >= _PIECE_BYTES:
                        self._socket.write(outgoing.read())
                    sent += session.write(view[sent : sent + _PIECE_BYTES])
        except ssl.SSLError as error:
            self._fail(error)
        else:
            self._socket.write(outgoing.read())

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        parts = list(list_of_data)
        if sum(map(len, parts)) <= _JOINED_BYTES:
            self.write(b"".join(parts))
        else:
            for part in parts:
                self.write(part)

    def write_eof(self) -> None:
        """Send close_notify after the written data, and drop received bytes until the socket closes."""
        if not self._is_closing:
            self._is_dropping = True
            self._send_close_notify()
            self._socket.write_eof()

    def close(self) -> None:
        """Send close_notify after the written data, and close when the socket has sent all bytes."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._protocol is not None and not self._is_dropping:
            self._send_close_notify()
        self._socket.close()

    def abort(self) -> None:
        self._is_closing = True
        self._socket.abort()

    def is_closing(self) -> bool:
        return self._is_closing or self._socket.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._session
        if name == "sslcontext":
            return default if self._session is None else self._session.context
        return self._socket.get_extra_info(name, default)

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast("asyncio.Protocol", protocol)
        self._receiver = protocol if isinstance(protocol, asyncio.BufferedProtocol) else None

    def is_reading(self) -> bool:
        return not self._is_paused and not self.is_closing()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._socket.resume_reading()
        if self._has_ended:
            asyncio.get_running_loop().call_soon(self._end)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._socket.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._socket.get_write_buffer_limits()

    # Internals

    def _continue_handshake(self) -> bool:
        """Continue the handshake. Returns whether it is complete and the protocol may receive bytes."""
        port = self._port
        try:
            if self._session is None:  # not before the first bytes, because a session needs memory
                self._session = port.context().wrap_bio(self._incoming, self._outgoing, server_side=True)
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            if error.reason == "HTTP_REQUEST":
                self._socket.write(_PLAIN_HTTP)
            self._refuse(error.reason or str(error))
            return False
        self._flush()
        if port.alpn is not None and self._session.selected_alpn_protocol() != port.alpn:
            self._send_close_notify()
            self._refuse(f"the client did not negotiate {port.alpn}")
            return False
        if self._session.session_reused and _has_expired(self._session.getpeercert()):
            self._refuse("the client's certificate has expired since the session that it resumes")
            return False
        self._end_handshake()
        self._budget = RecordBudget(self._session.version(), port.clock)
        self._protocol = self._make_protocol()
        self._protocol.connection_made(self)
        return not self._is_closing

    def _refuse(self, reason: str) -> None:
        """Send the alert and wait for the peer to close, up to the handshake timeout: a reset could drop the alert."""
        log_event(logger, logging.DEBUG, "TLS handshake failed", port=self._port.port, reason=reason)
        self._is_closing = True
        self._flush()
        self._socket.write_eof()

    def _end_handshake(self) -> None:
        self._port.handshakes.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _take(self, data: bytes | memoryview, parts: list[bytes]) -> None:
        """Decrypt received bytes into ``parts`` or the buffer of the protocol. This may close the session."""
        session, incoming = self._session, self._incoming
        incoming.write(data)
        if self._protocol is None:
            if not self._continue_handshake():
                return
            session = self._session
        assert session is not None
        assert self._budget is not None
        received_bytes, data_bytes, records = incoming.pending, 0, 0
        try:
            while incoming.pending or session.pending():  # pending: the rest of a record that exceeded the buffer
                count = self._read_record(session, parts)
                if not count:
                    self._has_ended = True
                    break
                data_bytes += count
                records += 1
                if self._is_closing:
                    return
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(error)
            return
        if self._outgoing.pending:  # responses that OpenSSL creates itself
            self._flush()
            if self._socket.get_write_buffer_size() > _UNREAD_BYTES:
                self._budget.skip_refill()
        if self._budget.is_exceeded(received_bytes, data=data_bytes, records=records):
            log_event(
                logger,
                logging.DEBUG,
                "TLS session was closed, because its records carry too little data",
                port=self._port.port,
            )
            self.abort()

    def _read_record(self, session: ssl.SSLObject, parts: list[bytes]) -> int:
        """Decrypt one record, or the part that fits. Returns the number of bytes; 0 after close_notify of the peer."""
        receiver = self._receiver
        if receiver is None:
            part = session.read(_PLAINTEXT_BYTES)
            if part:
                parts.append(part)
            return len(part)
        read: Any = session.read  # its stub declares neither memoryview buffers nor the returned number
        count: int = read(_PLAINTEXT_BYTES, receiver.get_buffer(_PLAINTEXT_BYTES))
        if count:
            receiver.buffer_updated(count)
        return count

    def _pass_on(self, parts: list[bytes]) -> None:
        """Pass all parts on in one call, so that a protocol that pauses receives nothing more."""
        if parts:
            assert self._protocol is not None
            self._protocol.data_received(parts[0] if len(parts) == 1 else b"".join(parts))
        if self._has_ended and not self._is_paused:
            self._end()

    def _end(self) -> None:
        """Handle close_notify like the end of the socket: earlier requests may still be answered."""
        if not self._is_closing and self._protocol is not None and not self._protocol.eof_received():
            self.close()

    def _fail(self, error: ssl.SSLError) -> None:
        log_event(logger, logging.DEBUG, "TLS session failed", port=self._port.port, reason=error.reason)
        self._is_closing = True
        self._flush()
        self._socket.close()

    def _send_close_notify(self) -> None:
        assert self._session is not None
        with suppress(ssl.SSLError):  # the close_notify of the peer has not arrived and is not needed
            self._session.unwrap()
        self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._socket.write(self._outgoing.read())


def _has_expired(certificate: Mapping[str, Any] | None) -> bool:
    """Whether a certificate of a client has expired; None and an empty one mean that it has sent none."""
    return bool(certificate and ssl.cert_time_to_seconds(certificate["notAfter"]) <= time.time())
