"""Cheap attacks by a peer: each is bounded, and the connection ends or continues without effect on others."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import grpc
import hpack
import pytest
from h2.settings import SettingCodes

from fakes.transport import FakeTransport
from native_wire import ECHO, HEADERS, HOLD, SLOW, STREAM, Client, Wire, framed, on_wire
from ortserve.config.option_groups import GrpcOptions
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.frames import ErrorCode
from ortserve.frontends.grpc.native.header_blocks import literal

CALM = ErrorCode.ENHANCE_YOUR_CALM
MANY = 20_000
"""More than any tolerated burst."""


def block(path: str = HOLD, timeout: str = "") -> bytes:
    """A header block that neither uses nor changes the dynamic table."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    headers = [*HEADERS[:3], (":path", path), ("content-type", "application/grpc")]
    if timeout:
        headers.append(("grpc-timeout", timeout))
    return encoder.encode(headers)


def opening(stream_id: int, path: str = HOLD, *, is_end: bool = False, timeout: str = "") -> bytes:
    return frames.header_block(stream_id, block(path, timeout), frames.MIN_FRAME_SIZE, is_end=is_end)


def data(stream_id: int, payload: bytes, *, is_end: bool = False) -> bytes:
    return frames.frame(frames.DATA, frames.END_STREAM if is_end else 0, stream_id, payload)


