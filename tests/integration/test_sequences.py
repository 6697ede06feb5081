"""Sequences of requests on both protocols: their order, their states, and the causes of their end."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from encodings_of_requests import triton_inputs
from models import builders, sequences
from servers import LONG_S, ServerProcess, add_model, json_input, read_metrics, rest_url, serving

START = 'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }'
READY = 'control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }'
END = 'control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }'
CORRID = 'control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }'
STATE = 'state { input_name: "STATE" output_name: "NEXT" data_type: TYPE_INT32 dims: [ 1 ] %s }'
INPUT = 'input { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }'
OUTPUTS = """output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: 1 },
  { name: "STATE_SEEN" data_type: TYPE_INT32 dims: 1 },
  { name: "ID_SEEN" dims: 1 }, { name: "FLAGS_SEEN" data_type: TYPE_FP32 dims: 3 } ]"""
IDLE = "max_sequence_idle_microseconds: 30000000"
LATE = "must specify the START flag on the first request of the sequence"


def accumulator(
    folder: Path,
    name: str,
    strategy: str = "oldest { }",
    rows: int = 4,
    initial: str = "",
    more: str = "",
    **traits: Any,
) -> Path:
    model = add_model(folder, name, sequences.accumulate, **traits)
    controls = f"{START} {READY} {END} {CORRID}"
    if "flag" in traits:
        controls = controls.replace(
            "int32_false_true", {"float": "fp32", "bool": "bool"}[traits["flag"]] + "_false_true"
        )
    if "correlation" in traits:
        controls = controls.replace("TYPE_UINT64", f"TYPE_{traits['correlation'].upper()}")
    idle = "" if "max_sequence_idle" in more else IDLE
    (model / "config.pbtxt").write_text(
        f"max_batch_size: {rows} {INPUT} {OUTPUTS} "
        f"sequence_batching {{ {strategy} {controls} {STATE % initial} {idle} {more} }}"
    )
    return model


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sequences")
    accumulator(folder, "oldest", "oldest { max_candidate_sequences: 64 }")
    accumulator(folder, "direct", "direct { }")
    accumulator(folder, "floats", flag="float", correlation="int32")
    accumulator(folder, "texts", flag="bool", correlation="string")
    accumulator(folder, "three", "oldest { max_candidate_sequences: 3 }")
    accumulator(folder, "forgetful", more="max_sequence_idle_microseconds: 500000")
    accumulator(folder, "file", initial='initial_state { name: "s" data_type: TYPE_INT32 dims: 1 data_file: "first" }')
    (folder / "file" / "initial_state").mkdir()
    (folder / "file" / "initial_state" / "first").write_bytes(np.array([77, 1], np.int32).tobytes())
    growing = add_model(folder, "growing", sequences.growing)
    (growing / "model.yaml").write_text(
        "batched: true\nsequences: {max_idle_s: 30, "
        "states: [{input: PAST, output: PRESENT, dims: [-1], initial_dims: [0]}]}\n"
    )
    (add_model(folder, "two", sequences.two_states) / "model.yaml").write_text(
        "sequences: {states: [{input: a_in, output: z_out}, {input: b_in, output: a_out}]}\n"
    )
    (add_model(folder, "marks", sequences.marks) / "model.yaml").write_text(
        "sequences: {max_idle_s: 30, states: [{input: STATE, output: NEXT}]}\n"
    )
    rows = add_model(folder, "rows", sequences.whole_batch)
    (rows / "model.yaml").write_text(
        "batched: true\nmax_rows: 4\nrow_checks: false\n"
        "sequences: {strategy: direct, max_idle_s: 30, controls: {READY: {kind: ready}}, "
        "states: [{input: STATE, output: NEXT}]}\n"
    )
    patient = add_model(folder, "patient", sequences.whole_batch)
    (patient / "model.yaml").write_text(
        "batched: true\nmax_rows: 4\nrow_checks: false\nqueue_delay_s: 0.4\n"
        "sequences: {strategy: direct, min_slot_utilization: 0.5, max_idle_s: 30, controls: {READY: {kind: ready}}, "
        "states: [{input: STATE, output: NEXT}]}\n"
    )
    add_model(folder, "plain", builders.identity)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    with serving(repository, "--warmup-s", "0.1", "--drain-timeout-s", "1") as server:
        yield server


class RefusedError(Exception):
    """An error answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text


