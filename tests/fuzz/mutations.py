"""Bad input, derived from valid input by a seed, so that each failing case can be repeated.

This module does not depend on the server; the tests send what it generates.
"""

import copy
import gzip
import json
import random
import zlib
from dataclasses import dataclass, field
from typing import Any, Final

HUGE: Final = (2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 10**30)
WORDS: Final = (
    "", "x", "digits", "simple", "image", "INPUT0", "\0", "a\0b", "é", "\ud800", "../../etc/passwd", "a" * 5000, "%s%n",
    "FP32", "INT32", "BYTES", "BF16", "FP16", "fp32", "nan", "NaN", "-1", "0x10", "1e5", "{}", "[]", "\r\nX: y", "null",
    "binary_data_size", "shared_memory_region", "classification", "$ref", "__class__", "/dev/shm/x",
)  # fmt: skip
"""Names and values that are meaningful somewhere, and some that must not be meaningful anywhere."""

INTERNAL_BY_PROTOCOL: Final = (
    "failed to load",
    "load failed for model",
    "failed to unload",
    "Unable to open shared memory region",
)
"""Faults of callers for which the protocol requires an internal error."""

MODELS: Final = ("digits", "simple", "text_stats", "nowhere")
ROUTES: Final = (
    ("GET", "/v2"), ("GET", "/v2/health/live"), ("GET", "/v2/health/ready"), ("GET", "/v2/models/stats"),
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    *(
        (method, f"/v2/models/{model}{page}")
        for model in ("{model}", "{model}/versions/{version}")
        for method, page in (
            ("GET", ""), ("GET", "/ready"), ("GET", "/config"), ("GET", "/stats"), ("GET", "/batching"),
            ("POST", "/infer"), ("POST", "/generate"), ("POST", "/generate_stream"), ("POST", "/profile"),
        )
    ),
    *(
        ("POST", f"/v2/repository{repository}{page}")
        for repository in ("", "/{repository}")
        for page in ("/index", "/models/{model}/load", "/models/{model}/unload")
    ),
    *(
        (method, f"/v2/{kind}sharedmemory{page}")
        for kind in ("system", "cuda")
        for method, page in (
            ("GET", "/status"), ("GET", "/region/{region}/status"), ("POST", "/region/{region}/register"),
            ("POST", "/region/{region}/unregister"), ("POST", "/unregister"),
        )
    ),
    *(
        (method, f"/v2{page}")
        for page in ("/trace/setting", "/models/{model}/trace/setting", "/logging")
        for method in ("GET", "POST")
    ),
    *((method, "/v2/models/{model}/labels") for method in ("GET", "PUT")),
    *((method, "/v2/models/{model}/rollout") for method in ("GET", "PUT", "DELETE")),
    ("POST", "/v2/models/{model}/promote"), ("POST", "/v2/models/{model}/rollback"),
    ("GET", "/v2/console/server"), ("GET", "/v2/console/models/{model}"),
    ("GET", "/v2/console/models/{model}/versions/{version}"), ("GET", "/console/{path}"), ("GET", "/"),
    ("GET", "/docs"), ("GET", "/docs/{name}"), ("GET", "/openapi.json"),
)  # fmt: skip
"""All routes of the protocol and of ortserve, with the application's names for their parameters."""


@dataclass(frozen=True)
class HttpCase:
    """A request that is valid HTTP: its Content-Length is correct."""

    method: str
    target: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        lines = [f"{self.method} {self.target} HTTP/1.1", "Host: x", f"Content-Length: {len(self.body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + self.body


def infer_document() -> dict[str, Any]:
    """A good request for ``simple``."""
    return {
        "id": "1",
        "parameters": {"priority": 1},
        "inputs": [
            {"name": name, "datatype": "INT32", "shape": [1, 16], "data": list(range(16))}
            for name in ("INPUT0", "INPUT1")
        ],
        "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": False}}],
    }


def http_case(rng: random.Random) -> HttpCase:
    """Any request: mostly inference that is almost valid, otherwise any route with any body."""
    makers = (_infer_json, _infer_binary, _infer_compressed, _generate, _any_route)
    make = rng.choices(makers, (10, 6, 2, 1, 6))[0]
    return make(rng)


