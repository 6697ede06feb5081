"""Cached heads mean the same as parsed ones, and exchanges are answered in request order."""

import random
import re
from typing import Any, Final

import pytest

from fakes.http import HttpSide, turns
from interpreted import interpreted_only
from ortserve.config.option_groups import HttpOptions
from ortserve.errors import ErrorKind
from ortserve.frontends.http.protocol import HttpProtocol
from ortserve.frontends.http.request_head import MAX_CACHED_BYTES, MAX_CACHED_HEADS, HeadCache, InferHead
from ortserve.service.call import Call

pytestmark = interpreted_only

CASES: Final = 400
BODIES: Final = tuple(
    b'{"id":"%s","inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[%d]}]}' % (b"i" * n, n) for n in range(3)
)
TARGETS: Final = (b"POST /v2/models/double/infer HTTP/1.1", b"POST /v2/models/double/versions/1/infer HTTP/1.1")
OTHERS: Final = (
    b"POST /v2/models/double/infer?a=right HTTP/1.1",
    b"POST /v2/models/nowhere/infer HTTP/1.1",
    b"POST /v2/models/double/infer HTTP/1.0",
    b"POST /elsewhere HTTP/1.1",
    b"PUT /v2/models/double/infer HTTP/1.1",
    b"GET /v2/models/double/infer HTTP/1.1",
    b"POST /v2/models/double/infer HTTP/3.1",
)
HEADERS: Final = (
    b"Authorization: Bearer right",
    b"Content-Type: application/json",
    b"X-Request-Timeout-Ms: 500",
    b"Connection: keep-alive",
)
VARYING: Final = (
    b"x-request-id: %d",
    b"X-Secret: %d",
    b"Traceparent: 00-%032d-01",
    b"X-Forwarded-For: 10.0.0.%d, 10.0.0.1",
    b"b3: %d",
)
ODD_HEADERS: Final = (
    b"Connection: close",
    b"Authorization:  Bearer right",
    b"authorization:Bearer right",
    b"AUTHORIZATION: ",
    b"X-Request-Id: \xe9",
    b"X-Request-Id: a\x01b",
    b"X-Request-Id: 1\n b3: 2",
    b"X-Request-Id: " + b"x" * 5000,
    b"Cookie: a=b",
    b"Expect: 100-continue",
    b"Authorization: Bearer wrong",
    b"X-Request-Timeout-Ms: soon",
    b"Content-Encoding: br",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c",
    b"Transfer-Encoding: chunked",
    b"Content-Length: 7",
    b"User-Agent: " + b"x" * MAX_CACHED_BYTES,
    b"Host: y",
    b"Host : x",
    b"no header",
)


class CountingHeads(HeadCache):
    found = 0

    def find(self, key: bytes, max_bytes: int) -> InferHead | None:
        head = super().find(key, max_bytes)
        self.found += head is not None
        return head


class Forgetful(HeadCache):
    def keep(self, key: bytes, head: InferHead) -> None: ...


def _known_of(call: Call) -> tuple[object, ...]:
    """The properties of a call that a frontend knows before it decodes the request."""
    return call.protocol, call.timing, call.timeout_ns, call.trace


def request(rng: random.Random) -> bytes:
    """A random request: most equal many others, some are invalid."""
    is_odd = rng.random() < 0.2
    lines = [rng.choice(TARGETS + OTHERS * is_odd), b"Host: x", *HEADERS[: rng.randrange(len(HEADERS) + 1)]]
    lines += [line % rng.randrange(1000) for line in VARYING if rng.random() < 0.1]
    body = rng.choice(BODIES)
    length = len(body)
    if is_odd:
        lines.insert(rng.randrange(1, len(lines)), rng.choice(ODD_HEADERS))
        length = max(0, length + rng.choice((0, 0, 0, -3, 3, 5000)))
    lines.append(b"Content-Length: %d" % length)
    line_end = b"\n" if is_odd and rng.random() < 0.2 else b"\r\n"
    if is_odd and rng.random() < 0.2:
        body = body.replace(b'":"', b'":"\r\n\r\n', 1)
    stray = b"\r\n" * (is_odd and rng.random() < 0.3)
    return stray + line_end.join([*lines, b"", b""]) + body + stray


