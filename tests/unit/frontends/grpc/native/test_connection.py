"""A connection against the h2 library: answers to calls, and the end of old, idle and draining connections."""

import asyncio
import random

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.clock import FakeClock
from fakes.loop import VirtualTimeLoop, run_virtual
from fakes.transport import FakeTransport
from native_wire import (
    BOOM,
    ECHO,
    FAIL,
    HEADERS,
    HOLD,
    SLOW,
    STREAM,
    Answer,
    Client,
    Wire,
    end,
    framed,
    on_wire,
)
from ortserve.codecs.compression import Encoding, compress
from ortserve.config.option_groups import GrpcOptions
from ortserve.errors import ErrorKind
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.connection import MessageReceiver
from ortserve.service.gate import Reservation

OK, CANCELLED, DEADLINE, EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 1, 4, 8, 12, 13


@pytest.mark.parametrize("path", [ECHO, STREAM])
@pytest.mark.parametrize("size", [0, 1, 16_378, 16_379, 16_384, 65_530, 65_531, 3_000_000])
def test_message_of_any_size_is_echoed(path: str, size: int) -> None:
    async def test(_: Wire, client: Client) -> None:
        message = bytes(range(256)) * (size // 256) + bytes(size % 256)
        stream = client.open(path)
        await client.send_all(stream, framed(message))
        await client.exchange()
        answer = client.answers[stream]
        assert answer.headers == {b":status": b"200", b"content-type": b"application/grpc"}
        assert answer.messages == [message]
        assert answer.status == OK
        assert answer.is_ended
        assert answer.reset is None

    on_wire(test)


@pytest.mark.parametrize("path", [ECHO, STREAM])
@pytest.mark.parametrize(("size", "most_copied"), [(700_000, 270_000), (5_000_000, 1_600_000)])
def test_large_message_is_received_mostly_in_place(path: str, size: int, most_copied: int) -> None:
    """Only these bytes are copied: bytes before the allocation, the announcing read, and bytes beside frame heads."""

    async def test(wire: Wire, client: Client) -> None:
        message = random.Random(size).randbytes(size)
        stream = client.open(path)
        await client.send_all(stream, framed(message))
        await client.exchange()
        assert client.answers[stream].messages == [message]
        assert size - wire.transport.placed_bytes <= most_copied
        small = await client.call(ECHO, b"small")
        assert small.messages == [b"small"]

    on_wire(test)


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.data_too_large])
def test_interleaved_large_messages_are_received(data: st.DataObject) -> None:
    """Frames have any size and padding, reads end anywhere, and small calls and ends of streams are in between."""

    async def test(wire: Wire, client: Client) -> None:
        seeded = random.Random(data.draw(st.integers(0, 2**32)))
        unsent: dict[int, bytes] = {}
        sent: dict[int, list[bytes]] = {}
        for _ in range(data.draw(st.integers(1, 4))):
            path = data.draw(st.sampled_from([ECHO, STREAM]))
            sizes = data.draw(st.lists(st.sampled_from([0, 70_000, 300_000, 1_500_000]), min_size=1, max_size=3))
            stream = client.open(path)
            sent[stream] = [seeded.randbytes(size) for size in sizes[: 1 if path == ECHO else 3]]
            unsent[stream] = b"".join(map(framed, sent[stream]))
        reset: set[int] = set()
        while unsent:
            stream = seeded.choice(sorted(unsent))
            if seeded.random() < 0.01:
                client.h2.reset_stream(stream)
                reset.add(stream)
                del unsent[stream]
                continue
            room = min(client.h2.local_flow_control_window(stream), client.h2.max_outbound_frame_size - 256)
            size = min(room, seeded.choice([1, 100, 16_384, 100_000, 1_000_000]))
            rest = unsent[stream]
            if size > 0:
                pad = seeded.choice([None, None, 0, 200]) if size + 300 < room else None
                client.h2.send_data(stream, rest[:size], end_stream=size >= len(rest), pad_length=pad)
                unsent[stream] = rest[size:]
                if size >= len(rest):
                    del unsent[stream]
            out = client.h2.data_to_send()
            while out:
                cut = seeded.choice([1, 50, 5_000, 300_000])
                wire.feed(out[:cut])
                out = out[cut:]
            await client.exchange()
        await client.exchange()
        for stream in sent.keys() - reset:
            assert client.answers[stream].status == OK
            assert client.answers[stream].messages == sent[stream]

    on_wire(test)


def test_call_that_ends_within_a_large_message_releases_it() -> None:
    async def test(wire: Wire, client: Client) -> None:
        stream = client.open(ECHO, ("grpc-timeout", "1S"))
        client.send(stream, framed(bytes(1_000_000))[:600_000])
        out = client.h2.data_to_send()
        wire.feed(out[:-200_000])
        await wire.turn()
        assert isinstance(wire.transport.get_protocol(), MessageReceiver)
        assert wire.gate.held_bytes == 400_000 - 5
        await asyncio.sleep(2)
        wire.feed(out[-200_000:])
        await client.exchange()
        assert client.answers[stream].status == DEADLINE
        assert wire.gate.held_bytes == 0
        other = await client.call(ECHO, b"x")
        assert other.messages == [b"x"]

    on_wire(test)


def test_unary_call_sends_its_timing_in_the_trailers() -> None:
    async def test(_: Wire, client: Client) -> None:
        answer = await client.call(ECHO, b"x")
        assert answer.trailers == {b"grpc-status": b"0", b"server-timing": b"all;dur=1"}

    on_wire(test)


@pytest.mark.parametrize("calls", [1, 2, 9])
def test_answers_of_a_batch_are_sent_in_one_write(calls: int) -> None:
    async def test(wire: Wire, client: Client) -> None:
        streams = [client.open(HOLD) for _ in range(calls)]
        for number, stream in enumerate(streams):
            client.send(stream, framed(b"%d" % number), is_end=True)
        await client.exchange()
        before = wire.transport.writes
        wire.release()
        assert wire.transport.writes == before + 1
        await client.exchange()
        assert [client.answers[stream].messages for stream in streams] == [[b"%d" % n] for n in range(calls)]
        assert wire.transport.writes == before + 1

    on_wire(test)


