"""A TLS session between a socket and the protocol that is served over it.

It is the socket's protocol and that protocol's transport, with nothing kept in between: what is read is decrypted and
handed on at once, what is written is encrypted and given to the socket's own transport, whose write buffer, limits and
pauses are the only ones. So a protocol sees of TLS what it sees without: a slow reader gets all of an answer after
which the connection closes, and a connection closes at once whether its peer says farewell or not. asyncio's and
uvloop's own TLS transports wait ``ssl_shutdown_timeout`` for a peer's farewell, and cut off by the same timeout what is
still unsent: either idle clients hold up a drain, or slow ones lose the end of their answers.

What a peer may have decrypted before others have their turn, and how much of it may bring nothing, is bounded here: no
limit of a protocol sees it.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, cast

from ortserve.clock import Clock, monotonic_ns
from ortserve.frontends.tls.empty_bytes import EmptyBytes
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_RECORD_BYTES: Final = 16 * 1024
"""The most plaintext of one record (RFC 8446, section 5.1), so that a read leaves none of it."""

_JOINED_BYTES: Final = 64 * 1024
"""Parts up to this size in sum are encrypted together: copying is cheaper than a record for each."""

_PIECE_BYTES: Final = 256 * 1024
"""Encrypted before it is given to the socket, so that a large answer is not kept twice."""

_SLICE_BYTES: Final = 32 * 1024
"""Given to OpenSSL, which nothing stops then, before anybody looks what it brought. Shorter ones would slow uploads."""

_LONG_READ_BYTES: Final = 128 * 1024
"""The next one waits for the loop's next turn: of a peer that has more, libuv makes up to 32 reads in one turn."""

_UNREAD_BYTES: Final = 64 * 1024
"""A peer that leaves more than this to be written does not read."""


class TlsEntrance:
    """What the sessions of one port share. Loop thread only."""

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
        """Let nobody in yet.

        Args:
            context: Gives that of the next session.
            port: Its name, for the log.
            handshake_timeout_s: From a connection's begin to the end of its handshake.
            max_handshakes: At one time; who comes beyond that is cut off.
            alpn: What a client must have negotiated; None for anything.
            clock: Of what sessions may cost.
        """
        self.context: Final = context
        self.port: Final = port
        self.handshake_timeout_s: Final = handshake_timeout_s
        self.max_handshakes: Final = max_handshakes
        self.alpn: Final = alpn
        self.clock: Final = clock
        self.is_closed = False
        self.shaking_hands: Final[set[TlsTransport]] = set()

    def before(self, make: Callable[..., asyncio.Protocol]) -> Callable[..., asyncio.Protocol]:
        """A factory of protocols for a listener; ``make`` makes those behind the handshake, of the same arguments."""
        return lambda *args, **kwargs: TlsTransport(self, lambda: make(*args, **kwargs))

    def close(self) -> None:
        """Let nobody in any more. Who has not ended the handshake has asked for nothing yet."""
        self.is_closed = True
        for session in list(self.shaking_hands):
            session.abort()


