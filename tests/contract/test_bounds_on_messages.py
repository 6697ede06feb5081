"""Messages that would expand to very many objects are rejected with a named reason and do not delay other callers.

One table covers both protocols. During each message another caller requests liveness every 5 ms. The server's CPU time
and memory are per process, so that other load on the machine does not change them. Waits are wall time, so a message is
sent up to three times and must stay within the bounds once.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import httpx
import psutil
import pytest

import crafted_messages as crafted
from liveness import LivenessCaller, asking_for_liveness
from models import costly
from ortserve.core.dtypes import DataType
from raw_grpc import end_of_call
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, rest_url, serving, starting

MIB: Final = 2**20
MAX_WAIT_S: Final = 0.15
"""Maximum wait for liveness during any message."""
MAX_CPU_S: Final = 0.5
"""Maximum CPU time of the server to reject a message; inflating 60 MB takes a third of it."""
MAX_JSON_CPU_S: Final = 20.0
"""Maximum CPU time of the low-priority process that reads large JSON; it must parse a document to find an error.

That takes 2 s, or 7 s on a virtual machine whose CPU time includes what other machines took."""
JSON_COPIES: Final = 36
"""Allowed memory for JSON in sizes of the body: the server's estimate for decoding, and the body itself."""
CERTAIN_S: Final = 1.0
"""A wait that load on the machine cannot explain."""
ATTEMPTS: Final = 3
METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"

