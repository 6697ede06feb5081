"""Events that start and end sequences: loads, unloads, shutdown, cancelled calls; and Triton's examples."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Event
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from encodings_of_requests import triton_inputs
from http_wire import Answers, connect, is_read, post, wait_until
from models import builders, sequences
from servers import (
    LONG_S,
    ServerProcess,
    add_model,
    json_input,
    rest_url,
    serving,
    starting,
    starting_batch,
    wait_for_queue,
)

FLAG = "control_input { name: '%s' control { kind: CONTROL_SEQUENCE_%s int32_false_true: [ 0, 1 ] } }"
START, READY, END = (FLAG % (name, name) for name in ("START", "READY", "END"))
CORRID = "control_input { name: 'CORRID' control { kind: CONTROL_SEQUENCE_CORRID data_type: %s } }"
EXAMPLE = """max_batch_size: 8 input { name: "INPUT" data_type: TYPE_INT32 dims: 1 }
output { name: "OUTPUT" data_type: TYPE_INT32 dims: 1 } instance_group { count: 2 kind: KIND_CPU }
sequence_batching { %s }"""
OLDEST = "max_sequence_idle_microseconds: 10000000 oldest { max_candidate_sequences: 1024 %s }"
STATE = "state { input_name: 'STATE' output_name: 'NEXT' data_type: TYPE_INT32 dims: 1 }"
SUM = (
    "max_rows: 8\nbatched: true\nrow_checks: false\n"
    "sequences: {max_idle_s: 30, states: [{input: STATE, output: NEXT}]}\n"
)
ACCUMULATE = (
    "batched: true\nsequences: {max_idle_s: 60, states: [{input: STATE, output: NEXT}], controls: "
    "{START: {kind: start}, READY: {kind: ready}, END: {kind: end}, CORRID: {kind: id}}}\n"
)
VALUES = [11, 7, 5, 3, 2, 0, 1]
IDS = iter(range(1, 1000))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("lives")
    delay = "max_queue_delay_microseconds: 10000"
    for name, build, batching in (
        ("simple_sequence", sequences.simple_sequence, f"{START} {READY}"),
        (
            "simple_dyna_sequence",
            sequences.simple_dyna_sequence,
            f"{OLDEST % delay} {START} {READY} {END} {CORRID % 'TYPE_UINT64'}",
        ),
        (
            "simple_string_dyna_sequence",
            sequences.simple_string_dyna_sequence,
            f"{OLDEST % delay} {START} {READY} {END} {CORRID % 'TYPE_STRING'} {STATE}",
        ),
    ):
        (add_model(folder, name, build) / "config.pbtxt").write_text(EXAMPLE % batching)
    for name, steps in (("slow", 50_000), ("slower", 200_000)):
        (add_model(folder, name, sequences.slow, steps=steps) / "model.yaml").write_text(SUM)
    (add_model(folder, "full", sequences.slow, steps=200_000) / "model.yaml").write_text(SUM + "max_queue_rows: 1\n")
    pairs = SUM.replace("max_rows: 8", "max_rows: 2") + "queue_delay_s: 60\n"  # two rows run, one row waits
    (add_model(folder, "pairs", sequences.slow, steps=1) / "model.yaml").write_text(pairs)
    (add_model(folder, "recorded", sequences.two_states) / "model.yaml").write_text(
        "record: {share: 1}\nsequences: {states: [{input: a_in, output: z_out}, {input: b_in, output: a_out}]}\n"
    )
    (add_model(folder, "counted", sequences.counted) / "model.yaml").write_text(
        "sequences: {states: [{input: STATE, output: NEXT}]}\n"
    )
    flags = ("--warmup-s", "0.1", "--drain-timeout-s", "1", "--record-dir", str(folder.parent / "recordings"))
    with serving(folder, *flags) as server:
        yield server


def tensors(kind: Any, value: int) -> list[Any]:
    tensor = kind.InferInput("INPUT", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[value]], np.int32))
    return [tensor]


def parts(kind: Any, name: int | str, model: str, values: list[int]) -> Iterator[dict[str, Any]]:
    """The requests of a sequence of one of the examples."""
    for count, value in enumerate(values, 1):
        yield {
            "model_name": model,
            "inputs": tensors(kind, value),
            "outputs": [kind.InferRequestedOutput("OUTPUT")],
            "request_id": f"{name}_{count}",
            "sequence_id": name,
            "sequence_start": count == 1,
            "sequence_end": count == len(values),
        }


def all_parts(kind: Any, offset: int, is_dyna: bool) -> list[dict[str, Any]]:
    integers, texts = ("simple_sequence",) * 2
    text = str(uuid4())
    if is_dyna:
        integers, texts, text = "simple_dyna_sequence", "simple_string_dyna_sequence", "1002"
    negated = [-value for value in VALUES]
    return [
        *parts(kind, 1000 + 2 * offset, integers, [0, *VALUES]),
        *parts(kind, 1001 + 2 * offset, integers, [100, *negated]),
        *parts(kind, text, texts, [20, *negated]),
    ]


def by_calls(kind: Any, address: str, offset: int, is_dyna: bool) -> list[Any]:
    with kind.InferenceServerClient(address) as client:
        return [client.infer(**part) for part in all_parts(kind, offset, is_dyna)]


def by_stream(address: str, offset: int, is_dyna: bool) -> list[Any]:
    answers: Queue[Any] = Queue()
    with triton_grpc.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        sent = all_parts(triton_grpc, offset, is_dyna)
        for part in sent:
            client.async_stream_infer(**part)
        return [answers.get(timeout=LONG_S) for _ in sent]


def by_aio_stream(address: str, offset: int, is_dyna: bool) -> list[Any]:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for part in all_parts(triton_aio, offset, is_dyna):
            yield part

    async def ask() -> list[Any]:
        async with triton_aio.InferenceServerClient(address) as client:
            return [error or result async for result, error in client.stream_infer(requests())]

    return asyncio.run(ask())


@pytest.mark.parametrize("is_dyna", [False, True])
@pytest.mark.parametrize("way", ["http", "grpc", "stream", "aio"])
def test_the_traffic_of_the_public_sequence_examples_passes(server: ServerProcess, way: str, is_dyna: bool) -> None:
    offset = {"http": 0, "grpc": 10, "stream": 20, "aio": 30}[way]
    match way:
        case "http":
            results = by_calls(triton_http, server.http, offset, is_dyna)
        case "grpc":
            results = by_calls(triton_grpc, server.grpc, offset, is_dyna)
        case "stream":
            results = by_stream(server.grpc, offset, is_dyna)
        case _:
            results = by_aio_stream(server.grpc, offset, is_dyna)
    found: dict[str, list[int]] = {}
    for result in results:
        assert not isinstance(result, InferenceServerException), result
        response = result.get_response()
        name = response["id"] if way == "http" else response.id
        found.setdefault(name.rpartition("_")[0], []).append(int(result.as_numpy("OUTPUT")[0, 0]))
    first, second, text = found.values()
    negated = [-value for value in VALUES]
    if is_dyna:
        assert first == [1, *VALUES[:-1], 1 + 1000 + 2 * offset]
        assert second == [101, *negated[:-1], -1 + 1001 + 2 * offset]
        assert text == [20, 9, 2, -3, -6, -8, -8, 993]
    else:
        assert (first, second, text) == ([1, *VALUES], [101, *negated], [21, *negated])


def body(value: int, **parameters: Any) -> dict[str, Any]:
    return {"inputs": [json_input("INPUT", np.array([[value]], np.int32))], "parameters": parameters}


def ask(server: ServerProcess, model: str, value: int, **parameters: Any) -> httpx.Response:
    return httpx.post(rest_url(server, model), json=body(value, **parameters), timeout=LONG_S)


def total(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["outputs"][0]["data"][0])


def test_requests_of_one_id_from_several_connections_run_in_order_of_arrival(server: ServerProcess) -> None:
    name = next(IDS)
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in range(4)]
        for number, connection in enumerate(connections):
            sent = body(10**number, sequence_id=name, sequence_start=number == 0)
            connection.sendall(post("slow", json.dumps(sent).encode()))
            wait_until(partial(is_read, connection))
        answers = [Answers(connection).next()[2]["outputs"][0]["data"][0] for connection in connections]
    assert answers == [1, 11, 111, 1111]


def test_a_sequence_ends_if_an_answer_cannot_be_built(server: ServerProcess) -> None:
    """Its state includes the request, so that a second try would count twice."""
    name = next(IDS)
    with triton_http.InferenceServerClient(server.http) as client:

        def count(length: int, *, is_start: bool = False) -> int:
            value = triton_http.InferInput("INPUT", [1, length], "FP32")
            value.set_data_from_numpy(np.zeros((1, length), np.float32))
            outputs = [
                triton_http.InferRequestedOutput("COUNT"),
                triton_http.InferRequestedOutput("OUTPUT", class_count=1),
            ]
            answer = client.infer("counted", [value], outputs=outputs, sequence_id=name, sequence_start=is_start)
            return int(answer.as_numpy("COUNT")[0, 0])

        assert [count(1, is_start=True), count(1)] == [1, 2]
        with pytest.raises(InferenceServerException, match="expected at most 1000000 elements"):
            count(1_000_001)
        with pytest.raises(InferenceServerException, match="must specify the START flag"):
            count(1)
        assert count(1, is_start=True) == 1


def test_sequences_share_a_batch(server: ServerProcess) -> None:
    names = [next(IDS) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        with starting_batch(server, "slower"):
            first = pool.submit(ask, server, "slower", 1, sequence_id=names[0], sequence_start=True)
        others = [pool.submit(ask, server, "slower", 1, sequence_id=name, sequence_start=True) for name in names[1:]]
        assert [total(call.result()) for call in (first, *others)] == [1, 1, 1, 1]
    statistics = httpx.get(f"{server.url}/v2/models/slower/stats", timeout=LONG_S).json()["model_stats"][0]
    assert any(batch["batch_size"] == 3 for batch in statistics["batch_stats"])


def test_a_cancelled_queued_call_ends_the_sequence_and_a_running_one_does_not(server: ServerProcess) -> None:
    names = [next(IDS) for _ in range(3)]
    outcomes: Queue[tuple[str, Any]] = Queue()

    def send(model: str, name: int, value: int, label: str, start: bool = False) -> Any:
        return client.async_infer(
            model,
            tensors(triton_grpc, value),
            callback=lambda result, error: outcomes.put((label, error or int(result.as_numpy("TOTAL")[0, 0]))),
            sequence_id=name,
            sequence_start=start,
        )

    def receive(count: int) -> dict[str, Any]:
        return dict([outcomes.get(timeout=LONG_S) for _ in range(count)])

    with triton_grpc.InferenceServerClient(server.grpc) as client:
        with starting_batch(server, "slower"):
            running = send("slower", names[0], 5, "running", True)
        running.cancel()
        send("slower", names[0], 1, "next")  # on the same connection, so that it arrives later
        assert receive(2)["next"] == 6
        send("pairs", names[1], 1, "first", True)
        queued = send("pairs", names[1], 1, "queued")
        send("pairs", names[1], 1, "later")
        wait_for_queue(server, "pairs", 3)
        queued.cancel()
        assert "CANCELLED" in str(receive(2)["later"].status())
        send("pairs", names[2], 2, "other", True)
        assert receive(2) == {"first": 1, "other": 2}
        send("pairs", names[1], 1, "last")
        assert "must specify the START flag" in str(receive(1)["last"])


def test_a_rejected_request_can_be_sent_again_by_a_client_that_awaits_each_answer(server: ServerProcess) -> None:
    name, sent, is_over = next(IDS), 1, Event()

    def keep_full(other: int) -> None:
        """Send requests of another sequence, one after the other: of all, one runs, one waits."""
        while not is_over.is_set():
            ask(server, "full", 1, sequence_id=other, sequence_start=True, sequence_end=True)

    assert total(ask(server, "full", sent, sequence_id=name, sequence_start=True)) == sent
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(keep_full, next(IDS)) for _ in range(4)]
        try:
            while (answer := ask(server, "full", 10, sequence_id=name)).status_code != 429:
                sent += 10
                assert total(answer) == sent
        finally:
            is_over.set()
        for other in others:
            other.result()
    assert total(ask(server, "full", 10, sequence_id=name)) == sent + 10
    assert total(ask(server, "full", 100, sequence_id=name)) == sent + 110


def test_no_request_runs_without_a_rejected_one_that_was_sent_ahead_of_an_answer(server: ServerProcess) -> None:
    name = next(IDS)
    answers: Queue[Any] = Queue()
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))

        def send(value: int) -> None:
            client.async_stream_infer("full", tensors(triton_grpc, value), sequence_id=name, sequence_start=value == 1)

        for value in (1, 10, 100):  # the first runs, the second waits, the third finds the queue full
            send(value)
        first = answers.get(timeout=LONG_S)
        send(1000)  # sent before the client has read the rejection
        second, rejected, following = (answers.get(timeout=LONG_S) for _ in range(3))
    assert [int(answer.as_numpy("TOTAL")[0, 0]) for answer in (first, second)] == [1, 11]
    assert "must specify the START flag" in str(following)
    assert f"sequence {name} ends with its earlier requests" in str(rejected)


def test_requests_are_recorded_with_the_tensors_that_the_server_adds(
    server: ServerProcess, tmp_path_factory: Any
) -> None:
    for number in range(2):
        total(ask(server, "recorded", 3, sequence_id=77, sequence_start=number == 0))
    folder = tmp_path_factory.getbasetemp() / "recordings" / "recorded" / "1"
    wait_until(lambda: len(list(folder.glob("*.npz"))) == 2)
    files = [np.load(path) for path in sorted(folder.glob("*.npz"))]
    assert [int(file["b_in"][0, 0]) for file in files] == [0, 10]
    assert set(files[0].files) == {"INPUT", "a_in", "b_in"}


EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*", "--warmup-s", "0.1")


def test_a_reload_loses_sequences_and_an_unchanged_load_does_not(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m", sequences.slow, steps=10)
    (folder / "model.yaml").write_text(SUM)
    with serving(tmp_path, *EXPLICIT, "--drain-timeout-s", "1") as server:
        url = f"{server.url}/v2/repository/models/m/load"
        assert total(ask(server, "m", 1, sequence_id=1, sequence_start=True)) == 1
        assert httpx.post(url, timeout=LONG_S).status_code == 200
        assert total(ask(server, "m", 1, sequence_id=1)) == 2
        (folder / "model.yaml").write_text(SUM.replace("max_rows: 8", "max_rows: 3"))
        assert httpx.post(url, timeout=LONG_S).status_code == 200
        answer = ask(server, "m", 1, sequence_id=1)
        assert "must specify the START flag" in answer.json()["error"]
        assert total(ask(server, "m", 1, sequence_id=1, sequence_start=True)) == 1


def test_an_unload_answers_what_waits(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m", sequences.slow)
    (folder / "model.yaml").write_text(SUM.replace("max_idle_s", "max_candidates: 1, max_idle_s"))
    with serving(tmp_path, *EXPLICIT) as server, ThreadPoolExecutor(3) as pool:
        with starting_batch(server, "m"):
            calls = [pool.submit(ask, server, "m", 1, sequence_id=1, sequence_start=True)]
        calls += [pool.submit(ask, server, "m", 2, sequence_id=2, sequence_start=True)]
        wait_for_queue(server, "m", 1)
        assert httpx.post(f"{server.url}/v2/repository/models/m/unload", timeout=LONG_S).status_code == 200
        assert [total(call.result()) for call in calls] == [1, 2]
        assert ask(server, "m", 1, sequence_id=1).status_code == 404


def test_a_stopping_server_lets_sequences_end_and_refuses_new_ones(tmp_path: Path) -> None:
    (add_model(tmp_path, "m", sequences.slow, steps=10) / "model.yaml").write_text(SUM)
    with starting(tmp_path, "--warmup-s", "0.1", "--drain-timeout-s", "20") as server:
        server.wait_until_loaded()
        assert total(ask(server, "m", 1, sequence_id=1, sequence_start=True)) == 1
        os.kill(server.pid, signal.SIGTERM)
        server.wait_for_line("draining")
        refused = ask(server, "m", 1, sequence_id=2, sequence_start=True)
        text = "Server is stopping, scheduler for model has stopped accepting new inference requests"
        assert (refused.status_code, refused.json()["error"]) == (503, text)
        assert total(ask(server, "m", 5, sequence_id=1)) == 6
        began = time.monotonic()
        assert total(ask(server, "m", 5, sequence_id=1, sequence_end=True)) == 11
        server.wait_for_line("drained")
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("transport", ["native", "grpcio"])
def test_requests_are_answered_in_a_drain_that_a_sequence_outlives(tmp_path: Path, transport: str) -> None:
    """A stream sends requests to another model until it ends, and no request may be lost."""
    (add_model(tmp_path, "sum", sequences.accumulate) / "model.yaml").write_text(ACCUMULATE)
    add_model(tmp_path, "slow", builders.slow, steps=3_000)
    inputs = triton_inputs(triton_grpc, {"x": np.zeros((1, 4), np.float32)})
    answers: Queue[tuple[Any, Any]] = Queue()
    flags = ("--warmup-s", "0.1", "--drain-timeout-s", "2", "--grpc-transport", transport)
    with starting(tmp_path, *flags) as server, triton_grpc.InferenceServerClient(server.grpc) as client:
        server.wait_until_loaded()
        parameters = {"sequence_id": 1, "sequence_start": True}
        first = {"inputs": [json_input("INPUT", np.ones((1, 1), np.int32))], "parameters": parameters}
        httpx.post(rest_url(server, "sum"), json=first, timeout=LONG_S).raise_for_status()
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        server.send(signal.SIGTERM)
        error = None
        while error is None:
            with suppress(InferenceServerException):  # an answer reports the end of the stream
                client.async_stream_infer("slow", inputs)
            _, error = answers.get(timeout=LONG_S)
        assert "the server is shutting down" in str(error)
        assert server.wait() == 0