def rest(server: ServerProcess, model: str, value: Any, **parameters: Any) -> dict[str, np.ndarray]:
    dtype = np.float32 if model == "growing" else np.int32
    body = {"inputs": [json_input("INPUT", np.array([[value]], dtype))], "parameters": parameters}
    answer = httpx.post(rest_url(server, model), json=body, timeout=LONG_S)
    if answer.status_code != 200:
        raise RefusedError(answer.status_code, answer.json()["error"])
    return {output["name"]: np.array(output["data"]) for output in answer.json()["outputs"]}


def over_grpc(server: ServerProcess, model: str, value: Any, **parameters: Any) -> dict[str, np.ndarray]:
    dtype = np.float32 if model == "growing" else np.int32
    tensor = triton_grpc.InferInput("INPUT", [1, 1], "FP32" if model == "growing" else "INT32")
    tensor.set_data_from_numpy(np.array([[value]], dtype))
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        try:
            result = client.infer(model, [tensor], **parameters)
        except InferenceServerException as error:
            raise RefusedError(STATUSES[str(error.status()).removeprefix("StatusCode.")], error.message()) from None
        return {output.name: result.as_numpy(output.name).reshape(-1) for output in result.get_response().outputs}


STATUSES = {
    "INVALID_ARGUMENT": 400,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "CANCELLED": 499,
    "RESOURCE_EXHAUSTED": 429,
}
PROTOCOLS = pytest.mark.parametrize("infer", [rest, over_grpc])
IDS = iter(range(1000, 1_000_000))


def sums(server: ServerProcess, infer: Any, model: str, values: list[int], sequence_id: int | str) -> list[int]:
    """Send one whole sequence. Returns its outputs."""
    last = len(values) - 1
    return [
        int(
            infer(server, model, value, sequence_id=sequence_id, sequence_start=n == 0, sequence_end=n == last)[
                "OUTPUT"
            ][0]
        )
        for n, value in enumerate(values)
    ]


@PROTOCOLS
@pytest.mark.parametrize("model", ["oldest", "direct", "floats"])
def test_a_sequence_accumulates_its_state(server: ServerProcess, infer: Any, model: str) -> None:
    assert sums(server, infer, model, [5, 7, 1], next(IDS)) == [5, 12, 13]


@PROTOCOLS
def test_texts_are_ids_too(server: ServerProcess, infer: Any) -> None:
    assert sums(server, infer, "texts", [5, 7, 1], f"one-{next(IDS)}") == [5, 12, 13]
    answer = infer(server, "texts", 1, sequence_id="a b", sequence_start=True, sequence_end=True)
    assert answer["ID_SEEN"][0] in ("a b", b"a b")