REFUSED: Final = (400, 413, 429, "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
UNKNOWN: Final = (*REFUSED, 404, "NOT_FOUND")
"""Outcomes for a name that cannot be a model's."""
SERVED: Final = (200, 413, 429, "OK", "RESOURCE_EXHAUSTED")
"""Outcomes for a valid request, which may exceed the server's limits."""

MANY: Final = 20_000_000
MILLION: Final = 1_000_000
LONG: Final = 60_000_000


@dataclass(frozen=True, slots=True)
class Message:
    """A body or gRPC message. A compressed message is stored compressed; ``size`` is the size of its content."""

    data: bytes
    size: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    """The text of a rejection must match ``names``; ``copies`` is the allowed memory in sizes of the message.

    ``model`` is the model to infer with; a value that begins with ``/`` is the path of another call. ``cpu_s`` bounds
    the CPU time of a rejection, ``wait_s`` the wait for liveness.
    """

    model: str
    make: Callable[[], Message]
    names: str
    outcomes: Sequence[int | str] = REFUSED
    copies: int = 4
    cpu_s: float = MAX_CPU_S
    wait_s: float = MAX_WAIT_S


@dataclass(frozen=True, slots=True)
class Seen:
    """The outcome of a message, and its cost."""

    outcome: int | str
    text: str
    longest_wait_s: float
    cpu_s: float
    grown_bytes: int


def _plain(make: Callable[[], bytes]) -> Callable[[], Message]:
    def made() -> Message:
        body = make()
        return Message(body, len(body), crafted.NO_HEADERS)

    return made


def _gzip(make: Callable[[], bytes]) -> Callable[[], Message]:
    def made() -> Message:
        body = make()
        return Message(crafted.gzipped(body), len(body), crafted.GZIP)

    return made


def _binary(make: Callable[[], tuple[bytes, dict[str, str]]]) -> Callable[[], Message]:
    def made() -> Message:
        body, headers = make()
        return Message(body, len(body), headers)

    return made


def _json_tensor(**changes: str) -> bytes:
    """A valid JSON request to ``largest``, with some values of its input replaced by these texts."""
    values = {"name": '"x"', "datatype": '"FP32"', "shape": "[1,1]", "data": "[1]"} | changes
    spelled = ",".join(f'"{name}":{value}' for name, value in values.items())
    return f'{{"inputs":[{{{spelled}}}]}}'.encode()


def _json_beside(name: str, value: str) -> bytes:
    """A valid request to ``largest`` with an additional key beside its inputs."""
    return _json_tensor()[:-1] + f',"{name}":{value}}}'.encode()


def _list(entry: str, count: int) -> str:
    return "[" + f"{entry}," * (count - 1) + entry + "]"


def _keys(count: int) -> str:
    return "{" + ",".join(f'"k{number}":0' for number in range(count)) + "}"


def _nested(count: int) -> str:
    return "[" * count + "]" * count


_ONE: Final = crafted.field(7, bytes(4))
_GOOD: Final = crafted.tensor_message("x", "FP32", [1, 1])


def _grpc_beside(*fields: bytes) -> bytes:
    """A valid message to ``largest`` with these additional fields."""
    return crafted.infer_message("largest", _GOOD, _ONE, *fields)


def _grpc_tensor(*fields: bytes, raw: bytes = b"") -> bytes:
    """A message whose only input has these additional fields; ``raw`` is the field of raw contents."""
    return crafted.infer_message("largest", crafted.tensor_message("x", "FP32", [1, 1], *fields), raw)


def _grpc_empty(tag: bytes, count: int) -> bytes:
    """A message without tensors and with ``count`` empty entries of one field."""
    return crafted.infer_message("largest", crafted.empty_fields(tag, count))


def _grpc_outputs(count: int) -> bytes:
    """Outputs with different names."""
    return b"".join(crafted.field(6, crafted.field(1, f"y{number}".encode())) for number in range(count))


def _bytes_contents(text: bytes, count: int) -> bytes:
    contents = crafted.field(5, crafted.field(8, text) * count)
    return crafted.infer_message("first_text", crafted.tensor_message("x", "BYTES", [1, count], contents))


def _unpacked(count: int) -> bytes:
    contents = crafted.field(5, b"\x10\x01" * count)
    return crafted.infer_message("largest_int32", crafted.tensor_message("x", "INT32", [1, count], contents))


def _map_entries(count: int) -> bytes:
    """At most 10 million parameters with different names and without values."""
    head = crafted.field(4, crafted.field(1, bytes(7)))[:-7]
    return b"".join(b"%b%07d" % (head, number) for number in range(count))


REST: Final[dict[str, Case]] = {
    "empty lists as inputs": Case("largest", _gzip(lambda: crafted.empty_inputs_json(MANY)), "inputs|values|JSON|json"),
    "empty objects as outputs": Case(
        "largest", _gzip(lambda: crafted.empty_outputs_json(MANY)), "outputs|values|JSON|json"
    ),
    "empty objects in a parameter": Case(
        "largest", _gzip(lambda: crafted.empty_parameters_json(MANY)), "parameter|values|JSON|json"
    ),
    "lists within lists": Case("largest", _plain(lambda: _json_beside("a", _nested(100_000))), "nest|deep|depth|JSON"),
    "lists within lists as data": Case(
        "largest", _plain(lambda: _json_tensor(data=_nested(100_000))), "nest|deep|depth|JSON|data|'x'"
    ),
    "lists within lists as a shape": Case(
        "largest", _plain(lambda: _json_tensor(shape=_nested(100_000))), "nest|deep|depth|JSON|shape"
    ),
    "objects within objects": Case(
        "largest",
        _plain(lambda: _json_beside("parameters", '{"a":' * 100_000 + "0" + "}" * 100_000)),
        "nest|deep|depth|JSON",
    ),
    "parameters": Case("largest", _plain(lambda: _json_beside("parameters", _keys(MILLION))), "parameter|keys|JSON"),
    "parameters of an input": Case(
        "largest", _plain(lambda: _json_tensor(parameters=_keys(MILLION))), "parameter|keys|JSON"
    ),
    "unknown keys": Case(
        "largest", _plain(lambda: _json_beside("a", _keys(MILLION))), "key|unknown|'a'|JSON", (200, *REFUSED)
    ),
    "the same key": Case(
        "largest",
        _plain(lambda: b"{" + b'"inputs":[],' * MILLION + b'"inputs":[]}'),
        "inputs|key|JSON",
    ),
    "dimensions": Case("largest", _plain(lambda: _json_tensor(shape=_list("1", MILLION))), "shape|dimension|axes|JSON"),
    "outputs": Case(
        "largest",
        _plain(lambda: _json_beside("outputs", json.dumps([{"name": f"y{number}"} for number in range(100_000)]))),
        "output|JSON",
    ),
    "the same output": Case(
        "largest", _plain(lambda: _json_beside("outputs", json.dumps([{"name": "y"}] * 100_000))), "output|JSON"
    ),
    "the same input": Case(
        "largest",
        _plain(lambda: b'{"inputs":[' + b",".join([_json_tensor()[11:-2]] * 100_000) + b"]}"),
        "input|JSON",
    ),
    "a long id": Case("largest", _plain(lambda: _json_beside("id", f'"{"a" * LONG}"')), "id|JSON"),
    "a long input name": Case("largest", _plain(lambda: _json_tensor(name=f'"{"a" * LONG}"')), "input|name|JSON"),
    "a long datatype": Case("largest", _plain(lambda: _json_tensor(datatype=f'"{"a" * LONG}"')), "datatype|JSON"),
    "numbers": Case("largest", _gzip(lambda: crafted.numbers_json(7_000_000)), "", (200,)),
    "too many numbers": Case("largest", _gzip(lambda: crafted.numbers_json(30_000_000)), "max_json_bytes"),
    "numbers, each in a list": Case(
        "largest",
        _gzip(lambda: _json_tensor(shape="[12000000,1]", data=_list("[1]", 12 * MILLION))),
        "",
        SERVED,
        copies=10,
    ),
    "digits of a number": Case("largest", _plain(lambda: _json_tensor(data=f"[{'1' * LONG}]")), "number|data|JSON|'x'"),
    "texts as JSON": Case(
        "first_text",
        _gzip(lambda: _json_tensor(datatype='"BYTES"', shape="[1,12000000]", data=_list('""', 12 * MILLION))),
        "",
        SERVED,
        copies=10,
    ),
    "empty binary texts": Case(
        "first_text",
        _binary(lambda: crafted.binary_request({"x": ("BYTES", [1, 16 * MILLION], crafted.texts(b"", 16 * MILLION))})),
        "",
        SERVED,
        copies=10,
    ),
    "short binary texts": Case(
        "text_stats",
        _binary(lambda: crafted.text_stats_request(b"eleven byte", 2 * MILLION)),
        "",
        SERVED,
        copies=20,
    ),
}

GRPC: Final[dict[str, Case]] = {
    **{
        f"{how} empty {name}": Case(
            "largest",
            way(partial(_grpc_empty, tag, count)),
            f"{name.rstrip('s')}|message",
        )
        for name, tag in {
            "raw_input_contents": crafted.RAW_CONTENTS_TAG,
            "inputs": crafted.INPUTS_TAG,
            "outputs": crafted.OUTPUTS_TAG,
            "parameters": crafted.PARAMETERS_TAG,
        }.items()
        for how, count, way in (("compressed", 28 * MILLION, _gzip), ("plain", 2 * MILLION, _plain))
    },
    "empty ids": Case(
        "largest", _plain(lambda: _grpc_beside(b"\x1a\0" * 2 * MILLION)), "id|field|message", ("OK", *REFUSED)
    ),
    "unknown fields": Case(
        "largest", _plain(lambda: _grpc_beside(b"\x78\0" * 2 * MILLION)), "field|message", ("OK", *REFUSED)
    ),
    "unknown fields of an input": Case(
        "largest",
        _plain(lambda: _grpc_tensor(b"\x78\0" * 2 * MILLION, raw=_ONE)),
        "field|message",
        ("OK", *REFUSED),
    ),
    "groups within groups": Case(
        "largest", _plain(lambda: _grpc_beside(b"\x7b" * 100_000 + b"\x7c" * 100_000)), "message|nest|group|protobuf"
    ),
    "empty groups": Case(
        "largest", _plain(lambda: _grpc_beside(b"\x7b\x7c" * 2 * MILLION)), "message|field|group", ("OK", *REFUSED)
    ),
    "varints one by one": Case("largest_int32", _plain(lambda: _unpacked(2 * MILLION)), "", SERVED, copies=10),
    "varints": Case(
        "largest_int32",
        _plain(lambda: crafted.typed_message("largest_int32", "INT32", 2, b"\1" * LONG, LONG)),
        "",
        SERVED,
        copies=10,
    ),
    "contents of several types": Case(
        "largest",
        _plain(lambda: _grpc_tensor(crafted.field(5, crafted.field(2, b"\1" * MILLION) + crafted.field(6, bytes(4))))),
        "contents|'x'",
    ),
    "contents again and again": Case(
        "largest", _plain(lambda: _grpc_tensor(b"\x2a\0" * 2 * MILLION)), "contents|'x'|message|field"
    ),
    "empty texts": Case("first_text", _gzip(lambda: _bytes_contents(b"", 28 * MILLION)), "", SERVED, copies=10),
    "short texts": Case(
        "first_text", _plain(lambda: _bytes_contents(b"eleven byte", 2 * MILLION)), "", SERVED, copies=20
    ),
    "dimensions": Case(
        "largest", _plain(lambda: _grpc_tensor(crafted.field(3, b"\1" * MILLION), raw=_ONE)), "shape|dimension|axes"
    ),
    "dimensions one by one": Case("largest", _plain(lambda: _grpc_tensor(b"\x18\1" * MILLION)), "shape|dimension|axes"),
    "parameters of different names": Case(
        "largest", _plain(lambda: _grpc_beside(_map_entries(MILLION))), "parameter|message"
    ),
    "parameters of an input": Case(
        "largest",
        _plain(lambda: _grpc_tensor(crafted.empty_fields(b"\x22", 2 * MILLION), raw=_ONE)),
        "parameter|message",
        ("OK", *REFUSED),
    ),
    "outputs of different names": Case(
        "largest",
        _plain(lambda: _grpc_beside(_grpc_outputs(100_000))),
        "output|message",
    ),
    "the same output": Case(
        "largest", _plain(lambda: _grpc_beside(crafted.field(6, crafted.field(1, b"y")) * 100_000)), "output|message"
    ),
    "the same input": Case(
        "largest", _plain(lambda: crafted.infer_message("largest", _GOOD * 100_000, _ONE * 100_000)), "input|message"
    ),
    "a long id": Case("largest", _plain(lambda: _grpc_beside(crafted.field(3, b"a" * LONG))), "id|message"),
    "a long model name": Case(
        "largest", _plain(lambda: crafted.infer_message("a" * LONG, _GOOD, _ONE)), "model|name|message", UNKNOWN
    ),
    "a long version": Case(
        "largest", _plain(lambda: _grpc_beside(crafted.field(2, b"1" * LONG))), "version|message", UNKNOWN
    ),
    "a long input name": Case(
        "largest",
        _plain(lambda: crafted.infer_message("largest", crafted.tensor_message("a" * LONG, "FP32", [1, 1]), _ONE)),
        "input|name|message",
    ),
    "a long datatype": Case(
        "largest",
        _plain(lambda: crafted.infer_message("largest", crafted.tensor_message("x", "a" * LONG, [1, 1]), _ONE)),
        "datatype|message",
    ),
}


OTHER_REST: Final = (
    "/v2/models/text_stats/generate",
    "/v2/models/text_stats/generate_stream",
    "/v1/embeddings",
    "/v2/models/text_stats/trace/setting",
    "/v2/repository/index",
    "/v2/repository/models/largest/load",
    "/v2/logging",
)
OTHER_GRPC: Final = {
    "RepositoryModelLoad": b"\x1a",
    "RepositoryModelUnload": b"\x1a",
    "TraceSetting": b"\x0a",
    "LogSettings": b"\x0a",
    "ModelMetadata": b"\x7a",
    "ServerLive": b"\x7a",
}
"""Methods, and the tag of a repeated field: their map of parameters or settings, or an unknown field."""
ANSWERED: Final = (
    *(200, 400, 404, 405, 409, 413, 415, 422, 429, 501, 503),
    *("OK", "NOT_FOUND", "UNIMPLEMENTED", "UNAVAILABLE", "FAILED_PRECONDITION", *REFUSED[3:]),
)
"""Statuses that blame the caller, or name a feature that the server does not have."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("bounds")
    add_model(repository, "largest", costly.largest)
    add_model(repository, "largest_int32", costly.largest, datatype=DataType.INT32)
    add_model(repository, "first_text", costly.first_text)
    return repository


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    with serving(repository, "--example", *SHORT_WARMUP) as server:
        yield server


@pytest.fixture(scope="module")
def plain_server(repository: Path) -> Iterator[ServerProcess]:
    with starting(repository, "--example", *SHORT_WARMUP, "--grpc-transport", "grpcio") as server:
        server.wait_until_loaded()
        yield server


@pytest.fixture(scope="module")
def liveness(server: ServerProcess) -> Iterator[LivenessCaller]:
    with asking_for_liveness(server.http) as caller:
        yield caller


@pytest.mark.parametrize("name", REST)
def test_rest_body_of_many_objects_delays_no_caller(server: ServerProcess, liveness: LivenessCaller, name: str) -> None:
    hold_rest_to_bounds(server, liveness, REST[name])


@pytest.mark.parametrize("path", OTHER_REST)
def test_many_objects_delay_no_other_route(server: ServerProcess, liveness: LivenessCaller, path: str) -> None:
    body = _plain(lambda: crafted.repeated_json('{"parameters":{"a":[', "[]", MILLION, "]}}"))
    hold_rest_to_bounds(server, liveness, Case(path, body, "", ANSWERED))


@pytest.mark.parametrize("name", GRPC)
def test_grpc_message_of_many_objects_delays_no_caller(
    server: ServerProcess, liveness: LivenessCaller, name: str
) -> None:
    hold_grpc_to_bounds(server, liveness, GRPC[name])


@pytest.mark.parametrize("method", OTHER_GRPC)
def test_many_objects_delay_no_other_method(server: ServerProcess, liveness: LivenessCaller, method: str) -> None:
    message = _plain(lambda: crafted.empty_fields(OTHER_GRPC[method], 2 * MILLION))
    hold_grpc_to_bounds(server, liveness, Case(f"/inference.GRPCInferenceService/{method}", message, "", ANSWERED))


@pytest.mark.parametrize("name", ["plain empty inputs", "varints"])
def test_grpcio_keeps_the_bounds_except_for_its_copies(plain_server: ServerProcess, name: str) -> None:
    with asking_for_liveness(plain_server.http) as liveness:
        hold_grpc_to_bounds(plain_server, liveness, replace(GRPC[name], wait_s=CERTAIN_S))


def hold_rest_to_bounds(server: ServerProcess, liveness: LivenessCaller, case: Case) -> None:
    case = replace(case, copies=JSON_COPIES, cpu_s=MAX_JSON_CPU_S)
    message = case.make()
    url = f"{server.url}{case.model}" if case.model.startswith("/") else rest_url(server, case.model)

    def send() -> tuple[int | str, str]:
        headers = {"Content-Type": "application/json", **message.headers}
        answer = httpx.post(url, content=message.data, headers=headers, timeout=LONG_S)
        return answer.status_code, answer.text

    hold_to_bounds(server, liveness, case, message, send)


def hold_grpc_to_bounds(server: ServerProcess, liveness: LivenessCaller, case: Case) -> None:
    message = case.make()
    method = case.model if case.model.startswith("/") else METHOD

    def send() -> tuple[int | str, str]:
        if message.headers:
            return _call_compressed(server, message)
        with grpc.insecure_channel(server.grpc, (("grpc.use_local_subchannel_pool", 1),)) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            try:
                call(message.data, timeout=LONG_S)
            except grpc.RpcError as error:
                return error.code().name, error.details() or ""
        return "OK", ""

    hold_to_bounds(server, liveness, case, message, send)


def hold_to_bounds(
    server: ServerProcess,
    liveness: LivenessCaller,
    case: Case,
    message: Message,
    send: Callable[[], tuple[int | str, str]],
) -> None:
    """Send a message up to three times until it stays within the bounds."""
    broken: list[str] = []
    for _ in range(ATTEMPTS):
        seen = _observe(server, liveness, send)
        broken = _broken_bounds(case, message, seen)
        if not broken or seen.outcome not in case.outcomes or seen.longest_wait_s > CERTAIN_S:
            break
    assert not broken


def _observe(server: ServerProcess, liveness: LivenessCaller, send: Callable[[], tuple[int | str, str]]) -> Seen:
    before_bytes, before_s = _begin_peak(server.pid), _cpu_s(server.pid)
    liveness.longest_wait_s()
    outcome, text = send()
    wait_s = liveness.longest_wait_s()
    return Seen(outcome, text, wait_s, _cpu_s(server.pid) - before_s, _memory_bytes(server.pid, "VmHWM") - before_bytes)


def _broken_bounds(case: Case, message: Message, seen: Seen) -> list[str]:
    broken = []
    is_refused = seen.outcome not in (200, "OK")
    if seen.outcome not in case.outcomes:
        broken.append(f"answered {seen.outcome}: {seen.text[:200]}")
    if is_refused and not re.search(case.names, seen.text):
        broken.append(f"the refusal does not name {case.names}: {seen.text[:200]}")
    if len(seen.text) > 8192 and is_refused:
        broken.append(f"the refusal has {len(seen.text)} characters")
    if seen.longest_wait_s > case.wait_s:
        broken.append(f"liveness waited {seen.longest_wait_s * 1e3:.0f} ms")
    if is_refused and seen.cpu_s > case.cpu_s:
        broken.append(f"the refusal took {seen.cpu_s * 1e3:.0f} ms of processor time")
    max_bytes = 64 * MIB + case.copies * message.size
    if seen.grown_bytes > max_bytes:
        broken.append(f"the server grew by {seen.grown_bytes / MIB:.0f} MiB, {max_bytes / MIB:.0f} allowed")
    return broken


def _call_compressed(server: ServerProcess, message: Message) -> tuple[int | str, str]:
    body = b"\1" + len(message.data).to_bytes(4, "big") + message.data
    assert len(body) < 65_536, "it must fit the first window of HTTP/2"
    trailers = end_of_call(server.grpc, METHOD, body, {"grpc-encoding": "gzip"})
    code = next(code for code in grpc.StatusCode if code.value[0] == int(trailers["grpc-status"]))
    return code.name, trailers.get("grpc-message", "")


def _of_processes(pid: int, read: Callable[[psutil.Process], float]) -> list[float]:
    """Read a value of the process and of each child. Children that end meanwhile are skipped."""
    process = psutil.Process(pid)
    values = [read(process)]
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            values.append(read(child))
    return values


def _cpu_s(pid: int) -> float:
    return sum(_of_processes(pid, lambda process: sum(process.cpu_times()[:2])))


def _memory_bytes(pid: int, name: str) -> int:
    """The memory of the process and its children. The sum of peaks is at least the peak of the sum."""

    def read(process: psutil.Process) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        return int(found[1]) * 1024 if found else 0

    return int(sum(_of_processes(pid, read)))


def _begin_peak(pid: int) -> int:
    """Reset the kernel's record of the peak (proc(5)). Returns the resident memory."""
    _of_processes(pid, lambda process: Path(f"/proc/{process.pid}/clear_refs").write_text("5"))
    return _memory_bytes(pid, "VmRSS")
