"""The gRPC client of the load, beside a server that sends given frames."""

import asyncio
from collections.abc import Iterable
from typing import Final

import hpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ortserve.tools.address import parse_address
from ortserve.tools.bench.connections import Connections
from ortserve.tools.bench.grpc_client import GrpcConnection, HeaderReader
from ortserve.tools.bench.outcomes import Recorder, Ticket
from ortserve.tools.bench.target import ServerPlan

MESSAGE: Final = b"\0\0\0\0\2hi"
DATA, HEADERS, GOAWAY, CONTINUATION = 0, 1, 7, 9
END_STREAM, END_HEADERS = 1, 4
NO_ERROR, ENHANCE_YOUR_CALM = bytes(4), b"\0\0\0\x0b"
LAST_OF_ALL: Final = b"\x7f\xff\xff\xff"


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


def block(fields: Iterable[tuple[str, str]]) -> bytes:
    """The fields as literals without indexing (RFC 7541, section 6.2.2)."""
    return b"".join(b"\0" + string(name) + string(value) for name, value in fields)


def string(text: str) -> bytes:
    return bytes(hpack.hpack.encode_integer(len(text), 7)) + text.encode()


START: Final = frame(HEADERS, END_HEADERS, 1, block([(":status", "200")])) + frame(DATA, 0, 1, MESSAGE)
OK: Final = frame(HEADERS, END_HEADERS | END_STREAM, 1, block([("grpc-status", "0"), ("server-timing", "x;dur=1.5")]))


class Sink(Recorder):
    """Keeps the outcomes of requests."""

    def __init__(self) -> None:
        super().__init__(0)
        self.seen: asyncio.Queue[tuple[object, object]] = asyncio.Queue()

    def answered(
        self, ticket: Ticket, done_ns: int, nbytes: int, timing: bytes | None = None, body: object = None
    ) -> None:
        self.seen.put_nowait((timing, body))

    def failed(self, ticket: Ticket, done_ns: int, kind: str, example: str) -> None:
        self.seen.put_nowait((kind, example))


def outcomes(*answers: bytes) -> list[tuple[object, object]]:
    """Send as many requests, one after the other. Each connection gets the next of the answers to its first request."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while MESSAGE not in await reader.read(65_536):
            pass
        writer.write(left.pop(0))
        await reader.read()  # until the client closes
        writer.close()

    async def run() -> list[tuple[object, object]]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        target = Connections(
            ServerPlan(parse_address(f"grpc://127.0.0.1:{port}"), (MESSAGE,), False, 1), GrpcConnection
        )
        target.sink = sink = Sink()
        seen = []
        async with server:
            for number in range(len(answers)):
                target.send(Ticket(number, 0, 0, wants_body=True))
                seen.append(await sink.seen.get())
            await target.close()
        return seen

    return asyncio.run(asyncio.wait_for(run(), 20))


def test_an_answer_has_its_message_and_its_timing() -> None:
    assert outcomes(START + OK) == [(b"x;dur=1.5", b"hi")]


def test_trailers_in_several_frames_are_read_to_their_end() -> None:
    trailers = block([("grpc-status", "3"), ("grpc-message", "a%20" * 5000)])
    frames = frame(HEADERS, END_STREAM, 1, trailers[:10]) + frame(CONTINUATION, END_HEADERS, 1, trailers[10:])
    assert outcomes(START + frames) == [("grpc_invalid_argument", "a " * 5000)]


def test_a_server_that_drains_answers_the_last_request_of_a_connection() -> None:
    """The next request takes another connection."""
    leaving = frame(GOAWAY, 0, 0, LAST_OF_ALL + NO_ERROR)
    assert outcomes(leaving + START + OK, START + OK) == [(b"x;dur=1.5", b"hi")] * 2


@pytest.mark.parametrize(
    "payload", [LAST_OF_ALL + ENHANCE_YOUR_CALM + b"too many", bytes(4) + NO_ERROR + b"too many"], ids=["error", "late"]
)
def test_a_server_that_closes_without_an_answer_fails_the_request(payload: bytes) -> None:
    expected = ("connection_lost", "the server closes the connection: too many")
    assert outcomes(frame(GOAWAY, 0, 0, payload)) == [expected]


NAMES: Final = st.sampled_from(["grpc-status", "server-timing"])
VALUES: Final = st.sampled_from(["0", "1", "x;dur=0.5", "a" * 200])
FIELDS: Final = st.dictionaries(NAMES, VALUES)
FORMS: Final = st.sampled_from(["learned", "learned with huffman", "never", "plain"])
SIZES: Final = st.sampled_from([None, 0, 80, 4096])


@example([({"grpc-status": status}, "learned", None) for status in "0011"])  # one index has two meanings
@given(st.lists(st.tuples(FIELDS, FORMS, SIZES), max_size=8))
def test_blocks_are_read_as_by_a_decoder_that_keeps_no_blocks(
    blocks: list[tuple[dict[str, str], str, int | None]],
) -> None:
    encoder, decoder, reader = hpack.Encoder(), hpack.Decoder(), HeaderReader()
    for fields, form, table_size in [*blocks, *blocks]:
        if form == "plain":
            encoded = block(fields.items())
        else:
            if table_size is not None:
                encoder.header_table_size = table_size
            kind = hpack.NeverIndexedHeaderTuple if form == "never" else hpack.HeaderTuple
            encoded = encoder.encode([kind(*one) for one in fields.items()], huffman="huffman" in form)
        expected = {str(name): str(value) for name, value in decoder.decode(encoded)}

        found, timing = reader.read(encoded)

        assert (timing or b"").decode() == expected.pop("server-timing", "")
        assert {name: value for name, value in found.items() if name != "server-timing"} == expected
