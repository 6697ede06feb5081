"""Bad input on gRPC streams: each stream ends in time, and the next good request is served.

On inference streams errors are sent as answers, so that the stream continues.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import service_pb2

from fuzz.bounds import CASES, LONG_ENOUGH, MAX_S, SEED, watching_memory
from fuzz.messages import good_infer, mutate
from fuzz.mutations import flip
from fuzz.test_fuzz_grpc import MODEL_INFER, REQUESTS, almost_good, check_health, check_status
from ortserve.frontends.access import GRPC_GROUPS
from servers import SHORT_WARMUP, ServerProcess, serving, wait_for_sample

pytestmark = LONG_ENOUGH

STREAMS: Final = CASES // 20
"""Number of streams, each of a few messages."""

STREAM_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
WATCH: Final = "/grpc.health.v1.Health/Watch"
REFLECTION: Final = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
OLD_REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
STREAMED: Final = (STREAM_INFER, WATCH, REFLECTION, OLD_REFLECTION)

SYMBOLS: Final = ("inference.GRPCInferenceService", "inference.ModelInferRequest", "grpc.health.v1.Health", "nothing")


@pytest.fixture(scope="module")
def server(grpc_transport: str) -> Iterator[ServerProcess]:
    flags = (f"--grpc-transport={grpc_transport}", "--max-body-bytes", "4000000", "--grpc-stream-requests", "8")
    with serving("--example", *SHORT_WARMUP, *flags) as server:
        yield server


@dataclass(frozen=True)
class Conversation:
    """The messages that a client sends on one stream.

    Attributes:
        path: Path of the call.
        messages: Sent one after the other, without waiting for answers.
        metadata: Metadata of the call.
        most_answers: Number of answers after which the client cancels; None to wait for the end of the stream.
    """

    path: str
    messages: tuple[bytes, ...]
    metadata: tuple[tuple[str, str], ...] = ()
    most_answers: int | None = None

    def __str__(self) -> str:
        sent = [message[:300] for message in self.messages]
        return f"{self.path} {self.metadata} {sent} and leaves after {self.most_answers}"


def conversation(rng: random.Random) -> Conversation:
    """A random stream, mostly inference with some good requests among the bad ones."""
    path = rng.choices(STREAMED, (7, 1, 1, 1))[0]
    count = rng.choice((1, 2, 3, 5, 30, 0))
    if path == WATCH:  # this call never ends by itself
        return Conversation(path, tuple(message(rng, path) for _ in range(min(count, 2))), most_answers=1)
    metadata = (("triton_grpc_error", "true"),) if rng.random() < 0.2 else ()
    leaves_after = rng.choice((0, 1, 2)) if rng.random() < 0.1 else None
    return Conversation(path, tuple(message(rng, path) for _ in range(count)), metadata, leaves_after)


def message(rng: random.Random, path: str) -> bytes:
    """A good or bad message of a type that the call accepts."""
    good: Any
    if path == STREAM_INFER:
        good = good_infer()
    elif path == WATCH:
        good = almost_good(rng, health_pb2.HealthCheckRequest)
    else:
        good = reflection_pb2.ServerReflectionRequest()
        setattr(good, rng.choice(("file_containing_symbol", "all_extension_numbers_of_type")), rng.choice(SYMBOLS))
    if rng.random() < 0.8:
        mutate(rng, good)
    if path == STREAM_INFER and rng.random() < 0.002:
        good.raw_input_contents.append(bytes(rng.choice((3_900_000, 5_000_000))))
    data: bytes = good.SerializeToString()
    return flip(rng, data) if rng.random() < 0.1 else data


def talk(channel: grpc.Channel, case: Conversation) -> tuple[grpc.StatusCode, str, list[bytes]]:
    """Send all messages and read until either side ends the stream. The status is CANCELLED if the client ends it."""
    begin: Callable[..., Any] = channel.stream_stream(case.path)
    call = begin(iter(case.messages), timeout=MAX_S, metadata=case.metadata)
    answers: list[bytes] = []
    try:
        while case.most_answers is None or len(answers) < case.most_answers:
            answers.append(next(call))
        call.cancel()
    except StopIteration:
        pass
    except grpc.RpcError:
        pass
    return call.code(), call.details() or "", answers


def check_answers(described: str, case: Conversation, code: grpc.StatusCode, answers: list[bytes]) -> int:
    """Check for one answer per message, or as many as the status allows. Returns the number of errors."""
    assert len(answers) <= len(case.messages), f"{described}: {len(answers)} answers"
    if code is grpc.StatusCode.OK:
        assert len(answers) == len(case.messages), f"{described}: {len(answers)} answers"
    if case.path != STREAM_INFER:
        return 0
    errors = [service_pb2.ModelStreamInferResponse.FromString(answer).error_message for answer in answers]
    assert "internal error" not in errors, described
    return len(errors) - errors.count("")


def test_bad_streams_end_in_time_and_good_calls_succeed(server: ServerProcess) -> None:
    codes: dict[tuple[str, grpc.StatusCode], int] = {}
    errors = 0
    good = good_infer().SerializeToString()
    with watching_memory(server) as memory, grpc.insecure_channel(server.grpc) as channel:
        infer: Callable[..., bytes] = channel.unary_unary(MODEL_INFER)
        for number in range(STREAMS):
            case = conversation(random.Random(f"{SEED}/stream/{number}"))
            described = f"case {SEED}/stream/{number}: {case}"
            began = time.monotonic()
            code, details, answers = talk(channel, case)
            check_status(described, code, details, time.monotonic() - began)
            errors += check_answers(described, case, code, answers)
            codes[case.path, code] = codes.get((case.path, code), 0) + 1
            answer = service_pb2.ModelInferResponse.FromString(infer(good, timeout=MAX_S))
            assert len(answer.raw_output_contents) == 1, described
            memory.after(f"{SEED}/stream/{number}")
    # The cases must be varied: by the client's choice, some errors are answers and others are the status.
    assert errors > STREAMS
    assert codes[STREAM_INFER, grpc.StatusCode.OK] > STREAMS / 4
    assert codes[STREAM_INFER, grpc.StatusCode.INVALID_ARGUMENT] > STREAMS / 100
    assert codes[REFLECTION, grpc.StatusCode.OK] > STREAMS / 100
    wait_for_sample(server, "ortserve_grpc_streams", lambda open_now: open_now == 0)
    check_health(server)


def test_every_call_is_fuzzed() -> None:
    assert {*REQUESTS, *STREAMED} == GRPC_GROUPS.keys()