def test_answers_are_sent_while_another_call_is_open() -> None:
    async def test(wire: Wire, client: Client) -> None:
        held = client.open(HOLD)
        client.send(held, framed(b"x"), is_end=True)
        other = client.open(STREAM)
        await client.exchange()
        wire.release()
        await client.exchange()
        assert client.answers[held].messages == [b"x"]
        assert not client.answers[other].is_ended

    on_wire(test)


@pytest.mark.parametrize("path", [ECHO, SLOW, STREAM])
def test_messages_are_independent_of_segmentation(path: str) -> None:
    async def test(wire: Wire, client: Client) -> None:
        for cut in (1, 2, 7):
            stream = client.open(path)
            client.send(stream, framed(b"hello") + (framed(b"") + framed(b"!" * 40) if path == STREAM else b""))
            client.send(stream, b"", is_end=True)
            data = client.h2.data_to_send()
            for begin in range(0, len(data), cut):
                wire.feed(data[begin : begin + cut])
            await client.exchange()
            wire.release()
            await client.exchange()
            expected = [b"hello", b"", b"!" * 40] if path == STREAM else [b"hello"]
            assert client.answers[stream].messages == expected
            assert client.answers[stream].status == OK

    on_wire(test)


@pytest.mark.parametrize("path", [ECHO, STREAM])
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=20))
@settings(max_examples=30)
def test_frames_of_every_kind_are_independent_of_segmentation(path: str, cuts: list[int]) -> None:
    """The reader of frames is tested alone only where it is interpreted, here also where it is compiled."""

    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        wire = Wire(loop, clock)
        client = Client(wire)
        preface_and_settings = client.h2.data_to_send()
        stream = client.open(path)
        block, message = client.h2.data_to_send()[frames.HEADER_BYTES :], framed(b"hello")
        padding_and_priority = b"\x02" + b"\0\0\0\0\x0f"
        head = padding_and_priority + block[:7] + b"__"
        sent = preface_and_settings + b"".join(
            (
                frames.frame(0xEE, 0x7, 9, b"?"),
                frames.frame(frames.HEADERS, frames.PADDED | frames.HAS_PRIORITY, stream, head),
                frames.frame(frames.CONTINUATION, 0, stream, b""),
                frames.frame(frames.CONTINUATION, frames.END_HEADERS, stream, block[7:]),
                frames.frame(frames.DATA, frames.PADDED, stream, b"\x03" + message[:4] + b"___"),
                frames.frame(frames.DATA, 0, stream, message[4:]),
                frames.frame(frames.PING, 0, 0, b"12345678"),
                frames.frame(frames.DATA, frames.END_STREAM, stream, b""),
            )
        )
        position = number = 0
        while position < len(sent):
            size = cuts[number % len(cuts)]
            wire.feed(sent[position : position + size])
            position += size
            number += 1
        await client.exchange()
        assert (client.answers[stream].messages, client.answers[stream].status) == ([b"hello"], OK)
        assert (client.pongs, client.goaways) == ([b"12345678"], [])
        await end(wire)

    run_virtual(main)


def test_padding_is_dropped_and_counts_against_the_windows() -> None:
    async def test(_: Wire, client: Client) -> None:
        for _number in range(40):  # more padding than a window has room for
            stream = client.open(STREAM)
            for byte in framed(b"hello world" * 30):
                client.send(stream, bytes((byte,)), pad=255)
            client.send(stream, b"", is_end=True, pad=0)
            await client.exchange()
            assert client.answers[stream].messages == [b"hello world" * 30]

    on_wire(test)


@pytest.mark.parametrize("path", [ECHO, STREAM])
@pytest.mark.parametrize(("more", "is_right"), [(0, True), (1, False), (-1, False), (-6, False)])
def test_request_unlike_its_content_length_is_reset(path: str, more: int, is_right: bool) -> None:
    async def test(_: Wire, client: Client) -> None:
        message = framed(b"hello")
        answer = await client.call(path, b"hello", ("content-length", str(len(message) + more)))
        assert (answer.reset, answer.messages) == ((None, [b"hello"]) if is_right else (ErrorCodes.PROTOCOL_ERROR, []))
        assert (await client.call(path, b"next")).messages == [b"next"]

    on_wire(test)


def test_call_starts_with_its_message_before_its_end() -> None:
    async def test(wire: Wire, client: Client) -> None:
        stream = client.open(HOLD)
        client.send(stream, framed(b"x"))
        await client.exchange()
        assert wire.running == 1
        client.send(stream, b"", is_end=True)
        await client.exchange()
        wire.release()
        await client.exchange()
        assert client.answers[stream].messages == [b"x"]
        assert (client.answers[stream].is_ended, client.answers[stream].reset) == (True, None)

    on_wire(test)


@pytest.mark.parametrize("path", [ECHO, FAIL, SLOW, "/nothing/Here"])
def test_call_that_is_answered_before_its_end_is_reset_without_error(path: str) -> None:
    async def test(wire: Wire, client: Client) -> None:
        stream = client.open(path)
        client.send(stream, framed(b"x"))
        await client.exchange()
        wire.release()
        await client.exchange()
        answer = client.answers[stream]
        assert answer.status == {ECHO: OK, FAIL: 3, SLOW: OK}.get(path, UNIMPLEMENTED)
        assert answer.is_ended
        assert answer.reset in (None, ErrorCodes.NO_ERROR)  # h2 reports no reset after the end
        assert not wire.connection._sending.streams
        # Frames in flight for the ended stream are ignored.
        header = frames.frame(frames.DATA, 0, stream, b"late")
        wire.feed(header + frames.frame(frames.RST_STREAM, 0, stream, bytes(4)))
        assert (await client.call(ECHO, b"y")).messages == [b"y"]

    on_wire(test)


def test_reset_follows_later_than_an_answer_before_the_end_of_its_request() -> None:
    async def test(wire: Wire, client: Client) -> None:
        stream = client.open("/nothing/Here")
        client.send(stream, framed(b"x"))
        await client.exchange()
        assert client.answers[stream].is_ended
        await asyncio.sleep(0.2)  # in virtual time
        assert await wire.turn() == b""
        await asyncio.sleep(0.3)
        assert await wire.turn() == frames.rst_stream(stream, frames.ErrorCode.NO_ERROR)

    on_wire(test)