FLOODS: dict[str, Callable[[int], bytes]] = {
    "pings": lambda n: frames.frame(frames.PING, 0, 0, bytes(8)),
    "answers to pings": lambda n: frames.frame(frames.PING, frames.ACK, 0, bytes(8)),
    "settings": lambda n: frames.settings({frames.INITIAL_WINDOW_SIZE: n}),
    "empty settings": lambda n: frames.settings({}),
    "answers to settings": lambda n: frames.frame(frames.SETTINGS, frames.ACK, 0),
    "rapid resets": lambda n: opening(2 * n + 3) + data(2 * n + 3, framed(b"x")) + frames.rst_stream(2 * n + 3, CALM),
    "resets by our own hand": lambda n: opening(2 * n + 3) + frames.window_update(2 * n + 3, 0),
    "streams that are malformed": lambda n: frames.frame(frames.HEADERS, frames.END_HEADERS, 2 * n + 3, b"\x82"),
    "trailers of nothing": lambda n: frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x82"),
    "empty DATA": lambda n: data(1, b""),
    "empty DATA of a stream that has ended": lambda n: (opening(3) if not n else b"") + data(3, b"", is_end=True),
    "DATA of a byte within a message": lambda n: data(1, b"x" if n else b"\0\0\1\0\0"),
    "priorities": lambda n: frames.frame(frames.PRIORITY, 0, 1, bytes(5)),
    "goaways": lambda n: frames.goaway(0, ErrorCode.NO_ERROR),
    "unknown frames": lambda n: frames.frame(0xEE, 0, 0, b"?"),
    "resets of a stream that has ended": lambda n: opening(3) * (not n) + frames.rst_stream(3, CALM),
    "windows of a byte where nothing waits": lambda n: frames.window_update(n % 2, 1),
    "windows of streams that have ended": lambda n: (
        (opening(3) + frames.rst_stream(3, CALM) if not n else b"") + frames.window_update(3, 1)
    ),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_flood_ends_its_connection(flood: Callable[[int], bytes]) -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.feed(opening(1, STREAM))
        sent = 0
        while not wire.transport.is_closing():
            assert sent < MANY, "the flood goes on"
            wire.feed(b"".join(flood(sent + n) for n in range(100)))
            sent += 100
            came = await wire.turn()
        code = int.from_bytes(came[came.rindex(bytes((frames.GOAWAY, 0, 0, 0, 0, 0))) + 10 :][:4], "big")
        assert code in (CALM, ErrorCode.PROTOCOL_ERROR)
        await wire.turn()
        assert wire.transport.is_lost
        assert wire.running == 0

    on_wire(test)


def test_small_frames_beside_large_ones_and_of_small_messages_are_not_counted() -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.feed(opening(1, STREAM) + data(1, b"\0" + (2**27).to_bytes(4, "big")))
        for _ in range(3_000):  # as HAProxy splits a message
            wire.feed(data(1, bytes(16_320)) + data(1, bytes(64)))
            await wire.turn()
        wire.feed(opening(3, STREAM))
        for _ in range(3_000):
            wire.feed(data(3, framed(b"x")[:5]) + data(3, b"x"))
            await wire.turn()
        assert not wire.transport.is_closing()

    on_wire(test)


def test_client_that_cancels_hundreds_of_calls_a_second_is_served() -> None:
    async def test(wire: Wire, client: Client) -> None:
        for _ in range(20):
            for _ in range(400):
                stream = client.open(HOLD)
                client.send(stream, framed(b"x"), is_end=True)
                client.h2.reset_stream(stream)
            await client.exchange()
            assert not client.goaways
            assert (await client.call(ECHO, b"x")).messages == [b"x"]
            await asyncio.sleep(1)

    on_wire(test)


async def answered(client: Client, count: int) -> None:
    for _ in range(count):
        stream = client.open(ECHO)
        client.send(stream, framed(b"x"), is_end=True)
    await client.exchange()
    assert [answer.messages for answer in client.answers.values()][-count:] == [[b"x"]] * count


def test_5000_cancelled_calls_a_second_affect_no_other_client() -> None:
    async def test(wire: Wire, client: Client) -> None:
        for _ in range(60):
            streams = [client.open(HOLD) for _ in range(100)]
            for stream in streams:
                client.send(stream, framed(b"x"), is_end=True)
            await client.exchange()
            assert (await client.call(ECHO, b"x")).messages == [b"x"]
            await asyncio.sleep(0.02)
            for stream in streams:
                client.h2.reset_stream(stream)
            await client.exchange()
        assert not client.goaways
        assert wire.cancelled == 6_000

    on_wire(test)


def test_resets_of_answered_calls_are_not_counted() -> None:
    async def test(wire: Wire, client: Client) -> None:
        for number in range(6):  # more resets than a burst allows
            await answered(client, 500)
            first = 2 * 500 * number + 1
            wire.feed(b"".join(frames.rst_stream(first + 2 * n, ErrorCode.CANCEL) for n in range(500)))
            await client.exchange()
        assert not client.goaways

    on_wire(test)


def test_immediate_resets_are_tolerated_up_to_the_answered_calls() -> None:
    async def test(wire: Wire, client: Client) -> None:
        for _ in range(6):
            await answered(client, 500)
            for _ in range(500):
                client.h2.reset_stream(client.open(HOLD))
            await client.exchange()
        assert not client.goaways
        for _ in range(3_500):  # more than a burst and the last answered calls allow
            client.h2.reset_stream(client.open(HOLD))
        await client.exchange()
        assert client.goaways[0][0] == CALM

    on_wire(test)


TOO_LARGE = {
    "one": (("x", "y" * 20_000),),
    "many": tuple((f"x-{number}", "y") for number in range(600)),
    "almost all that a block may have": (("x", "y" * 60_000),),
}


@pytest.mark.parametrize("metadata", TOO_LARGE.values(), ids=TOO_LARGE)
def test_oversized_metadata_fails_only_its_call(metadata: tuple[tuple[str, str], ...]) -> None:
    async def test(wire: Wire, client: Client) -> None:
        held = client.open(HOLD)
        client.send(held, framed(b"x"), is_end=True)
        echoing = client.open(STREAM, ("x-0", "y"))
        client.send(echoing, framed(b"x"))
        for _ in range(3):
            refused = await client.call(ECHO, b"x", *metadata)
            assert refused.status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert refused.text.startswith(b"metadata: expected at most 16384 bytes")
            # The tables of both sides are equal.
            assert (await client.call(ECHO, b"x", *metadata[:300] if len(metadata) > 1 else ())).messages == [b"x"]
        wire.release()
        client.send(echoing, framed(b"y"), is_end=True)
        await client.exchange()
        assert client.answers[held].messages == [b"x"]
        assert client.answers[echoing].messages == [b"x", b"y"]
        assert not client.goaways

    on_wire(test)


def test_large_header_block_in_one_frame_is_accepted() -> None:
    async def test(wire: Wire, client: Client) -> None:
        for stream_id, size, is_borne in ((1, 10_000, True), (3, 60_000, True), (5, 65_536, False)):
            large = block(ECHO) + literal(b"x", bytes(size).replace(b"\0", b"y"))
            wire.feed(frames.header_block(stream_id, large, frames.LARGEST_FRAME_SIZE, is_end=False))
            wire.feed(data(stream_id, framed(b"x"), is_end=True))
            came = await wire.turn()
            assert wire.transport.is_closing() is not is_borne
            assert (literal(b"grpc-status", b"0" if size < 16_384 else b"8") in came) is is_borne

    on_wire(test)


def test_oversized_request_trailers_fail_the_call() -> None:
    async def test(_: Wire, client: Client) -> None:
        stream = client.open(ECHO)
        client.send(stream, framed(b"x"))
        client.h2.send_headers(stream, [("x", "y" * 20_000)], end_stream=True)
        await client.exchange()
        assert client.answers[stream].messages == [b"x"]

    on_wire(test)


def test_pings_on_an_idle_connection_end_it_after_the_strikes() -> None:
    async def test(wire: Wire, client: Client) -> None:
        for number in range(4):
            assert not client.goaways
            client.h2.ping(b"%8d" % number)
            await client.exchange()
            await asyncio.sleep(60)
        assert client.goaways == [(CALM, b"too_many_pings")]
        assert len(client.pongs) == 3

    on_wire(test)


def test_pings_beside_calls_are_answered() -> None:
    async def test(wire: Wire, client: Client) -> None:
        for number in range(50):
            client.h2.ping(b"%8d" % number)
            assert (await client.call(ECHO, b"x")).messages == [b"x"]
        assert len(client.pongs) == 50

    on_wire(test)


def test_pings_beside_the_messages_of_a_stream_are_answered() -> None:
    async def test(_: Wire, client: Client) -> None:
        stream = client.open(STREAM)
        for number in range(50):
            client.send(stream, framed(b"x"))
            await client.exchange()
            client.h2.ping(b"%8d" % number)
            await client.exchange()
        assert client.answers[stream].messages == [b"x"] * 50
        assert len(client.pongs) == 50

    on_wire(test)


@pytest.mark.parametrize("size", [0, 1, 16_000])
def test_endless_header_block_ends_the_connection(size: int) -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.feed(frames.frame(frames.HEADERS, 0, 1, block()[:10]))
        for _ in range(100):
            wire.feed(frames.frame(frames.CONTINUATION, 0, 1, bytes(size)))
        await client.exchange()
        assert client.goaways[0][0] == CALM
        assert wire.transport.is_lost

    on_wire(test)


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x82\x86\x84" + b"\xc4" * 16_000,  # one entry of the static table per byte
        b"\x40\x01a\x7f\xc1\x1e" + b"b" * 4000 + b"\xbe" * 12_000,  # one entry of 4,000 bytes per byte
        b"\x00\x01a\xff\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",  # a length of 2**70
        b"\x3f" + b"\xff" * 1000,
        b"\xff" * 16_000,
        b"\x3f\xe1\xff\x03",  # a table larger than the server's
        b"\x82" + b"\x20",  # a resize in the middle
        b"\x20" * 16_000,
    ],
    ids=["static", "dynamic", "length", "resize", "index", "table", "late resize", "many resizes"],
)
def test_oversized_or_malformed_header_block_ends_the_connection(bomb: bytes) -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.feed(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, bomb[:16_384]))
        await client.exchange()
        assert client.goaways[0][0] in (CALM, ErrorCode.COMPRESSION_ERROR)
        assert wire.transport.is_lost

    on_wire(test)