def stream(rng: random.Random) -> list[bytes]:
    """Random requests, most of them in separate segments."""
    pieces: list[bytes] = []
    for _ in range(rng.randrange(1, 12)):
        came = request(rng)
        cut = rng.random()
        if cut < 0.1 and pieces:
            pieces[-1] += came
        elif cut < 0.3:
            at = rng.randrange(1, len(came))
            pieces += [came[:at], came[at:]]
        else:
            pieces.append(came)
    return pieces


@pytest.mark.parametrize("has_keys", [False, True])
async def test_cached_heads_give_the_same_answers(has_keys: bool) -> None:
    heads = CountingHeads()
    knowing, parsing = HttpSide(heads=heads, has_keys=has_keys), HttpSide(heads=Forgetful(), has_keys=has_keys)
    for number in range(CASES):
        pieces = stream(random.Random(number))
        assert await knowing.answer(pieces) == await parsing.answer(pieces), (number, pieces)
    assert knowing.rejected == parsing.rejected
    assert knowing.service.refused == parsing.service.refused
    assert [_known_of(call) for call in knowing.service.received] == [
        _known_of(call) for call in parsing.service.received
    ]
    assert knowing.service.held_bytes == parsing.service.held_bytes
    assert knowing.service.gate.held_bytes == 0
    assert knowing.traces.seen == parsing.traces.seen
    assert heads.found > 250
    assert not re.search(b"right|10\\.0", b"".join(all_kept(heads)))


async def test_known_head_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    side = HttpSide(heads=HeadCache())
    first, _ = await side.answer([whole(0)])
    monkeypatch.setattr(HttpProtocol, "on_message_begin", lambda _: pytest.fail("it is parsed"))
    assert await side.answer([whole(0), whole(0)]) == (first + first, False)