@PROTOCOLS
@pytest.mark.parametrize("none", [{}, {"sequence_id": 0}, {"sequence_id": "", "sequence_start": True}])
def test_a_request_needs_an_id(server: ServerProcess, infer: Any, none: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as caught:
        infer(server, "oldest", 1, **none)
    text = "inference request to model 'oldest' must specify a non-zero or non-empty correlation ID"
    assert (caught.value.status, caught.value.text) == (400, text)


@PROTOCOLS
@pytest.mark.parametrize("ends", [False, True])
def test_a_sequence_needs_a_start(server: ServerProcess, infer: Any, ends: bool) -> None:
    one = next(IDS)
    with pytest.raises(RefusedError) as caught:
        infer(server, "oldest", 1, sequence_id=one, sequence_end=ends)
    assert caught.value.status == 400
    assert caught.value.text == f"inference request for sequence {one} to model 'oldest' {LATE}"


@PROTOCOLS
def test_a_sequence_may_be_one_request(server: ServerProcess, infer: Any) -> None:
    one = next(IDS)
    answer = infer(server, "oldest", 3, sequence_id=one, sequence_start=True, sequence_end=True)
    assert list(answer["FLAGS_SEEN"]) == [1, 1, 1]
    with pytest.raises(RefusedError, match=LATE):
        infer(server, "oldest", 3, sequence_id=one)


def test_a_second_start_begins_with_a_fresh_state(server: ServerProcess) -> None:
    one = next(IDS)
    flags = [(3, True, False), (4, False, False), (10, True, False), (1, False, True)]
    found = [
        rest(server, "oldest", value, sequence_id=one, sequence_start=start, sequence_end=end)["OUTPUT"][0]
        for value, start, end in flags
    ]
    assert found == [3, 7, 10, 11]


@pytest.mark.parametrize("odd", [-1, 1.5, True, None, [1], 2**64])
def test_odd_ids_are_rejected(server: ServerProcess, odd: Any) -> None:
    with pytest.raises(RefusedError) as caught:
        rest(server, "oldest", 1, sequence_id=odd, sequence_start=True)
    assert caught.value.status == 400


@pytest.mark.parametrize("odd", ["true", 1])
def test_odd_flags_are_rejected(server: ServerProcess, odd: Any) -> None:
    with pytest.raises(RefusedError, match="Unable to parse 'sequence_start'") as caught:
        rest(server, "oldest", 1, sequence_id=1, sequence_start=odd)
    assert caught.value.status == 400


def test_large_ids_reach_the_model_whole_or_by_their_low_bits(server: ServerProcess) -> None:
    largest = rest(server, "oldest", 1, sequence_id=2**64 - 1, sequence_start=True)
    assert largest["ID_SEEN"][0] == 2**64 - 1
    over_grpc(server, "oldest", 1, sequence_id=-1, sequence_end=True)  # the same sequence
    low = rest(server, "floats", 1, sequence_id=2**33 + 7, sequence_start=True, sequence_end=True)
    assert low["ID_SEEN"][0] == 7


def test_rows_and_long_texts_are_rejected(server: ServerProcess) -> None:
    body = {
        "inputs": [json_input("INPUT", np.zeros((2, 1), np.int32))],
        "parameters": {"sequence_id": 9, "sequence_start": True},
    }
    answer = httpx.post(rest_url(server, "oldest"), json=body, timeout=LONG_S)
    assert answer.status_code == 400
    assert "must specify batch-size 1 due to requirements of sequence batcher" in answer.json()["error"]
    for infer in (rest, over_grpc):
        with pytest.raises(RefusedError, match="cannot be longer than 128 characters") as caught:
            infer(server, "texts", 1, sequence_id="x" * 129, sequence_start=True)
        assert caught.value.status == 501


def test_a_number_and_its_text_are_two_sequences(server: ServerProcess) -> None:
    for infer, name, start in ((rest, 1, True), (over_grpc, "1", True), (rest, 1, False), (over_grpc, "1", False)):
        answer = infer(server, "two", 0, sequence_id=name, sequence_start=start)
        assert answer["A"][0] == (1 if start else 2)


def test_ids_must_fit_the_control(server: ServerProcess) -> None:
    with pytest.raises(RefusedError, match=r"\[request id: <id_unknown>\] sequence batching control 'CORRID' data-"):
        rest(server, "oldest", 1, sequence_id="text", sequence_start=True)
    with pytest.raises(RefusedError, match="data-type is 'UINT64', but model 'texts' expects 'BYTES'"):
        over_grpc(server, "texts", 1, sequence_id=5, sequence_start=True)


def test_plain_models_ignore_the_parameters(server: ServerProcess) -> None:
    spec = httpx.get(f"{server.url}/v2/models/plain", timeout=LONG_S).json()["inputs"][0]
    row = np.ones([abs(size) for size in spec["shape"]], np.float32)
    body = {"inputs": [json_input("x", row)], "parameters": {"sequence_id": 7, "sequence_start": False}}
    assert httpx.post(rest_url(server, "plain"), json=body, timeout=LONG_S).status_code == 200


def test_a_stream_reports_the_bad_request_only(server: ServerProcess) -> None:
    answers: Queue[tuple[Any, Any]] = Queue()
    one = next(IDS)
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for number, (sequence_id, value) in enumerate([(one, 5), (one + 500_000, 1), (one, 6)]):
            tensor = triton_grpc.InferInput("INPUT", [1, 1], "INT32")
            tensor.set_data_from_numpy(np.array([[value]], np.int32))
            client.async_stream_infer(
                "oldest", [tensor], request_id=f"r{number}", sequence_id=sequence_id, sequence_start=number == 0
            )
        found = [answers.get(timeout=LONG_S) for _ in range(3)]
    (first, none), (_, error), (third, nothing) = found
    assert none is None
    assert nothing is None
    assert [result.get_response().id for result in (first, third)] == ["r0", "r2"]
    assert [int(result.as_numpy("OUTPUT")[0, 0]) for result in (first, third)] == [5, 11]
    assert LATE in str(error)


@pytest.mark.parametrize("between", ["", "plain", "absent"])
def test_a_request_that_takes_long_to_decode_is_not_overtaken_in_its_stream(
    server: ServerProcess, between: str
) -> None:
    """The order also holds if requests of other models, which do not wait, are sent in between."""
    answers: Queue[tuple[Any, Any]] = Queue()
    one, lengths = next(IDS), [20_000, 1, 30_000, 2]
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for number, length in enumerate(lengths):
            tensor = triton_grpc.InferInput("INPUT", [1, length], "BYTES")
            tensor.set_data_from_numpy(np.full((1, length), b"x", object))
            client.async_stream_infer("marks", [tensor], sequence_id=one, sequence_start=number == 0)
            if between:
                client.async_stream_infer(between, triton_inputs(triton_grpc, {"x": np.ones((1, 4), np.float32)}))
        found = [answers.get(timeout=LONG_S) for _ in range(len(lengths) * (2 if between else 1))]
    found = found[:: 2 if between else 1]
    assert [error for _, error in found] == [None] * len(lengths)
    totals = [int(result.as_numpy("TOTAL")[0, 0]) for result, _ in found]
    assert totals == np.cumsum(lengths).tolist()


def test_hidden_tensors_are_not_for_clients(server: ServerProcess) -> None:
    metadata = httpx.get(f"{server.url}/v2/models/oldest", timeout=LONG_S).json()
    assert [spec["name"] for spec in metadata["inputs"]] == ["INPUT"]
    assert [spec["name"] for spec in metadata["outputs"]] == ["OUTPUT", "STATE_SEEN", "ID_SEEN", "FLAGS_SEEN"]
    config = httpx.get(f"{server.url}/v2/models/oldest/config", timeout=LONG_S).json()
    assert config["sequence_batching"]["oldest"]["max_candidate_sequences"] == 64
    assert [control["name"] for control in config["sequence_batching"]["control_input"]] == [
        "START",
        "READY",
        "END",
        "CORRID",
    ]
    one = next(IDS)
    rest(server, "oldest", 5, sequence_id=one, sequence_start=True)
    url, row = rest_url(server, "oldest"), json_input("INPUT", np.array([[1]], np.int32))
    for body in (
        {"inputs": [row, json_input("START", np.array([[1]], np.int32))]},
        {"inputs": [row], "outputs": [{"name": "NEXT"}]},
    ):
        answer = httpx.post(url, json={**body, "parameters": {"sequence_id": one}}, timeout=LONG_S)
        assert answer.status_code == 400
    assert rest(server, "oldest", 2, sequence_id=one)["OUTPUT"][0] == 7


def test_states_are_paired_as_configured(server: ServerProcess) -> None:
    one = next(IDS)
    found = [rest(server, "two", 0, sequence_id=one, sequence_start=n == 0) for n in range(3)]
    assert [(answer["A"][0], answer["B"][0]) for answer in found] == [(1, 10), (2, 20), (3, 30)]


def test_first_states_are_zeros_or_a_file(server: ServerProcess) -> None:
    for model, value in (("oldest", 0), ("file", 77)):
        answer = rest(server, model, 1, sequence_id=next(IDS), sequence_start=True, sequence_end=True)
        assert answer["STATE_SEEN"][0] == value


@PROTOCOLS
def test_states_grow(server: ServerProcess, infer: Any) -> None:
    ids = [next(IDS) for _ in range(3)]
    for ahead, one in enumerate(ids):  # sequences of different lengths
        for n in range(ahead + 1):
            infer(server, "growing", 1.0, sequence_id=one, sequence_start=n == 0)
    with ThreadPoolExecutor(3) as pool:
        for round_ in range(3):
            found = list(pool.map(lambda one: infer(server, "growing", 2.0, sequence_id=one), ids))
            assert [int(answer["LENGTH"][0]) for answer in found] == [round_ + ahead + 2 for ahead in range(3)]


def test_a_failed_run_leaves_the_state(server: ServerProcess) -> None:
    for model in ("oldest", "direct"):
        one, other = next(IDS), next(IDS)
        for sequence in (one, other):
            rest(server, model, 5, sequence_id=sequence, sequence_start=True)
        with ThreadPoolExecutor(2) as pool:
            good = pool.submit(rest, server, model, 1, sequence_id=other)
            with pytest.raises(RefusedError):
                rest(server, model, 5000, sequence_id=one)
            assert good.result()["OUTPUT"][0] == 6
        assert rest(server, model, 2, sequence_id=one, sequence_end=True)["OUTPUT"][0] == 7
        with pytest.raises(RefusedError):
            rest(server, model, 5000, sequence_id=one, sequence_start=True)
        with pytest.raises(RefusedError, match=LATE):  # no sequence started
            rest(server, model, 2, sequence_id=one)


def test_an_idle_sequence_ends(server: ServerProcess) -> None:
    one, other = next(IDS), next(IDS)
    rest(server, "forgetful", 5, sequence_id=one, sequence_start=True)
    for n in range(4):  # keeps the sequence active
        rest(server, "forgetful", 1, sequence_id=other, sequence_start=n == 0)
        time.sleep(0.3)
    with pytest.raises(RefusedError, match=LATE):
        rest(server, "forgetful", 1, sequence_id=one)
    assert rest(server, "forgetful", 1, sequence_id=other)["OUTPUT"][0] == 5
    ended = read_metrics(server).by_labels("ortserve_ended_sequences_total", "model", "reason")
    assert ended["forgetful expired"] >= 1


def test_sequences_wait_for_a_candidate_to_end(server: ServerProcess) -> None:
    ids = [next(IDS) for _ in range(4)]
    for one in ids[:3]:
        rest(server, "three", 1, sequence_id=one, sequence_start=True)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(rest, server, "three", 8, sequence_id=ids[3], sequence_start=True)
        late = pool.submit(rest, server, "three", 8, sequence_id=next(IDS), sequence_start=True, timeout=200_000)
        with pytest.raises(RefusedError, match="timeout of the corresponding sequence has been expired") as caught:
            late.result()
        assert caught.value.status == 503
        assert not waiting.done()
        states = read_metrics(server).by_labels("ortserve_sequences", "model", "state")
        assert (states["three active"], states["three waiting"]) == (3, 1)
        rest(server, "three", 1, sequence_id=ids[0], sequence_end=True)
        assert waiting.result()["OUTPUT"][0] == 8


def test_direct_pads_to_the_highest_slot(server: ServerProcess) -> None:
    ids = [next(IDS) for _ in range(4)]
    for one in ids:
        rest(server, "rows", 1, sequence_id=one, sequence_start=True)
    answer = rest(server, "rows", 7, sequence_id=ids[3])
    assert (answer["ROWS"][0], answer["READY_ROWS"][0], answer["INPUT_ROWS"][0]) == (4, 10_000, 70_000)
    assert answer["OUTPUT"][0] == 8
    answer = rest(server, "rows", 2, sequence_id=ids[0])
    assert (answer["ROWS"][0], answer["READY_ROWS"][0], answer["OUTPUT"][0]) == (1, 10, 3)


def test_direct_waits_for_a_share_of_its_slots(server: ServerProcess) -> None:
    one, other = next(IDS), next(IDS)
    began = time.monotonic()
    rest(server, "patient", 1, sequence_id=one, sequence_start=True)
    assert time.monotonic() - began >= 0.4
    rest(server, "patient", 1, sequence_id=other, sequence_start=True)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda one: rest(server, "patient", 1, sequence_id=one), (one, other)))
    assert [answer["ROWS"][0] for answer in answers] == [2, 2]