def broken_http(rng: random.Random) -> bytes:
    """Bytes that are not HTTP, or whose framing is wrong. The connection is unusable afterwards."""
    good = http_case(rng).encode()
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 2000))
    if kind == 1:
        return good[: rng.randrange(1, len(good))]
    if kind == 2:
        return flip(rng, good)
    if kind == 3:
        return good.replace(
            b"Content-Length: ", b"Content-Length: " + rng.choice((b"-", b"+", b"9" * 30, b"0x", b"1, "))
        )
    if kind == 4:
        return good.replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nContent-Length")
    if kind == 5:
        size = rng.choice((b"FFFFFFFFFFFFFFFFF", b"-1", b"zz", b"", b"5;" + b"x" * 3000, b"7fffffffffffffff"))
        head = b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        return head + size + b"\r\n{}\r\n0\r\n\r\n"
    if kind == 6:
        filler = b"".join(b"X-%d: %b\r\n" % (n, b"y" * rng.randrange(500)) for n in range(rng.randrange(400)))
        return good.replace(b"Host: x\r\n", b"Host: x\r\n" + filler)
    target = rng.choice((b"/" + b"a" * 70_000, b"/v2/models/\xff\xfe/infer", b"*", b"http://[::1", b"//x/y", b"/%"))
    return b"POST " + target + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