@pytest.mark.parametrize("path", [ECHO, "/nothing/Here"])
@pytest.mark.parametrize("ending", ["data", "trailers", "reset"])
def test_request_that_ends_after_its_answer_is_not_reset(path: str, ending: str) -> None:
    """An endpoint must not send frames on a closed stream (RFC 9113, section 5.1)."""

    async def test(wire: Wire, client: Client) -> None:
        stream = client.open(path)
        client.send(stream, framed(b"x"))
        await client.exchange()
        assert client.answers[stream].is_ended
        if ending == "data":
            client.h2.end_stream(stream)
        elif ending == "trailers":
            client.h2.send_headers(stream, [("key", "value")], end_stream=True)
        else:
            client.h2.reset_stream(stream, ErrorCodes.CANCEL)
        await client.exchange()
        await asyncio.sleep(1)  # in virtual time
        assert await wire.turn() == b""

    on_wire(test)


def test_empty_frames_that_end_answered_requests_are_no_flood() -> None:
    """Some clients and proxies send the end of a request apart from its message, which may be answered before."""

    async def test(_: Wire, client: Client) -> None:
        for _call in range(2_100):
            stream = client.open(ECHO)
            client.send(stream, framed(b"x"))
            await client.exchange()
            assert client.answers[stream].is_ended
            client.h2.end_stream(stream)
        await client.exchange()
        assert not client.goaways

    on_wire(test)


@pytest.mark.parametrize(
    ("path", "sent", "status", "text"),
    [
        (ECHO, b"", UNIMPLEMENTED, b"expected one message, got none"),
        (SLOW, b"", UNIMPLEMENTED, b"expected one message, got none"),
        (ECHO, framed(b"x") + framed(b"y"), UNIMPLEMENTED, b"expected one message, got more"),
        (ECHO, b"\0\0\0\0\5abc", INTERNAL, b"the stream ended in the middle of a message"),
        (STREAM, b"\0\0", INTERNAL, b"the stream ended in the middle of a message"),
        (ECHO, framed(b"x", flag=2), INTERNAL, b"message flags: expected 0 or 1, got 2"),
        (STREAM, framed(b"x", flag=1), INTERNAL, b"a message is compressed, and grpc-encoding names no encoding"),
        (ECHO, b"\0\xff\xff\xff\xff", EXHAUSTED, b"message larger than max_body_bytes"),
        (FAIL, framed(b"x"), 3, b"it is 100 %25 wrong: %C3%BC"),
        (BOOM, framed(b"x"), INTERNAL, b"internal error"),
        ("/nothing/Here", framed(b"x"), UNIMPLEMENTED, b"no such call"),
    ],
)
def test_bad_call_ends_with_trailers_only(
    path: str, sent: bytes, status: int, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(wire: Wire, client: Client) -> None:
        stream = client.open(path)
        client.send(stream, sent, is_end=True)
        await client.exchange()
        answer = client.answers[stream]
        assert (answer.status, answer.is_ended, answer.data) == (status, True, b"")
        assert answer.text.startswith(text)
        assert b":status" in answer.headers
        assert not answer.trailers
        assert (await client.call(ECHO, b"y")).messages == [b"y"]

    on_wire(test, max_message_bytes=10_000_000)
    assert ("/secret/path" in caplog.text) == (path == BOOM)


@pytest.mark.parametrize("path", [ECHO, STREAM])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_messages_of_both_encodings_are_decoded(path: str, encoding: str) -> None:
    async def test(_: Wire, client: Client) -> None:
        stream = client.open(path, ("grpc-encoding", encoding))
        packed = compress(b"hello" * 50, Encoding(encoding))
        client.send(stream, framed(packed, flag=1), is_end=True)
        await client.exchange()
        assert client.answers[stream].messages == [b"hello" * 50]

    on_wire(test)


@pytest.mark.parametrize("path", [ECHO, STREAM, SLOW])
def test_accepted_compression_is_used_where_it_shrinks_the_answer(path: str) -> None:
    async def test(wire: Wire, client: Client) -> None:
        for accepted, is_compressed in (("identity,gzip", True), ("deflate", False)):
            for message in (b"a" * 1000, b"a"):
                stream = client.open(path, ("grpc-accept-encoding", accepted))
                client.send(stream, framed(message), is_end=True)
                await client.exchange()
                wire.release()
                await client.exchange()
                answer = client.answers[stream]
                assert answer.headers.get(b"grpc-encoding") == (b"gzip" if is_compressed else None)
                packed = is_compressed and len(message) > 1
                assert answer.data == (framed(compress(message, Encoding.GZIP), flag=1) if packed else framed(message))
                assert answer.status == OK

    on_wire(test, compression="gzip")


@pytest.mark.parametrize("path", [HOLD, SLOW, STREAM])
@pytest.mark.parametrize("how", ["reset", "deadline", "connection"])
def test_reset_call_is_cancelled_and_released(path: str, how: str) -> None:
    async def test(wire: Wire, client: Client) -> None:
        stream = client.open(path, *((("grpc-timeout", "50m"),) if how == "deadline" else ()))
        client.send(stream, framed(b"x"))
        await client.exchange()
        assert wire.running == 1
        if how == "reset":
            client.h2.reset_stream(stream, ErrorCodes.CANCEL)
            await client.exchange()
        elif how == "deadline":
            await asyncio.sleep(0.06)
            await client.exchange()
            answer = client.answers[stream]
            assert (answer.status, answer.is_ended) == (DEADLINE, True)
        else:
            wire.lose()
            await wire.turn()
        await wire.work.until_done()
        assert (wire.running, wire.cancelled) == (0, 1)
        assert not wire.connection._sending.streams

    on_wire(test)


def test_deadline_of_a_quick_call_counts_from_its_headers() -> None:
    async def test(wire: Wire, client: Client) -> None:
        stream = client.open(ECHO, ("grpc-timeout", "2S"))
        await client.exchange()
        await asyncio.sleep(1.5)
        client.send(stream, framed(b"x"), is_end=True)
        await client.exchange()
        assert client.answers[stream].messages == [b"x"]
        assert wire.timeouts_ns == [pytest.approx(0.5e9, abs=1e6)]

    on_wire(test)


def test_each_deadline_ends_its_call() -> None:
    async def test(wire: Wire, client: Client) -> None:
        streams = {seconds: client.open(HOLD, ("grpc-timeout", f"{seconds}S")) for seconds in (3, 1, 2)}
        for stream in streams.values():
            client.send(stream, framed(b"x"), is_end=True)
        await client.exchange()
        for seconds in (1, 2, 3):
            await asyncio.sleep(1.0001)
            await client.exchange()
            ended = [second for second, stream in streams.items() if client.answers[stream].is_ended]
            assert sorted(ended) == list(range(1, seconds + 1))
        assert wire.cancelled == 3

    on_wire(test)


@pytest.mark.parametrize("value", ["", "1", "S", "123456789S", "-1S", "1s", "1 S"])
def test_malformed_deadline_is_an_invalid_argument(value: str) -> None:
    async def test(_: Wire, client: Client) -> None:
        stream = client.open(ECHO, ("grpc-timeout", value))
        await client.exchange()
        assert client.answers[stream].status == 3

    on_wire(test)


@pytest.mark.parametrize(
    ("method", "content_type", "status"),
    [
        ("GET", "application/grpc", b"405"),
        ("POST", "application/json", b"415"),
        ("POST", "application/grpcfoo", b"415"),
        ("POST", "", b"415"),
        ("POST", "application/grpc+proto", b"200"),
    ],
)
def test_request_that_is_not_grpc_gets_an_http_status(method: str, content_type: str, status: bytes) -> None:
    async def test(_: Wire, client: Client) -> None:
        client.answers[1] = Answer()
        headers = [(":method", method), *HEADERS[1:3], (":path", "/x"), ("content-type", content_type)]
        client.h2.send_headers(1, headers[: None if content_type else -1], end_stream=True)
        await client.exchange()
        assert (client.answers[1].headers[b":status"], client.answers[1].is_ended) == (status, True)
        assert (await client.call(ECHO, b"y")).messages == [b"y"]

    on_wire(test)


def test_window_lowered_below_the_sent_bytes_is_respected() -> None:
    async def test(wire: Wire, client: Client) -> None:
        client.reads = False
        message = bytes(200_000)
        stream = client.open(STREAM)
        await client.send_all(stream, framed(message))
        await client.exchange()
        assert len(client.answers[stream].data) == 65_535
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100})  # 65,435 below zero
        await client.exchange()
        client.h2.increment_flow_control_window(1_000_000)
        client.h2.increment_flow_control_window(65_435, stream)
        await client.exchange()
        assert len(client.answers[stream].data) == 65_535
        client.h2.increment_flow_control_window(1, stream)
        await client.exchange()
        assert len(client.answers[stream].data) == 65_536
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1_000_000})
        await client.exchange()
        assert client.answers[stream].messages == [message]
        assert client.answers[stream].status == OK

    on_wire(test)


