"""A TLS session on a real socket, seen by its protocol and by its peer."""

import asyncio
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, cast

import pytest
import trustme
import uvloop

from fakes.clock import FakeClock
from ortserve.frontends.tls.transport import TlsPort, TlsTransport
from tls_records import ClientRecords

T = TypeVar("T")
LONG_S: Final = 30.0
"""A wait that only a failing test sees the end of."""

AUTHORITY: Final = trustme.CA()
MAX_HANDSHAKES: Final = 50
LARGE: Final = 8 * 1024 * 1024
"""More than the kernel keeps for a reader that does not read."""


class Recorder(asyncio.Protocol):
    """The protocol behind the session; records its callbacks, on the event loop."""

    def __init__(self) -> None:
        self.came = b""
        self.pieces = 0
        self.calls: list[str] = []
        self.news = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("TlsTransport", transport)
        self._note("made")

    def data_received(self, data: bytes) -> None:
        self.came += data
        self.pieces += 1
        self._note("data")

    def eof_received(self) -> None:
        self._note("eof")

    def connection_lost(self, exc: Exception | None) -> None:
        self._note("lost")

    def pause_writing(self) -> None:
        self._note("pause")

    def resume_writing(self) -> None:
        self._note("resume")

    async def until(self, claim: Callable[["Recorder"], bool]) -> None:
        async with asyncio.timeout(LONG_S):
            while not claim(self):
                self.news.clear()
                await self.news.wait()

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.news.set()


class Taker(asyncio.BufferedProtocol):
    """Takes the next ``room`` bytes of a recorder's session in its own memory, then leaves the rest to it."""

    def __init__(self, recorder: Recorder, room: int) -> None:
        self.taken = bytearray()
        self._recorder = recorder
        self._buffer = bytearray(room)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[len(self.taken) :]

    def buffer_updated(self, nbytes: int) -> None:
        self.taken += self._buffer[len(self.taken) :][:nbytes]
        self._recorder.news.set()
        if len(self.taken) == len(self._buffer):
            self._recorder.transport.set_protocol(self._recorder)

    def eof_received(self) -> None:
        self._recorder.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._recorder.connection_lost(exc)