def flip(rng: random.Random, data: bytes) -> bytes:
    """Change, drop or insert a few bytes."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(3)
        if kind == 0:
            changed[at : at + 1] = rng.randbytes(1)
        elif kind == 1:
            del changed[at : at + rng.randrange(1, 9)]
        else:
            changed[at:at] = rng.randbytes(rng.randrange(1, 9))
    return bytes(changed)


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, unusual ones preferred."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return rng.choice((None, True, False, {}, []))
    if kind == 1:
        return rng.choice((0, -0.0, 1, -1, 16, 1.5, 1e308, 1e-320, -(2**63), *HUGE))
    if kind == 2:
        return rng.choice((float("nan"), float("inf"), float("-inf"), 0.1))
    if kind in (3, 4, 5):
        return rng.choice(WORDS)
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(5))]
    if kind == 7:
        return {rng.choice(WORDS): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    nested: Any = 1
    for _ in range(rng.choice((3, 50, 99, 101, 200))):
        nested = [nested] if rng.random() < 0.9 else {"a": nested}
    return nested


def mutate(rng: random.Random, document: Any) -> Any:
    """Change a document in one to three places, at any depth."""
    document = copy.deepcopy(document)
    for _ in range(rng.randrange(1, 4)):
        place = document
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            inner = place[key]
            if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
                place = inner
                continue
            kind = rng.randrange(5)
            if kind == 0:
                del place[key]
            elif kind == 1 and isinstance(place, list):
                place.extend(copy.deepcopy(place[: rng.randrange(20)]))
            elif kind == 2 and isinstance(place, dict):
                place[rng.choice(_KEYS)] = value(rng)
            else:
                place[key] = value(rng)
            break
    return document


def dumps(document: Any) -> bytes:
    """Encode a document, including lone surrogates."""
    return json.dumps(document).encode()


_KEYS: Final = (
    "name", "shape", "datatype", "data", "parameters", "id", "inputs", "outputs", "binary_data_size", "binary_data",
    "binary_data_output", "classification", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end",
    "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "key", "offset", "byte_size",
    "raw_handle", "config", "file:1/model.onnx", "unload_dependents", "ready", "log_verbose_level", "log_file",
    "log_info", "log_format", "trace_level", "trace_rate", "trace_count", "trace_file", "log_frequency", "text_input",
)  # fmt: skip


_HEADERS: Final = (
    "Content-Type", "Accept-Encoding", "X-Request-Timeout-Ms", "Inference-Header-Content-Length", "Accept",
    "traceparent", "Authorization", "x-envoy-expected-rq-timeout-ms", "Expect",
)  # fmt: skip
_HEADER_VALUES: Final = (
    "application/json", "text/plain", "gzip;q=2", "gzip, deflate, br", "*", "-1", "0", "9" * 20, "1e3", "a",
    "gzip;q=0", ";;;,,=", "99999999999",
)  # fmt: skip


def _headers(rng: random.Random) -> dict[str, str]:
    headers = {}
    if rng.random() < 0.3:
        headers[rng.choice(_HEADERS)] = rng.choice(_HEADER_VALUES)
    return headers


def _infer_target(rng: random.Random) -> str:
    return rng.choice(
        ("/v2/models/simple/infer",) * 6 + ("/v2/models/simple/versions/1/infer", "/v2/models/digits/infer")
    )


def _infer_json(rng: random.Random) -> HttpCase:
    body = dumps(mutate(rng, infer_document()))
    odd = rng.random()
    if odd < 0.1:
        body = flip(rng, body)
    elif odd < 0.12:
        body = b'{"inputs":' + rng.choice((b"[", b'{"a":', b'[{"shape":')) * rng.choice((1_000, 100_000))
    return HttpCase("POST", _infer_target(rng), body, _headers(rng))


def _infer_binary(rng: random.Random) -> HttpCase:
    document = infer_document()
    for tensor in document["inputs"]:
        del tensor["data"]
        tensor["parameters"] = {"binary_data_size": 64}
    if rng.random() < 0.5:
        document["parameters"]["binary_data_output"] = True
    if rng.random() < 0.8:
        document = mutate(rng, document)
    header = dumps(document)
    size = len(header) + (rng.choice((0, 0, 1, -1, -len(header), 128, 10**9)))
    tail = rng.randbytes(rng.choice((128, 128, 128, 0, 1, 64, 127, 129, 4000)))
    if rng.random() < 0.03:
        tail += bytes(rng.choice((66_000, 200_000, 3_900_000)))  # large enough to be received in its final place
    return HttpCase(
        "POST", _infer_target(rng), header + tail, {"Inference-Header-Content-Length": str(size)} | _headers(rng)
    )


def _infer_compressed(rng: random.Random) -> HttpCase:
    encoding = rng.choice(("gzip", "deflate", "gzip", "br", "identity", "gzip, deflate", "x-gzip"))
    body = dumps(infer_document())
    if rng.random() < 0.2:
        body = body[:-1] + b" " * rng.choice((10**6, 8 * 10**6)) + b"}"
    packed = gzip.compress(body, 1) if "gzip" in encoding else zlib.compress(body, 1)
    kind = rng.randrange(4)
    if kind == 0:
        packed = flip(rng, packed)
    elif kind == 1:
        packed = packed[: rng.randrange(len(packed))]
    elif kind == 2:
        packed += rng.randbytes(rng.randrange(1, 50))
    return HttpCase("POST", _infer_target(rng), packed, {"Content-Encoding": encoding} | _headers(rng))


def _generate(rng: random.Random) -> HttpCase:
    document = {"id": "1", "text": "two words", "weight": 1.5, "stream": True, "parameters": {"priority": 1}}
    model = f"/v2/models/text_stats{rng.choice(('', '/versions/1'))}"
    target = f"{model}/{rng.choice(('generate', 'generate_stream'))}"
    return HttpCase("POST", target, dumps(mutate(rng, document)), _headers(rng))


def _any_route(rng: random.Random) -> HttpCase:
    method, target = rng.choice(ROUTES)
    if rng.random() < 0.1:
        method = rng.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"))
    escapes = (
        "digits",
        "simple",
        "nowhere",
        "%00",
        "%2e%2e",
        "a%2Fb",
        "%ff%fe",
        "é",
        "a" * 300,
        "-1",
        "1",
        "0",
        "999999999999",
    )
    for part in ("{model}", "{version}", "{region}", "{repository}", "{path}", "{name}"):
        usual = "1" if part == "{version}" else "simple"
        target = target.replace(part, rng.choice(escapes) if rng.random() < 0.5 else usual)
    if rng.random() < 0.1:
        target += rng.choice(("?", "?a=b", "/", "//", "?%00", "#x"))
    kind = rng.randrange(4)
    body = b""
    if kind == 1:
        body = dumps(value(rng))
    elif kind == 2:
        body = dumps({rng.choice(_KEYS): value(rng) for _ in range(rng.randrange(6))})
    elif kind == 3:
        body = rng.randbytes(rng.randrange(200))
    return HttpCase(method, target, body if method != "GET" else b"", _headers(rng))