def test_smaller_table_of_headers_is_confirmed_by_the_next_block() -> None:
    async def test(_: Wire, client: Client) -> None:
        for size in (0, 4096, 100):
            client.h2.update_settings({SettingCodes.HEADER_TABLE_SIZE: size})
            await client.exchange()
            for path in (ECHO, STREAM, FAIL):
                assert (await client.call(path, b"x")).is_ended  # h2 would end the connection if the end were missing

    on_wire(test)


def test_trailers_larger_than_a_frame_are_continued() -> None:
    sent = frames.header_block(3, b"abcdefgh", 3, is_end=True)
    expected = (
        frames.frame(frames.HEADERS, frames.END_STREAM, 3, b"abc"),
        frames.frame(frames.CONTINUATION, 0, 3, b"def"),
        frames.frame(frames.CONTINUATION, frames.END_HEADERS, 3, b"gh"),
    )
    assert sent == b"".join(expected)


def test_reset_stream_releases_its_window() -> None:
    async def test(wire: Wire, client: Client) -> None:
        client.reads = False
        streams = [client.open(STREAM) for _ in range(3)]
        for stream in streams:
            await client.send_all(stream, framed(bytes(50_000)))
        await client.exchange()
        got = sum(len(client.answers[stream].data) for stream in streams)
        assert got == 65_535
        blocked = [stream for stream in streams if not client.answers[stream].is_ended]
        client.h2.reset_stream(blocked[0], ErrorCodes.CANCEL)
        client.h2.increment_flow_control_window(10_000_000)
        await client.exchange()
        for stream in set(streams) - {blocked[0]}:
            assert client.answers[stream].messages == [bytes(50_000)]
        assert wire.connection._sending.unsent_bytes == 0

    on_wire(test)


def test_peer_that_reads_nothing_is_paused_until_it_reads() -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.transport.is_stuck = True
        client.h2.increment_flow_control_window(100_000_000)
        large = []
        for _ in range(900):
            large.append(client.open(ECHO))
            client.send(large[-1], framed(bytes(4000)), is_end=True)
        wire.feed(client.h2.data_to_send())
        await wire.turn()
        failed = []
        while wire.transport.is_reading():
            failed.append(client.open(FAIL))
            client.send(failed[-1], framed(b"x"), is_end=True)
            wire.feed(client.h2.data_to_send())
            await wire.turn()
            client.h2.reset_stream(failed[-1])  # only locally: otherwise h2 would open no more
            client.h2.data_to_send()
            assert len(failed) < 20_000
        assert wire.transport.get_write_buffer_size() < 3_000_000
        wire.transport.is_stuck = False
        sent = b""
        while came := await wire.turn():
            sent += came
        assert wire.transport.is_reading()
        assert sent.count(framed(bytes(4000))) == len(large)

    on_wire(test)


@pytest.mark.parametrize("count", [1, 5])
def test_calls_past_the_stream_limit_are_refused_as_retryable(count: int) -> None:
    async def test(wire: Wire, client: Client) -> None:
        held = [client.open(HOLD) for _ in range(count)]
        for stream in held:
            client.send(stream, framed(b"x"), is_end=True)
        await client.exchange()
        client.h2.remote_settings._settings[SettingCodes.MAX_CONCURRENT_STREAMS][0] = 100
        more = client.open(HOLD)
        await client.exchange()
        assert client.answers[more].reset == ErrorCodes.REFUSED_STREAM
        wire.release()
        await client.exchange()
        assert [client.answers[stream].status for stream in held] == [OK] * count
        assert (await client.call(ECHO, b"y")).messages == [b"y"]

    on_wire(test, options=GrpcOptions(grpc_max_connection_calls=count))