class TlsTransport(asyncio.Protocol, asyncio.Transport):
    """Made for each socket. The protocol behind it is made when the handshake is over."""

    def __init__(self, entrance: TlsEntrance, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        super().__init__()
        self._entrance = entrance
        self._make_protocol = make_protocol
        self._protocol: asyncio.Protocol | None = None
        self._receiver: asyncio.BufferedProtocol | None = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._session: ssl.SSLObject | None = None
        self._empty: EmptyBytes | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._has_ended = False
        self._is_dropping = False
        self._is_paused = False

    # The socket's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)
        entrance = self._entrance
        if entrance.is_closed or len(entrance.shaking_hands) >= entrance.max_handshakes:
            self.abort()
            return
        entrance.shaking_hands.add(self)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(entrance.handshake_timeout_s, self.abort)

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
            self._hand_on(parts)
        if len(data) >= _LONG_READ_BYTES:
            self._rest()

    def eof_received(self) -> bool | None:
        """Returns what the protocol says, which is asked once: whether the socket stays open for answers."""
        if self._protocol is None or self._is_closing or self._has_ended:
            return self._has_ended and not self._is_closing
        self._has_ended = True
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._end_handshake()
        protocol, self._protocol = self._protocol, None  # else both would wait for the garbage collector
        self._receiver = None
        if protocol is not None:
            protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    # The protocol's calls

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
        """Say farewell behind what was written, and drop all that still comes, unread, until the socket closes."""
        if not self._is_closing:
            self._is_dropping = True
            self._say_farewell()
            self._socket.write_eof()

    def close(self) -> None:
        """Say farewell behind what was written, and close when the socket took it all."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._protocol is not None and not self._is_dropping:
            self._say_farewell()
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

    def can_write_eof(self) -> bool:
        return True

    # Inside

    def _shake_hands(self) -> bool:
        """Go on with the handshake; True when it is over and the protocol there."""
        entrance = self._entrance
        try:
            if self._session is None:  # not before the peer said something: it is what costs memory
                self._session = entrance.context().wrap_bio(self._incoming, self._outgoing, server_side=True)
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            self._send_out()
            return False
        except ssl.SSLError as error:
            self._refuse(error.reason or str(error))
            return False
        self._send_out()
        if entrance.alpn is not None and self._session.selected_alpn_protocol() != entrance.alpn:
            self._say_farewell()
            self._refuse(f"the client did not negotiate {entrance.alpn}")
            return False
        self._end_handshake()
        self._empty = EmptyBytes(self._session.version(), entrance.clock)
        self._protocol = self._make_protocol()
        self._protocol.connection_made(self)
        return not self._is_closing

    def _refuse(self, reason: str) -> None:
        """Send the alert that says why, and let the peer close in what is left of its time: a reset would undo it."""
        log_event(logger, logging.DEBUG, "TLS handshake failed", port=self._entrance.port, reason=reason)
        self._is_closing = True
        self._send_out()
        self._socket.write_eof()

    def _end_handshake(self) -> None:
        self._entrance.shaking_hands.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _take(self, data: bytes | memoryview, parts: list[bytes]) -> None:
        """Decrypt what has come, into ``parts`` or where the protocol wants it; the session may be closing after it."""
        session, incoming = self._session, self._incoming
        incoming.write(data)
        if self._protocol is None:
            if not self._shake_hands():
                return
            session = self._session
        assert session is not None
        assert self._empty is not None
        came, data_bytes, records = incoming.pending, 0, 0
        try:
            while incoming.pending or session.pending():  # of a record that did not fit where it was wanted
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
        if self._outgoing.pending:  # what OpenSSL answers by itself
            self._send_out()
            if self._socket.get_write_buffer_size() > _UNREAD_BYTES:
                self._empty.forgo_refill()
        if self._empty.are_too_many(came, data=data_bytes, records=records):
            log_event(logger, logging.DEBUG, "TLS session brings too little data", port=self._entrance.port)
            self.abort()

    def _read_record(self, session: ssl.SSLObject, parts: list[bytes]) -> int:
        """Decrypt one record, or what there is room for; its bytes, 0 where the peer has sent all."""
        receiver = self._receiver
        if receiver is None:
            part = session.read(_RECORD_BYTES)
            if part:
                parts.append(part)
            return len(part)
        read: Any = session.read  # its stub knows of no other buffers than bytearray, and of no number
        count: int = read(_RECORD_BYTES, receiver.get_buffer(_RECORD_BYTES))
        if count:
            receiver.buffer_updated(count)
        return count

    def _hand_on(self, parts: list[bytes]) -> None:
        """As one piece: so that a protocol that pauses is sent nothing more."""
        if parts:
            assert self._protocol is not None
            self._protocol.data_received(parts[0] if len(parts) == 1 else b"".join(parts))
        if self._has_ended and not self._is_paused:
            self._end()

    def _rest(self) -> None:
        """Read no more in this turn of the loop, in which others are waiting."""
        if not self._is_closing:
            self._socket.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self._is_paused and not self.is_closing():
            self._socket.resume_reading()

    def _end(self) -> None:
        """The peer said farewell, which is as if its socket had ended: what was asked before may still be answered."""
        if not self._is_closing and self._protocol is not None and not self._protocol.eof_received():
            self.close()

    def _fail(self, error: ssl.SSLError) -> None:
        log_event(logger, logging.DEBUG, "TLS session failed", port=self._entrance.port, reason=error.reason)
        self._is_closing = True
        self._send_out()
        self._socket.close()

    def _say_farewell(self) -> None:
        assert self._session is not None
        with suppress(ssl.SSLError):  # the peer's own is not there yet, and nobody waits for it
            self._session.unwrap()
        self._send_out()

    def _send_out(self) -> None:
        if self._outgoing.pending:
            self._socket.write(self._outgoing.read())
