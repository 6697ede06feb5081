"""Under a memory limit the server rejects requests that do not fit and keeps serving; it never crashes.

Each limit is real: that of the address space of the server's process, and the memory controller of cgroup v2 where
tests may create a group. ``ORTSERVE_TEST_CGROUP`` names a folder in which they may, such as one that systemd has
delegated; otherwise groups are created below the group that runs the tests.
"""

import os
import re
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import httpx
import numpy as np
import pytest

import crafted_messages as crafted
from models import costly
from ortserve.core.dtypes import DataType
from raw_grpc import end_of_call
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, json_input, rest_url, serving

MIB: Final = 2**20
ADDRESS_SPACE_BYTES: Final = 1500 * MIB
"""Address space of the server. An idle server has reserved at most 400 MiB: libraries, stacks, and malloc's arenas,
which are few if the address space is limited."""
CGROUP_BYTES: Final = 768 * MIB
"""Memory of the server; an idle server has 120 MiB resident."""

METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"
REFUSED: Final = (400, 413, 429, 503, "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
SERVED: Final = (200, 413, 429, 503, "OK", "RESOURCE_EXHAUSTED", "UNAVAILABLE")

Outcome = int | str
Send = Callable[[ServerProcess], Outcome]

_CGROUPS: Final = Path("/sys/fs/cgroup")
_CONNECTION_ENDED: Final = re.compile("socket|connect|recvmsg|goaway", re.IGNORECASE)
"""Texts of gRPC's client for an ended connection."""


@dataclass(frozen=True, slots=True)
class Burst:
    """``count`` equal requests at once. At least one outcome must be among ``needs``."""

    count: int
    make: Callable[[], Send]
    outcomes: Sequence[Outcome]
    needs: Sequence[Outcome] = ()


def _posting(make: Callable[[], tuple[bytes, Mapping[str, str]]], model: str) -> Callable[[], Send]:
    def made() -> Send:
        body, headers = make()

        def send(server: ServerProcess) -> Outcome:
            all_headers = {"Content-Type": "application/json", **headers}
            return httpx.post(rest_url(server, model), content=body, headers=all_headers, timeout=LONG_S).status_code

        return send

    return made


def _calling(make: Callable[[], bytes]) -> Callable[[], Send]:
    def made() -> Send:
        message = make()

        def send(server: ServerProcess) -> Outcome:
            with grpc.insecure_channel(server.grpc, (("grpc.use_local_subchannel_pool", 1),)) as channel:
                call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
                try:
                    call(message, timeout=LONG_S)
                except grpc.RpcError as error:
                    code, text = error.code().name, error.details() or ""
                    # A call whose connection ended has a code that rejections also use.
                    return f"the connection ended: {text}" if _CONNECTION_ENDED.search(text) else code
                return "OK"

        return send

    return made


def _calling_compressed(make: Callable[[], bytes]) -> Callable[[], Send]:
    def made() -> Send:
        packed = crafted.gzipped(make())
        body = b"\1" + len(packed).to_bytes(4, "big") + packed

        def send(server: ServerProcess) -> Outcome:
            trailers = end_of_call(server.grpc, METHOD, body, {"grpc-encoding": "gzip"})
            return next(code.name for code in grpc.StatusCode if code.value[0] == int(trailers["grpc-status"]))

        return send

    return made


def _gzip(make: Callable[[], bytes]) -> Callable[[], tuple[bytes, Mapping[str, str]]]:
    return lambda: (crafted.gzipped(make()), crafted.GZIP)


def _numbers() -> tuple[bytes, Mapping[str, str]]:
    """50 MB of JSON numbers."""
    return crafted.numbers_json(5_000_000, "0.1234567"), crafted.NO_HEADERS


def _floats() -> tuple[bytes, Mapping[str, str]]:
    """16 MB of binary floats."""
    return crafted.binary_request({"x": ("FP32", [1, 4_000_000], bytes(16_000_000))})


def _floats_message() -> bytes:
    tensor = crafted.tensor_message("x", "FP32", [1, 4_000_000])
    return crafted.infer_message("largest", tensor, crafted.field(7, bytes(16_000_000)))


def _integers_message() -> bytes:
    return crafted.typed_message("largest_int32", "INT32", 2, b"\1" * 60_000_000, 60_000_000)


BURSTS: Final[dict[str, Burst]] = {
    "50 MB of JSON": Burst(6, _posting(_numbers, "largest"), SERVED),
    "numbers in 60 KB of gzip": Burst(
        16, _posting(_gzip(partial(crafted.numbers_json, 30_000_000)), "largest"), SERVED
    ),
    "empty lists in 60 KB of gzip": Burst(
        16, _posting(_gzip(partial(crafted.empty_inputs_json, 20_000_000)), "largest"), REFUSED
    ),
    "16 MB of floats": Burst(48, _posting(_floats, "largest"), SERVED, needs=(200,)),
    "texts": Burst(8, _posting(partial(crafted.text_stats_request, b"eleven byte", 2_000_000), "text_stats"), SERVED),
    "gRPC: 16 MB of floats": Burst(48, _calling(_floats_message), SERVED, needs=("OK",)),
    "gRPC: 60 MB of typed integers": Burst(6, _calling(_integers_message), SERVED),
    "gRPC: empty raw contents in 60 KB of gzip": Burst(
        16,
        _calling_compressed(
            lambda: crafted.infer_message("largest", crafted.empty_fields(crafted.RAW_CONTENTS_TAG, 28_000_000))
        ),
        REFUSED,
    ),
}


@pytest.fixture(params=["address space", "cgroup"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    """A new server for each burst, because an earlier burst might have ended it."""
    repository = tmp_path / "limited"
    add_model(repository, "largest", costly.largest)
    add_model(repository, "largest_int32", costly.largest, datatype=DataType.INT32)
    arguments = (repository, "--example", *SHORT_WARMUP)
    if request.param == "address space":
        with serving(*arguments, limits={resource.RLIMIT_AS: (ADDRESS_SPACE_BYTES,) * 2}) as server:
            yield server
    else:
        with _memory_cgroup() as through, serving(*arguments, through=through) as server:
            yield server


@pytest.mark.parametrize("name", BURSTS)
def test_requests_past_the_memory_limit_are_rejected(server: ServerProcess, name: str) -> None:
    burst = BURSTS[name]
    send = burst.make()

    def outcome(_: int) -> Outcome:
        try:
            return send(server)
        except (httpx.TransportError, OSError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(burst.count) as pool:
        outcomes = Counter(pool.map(outcome, range(burst.count)))
    assert outcomes.keys() <= set(burst.outcomes), outcomes
    assert not burst.needs or any(outcomes[needed] for needed in burst.needs), outcomes
    assert _is_answering(server)


def _is_answering(server: ServerProcess) -> bool:
    """Whether a digit is classified correctly: the largest of ten probabilities."""
    row = np.zeros((1, 1, 8, 8), np.float32)
    body = {"inputs": [json_input("image", row)]}
    answer = httpx.post(rest_url(server, "digits"), json=body, timeout=LONG_S)
    assert answer.status_code == 200, answer.text
    return True


@contextmanager
def _memory_cgroup() -> Iterator[Sequence[str]]:
    """A group of cgroup v2 with a limit, and the command that enters it. Skips if it cannot be created."""
    group = _cgroup_parent() / f"ortserve-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        limit = group / "memory.max"
        if not limit.exists():
            pytest.skip(f"the memory controller is not on beneath {group.parent}")
        limit.write_text(str(CGROUP_BYTES))
        yield "sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)
        events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
        assert events["oom_kill"] == "0", events
    finally:
        group.rmdir()


def _cgroup_parent() -> Path:
    if named := os.environ.get("ORTSERVE_TEST_CGROUP"):
        return Path(named)
    if not (_CGROUPS / "cgroup.controllers").exists():
        pytest.skip(f"{_CGROUPS} is not cgroup v2")
    line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    return _CGROUPS / line.removeprefix("0::").lstrip("/")