def test_message_is_rejected_at_the_memory_limit() -> None:
    async def test(wire: Wire, client: Client) -> None:
        with Reservation(wire.gate, 500):
            stream = client.open(ECHO)
            client.send(stream, framed(bytes(600))[:100])
            await client.exchange()
            answer = client.answers[stream]
            assert answer.status == EXHAUSTED
            assert b"max_inflight_bytes" in answer.text
            assert (answer.trailers or answer.headers)[b"grpc-retry-pushback-ms"] == b"1000"
            assert wire.gate.held_bytes == 500
            fitting = client.open(ECHO)
            client.send(fitting, framed(bytes(400))[:100])
            await client.exchange()
            assert wire.gate.held_bytes == 595
            client.send(fitting, framed(bytes(400))[100:], is_end=True)
            await client.exchange()
            assert client.answers[fitting].messages == [bytes(400)]
            assert wire.gate.held_bytes == 500

    on_wire(test, max_inflight_bytes=1000)


@pytest.mark.parametrize("path", [ECHO, SLOW, STREAM])
def test_call_beside_memory_over_the_limit_affects_no_other(path: str) -> None:
    """Decoded requests and messages of streams may take the memory of all bodies over the limit."""

    async def test(wire: Wire, client: Client) -> None:
        held = client.open(HOLD)
        client.send(held, framed(b"x"), is_end=True)
        await client.exchange()
        with Reservation(wire.gate, 0) as others:
            others.set_unchecked(2000)
            late = client.open(path)
            client.send(late, framed(bytes(600))[:100])
            await client.exchange()
            if path != STREAM:
                assert client.answers[late].status == EXHAUSTED
        wire.release()
        await client.exchange()
        assert client.answers[held].messages == [b"x"]
        assert not client.goaways
        wire.lose()

    on_wire(test, max_inflight_bytes=1000)


@pytest.mark.parametrize("path", [ECHO, SLOW])
def test_incomplete_messages_of_unary_calls_stay_within_the_memory_limit(path: str) -> None:
    async def test(wire: Wire, client: Client) -> None:
        calls = [client.open(path) for _ in range(20)]
        for call in calls:
            client.send(call, framed(bytes(600))[:300])
        await client.exchange()
        assert wire.gate.held_bytes <= 1000
        assert sum(client.answers[call].is_ended for call in calls) >= 16
        wire.lose()

    on_wire(test, max_inflight_bytes=1000)


def test_messages_of_streams_take_at_most_twice_the_memory_limit() -> None:
    async def test(wire: Wire, client: Client) -> None:
        streams = [client.open(STREAM) for _ in range(8)]
        for stream in streams:
            client.send(stream, framed(bytes(400_000))[:300_000])
            await client.exchange()
        assert wire.gate.held_bytes <= 2_000_000
        ended = [stream for stream in streams if client.answers[stream].is_ended]
        assert ended == streams[6:]
        assert {client.answers[stream].status for stream in ended} == {EXHAUSTED}
        assert (await client.call(STREAM, b"small")).messages == [b"small"]
        wire.lose()

    on_wire(test, max_inflight_bytes=1_000_000)


def test_small_message_in_two_frames_is_answered_at_the_memory_limit() -> None:
    async def test(wire: Wire, client: Client) -> None:
        with Reservation(wire.gate, 1000):
            call, message = client.open(SLOW), framed(b"name")
            client.send(call, message[:7])
            await client.exchange()
            client.send(call, message[7:], is_end=True)
            await client.exchange()
            wire.release()
            await client.exchange()
            assert client.answers[call].messages == [b"name"]
        wire.lose()
        assert wire.gate.held_bytes == 0

    on_wire(test, max_inflight_bytes=1000)


@pytest.mark.parametrize("path", [HOLD, SLOW])
def test_second_message_ends_a_unary_call(path: str) -> None:
    async def test(wire: Wire, client: Client) -> None:
        call = client.open(path)
        client.send(call, framed(b"x"))
        await client.exchange()
        assert wire.running == 1
        client.send(call, framed(b"y"))
        await client.exchange()
        assert client.answers[call].status == UNIMPLEMENTED
        assert client.answers[call].text == b"expected one message, got more"
        assert (wire.running, wire.cancelled) == (0, 1)

    on_wire(test)


def test_drain_finishes_started_and_in_flight_calls_only() -> None:
    async def test(wire: Wire, client: Client) -> None:
        held = client.open(HOLD)
        client.send(held, framed(b"x"), is_end=True)
        await client.exchange()
        wire.connection.begin_drain()
        on_its_way = client.open(ECHO)
        client.send(on_its_way, framed(b"y"), is_end=True)
        wire.feed(client.h2.data_to_send())
        goaways = await wire.turn()
        assert goaways.count(frames.goaway(frames.MAX_STREAM_ID, frames.ErrorCode.NO_ERROR)) == 1
        wire.feed(frames.frame(frames.PING, frames.ACK, 0, b"draining"))
        assert frames.goaway(on_its_way, frames.ErrorCode.NO_ERROR) in await wire.turn()
        late = frames.frame(frames.HEADERS, frames.END_HEADERS, on_its_way + 2, b"\x82")
        wire.feed(late)
        assert not wire.transport.is_closing()
        wire.release()
        assert framed(b"x") in await wire.turn()
        assert wire.transport.is_lost

    on_wire(test)


@pytest.mark.parametrize("how", ["reset", "silence"])
def test_drain_waits_for_the_end_of_an_answered_request(how: str) -> None:
    """Otherwise the socket is closed while the peer's reset is unread, and the peer may lose answers."""

    async def test(wire: Wire, client: Client) -> None:
        stream = client.open(HOLD)
        client.send(stream, framed(b"x"))
        await client.exchange()
        wire.connection.begin_drain()
        wire.feed(frames.frame(frames.PING, frames.ACK, 0, b"draining"))
        await wire.turn()
        wire.release()
        assert framed(b"x") in await wire.turn()
        assert not wire.transport.is_closing()
        if how == "reset":
            wire.feed(frames.rst_stream(stream, frames.ErrorCode.CANCEL))
        else:
            await asyncio.sleep(0.3)  # in virtual time
        await wire.turn()
        assert wire.transport.is_lost

    on_wire(test)