@pytest.mark.parametrize("name", [b"Content-Length", b"content-length"])
async def test_body_length_can_vary_behind_a_known_head(name: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [b"%b\r\nHost: x\r\n%b: %d\r\n\r\n%b" % (TARGETS[0], name, len(body), body) for body in BODIES]
    expected = await HttpSide(heads=Forgetful()).answer(requests)
    side = HttpSide(heads=HeadCache())
    await side.answer(requests[1:2])
    monkeypatch.setattr(HttpProtocol, "on_message_begin", lambda _: pytest.fail("it is parsed"))
    assert await side.answer(requests) == expected


async def test_every_expect_continue_gets_100_continue() -> None:
    written, _ = await HttpSide(heads=HeadCache()).answer([whole(0, b"Expect: 100-continue")] * 2)
    assert re.findall(rb"HTTP/1.1 (\d+)", written) == [b"100", b"200", b"100", b"200"]


async def test_oversized_body_is_rejected_behind_a_known_head() -> None:
    side = HttpSide(heads=HeadCache())
    body = BODIES[0] + b" " * 1000
    large = whole(0).replace(b"Content-Length: %d" % len(BODIES[0]), b"Content-Length: %d" % len(body)) + b" " * 1000
    _, (refused, is_closed) = await side.answer([whole(0)]), await side.answer([large])
    assert refused.startswith(b"HTTP/1.1 413 ")
    assert is_closed
    assert side.service.gate.held_bytes == 0


async def test_cache_lookups_stop_on_a_connection_with_new_heads_only() -> None:
    heads = CountingHeads()
    side = HttpSide(heads=heads)
    await side.answer([whole(number) for number in range(100)])
    assert len(heads) < 30
    await side.answer([whole(number % 2) for number in range(100)])
    assert heads.found == 100


async def test_rejected_connection_is_answered_once() -> None:
    side = HttpSide(heads=HeadCache())
    await side.answer([whole(0)])
    assert len(side.endpoint.heads) == 1
    others: Any = {object() for _ in range(HttpOptions().http_max_connections)}
    side.state.connections |= others
    written, _ = await side.answer([whole(0)])
    assert written.startswith(b"HTTP/1.1 429 ")
    assert written.count(b"HTTP/1.1 ") == 1


async def test_empty_lines_between_requests_are_ignored() -> None:
    heads = CountingHeads()
    await HttpSide(heads=heads).answer([whole(0), *[b"\r\n"] * 40, whole(0)])
    assert heads.found == 1


async def test_head_with_bare_line_feeds_is_not_cached() -> None:
    """If the parser accepted lines without a carriage return, this body would contain a head."""
    side = HttpSide(heads=HeadCache())
    inner = b"\r\nContent-Length: 5\r\n\r\nhello"
    outer = b"%b\nHost: x\nContent-Length: %d\n\n%b" % (TARGETS[0], len(inner), inner)
    written, _ = await side.answer([whole(0), outer])
    assert b"HTTP/1.1 400 " in written
    assert len(side.endpoint.heads) == 1


@pytest.mark.parametrize("line", VARYING)
async def test_head_is_recognised_with_varying_header_values(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [whole(0, line % number) for number in range(3)]
    expected = HttpSide(heads=Forgetful())
    await expected.answer(requests)
    side = HttpSide(heads=HeadCache())
    await side.answer(requests[:1])
    monkeypatch.setattr(HttpProtocol, "on_message_begin", lambda _: pytest.fail("it is parsed"))
    await side.answer(requests[1:])
    assert side.traces.seen == expected.traces.seen
    assert len({tuple(headers) for *_, headers in side.traces.seen}) == 3


async def test_key_is_checked_on_each_request_behind_a_known_head() -> None:
    heads = CountingHeads()
    side = HttpSide(heads=heads, has_keys=True)
    keys = (b"right", b"wrong", b"right")
    said = [await side.answer([whole(0, b"Authorization: Bearer " + key)]) for key in keys]
    assert [answer[:13] for answer, _ in said] == [b"HTTP/1.1 200 ", b"HTTP/1.1 401 ", b"HTTP/1.1 200 "]
    assert heads.found == 2
    assert b"right" not in b"".join(all_kept(heads))


@pytest.mark.parametrize(
    "value", [b"", b" 1", b"1 ", b"1\t2", b"\xe9", b"a\x01b", b"a\x00b", b"1\nb3: 2", b"1\rb", b"x" * 5000]
)
async def test_odd_header_value_is_read_as_by_the_parser(value: bytes) -> None:
    """A value for a header that may have any, in an otherwise known head."""
    requests = [whole(0, b"X-Request-Id: " + said) for said in (b"1", value)]
    knowing, parsing = HttpSide(heads=HeadCache()), HttpSide(heads=Forgetful())
    assert await knowing.answer(requests) == await parsing.answer(requests)
    assert knowing.traces.seen == parsing.traces.seen


async def test_known_head_with_a_value_over_the_limit_is_rejected() -> None:
    side = HttpSide(heads=HeadCache())
    small, large = (whole(0, b"X-Request-Id: " + b"x" * size) for size in (10, 5000))
    written, _ = await side.answer([small, large])
    assert re.findall(rb"HTTP/1.1 (\d+)", written) == [b"200", b"431"]


async def test_head_over_the_limit_is_rejected_in_a_part_of_a_read() -> None:
    """The rest of a costly read arrives in this way, after reads shorter than the limit."""
    written = bytearray()
    protocol, _ = HttpSide().connect(written)
    protocol.data_received(whole(0, b"X-Request-Id: 1"))
    await turns()
    large = whole(0, b"X-Request-Id: " + b"x" * 5000)
    for part in (large[:3000], large[3000:]):
        protocol.on_part(part)
    protocol.on_read(large)
    await turns()
    assert re.findall(rb"HTTP/1.1 (\d+)", written) == [b"200", b"431"]


@pytest.mark.parametrize("name", [b"Authorization", b"proxy-authorization", b"Cookie", b"X-Api-Key", b"x-any-other"])
async def test_possible_credentials_are_not_cached(name: bytes) -> None:
    heads = CountingHeads()
    side = HttpSide(heads=heads)
    for key in (b"secret", b"secret too"):
        await side.answer([whole(0, name + b": " + key)])
    assert heads.found == 1
    assert b"secret" not in b"".join(all_kept(heads))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"Accept: */*", b"X-Api-Key:secret"),
        (b"Accept: */*", b"X-Api-Key:  secret"),
        (b"Accept: */*", b"X-Api-Key: \xe9secret"),
        (b"infer HTTP", b"infer?key=secret HTTP"),
    ],
    ids=["no space", "two spaces", "other characters", "query"],
)
async def test_head_that_contains_a_credential_is_not_cached(before: bytes, after: bytes) -> None:
    side = HttpSide(heads=HeadCache())
    await side.answer([whole(0).replace(before, after)])
    assert side.service.received
    assert side.endpoint.heads == {}