ILLEGAL = {
    "no HTTP/2": (b"GET / HTTP/1.1\r\n\r\n", ErrorCode.PROTOCOL_ERROR),
    "no SETTINGS first": (frames.PREFACE + frames.frame(frames.PING, 0, 0, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "an ACK first": (frames.PREFACE + frames.frame(frames.SETTINGS, frames.ACK, 0), ErrorCode.PROTOCOL_ERROR),
}


@pytest.mark.parametrize(("sent", "code"), ILLEGAL.values(), ids=ILLEGAL)
def test_bad_preface_is_answered_and_the_connection_closed(sent: bytes, code: ErrorCode) -> None:
    async def test(wire: Wire, client: Client) -> None:
        fresh = Wire(asyncio.get_running_loop(), wire.clock)
        await fresh.turn()
        fresh.feed(sent)
        came = await fresh.turn()
        assert code.to_bytes(4, "big") in came
        assert fresh.transport.is_closing()

    on_wire(test)


WRONG = {
    "DATA that are too large": (b"\x10\x00\x01\x00\x00\x00\x00\x00\x01", ErrorCode.FRAME_SIZE_ERROR),
    "HEADERS that are too large": (b"\x01\x00\x01\x01\x04\x00\x00\x00\x01", ErrorCode.ENHANCE_YOUR_CALM),
    "SETTINGS that are too large": (b"\x00\x40\x01\x04\x00\x00\x00\x00\x00", ErrorCode.ENHANCE_YOUR_CALM),
    "DATA of an idle stream": (data(1, b"x"), ErrorCode.PROTOCOL_ERROR),
    "DATA of no stream": (data(0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "HEADERS of a server's stream": (opening(2), ErrorCode.PROTOCOL_ERROR),
    "HEADERS of no stream": (opening(0), ErrorCode.PROTOCOL_ERROR),
    "DATA of a server's stream": (opening(3) + data(2, b"x"), ErrorCode.PROTOCOL_ERROR),
    "a window of a server's stream": (opening(3) + frames.window_update(2, 1), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM of a server's stream": (opening(3) + frames.rst_stream(2, CALM), ErrorCode.PROTOCOL_ERROR),
    "HEADERS of a stream that was passed over": (opening(1) + opening(9) + opening(5), ErrorCode.PROTOCOL_ERROR),
    "HEADERS of the first stream after others": (opening(3) + opening(1), ErrorCode.PROTOCOL_ERROR),
    "DATA of a stream that was passed over": (opening(5) + data(3, b"x"), ErrorCode.PROTOCOL_ERROR),
    "a window of a stream that was passed over": (opening(5) + frames.window_update(3, 1), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM of a stream that was passed over": (opening(5) + frames.rst_stream(1, CALM), ErrorCode.PROTOCOL_ERROR),
    "HEADERS in a block": (
        frames.frame(frames.HEADERS, 0, 1, b"\x82") + opening(3),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "CONTINUATION of another stream": (
        frames.frame(frames.HEADERS, 0, 1, b"\x82") + frames.frame(frames.CONTINUATION, 4, 3, b""),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "CONTINUATION of nothing": (frames.frame(frames.CONTINUATION, 4, 1, b""), ErrorCode.PROTOCOL_ERROR),
    "more padding than payload": (
        opening(1) + frames.frame(frames.DATA, frames.PADDED, 1, b"\x05abc"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "padding without a length": (
        opening(1) + frames.frame(frames.DATA, frames.PADDED, 1, b""),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "HEADERS without its priority": (
        frames.frame(frames.HEADERS, frames.END_HEADERS | frames.HAS_PRIORITY, 1, b"abc"),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "a short PING": (frames.frame(frames.PING, 0, 0, b"x"), ErrorCode.FRAME_SIZE_ERROR),
    "PING of a stream": (frames.frame(frames.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "SETTINGS of a stream": (frames.frame(frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "half a setting": (frames.frame(frames.SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
    "SETTINGS that confirm and set": (frames.frame(frames.SETTINGS, 1, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
    "a thousand settings": (frames.frame(frames.SETTINGS, 0, 0, bytes(6000)), CALM),
    "a window that is too large": (frames.window_update(0, frames.MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
    "a window by nothing": (frames.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    "a short WINDOW_UPDATE": (frames.frame(frames.WINDOW_UPDATE, 0, 0, b"x"), ErrorCode.FRAME_SIZE_ERROR),
    "a window of an idle stream": (frames.window_update(1, 1), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM of an idle stream": (frames.rst_stream(1, CALM), ErrorCode.PROTOCOL_ERROR),
    "a short RST_STREAM": (opening(1) + frames.frame(frames.RST_STREAM, 0, 1, b"x"), ErrorCode.FRAME_SIZE_ERROR),
    "PUSH_PROMISE": (frames.frame(frames.PUSH_PROMISE, 4, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "a short PRIORITY": (frames.frame(frames.PRIORITY, 0, 1, b"x"), ErrorCode.FRAME_SIZE_ERROR),
    "GOAWAY of a stream": (frames.frame(frames.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
}


@pytest.mark.parametrize(("sent", "code"), WRONG.values(), ids=WRONG)
def test_illegal_frame_ends_the_connection_with_its_code(sent: bytes, code: ErrorCode) -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.feed(sent)
        await client.exchange()
        assert client.goaways[0][0] == code
        assert wire.transport.is_lost

    on_wire(test)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (WRONG["DATA that are too large"][0], "frame: expected at most 1048576 bytes, got 1048577"),
        (WRONG["SETTINGS that are too large"][0], "frame of type 4: expected at most 16384 bytes, got 16385"),
        (frames.frame(frames.SETTINGS, 0, 0, 65 * bytes(6)), "SETTINGS: expected at most 64 values, got 65"),
        (WRONG["a window that is too large"][0], "window: expected at most 2147483647 bytes, got 2147549182"),
    ],
)
def test_goaway_names_the_limit_and_what_came(sent: bytes, text: str) -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.feed(sent)
        await client.exchange()
        assert client.goaways[0][-1] == text.encode()

    on_wire(test)


LATE = {
    "HEADERS": opening(3),
    "DATA": data(3, b"x"),
    "WINDOW_UPDATE": frames.window_update(3, 1),
    "RST_STREAM": frames.rst_stream(3, ErrorCode.CANCEL),
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_frame_of_an_ended_stream_affects_no_other(late: bytes) -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.feed(opening(1) + data(1, framed(b"x"), is_end=True))
        wire.feed(opening(3, ECHO) + data(3, framed(b"x"), is_end=True))
        await wire.turn()
        wire.feed(late)
        await wire.turn()
        assert not wire.transport.is_closing()
        assert wire.running == 1

    on_wire(test)


@pytest.mark.parametrize(
    "trailer", [(b":path", b"/a/B"), (b"X-Upper", b"x"), (b"connection", b"close"), (b"x-a", b"b\r\nc: d")]
)
def test_malformed_trailers_reset_only_their_stream(trailer: tuple[bytes, bytes]) -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.feed(opening(1) + data(1, framed(b"x"), is_end=True))
        wire.feed(opening(3, ECHO) + data(3, framed(b"x")))
        wire.feed(frames.header_block(3, literal(*trailer), frames.MIN_FRAME_SIZE, is_end=True))
        came = await wire.turn()
        assert came == frames.rst_stream(3, ErrorCode.PROTOCOL_ERROR)
        assert not wire.transport.is_closing()
        wire.release()
        assert literal(b"grpc-status", b"0") in await wire.turn()

    on_wire(test)


def test_absurd_number_resets_only_its_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def test(wire: Wire, client: Client) -> None:
        held = client.open(HOLD)
        client.send(held, framed(b"x"), is_end=True)
        wrong = client.open(ECHO, ("content-length", "1" * 4301))
        await client.exchange()
        assert client.answers[wrong].reset == ErrorCode.PROTOCOL_ERROR
        wire.release()
        await client.exchange()
        assert client.answers[held].messages == [b"x"]
        assert not client.goaways

    on_wire(test)
    assert not caplog.records


def test_stream_past_its_window_is_reset_and_others_continue() -> None:
    async def test(wire: Wire, client: Client) -> None:
        assert (await client.call(ECHO, b"x")).messages == [b"x"]
        # A handler that cannot write does not read on, so the window is not refilled.
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        await client.exchange()
        wire.feed(opening(3, STREAM) + data(3, framed(b"x") * 3))
        await wire.turn()
        sent = b""
        for _ in range(65):
            wire.feed(data(3, framed(bytes(16_379))))
            sent += await wire.turn()
        assert frames.rst_stream(3, ErrorCode.FLOW_CONTROL_ERROR) in sent
        assert not wire.transport.is_closing()
        assert wire.running == 0

    on_wire(test)


def test_connection_past_its_window_ends() -> None:
    async def test(wire: Wire, client: Client) -> None:
        window = wire.connection._receiving._window
        assert window.take(16 * 1024 * 1024 - 10)
        wire.feed(opening(1, STREAM) + data(1, bytes(11)))
        await client.exchange()
        assert client.goaways[0][0] == ErrorCode.FLOW_CONTROL_ERROR

    on_wire(test)


def test_peer_that_opens_windows_by_single_bytes_is_disconnected() -> None:
    async def test(wire: Wire, client: Client) -> None:
        client.reads = False
        stream = client.open(STREAM)
        await client.send_all(stream, framed(bytes(500_000)))
        await client.exchange()
        for _ in range(MANY):
            wire.feed(frames.window_update(0, 1) + frames.window_update(stream, 1))
            await wire.turn()
            if wire.transport.is_closing():
                break
        assert wire.transport.is_lost

    on_wire(test)


def time_of(work: Callable[[], None]) -> float:
    """The least processor time of three tries, in seconds."""
    began_s = [time.thread_time()]
    for _ in range(3):
        work()
        began_s.append(time.thread_time())
    return min(end - begin for begin, end in pairwise(began_s))


def test_settings_cost_no_time_for_each_open_call() -> None:
    """Beside 2,000 open calls, the 500 SETTINGS of one short read took 100 ms."""

    async def test(wire: Wire, client: Client) -> None:
        def send_settings() -> None:
            wire.feed(b"".join(frames.settings({frames.INITIAL_WINDOW_SIZE: size}) for size in range(500)))

        wire.feed(opening(1))
        beside_one_s = time_of(send_settings)
        await asyncio.sleep(10)  # the tokens of the flood limit return
        for stream_id in range(3, 4_001, 2):
            wire.feed(opening(stream_id))
        assert time_of(send_settings) < 10 * beside_one_s
        assert not wire.transport.is_closing()
        wire.lose()

    on_wire(test)


def test_calls_that_one_frame_continues_share_the_loop_with_others() -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
        for stream_id in range(1, 2_000, 2):
            wire.feed(opening(stream_id, ECHO) + data(stream_id, framed(b"x"), is_end=True))
        await wire.turn()
        wire.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: 100}))
        answered: list[int] = []
        while len(answered) < 20 and sum(answered) < 1_000:
            await asyncio.sleep(0)
            answered.append(wire.transport.take().count(b"grpc-status"))
        assert sum(answered) == 1_000
        assert max(answered) < 300

    on_wire(test)


def test_window_past_its_limit_by_settings_ends_the_connection() -> None:
    async def test(wire: Wire, client: Client) -> None:
        grown = frames.window_update(1, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)
        larger = frames.settings({frames.INITIAL_WINDOW_SIZE: frames.DEFAULT_WINDOW + 1})
        wire.feed(opening(1) + grown + frames.rst_stream(1, CALM) + larger)  # no open call has this window
        await client.exchange()
        assert not client.goaways
        wire.feed(opening(3) + frames.window_update(3, frames.MAX_WINDOW - frames.DEFAULT_WINDOW - 1) + larger)
        await client.exchange()
        assert not client.goaways
        wire.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: frames.DEFAULT_WINDOW + 2}))
        await client.exchange()
        text = b"window: expected at most 2147483647 bytes, got 2147483648"
        assert client.goaways == [(ErrorCode.FLOW_CONTROL_ERROR, text)]

    on_wire(test)


def test_floods_are_logged_once_a_second_and_counted_each(caplog: pytest.LogCaptureFixture) -> None:
    async def test(wire: Wire, client: Client) -> None:
        loop = asyncio.get_running_loop()
        for wait_s in (0.4, 0.4, 0.4, 0.4):
            flooded = Wire(loop, wire.clock, errors=wire.errors)
            flooded.feed(frames.PREFACE + frames.settings({}) * 3_000)
            await flooded.turn()
            assert flooded.transport.is_lost
            await asyncio.sleep(wait_s)
        assert wire.connection_errors == ["enhance_your_calm"] * 4

    on_wire(test)
    assert [record.__dict__["fields"]["unlogged"] for record in caplog.records] == [0, 2]


async def given_room(wire: Wire, windows: list[int], *, size: int, calls: int) -> tuple[int, int]:
    """Make calls whose answers have ``size`` bytes, and repeatedly enlarge their windows by small increments.

    Returns:
        Received bytes and frames of DATA.
    """
    total = count = 0
    message = data(1, framed(bytes(size)), is_end=True)[frames.HEADER_BYTES :]
    for number in range(calls):
        stream = 2 * number + 1
        wire.feed(opening(stream, ECHO) + frames.frame(frames.DATA, frames.END_STREAM, stream, message))
        came, left, turn = await wire.turn(), size + 5, 0
        while not wire.transport.is_closing():
            for kind, length in frames_in(came):
                if kind == frames.DATA:
                    total, count, left = total + length, count + 1, left - length
            if not left:
                break
            room = windows[turn % len(windows)]
            wire.feed(frames.window_update(0, room) + frames.window_update(stream, room))
            came, turn = await wire.turn(), turn + 1
    return total, count


def frames_in(came: bytes) -> Iterator[tuple[int, int]]:
    position = 0
    while position < len(came):
        length_and_kind, _, _ = frames.read_header(came, position)
        yield length_and_kind & 0xFF, length_and_kind >> 8
        position += frames.HEADER_BYTES + (length_and_kind >> 8)


def test_uneven_windows_with_much_data_are_not_counted() -> None:
    """HAProxy returns the window that fits its buffer, then the few remaining bytes."""

    async def test(wire: Wire, client: Client) -> None:
        total, _ = await given_room(wire, [16_320, 64], size=900_000, calls=60)
        assert total == 60 * 900_005
        assert not wire.transport.is_closing()

    on_wire(test)


@pytest.mark.parametrize("room", [1, 100, 400])
def test_small_window_updates_are_bounded_by_the_sent_bytes(room: int) -> None:
    async def test(wire: Wire, client: Client) -> None:
        total, count = await given_room(wire, [room], size=900_000, calls=60)
        assert wire.transport.is_lost
        assert wire.connection_errors == ["enhance_your_calm"]
        assert wire.cut_answers == ["connection_error"]
        # Each round uses two WINDOW_UPDATEs; each KiB permits one, in addition to a burst.
        assert count <= 1_100 + (total - frames.DEFAULT_WINDOW) / 1024

    on_wire(test)


def test_simultaneous_window_updates_are_combined() -> None:
    async def test(wire: Wire, client: Client) -> None:
        client.reads = False
        stream = client.open(ECHO)
        await client.send_all(stream, framed(bytes(100_000)))
        await client.exchange()
        wire.feed((frames.window_update(stream, 1) + frames.window_update(0, 1)) * 100)
        assert list(frames_in(await wire.turn())) == [(frames.DATA, 100)]

    on_wire(test)


def test_slow_frame_and_slow_handshake_end_the_connection() -> None:
    async def test(wire: Wire, client: Client) -> None:
        silent = Wire(asyncio.get_running_loop(), wire.clock)
        await silent.turn()
        for byte in frames.frame(frames.HEADERS, frames.END_HEADERS, 1, bytes(40)):
            wire.feed(bytes((byte,)))
            await asyncio.sleep(1)
            if wire.transport.is_lost:
                break
        assert wire.transport.is_lost
        assert silent.transport.is_lost

    on_wire(test)


def test_empty_messages_count_against_the_limit() -> None:
    async def test(wire: Wire, client: Client) -> None:
        client.reads = False
        stream = client.open(STREAM)
        await client.send_all(stream, framed(bytes(100_000)) + framed(b"") * 20_000)
        await client.exchange()
        assert wire.gate.held_bytes > 20_000 * 100

    on_wire(test)


def openings(path: str, ids: Iterable[int]) -> Iterator[bytes]:
    """HEADERS of 15 bytes, except the first ones."""
    encoder = hpack.Encoder()
    headers = [*HEADERS[:3], (":path", path), ("content-type", "application/grpc")]
    for stream_id in ids:
        yield frames.header_block(stream_id, encoder.encode(headers), frames.MIN_FRAME_SIZE, is_end=False)


def many_calls(path: str, count: int) -> bytes:
    """Calls of 30 bytes each."""
    ids = range(1, 2 * count, 2)
    return b"".join(
        head + data(one, framed(b""), is_end=True) for one, head in zip(ids, openings(path, ids), strict=True)
    )


@pytest.mark.parametrize("path", [HOLD, SLOW])
@pytest.mark.parametrize("count", [250, 1_000])
def test_calls_of_one_read_begin_in_several_turns(path: str, count: int) -> None:
    """250 calls of 8 KB took 28 ms of a turn, and those of longer reads as much in each turn."""

    async def test(wire: Wire, client: Client) -> None:
        wire.feed(many_calls(path, count))
        running = [0]
        while running[-1] < count:
            assert len(running) < count
            await asyncio.sleep(0)
            running.append(wire.running)
        assert max(after - before for before, after in pairwise(running)) <= 64
        for _ in range(3):
            await asyncio.sleep(0)
        assert wire.transport.is_reading()

    on_wire(test)


@pytest.mark.parametrize("between", range(60, 66))
def test_large_message_whose_second_frame_is_the_last_of_a_turn_is_received_whole(between: int) -> None:
    async def test(wire: Wire, client: Client) -> None:
        large = framed(bytes(range(256)) * 2_000)
        wire.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: 10**6}) + frames.window_update(0, 10**6))
        heads = openings(ECHO, range(1, 2 * between + 3, 2))
        wire.feed(next(heads) + data(1, large[:200_000]))
        await wire.turn()
        rest = b"".join(heads) + data(1, large[200_000:], is_end=True)
        begin = rest.index(large[200_000:]) + 100
        wire.feed(rest[:begin])  # a short read, after which the large message may be received into its memory
        wire.feed(rest[begin:])
        came = await wire.turn()
        answer = b""
        for kind, size in frames_in(came):
            came = came[frames.HEADER_BYTES :]
            answer += came[:size] if kind == frames.DATA else b""
            came = came[size:]
        assert answer == large

    on_wire(test)


def test_calls_of_a_read_that_ends_with_a_fin_begin_in_several_turns() -> None:
    async def test(wire: Wire, client: Client) -> None:
        running = [0]
        wire.feed(many_calls(HOLD, 250))
        wire.transport.receive_eof()
        while running[-1] < 250:
            running.append(wire.running)
            await asyncio.sleep(0)
        assert max(after - before for before, after in pairwise(running)) <= 64
        wire.release()
        assert (await wire.turn()).count(b"grpc-status") == 250
        assert wire.transport.is_lost

    on_wire(test)


def test_calls_before_the_end_of_the_peer_are_answered() -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.feed(many_calls(ECHO, 250))
        wire.transport.receive_eof()
        assert (await wire.turn()).count(b"grpc-status") == 250

    on_wire(test)


def open_streams(wire: Wire) -> int:
    return len(wire.connection._sending.streams)


async def most_ended_in_a_turn(wire: Wire, left: Callable[[Wire], int] = lambda wire: wire.running) -> int:
    """Run the loop until all calls have ended. Returns the largest number that ended in one turn."""
    running = [left(wire)]
    while running[-1]:
        await asyncio.sleep(0)
        running.append(left(wire))
    return max(before - after for before, after in pairwise(running))


@pytest.mark.parametrize("path", [HOLD, STREAM])
def test_calls_of_lost_connections_end_in_several_turns(path: str) -> None:
    """2,000 calls held the loop for 17 ms, on one connection or on ten."""

    async def test(wire: Wire, client: Client) -> None:
        transports = [wire.transport]
        for _ in range(4):
            connection = wire.connect(GrpcOptions())
            transports.append(FakeTransport(asyncio.get_running_loop(), connection))
            connection.connection_made(transports[-1])
            transports[-1].receive(frames.PREFACE + frames.settings({}))
        for transport in transports:
            for stream_id in range(1, 400, 2):
                transport.receive(opening(stream_id, path) + data(stream_id, framed(b"x"), is_end=path == HOLD))
        await wire.turn()
        assert wire.running == 1_000
        for transport in transports:
            transport.abort()
        assert await most_ended_in_a_turn(wire) <= 100

    on_wire(test)


@pytest.mark.parametrize("is_complete", [True, False])
def test_streams_of_a_peer_that_closed_its_side_end_in_several_turns(is_complete: bool) -> None:
    async def test(wire: Wire, client: Client) -> None:
        for stream_id in range(1, 2_000, 2):
            wire.feed(opening(stream_id, STREAM) + data(stream_id, framed(b"x")[: None if is_complete else -1]))
        await wire.turn()
        assert wire.running == 1_000
        wire.transport.receive_eof()
        assert await most_ended_in_a_turn(wire) <= 100
        assert wire.connection.closed.done() or wire.transport.is_closing()

    on_wire(test)


def test_stalled_messages_end_in_several_turns() -> None:
    """2,000 equally stalled messages held the loop for 30 ms."""

    async def test(wire: Wire, client: Client) -> None:
        for stream_id in range(1, 2_000, 2):
            wire.feed(opening(stream_id, ECHO) + data(stream_id, framed(b"xy")[:-1]))
        await wire.turn()
        await asyncio.sleep(58)
        assert open_streams(wire) == 1_000
        wire.clock.advance(4 * 10**9)
        assert await most_ended_in_a_turn(wire, open_streams) <= 100
        assert (await wire.turn()).count(b"grpc_message_timeout_s") == 1_000

    on_wire(test)


def test_calls_whose_answers_stall_end_in_several_turns() -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: 1}))
        for stream_id in range(1, 2_000, 2):
            wire.feed(opening(stream_id, ECHO) + data(stream_id, framed(b"xy"), is_end=True))
        await wire.turn()
        await asyncio.sleep(58)
        assert open_streams(wire) == 1_000
        wire.clock.advance(4 * 10**9)
        assert await most_ended_in_a_turn(wire, open_streams) <= 100
        assert (await wire.turn()).count(b"grpc_send_timeout_s") == 1_000

    on_wire(test)


def test_stalled_call_that_goes_on_while_others_end_does_not_end() -> None:
    """Calls end in several turns; one whose message or answer went on between two of them ended, too."""

    async def test(wire: Wire, client: Client) -> None:
        wire.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: 1}))
        for stream_id in range(1, 2_000, 4):
            wire.feed(opening(stream_id, HOLD) + data(stream_id, framed(b"xy")[:-1]))
            wire.feed(opening(stream_id + 2, ECHO) + data(stream_id + 2, framed(b"xy"), is_end=True))
        await wire.turn()
        await asyncio.sleep(58)
        wire.clock.advance(4 * 10**9)
        turns = 0
        while open_streams(wire) == 1_000:
            turns += 1
            await asyncio.sleep(0)
        assert turns < 8
        unfinished, unread = 1_997, 1_999
        wire.feed(data(unfinished, b"y", is_end=True))
        wire.feed(frames.window_update(unread, 1))
        sent = await wire.turn() + await wire.turn()
        assert sent.count(b"grpc_message_timeout_s") == sent.count(b"grpc_send_timeout_s") == 499
        assert list(wire.connection._sending.streams) == [unfinished, unread]

    on_wire(test)


def test_unsendable_answers_to_a_peer_that_closed_its_side_end_in_several_turns() -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: 1}))
        for stream_id in range(1, 2_000, 2):
            wire.feed(opening(stream_id, ECHO) + data(stream_id, framed(b"xy"), is_end=True))
        await wire.turn()
        wire.transport.receive_eof()
        wire.clock.advance(2 * 10**9)
        assert open_streams(wire) == 1_000
        assert await most_ended_in_a_turn(wire, open_streams) <= 100

    on_wire(test)


def test_calls_with_one_deadline_end_in_several_turns() -> None:
    async def test(wire: Wire, client: Client) -> None:
        for stream_id in range(1, 2_000, 2):
            wire.feed(opening(stream_id, timeout="1S") + data(stream_id, framed(b"x"), is_end=True))
        await wire.turn()
        await asyncio.sleep(0.999)
        assert wire.running == 1_000
        await asyncio.sleep(0.001)
        assert await most_ended_in_a_turn(wire) <= 100
        assert (await wire.turn()).count(b"Deadline Exceeded") == 1_000

    on_wire(test)