@pytest.mark.parametrize("how", ["reset", "silence"])
def test_drain_ends_with_the_last_call(how: str) -> None:
    async def test(wire: Wire, client: Client) -> None:
        held = client.open(HOLD)
        await client.exchange()
        wire.connection.begin_drain(5.0)
        await wire.turn()
        await asyncio.sleep(1.5)  # the peer does not answer the ping
        assert not wire.transport.is_closing()
        if how == "reset":
            wire.feed(frames.rst_stream(held, frames.ErrorCode.CANCEL))
        else:
            await asyncio.sleep(5)
        await wire.turn()
        assert wire.transport.is_lost

    on_wire(test)


@pytest.mark.parametrize("is_half_closed", [False, True])
def test_connection_that_used_the_last_stream_id_ends(is_half_closed: bool) -> None:
    async def test(wire: Wire, client: Client) -> None:
        client.h2.highest_outbound_stream_id = frames.MAX_STREAM_ID - 2
        held = client.open(HOLD)
        assert held == frames.MAX_STREAM_ID
        client.send(held, framed(b"x"), is_end=True)
        await client.exchange()
        if is_half_closed:
            wire.connection.eof_received()
        else:
            wire.connection.begin_drain()
            wire.feed(frames.frame(frames.PING, frames.ACK, 0, b"draining"))
        await wire.turn()
        assert not wire.transport.is_lost
        wire.release()
        await wire.turn()
        assert wire.transport.is_lost

    on_wire(test)


@pytest.mark.parametrize(
    ("options", "max_age_s", "by_s"),
    [(GrpcOptions(grpc_max_connection_idle_s=10.0), None, 12), (GrpcOptions(grpc_max_connection_age_s=10.0), 10.0, 12)],
)
def test_idle_or_expired_connection_gets_goaway_and_is_closed(
    options: GrpcOptions, max_age_s: float | None, by_s: float
) -> None:
    async def test(wire: Wire, client: Client) -> None:
        await asyncio.sleep(9)
        await client.exchange()
        assert not client.goaways
        await asyncio.sleep(by_s - 9)
        sent = await wire.turn()
        assert frames.goaway(frames.MAX_STREAM_ID, frames.ErrorCode.NO_ERROR) in sent
        assert frames.goaway(0, frames.ErrorCode.NO_ERROR) in sent
        assert wire.transport.is_lost

    on_wire(test, options=options, max_age_s=max_age_s)


def test_keepalive_ping_detects_a_dead_peer() -> None:
    async def test(wire: Wire, client: Client) -> None:
        client.open(HOLD)
        await client.exchange()
        for _ in range(2):
            await asyncio.sleep(11.5)
            await client.exchange()  # h2 answers the ping
        await asyncio.sleep(3)
        assert not wire.transport.is_closing()
        await asyncio.sleep(12)
        assert wire.transport.is_lost

    on_wire(
        test,
        options=GrpcOptions(
            grpc_keepalive_time_s=10.0, grpc_keepalive_timeout_s=2.0, grpc_http2_max_pings_without_data=0
        ),
    )


def test_unread_output_does_not_delay_a_close() -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.transport.is_stuck = True
        wire.feed(frames.frame(frames.DATA, 0, 9, b"x"))
        await wire.turn()
        assert (wire.transport.is_closing(), wire.transport.is_lost) == (True, False)
        await asyncio.sleep(62)
        assert wire.transport.is_lost

    on_wire(test)


def test_stalled_message_ends_its_call_and_releases_its_bytes() -> None:
    async def test(wire: Wire, client: Client) -> None:
        stalled = client.open(ECHO)
        client.send(stalled, framed(bytes(1000))[:500])
        waiting = client.open(STREAM)  # a caller may pause between messages
        client.send(waiting, framed(b"x"))
        await client.exchange()
        assert wire.gate.held_bytes > 0
        await asyncio.sleep(62)
        await client.exchange()
        assert client.answers[stalled].status == CANCELLED
        assert b"a message arrived at less than 4096 bytes per second for 60 s" in client.answers[stalled].text
        assert wire.gate.held_bytes == 0
        assert not client.answers[waiting].is_ended

    on_wire(test)


@pytest.mark.parametrize("path", [ECHO, SLOW])
def test_unary_call_whose_message_does_not_begin_ends(path: str) -> None:
    async def test(wire: Wire, client: Client) -> None:
        silent = [client.open(path) for _ in range(2)]
        client.send(silent[1], framed(b"x")[:4])
        idle, running = client.open(STREAM), client.open(path)
        client.send(running, framed(b"x"))
        await client.exchange()
        await asyncio.sleep(58)
        await client.exchange()
        assert not any(client.answers[stream].is_ended for stream in silent)
        await asyncio.sleep(4)
        await client.exchange()
        assert [client.answers[stream].status for stream in silent] == [CANCELLED] * 2
        assert not client.answers[idle].is_ended
        wire.release()
        await client.exchange()
        assert client.answers[running].messages == [b"x"]

    on_wire(test)


@pytest.mark.parametrize("part_bytes", [50, 200])
def test_slow_message_is_accepted_at_the_minimum_rate(part_bytes: int) -> None:
    async def test(wire: Wire, client: Client) -> None:
        stream = client.open(ECHO)
        message = framed(bytes(2000))
        for begin in range(0, 2000, part_bytes):
            if not client.answers[stream].is_ended:
                client.send(stream, message[begin : begin + part_bytes])
            await client.exchange()
            await asyncio.sleep(1)
        if part_bytes < 100:
            assert client.answers[stream].status == CANCELLED
            assert wire.gate.held_bytes == 0
        else:
            client.send(stream, message[2000:], is_end=True)
            await client.exchange()
            assert client.answers[stream].messages == [bytes(2000)]

    on_wire(test, options=GrpcOptions(grpc_message_timeout_s=4, grpc_min_message_bytes_per_s=100))