def test_oldest_head_is_evicted_and_long_heads_are_not_cached() -> None:
    heads, head = HeadCache(), InferHead(b"/", "m", "", [], keep_alive=True, expects_continue=False)
    heads.keep(b"x" * (MAX_CACHED_BYTES + 1), head)
    for number in range(MAX_CACHED_HEADS + 1):
        heads.keep(b"%d" % number, head)
    assert list(heads)[:1] == [b"1"]
    assert list(heads)[-1] == b"%d" % MAX_CACHED_HEADS


def whole(number: int, line: bytes = b"Accept: */*") -> bytes:
    """A complete request whose head contains this number and this line."""
    body = BODIES[0]
    lines = (TARGETS[0], b"Host: x", b"User-Agent: %d" % number, line, b"Content-Length: %d" % len(body), b"", body)
    return b"\r\n".join(lines)


def all_kept(heads: HeadCache) -> list[bytes]:
    """All bytes in the cache: its keys and the results of parsing."""
    keys = [part for key in heads for part in ((key,) if isinstance(key, bytes) else key)]
    return keys + [part for head in heads.values() for header in head.headers for part in header]


# --- the order of exchanges


async def test_connection_lost_between_exchanges_holds_no_memory() -> None:
    """The loop starts a waiting exchange in the iteration after the previous response."""
    side = HttpSide()
    protocol, transport = side.connect(bytearray())
    protocol.data_received(whole(0).replace(b"/double/", b"/held/") + whole(0))
    await turns()
    assert side.service.gate.held_bytes == 2 * len(BODIES[0])
    side.service.release.set()
    exchange = protocol.connection.exchange
    while protocol.connection.exchange is exchange:
        await turns(1)
    transport.close()
    protocol.connection_lost(None)
    await turns()
    assert len(side.service.received) == 1
    assert side.service.gate.held_bytes == 0


@pytest.mark.parametrize(
    "first",
    [
        b"GET /v2/models/double/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"POST /v2/models/double/infer HTTP/1.1\r\nHost: x\r\nContent-Encoding: br\r\nContent-Length: 1\r\n\r\n1",
    ],
    ids=["wrong method", "rejected body"],
)
async def test_request_behind_the_last_response_of_a_connection_is_not_run(first: bytes) -> None:
    side = HttpSide()
    written, is_closed = await side.answer([first + whole(0)])
    assert (written.count(b"HTTP/1.1 "), is_closed) == (1, True)
    assert side.service.received == []
    assert side.service.gate.held_bytes == 0


@pytest.mark.parametrize(
    "target",
    [
        b"http://x/v2/models/double/infer",
        b"http://x:80/v2/models/double/infer?a=b",
        b"/v2/models/double/infer/",
        b"/v2/models/d%6fuble/infer",
        b"/v2/models/double/infer?" + b"x" * 600,
        b"/v2/models/double/infer#x",
    ],
    ids=["with a host", "with a port and a query", "slash at the end", "escaped", "long query", "fragment"],
)
async def test_every_form_of_an_infer_url_is_routed(target: bytes) -> None:
    side = HttpSide(has_keys=True)
    request = whole(0, b"Authorization: Bearer right").replace(b"/v2/models/double/infer", target)
    written, _ = await side.answer([request])
    assert written.startswith(b"HTTP/1.1 200 ")
    assert len(side.service.received) == 1
    refused, _ = await side.answer([request.replace(b"right", b"wrong")])
    assert refused.startswith(b"HTTP/1.1 401 ")


async def test_parser_stops_at_the_first_header_over_the_limit() -> None:
    side = HttpSide()
    protocol, _ = side.connect(bytearray())
    protocol.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 40_000)
    assert side.rejected == [ErrorKind.HEADERS_TOO_LARGE]
    assert len(protocol.headers) == side.context.options.http_max_headers


async def test_trailers_do_not_become_headers() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        seen.append(dict(scope["headers"]))

    head = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    await HttpSide(app).answer([head + b"1\r\na\r\n0\r\nAuthorization: b\r\n\r\n"])
    assert seen == [{b"host": b"x", b"transfer-encoding": b"chunked"}]