class Listener:
    """An event loop in a separate thread, as the server's, with TLS on a port."""

    def __init__(self, *, alpn: str | None, handshake_timeout_s: float) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.clock = FakeClock()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["h2"])
        AUTHORITY.issue_cert("127.0.0.1").configure_cert(context)
        self.tls_port = TlsPort(
            lambda: context,
            port="test",
            handshake_timeout_s=handshake_timeout_s,
            max_handshakes=MAX_HANDSHAKES,
            alpn=alpn,
            clock=self.clock,
        )
        self._made: list[Recorder] = []
        self._server = self.run(self._listen)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def run(self, make: Callable[[], Coroutine[object, object, T]]) -> T:
        """Run a coroutine on the loop, from the test's thread."""
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(LONG_S)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the loop."""
        done: Future[T] = Future()

        def call() -> None:
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(call)
        return done.result(LONG_S)

    def wait(self, recorder: Recorder, claim: Callable[[Recorder], bool]) -> None:
        """Wait until ``claim`` holds for the recorder."""
        self.run(lambda: recorder.until(claim))

    def connect(
        self,
        *,
        alpn: str = "h2",
        receive_bytes: int | None = None,
        version: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED,
    ) -> tuple[ssl.SSLSocket, Recorder]:
        """A client whose handshake is over, and the protocol that was made for it."""
        count = len(self._made)
        raw = socket.socket()
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        raw.settimeout(LONG_S)
        raw.connect(("127.0.0.1", self.port))
        client = ssl.create_default_context()
        AUTHORITY.configure_trust(client)
        client.set_alpn_protocols([alpn])
        client.maximum_version = version
        session = client.wrap_socket(raw, server_hostname="127.0.0.1", suppress_ragged_eofs=False)

        self.run(lambda: _until(lambda: len(self._made) > count))
        return session, self._made[count]

    def newest(self) -> Recorder:
        return self._made[-1]

    def count(self) -> int:
        """The number of protocols that were made."""
        return len(self._made)

    def close(self) -> None:
        async def close() -> None:
            self._server.close()
            self.tls_port.close()
            for recorder in self._made:
                recorder.transport.abort()
                await recorder.until(lambda peer: "lost" in peer.calls)

        self.run(close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        def make() -> Recorder:
            self._made.append(Recorder())
            return self._made[-1]

        server = await self._loop.create_server(self.tls_port.wrap(make), "127.0.0.1", 0)
        return cast("asyncio.Server", server)


@contextmanager
def listening(*, alpn: str | None = None, handshake_timeout_s: float = LONG_S) -> Iterator[Listener]:
    listener = Listener(alpn=alpn, handshake_timeout_s=handshake_timeout_s)
    try:
        yield listener
    finally:
        listener.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening() as listener:
        yield listener


def read_to_end(session: ssl.SSLSocket) -> bytes:
    """All until the farewell; a connection that ends without one raises."""
    parts = []
    while part := session.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def test_bytes_arrive_as_they_were_sent_both_ways(listener: Listener) -> None:
    session, recorder = listener.connect()
    with session:
        sent = os.urandom(1_000_000)
        session.sendall(sent)
        listener.wait(recorder, lambda peer: len(peer.came) == len(sent))
        assert recorder.came == sent
        pieces: list[bytes | bytearray | memoryview] = [
            sent[:10],
            memoryview(sent)[10:20_000],
            bytearray(sent[20_000:700_000]),
            b"",
            sent[700_000:],
        ]

        def answer() -> None:
            recorder.transport.write(pieces[0])
            recorder.transport.writelines(pieces[1:])
            recorder.transport.close()

        listener.call(answer)
        assert read_to_end(session) == sent


@pytest.mark.parametrize("room", [1, 16_383, 16_384, 100_000, 500_000])
def test_buffered_protocol_gets_its_bytes_and_its_successor_the_rest(listener: Listener, room: int) -> None:
    session, recorder = listener.connect()
    with session:
        taker = Taker(recorder, room)
        session.sendall(b"before")
        listener.wait(recorder, lambda peer: peer.came == b"before")
        listener.call(lambda: recorder.transport.set_protocol(taker))
        sent = os.urandom(500_010)
        session.sendall(sent)
        listener.wait(recorder, lambda peer: len(peer.came) + len(taker.taken) == 6 + len(sent))
        assert taker.taken == sent[:room]
        assert recorder.came == b"before" + sent[room:]


def test_buffered_protocol_is_notified_of_the_end(listener: Listener) -> None:
    session, recorder = listener.connect()
    with session:
        taker = Taker(recorder, 100)
        listener.call(lambda: recorder.transport.set_protocol(taker))
        session.sendall(b"some")
        listener.wait(recorder, lambda _: taker.taken == b"some")
        with suppress(ConnectionError):
            session.unwrap()
        listener.wait(recorder, lambda peer: "lost" in peer.calls)
        assert recorder.calls == ["made", "eof", "lost"]


def test_session_closed_by_its_buffered_protocol_delivers_no_more(listener: Listener) -> None:
    with by_hand(listener) as (raw, session, outgoing):
        recorder = listener.newest()
        taker = Taker(recorder, 100)
        take = taker.buffer_updated

        def take_one_and_leave(nbytes: int) -> None:
            take(nbytes)
            recorder.transport.abort()

        taker.buffer_updated = take_one_and_leave  # type: ignore[method-assign]
        listener.call(lambda: recorder.transport.set_protocol(taker))
        for number in range(5):
            session.write(b"%d" % number)
        raw.sendall(outgoing.read())
        listener.wait(recorder, lambda peer: "lost" in peer.calls)
        assert taker.taken == b"0"


def test_protocol_can_read_the_tls_session(listener: Listener) -> None:
    session, recorder = listener.connect()
    with session:
        transport = recorder.transport
        assert transport.get_protocol() is recorder
        assert isinstance(transport.get_extra_info("ssl_object"), ssl.SSLObject)
        assert isinstance(transport.get_extra_info("sslcontext"), ssl.SSLContext)
        assert transport.get_extra_info("peername")[1] == session.getsockname()[1]


def test_connection_closes_without_waiting_for_close_notify(listener: Listener) -> None:
    session, recorder = listener.connect()
    with session:
        listener.call(recorder.transport.close)
        listener.wait(recorder, lambda peer: "lost" in peer.calls)  # and the peer has not moved
        assert read_to_end(session) == b""


def test_slow_reader_gets_all_that_was_written_before_the_close(listener: Listener) -> None:
    session, recorder = listener.connect(receive_bytes=4096)
    with session:
        sent = os.urandom(LARGE)

        def answer_and_close() -> int:
            recorder.transport.write(sent)
            recorder.transport.close()
            return recorder.transport.get_write_buffer_size()

        assert listener.call(answer_and_close) > LARGE / 2
        assert recorder.calls == ["made", "pause"]
        assert read_to_end(session) == sent
        listener.wait(recorder, lambda peer: "lost" in peer.calls)


def test_protocol_is_paused_while_its_peer_does_not_read(listener: Listener) -> None:
    session, recorder = listener.connect(receive_bytes=4096)
    with session:

        def write() -> None:
            recorder.transport.set_write_buffer_limits(high=100_000)
            assert recorder.transport.get_write_buffer_limits() == (25_000, 100_000)
            recorder.transport.write(bytes(LARGE))

        listener.call(write)
        assert recorder.calls == ["made", "pause"]
        left = LARGE
        while left:
            left -= len(session.recv(min(left, 1 << 20)))
        listener.wait(recorder, lambda peer: peer.calls == ["made", "pause", "resume"])


def test_paused_protocol_receives_no_data(listener: Listener) -> None:
    session, recorder = listener.connect()
    with session:
        session.sendall(b"a")
        listener.wait(recorder, lambda peer: peer.came == b"a")
        listener.call(recorder.transport.pause_reading)
        assert not recorder.transport.is_reading()
        session.sendall(b"b")
        session.setblocking(False)
        with pytest.raises(ssl.SSLWantReadError):
            session.unwrap()
        listener.call(lambda: None)
        assert recorder.came == b"a"
        listener.call(recorder.transport.resume_reading)
        listener.wait(recorder, lambda peer: "lost" in peer.calls)
        assert recorder.came == b"ab"
        assert recorder.calls[-2:] == ["eof", "lost"]


def test_close_notify_waits_for_a_paused_protocol(listener: Listener) -> None:
    with by_hand(listener) as (raw, session, outgoing):
        recorder = listener.newest()

        def pause_with_the_bytes() -> None:
            take = recorder.data_received

            def data_received(data: bytes) -> None:
                take(data)
                recorder.transport.pause_reading()

            recorder.data_received = data_received  # type: ignore[method-assign]

        listener.call(pause_with_the_bytes)
        session.write(b"last words")
        with pytest.raises(ssl.SSLWantReadError):
            session.unwrap()
        raw.sendall(outgoing.read())
        listener.wait(recorder, lambda peer: peer.came == b"last words")
        assert "eof" not in recorder.calls
        listener.call(recorder.transport.resume_reading)
        listener.wait(recorder, lambda peer: "lost" in peer.calls)
        assert recorder.calls[-2:] == ["eof", "lost"]


def test_records_received_together_are_delivered_together(listener: Listener) -> None:
    with by_hand(listener) as (raw, session, outgoing):
        recorder = listener.newest()
        for number in range(100):
            session.write(b"%03d" % number)
        raw.sendall(outgoing.read())
        listener.wait(recorder, lambda peer: len(peer.came) == 300)
        assert recorder.came == b"".join(b"%03d" % number for number in range(100))
        assert recorder.pieces < 10


def test_eof_without_close_notify_loses_the_connection(listener: Listener) -> None:
    session, recorder = listener.connect()
    with session:
        socket.socket.shutdown(session, socket.SHUT_WR)
        listener.wait(recorder, lambda peer: "lost" in peer.calls)
        assert recorder.calls == ["made", "eof", "lost"]
        listener.call(lambda: recorder.transport.write(b"too late"))
        listener.call(recorder.transport.close)


def test_forged_record_ends_the_connection(listener: Listener) -> None:
    with by_hand(listener) as (raw, session, outgoing):
        recorder = listener.newest()
        session.write(b"genuine")
        forged = bytearray(outgoing.read())
        forged[-1] ^= 1
        raw.sendall(forged)
        listener.wait(recorder, lambda peer: "lost" in peer.calls)
        assert recorder.came == b""


@pytest.mark.parametrize("said", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00" * 64])
def test_client_without_tls_is_disconnected_before_a_protocol_exists(listener: Listener, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", listener.port), timeout=LONG_S) as raw:
        raw.sendall(said)
        answer = b""
        while part := raw.recv(1000):
            answer += part
    assert b"HTTP" not in answer
    session, recorder = listener.connect()
    with session:
        assert listener.newest() is recorder
        assert listener.count() == 1


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "a part of a ClientHello"])
def test_unfinished_handshake_is_closed_and_delays_no_other(said: bytes) -> None:
    with listening(handshake_timeout_s=1.0) as listener:
        slow = [socket.create_connection(("127.0.0.1", listener.port), timeout=LONG_S) for _ in range(40)]
        for raw in slow:
            raw.sendall(said)
        session, recorder = listener.connect()
        with session:
            session.sendall(b"in time")
            listener.wait(recorder, lambda peer: peer.came == b"in time")
            for raw in slow:
                with raw, suppress(ConnectionResetError):
                    assert raw.recv(1) == b""
            assert not listener.call(lambda: set(listener.tls_port.handshakes))
            listener.call(lambda: recorder.transport.write(b"still there"))
            assert session.recv(100) == b"still there"


def test_handshake_past_the_limit_replaces_the_oldest() -> None:
    with listening() as listener:
        address = ("127.0.0.1", listener.port)
        slow = [socket.create_connection(address, timeout=LONG_S) for _ in range(MAX_HANDSHAKES)]
        session, recorder = listener.connect()
        with session:
            session.sendall(b"now")
            listener.wait(recorder, lambda peer: peer.came == b"now")
        with suppress(ConnectionResetError):
            assert slow[0].recv(1) == b""
        assert listener.call(lambda: len(listener.tls_port.handshakes)) == MAX_HANDSHAKES - 1
        for raw in slow:
            raw.close()


@pytest.mark.parametrize("offered", [None, "http/1.1"])
def test_client_without_the_alpn_protocol_is_disconnected(offered: str | None) -> None:
    with listening(alpn="h2") as listener:
        client = ssl.create_default_context()
        AUTHORITY.configure_trust(client)
        if offered is not None:
            client.set_alpn_protocols([offered])
        raw = socket.create_connection(("127.0.0.1", listener.port), timeout=LONG_S)
        with client.wrap_socket(raw, server_hostname="127.0.0.1", suppress_ragged_eofs=False) as session:
            assert session.recv(1) == b""
        session, _ = listener.connect()
        session.close()
        assert listener.count() == 1


def test_pending_handshakes_end_with_the_port(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port), timeout=LONG_S) as raw:
        raw.sendall(b"\x16")
        listener.run(lambda: _until(lambda: bool(listener.tls_port.handshakes)))
        listener.call(listener.tls_port.close)
        with suppress(ConnectionResetError):
            assert raw.recv(1) == b""


@pytest.mark.parametrize("way", ["alone", "asking for answers", "between bytes of data"])
def test_key_update_flood_is_disconnected(listener: Listener, tmp_path: Path, way: str) -> None:
    with by_hand(listener, tmp_path / "keys") as (raw, session, _):
        recorder = listener.newest()
        records = ClientRecords(session, tmp_path / "keys")
        flood = bytearray()
        while len(flood) < 512 * 1024:
            flood += records.key_update(is_answer_wanted=way == "asking for answers")
            if way == "between bytes of data":
                flood += records.data(b"x")
        with suppress(ConnectionError):
            raw.sendall(flood)
            listener.wait(recorder, lambda peer: "lost" in peer.calls)
        listener.wait(recorder, lambda peer: "lost" in peer.calls)
        assert "eof" not in recorder.calls
        assert len(recorder.came) < 8 * 1024


def test_occasional_key_updates_are_accepted(listener: Listener, tmp_path: Path) -> None:
    with by_hand(listener, tmp_path / "keys") as (raw, session, _):
        recorder = listener.newest()
        records = ClientRecords(session, tmp_path / "keys")
        for turn in range(1, 6):
            raw.sendall(b"".join(records.key_update(is_answer_wanted=True) for _ in range(1000)) + records.data(b"x"))
            listener.wait(recorder, partial(_has_bytes_or_lost, turn))
            assert "lost" not in recorder.calls
            listener.clock.advance(1_000_000_000)


def test_unread_key_update_replies_lower_the_allowance(listener: Listener, tmp_path: Path) -> None:
    with by_hand(listener, tmp_path / "keys") as (raw, session, _):
        recorder = listener.newest()
        records = ClientRecords(session, tmp_path / "keys")
        listener.call(lambda: recorder.transport.write(bytes(LARGE)))
        for seconds in range(1, 10):
            raw.sendall(b"".join(records.key_update(is_answer_wanted=True) for _ in range(1000)) + records.data(b"x"))
            listener.wait(recorder, partial(_has_bytes_or_lost, seconds))
            if "lost" in recorder.calls:
                break
            listener.clock.advance(1_000_000_000)
        assert seconds == 2


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_data_records_of_any_size_are_accepted(listener: Listener, version: ssl.TLSVersion) -> None:
    session, recorder = listener.connect(version=version)
    with session:
        for _ in range(20_000):
            session.sendall(b"x")
        session.sendall(bytes(LARGE))
        listener.wait(recorder, lambda peer: len(peer.came) == 20_000 + LARGE)


def test_large_upload_gets_one_long_read_per_turn(listener: Listener) -> None:
    """Others are read in the same turn, before or after it."""
    session, recorder = listener.connect()
    with session:
        turns, reads = [0], list[int]()

        def turn() -> None:
            turns[0] += 1
            asyncio.get_running_loop().call_soon(turn)

        def take(data: bytes) -> None:
            recorder.came += data
            reads.append(turns[0])
            recorder.news.set()

        def begin() -> None:
            recorder.data_received = take  # type: ignore[method-assign]
            recorder.transport.pause_reading()
            turn()

        listener.call(begin)
        sent = os.urandom(2_000_000)
        sending = threading.Thread(target=session.sendall, args=(sent,))
        sending.start()
        unread = recorder.transport.get_extra_info("socket")
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1024 * 1024)  # four reads of the loop's
        assert select.select([unread], [], [], LONG_S)[0]
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        listener.call(recorder.transport.resume_reading)
        listener.wait(recorder, lambda peer: len(peer.came) == len(sent))
        sending.join(LONG_S)
        assert recorder.came == sent
        assert len(reads) == len(set(reads))


def test_protocol_can_pause_and_resume_within_an_upload(listener: Listener) -> None:
    session, recorder = listener.connect()
    with session:
        take = recorder.data_received

        def data_received(data: bytes) -> None:
            assert recorder.transport.is_reading()
            take(data)
            recorder.transport.pause_reading()
            loop = asyncio.get_running_loop()
            if recorder.pieces % 2:
                loop.call_soon(recorder.transport.resume_reading)
            else:
                loop.call_later(0.001, recorder.transport.resume_reading)

        def begin() -> None:
            recorder.data_received = data_received  # type: ignore[method-assign]

        listener.call(begin)
        sent = os.urandom(LARGE)
        session.sendall(sent)
        listener.wait(recorder, lambda peer: len(peer.came) == len(sent))
        assert recorder.came == sent


def _has_bytes_or_lost(count: int, peer: Recorder) -> bool:
    return len(peer.came) == count or "lost" in peer.calls


async def _until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not claim():  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0)


@contextmanager
def by_hand(
    listener: Listener, key_log: Path | None = None
) -> Iterator[tuple[socket.socket, ssl.SSLObject, ssl.MemoryBIO]]:
    """A client whose records go to the socket as the test likes, and its handshake over."""
    client = ssl.create_default_context()
    if key_log is not None:
        client.keylog_filename = str(key_log)
    AUTHORITY.configure_trust(client)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = client.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    count = listener.count()
    with socket.create_connection(("127.0.0.1", listener.port), timeout=LONG_S) as raw:
        while True:
            try:
                session.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(outgoing.read())
                incoming.write(raw.recv(1 << 16))
        raw.sendall(outgoing.read())
        listener.run(lambda: _until(lambda: listener.count() == count + 1))
        yield raw, session, outgoing