def test_fast_start_of_a_message_gives_no_later_credit() -> None:
    async def test(wire: Wire, client: Client) -> None:
        stream = client.open(ECHO)
        client.send(stream, framed(bytes(20_000))[:10_000])
        await client.exchange()
        await asyncio.sleep(10)
        await client.exchange()
        assert client.answers[stream].status == CANCELLED

    on_wire(test, options=GrpcOptions(grpc_message_timeout_s=4, grpc_min_message_bytes_per_s=100))


@pytest.mark.parametrize("path", [ECHO, STREAM])
def test_unread_answer_ends_only_its_call(path: str) -> None:
    async def test(wire: Wire, client: Client) -> None:
        client.reads = False
        client.h2.increment_flow_control_window(10_000_000)
        stuck = client.open(path)
        await client.send_all(stuck, framed(bytes(100_000)))
        await client.exchange()
        assert wire.budget.held_bytes > 30_000
        await asyncio.sleep(59)
        await client.exchange()
        assert not client.answers[stuck].is_ended
        assert (await client.call(ECHO, b"x")).messages == [b"x"]
        await asyncio.sleep(3)
        await client.exchange()
        assert client.answers[stuck].status == CANCELLED
        assert client.answers[stuck].text == b"grpc_send_timeout_s: the caller read nothing of the answer for 60 s"
        assert wire.budget.held_bytes == 0
        assert (await client.call(ECHO, b"y")).messages == [b"y"]

    on_wire(test)


def test_slowly_read_answer_is_sent_completely() -> None:
    async def test(wire: Wire, client: Client) -> None:
        client.reads = False
        stream = client.open(ECHO)
        await client.send_all(stream, framed(bytes(70_000)))
        await client.exchange()
        for _ in range(5):
            await asyncio.sleep(50)
            client.h2.increment_flow_control_window(1000)
            client.h2.increment_flow_control_window(1000, stream)
            await client.exchange()
        assert client.answers[stream].messages == [bytes(70_000)]
        assert client.answers[stream].status == OK

    on_wire(test)


@pytest.mark.parametrize("per_second", [0, 10, 200])
@pytest.mark.parametrize("part", ["answer", "request"])
def test_connection_with_slow_callers_only_yields_to_a_new_one(part: str, per_second: int) -> None:
    async def test(wire: Wire, client: Client) -> None:
        client.reads = False
        stream = client.open(ECHO)
        if part == "answer":
            await client.send_all(stream, framed(bytes(80_000)))
        else:
            client.send(stream, framed(bytes(10_000))[:100])
        for second in range(25):
            if per_second and part == "answer" and not wire.transport.is_closing():
                client.h2.increment_flow_control_window(per_second)
                client.h2.increment_flow_control_window(per_second, stream)
            elif per_second and not wire.transport.is_closing():
                client.send(stream, bytes(per_second))
            await client.exchange()
            assert not (wire.idle_connections.evict_one() and second < 10)
            await asyncio.sleep(1)
        assert wire.transport.is_lost is (per_second < 100)
        assert wire.cut_answers == ["overloaded"] * (wire.transport.is_lost and part == "answer")

    on_wire(test, options=GrpcOptions(grpc_min_message_bytes_per_s=100))


@pytest.mark.parametrize("path", [HOLD, STREAM, ECHO])
def test_connection_with_another_call_does_not_yield(path: str) -> None:
    """Behind a proxy, the calls of several callers share a connection."""

    async def test(wire: Wire, client: Client) -> None:
        client.reads = False
        await client.send_all(client.open(ECHO), framed(bytes(80_000)))
        other = client.open(path)
        if path != STREAM:
            client.send(other, framed(b"x"), is_end=True)
        await client.exchange()
        await asyncio.sleep(30)
        if path == ECHO:  # its answer waits behind others, for a moment so far
            await client.send_all(client.open(ECHO), framed(bytes(80_000)))
            await asyncio.sleep(2)
        assert not wire.idle_connections.evict_one()

    on_wire(test)


def test_connection_does_not_yield_at_the_answer_of_a_long_call() -> None:
    """Behind a proxy, a slow caller must not cost the answer of another one that has just been computed."""

    async def test(wire: Wire, client: Client) -> None:
        client.reads = False
        await client.send_all(client.open(ECHO), framed(bytes(80_000)))
        await client.send_all(client.open(HOLD), framed(bytes(80_000)))
        await client.exchange()
        await asyncio.sleep(30)
        wire.release()
        await asyncio.sleep(2)
        assert not wire.idle_connections.evict_one()
        await asyncio.sleep(10)  # nothing of it was read meanwhile
        assert wire.idle_connections.evict_one()

    on_wire(test)


def test_queued_answers_on_a_slow_connection_do_not_time_out() -> None:
    async def test(wire: Wire, client: Client) -> None:
        client.reads = False
        streams = [client.open(ECHO) for _ in range(3)]
        for stream in streams:
            await client.send_all(stream, framed(bytes(60_000)))
        await client.exchange()
        for _ in range(12):
            await asyncio.sleep(30)
            client.h2.increment_flow_control_window(10_000)
            await client.exchange()
        assert [client.answers[stream].status for stream in streams] == [OK] * 3

    on_wire(test)


def test_answer_in_a_full_transport_does_not_time_out() -> None:
    """The transport resumes writing long after its buffer begins to drain."""

    async def test(wire: Wire, client: Client) -> None:
        stream = client.open(STREAM)
        await client.send_all(stream, framed(bytes(3_000_000)))
        await client.exchange()
        wire.transport.is_stuck = True
        client.h2.increment_flow_control_window(2**30)
        client.h2.increment_flow_control_window(2**30, stream)
        wire.feed(client.h2.data_to_send())
        await wire.turn()
        assert wire.transport.get_write_buffer_size() > 10**6
        assert wire.connection._sending.unsent_bytes > 10**6
        for _ in range(4):
            await asyncio.sleep(50)
            del wire.transport._buffer[:1000]
        assert wire.connection._sending.unsent_bytes > 10**6
        assert not wire.transport.is_lost

    on_wire(test, settings={SettingCodes.INITIAL_WINDOW_SIZE: 0})


def test_connection_that_reads_nothing_is_closed() -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.transport.is_stuck = True
        client.h2.ping(bytes(8))
        wire.feed(client.h2.data_to_send())
        await wire.turn()
        assert wire.transport.get_write_buffer_size() > 0
        await asyncio.sleep(59)
        assert not wire.transport.is_lost
        await asyncio.sleep(3)
        assert wire.transport.is_lost

    on_wire(test)


def test_connection_whose_peer_reads_slowly_is_kept() -> None:
    async def test(wire: Wire, client: Client) -> None:
        wire.transport.is_stuck = True
        for _ in range(6):
            wire.feed(frames.settings({}) * 2)  # unsent bytes grow as fast as they are taken
            await wire.turn()
            del wire.transport._buffer[:9]
            await asyncio.sleep(50)
        assert not wire.transport.is_lost

    on_wire(test)


def test_connection_with_the_most_unsent_bytes_loses_its_oldest_calls() -> None:
    async def test(wire: Wire, client: Client) -> None:
        other = Wire(asyncio.get_running_loop(), wire.clock, budget=wire.budget)
        honest = Client(other)
        await honest.exchange()
        honest.reads = False
        streams = [client.open(STREAM) for _ in range(3)]
        for stream in streams:
            await client.send_all(stream, framed(bytes(50_000)))
        await client.exchange()
        assert wire.budget.held_bytes == 3 * 50_005
        slow = honest.open(ECHO)
        await honest.send_all(slow, framed(bytes(130_000)))
        await honest.exchange()
        await client.exchange()
        ended = [answer for answer in client.answers.values() if answer.is_ended]
        assert ended == [client.answers[streams[0]]]
        assert ended[0].status == EXHAUSTED
        assert ended[0].text.startswith(b"grpc_unsent_bytes: expected at most 200000 bytes of unsent answers, got")
        honest.h2.increment_flow_control_window(1_000_000)
        honest.h2.increment_flow_control_window(1_000_000, slow)
        await honest.exchange()
        assert honest.answers[slow].messages == [bytes(130_000)]
        other.lose()
        await other.turn()

    on_wire(test, options=GrpcOptions(grpc_unsent_bytes=200_000), settings={SettingCodes.INITIAL_WINDOW_SIZE: 0})


def test_connection_that_resets_a_call_has_not_read_its_answer() -> None:
    """A caller that now and then reset a small call kept its other answers, and those of others were dropped."""

    async def test(wire: Wire, client: Client) -> None:
        wires = [Wire(asyncio.get_running_loop(), wire.clock, budget=wire.budget) for _ in range(2)]
        honest, new = Client(wires[0]), Client(wires[1])
        for caller in (client, honest, new):
            await caller.exchange()
            caller.reads = False
        large, small = client.open(ECHO), client.open(ECHO)
        kept, last = honest.open(ECHO), new.open(ECHO)
        for caller, stream, size in ((client, large, 90_000), (client, small, 100), (honest, kept, 140_000)):
            await caller.send_all(stream, framed(bytes(size)))
            await caller.exchange()
        wire.clock.advance(10 * 10**9)
        client.h2.reset_stream(small)
        await client.exchange()
        wire.clock.advance(10**9)
        await new.send_all(last, framed(bytes(120_000)))
        await new.exchange()
        await client.exchange()
        assert client.answers[large].status == EXHAUSTED
        assert not honest.answers[kept].is_ended
        for other in wires:
            other.lose()
            await other.turn()

    on_wire(test, options=GrpcOptions(grpc_unsent_bytes=200_000), settings={SettingCodes.INITIAL_WINDOW_SIZE: 0})


def test_sole_answer_can_exceed_the_limit() -> None:
    async def test(_: Wire, client: Client) -> None:
        assert (await client.call(ECHO, bytes(60_000))).messages == [bytes(60_000)]

    on_wire(test, options=GrpcOptions(grpc_unsent_bytes=1), settings={SettingCodes.INITIAL_WINDOW_SIZE: 1000})


def test_connection_that_reads_no_answers_starts_no_calls() -> None:
    async def test(_: Wire, client: Client) -> None:
        client.reads = False
        stream = client.open(STREAM)
        await client.send_all(stream, framed(bytes(100_000)))
        await client.exchange()
        refused = client.open(ECHO)
        await client.exchange()
        assert client.answers[refused].reset == ErrorCodes.REFUSED_STREAM
        client.h2.increment_flow_control_window(1_000_000)
        client.h2.increment_flow_control_window(1_000_000, stream)
        await client.exchange()
        assert (await client.call(ECHO, b"x")).messages == [b"x"]

    on_wire(test, options=GrpcOptions(grpc_unsent_bytes=2 * 34_000))


def test_connection_can_exceed_its_share_while_half_the_limit_is_free() -> None:
    async def test(_: Wire, client: Client) -> None:
        client.reads = False
        stream = client.open(STREAM)
        await client.send_all(stream, framed(bytes(100_000)))
        await client.exchange()
        echoed = client.open(ECHO)
        await client.exchange()
        assert client.answers[echoed].reset is None

    on_wire(test, options=GrpcOptions(grpc_unsent_bytes=4 * 30_000))


def test_connection_past_the_limit_is_closed_without_settings() -> None:
    """A client that received SETTINGS would reconnect at once."""

    async def test(wire: Wire, client: Client) -> None:
        held = client.open(HOLD)
        client.send(held, framed(b"x"), is_end=True)
        await client.exchange()
        other = wire.connect(GrpcOptions(grpc_max_connections=1))
        transport = FakeTransport(asyncio.get_running_loop(), other)
        other.connection_made(transport)
        assert transport.take() == b""
        await wire.turn()
        assert transport.is_lost
        assert other.closed.done()
        assert wire.connections == {wire.connection}
        assert wire.rejections == [ErrorKind.OVERLOADED]
        wire.release()
        await client.exchange()
        assert client.answers[held].messages == [b"x"]

    on_wire(test)


def test_closed_stream_is_released() -> None:
    async def test(wire: Wire, client: Client) -> None:
        for _ in range(200):
            await client.call(ECHO, b"x")
            await client.call(STREAM, b"x")
        assert not wire.connection._sending.streams
        assert not wire.connection._sending._waiting
        assert not wire.work._tasks

    on_wire(test)


def test_wire_detects_held_bytes_at_its_end() -> None:
    async def test(wire: Wire, _: Client) -> None:
        Reservation(wire.gate, 1)

    with pytest.raises(AssertionError):
        on_wire(test)
