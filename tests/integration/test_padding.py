"""Requests of different lengths share batches, and each gets the model's answer to it alone and unpadded."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np
import onnxruntime
import pytest

from encodings_of_requests import ENCODINGS, Infer, grpc_raw, rest_binary, rest_json
from models import builders
from servers import (
    LONG_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    json_input,
    read_metrics,
    rest_url,
    serving,
    starting,
)

# The padding value of ids is not neutral, so that correct answers show that the mask is padded too.
TOKENS = "pad:\n  ids: {axis: 1, multiple: 16, value: 7}\n  mask: {axis: 1, multiple: 16, value: 0}\n"
SUMS = "pad:\n  x: {axis: 1, multiple: 8, value: 0}\n"
BUCKETS = "buckets: [1, 2, 4]\n"
FULL_ONLY = "queue_delay_s: 60\nmax_rows: 4\n"
"""A batch runs when four rows wait; otherwise it would wait longer than a test."""

Oracle: TypeAlias = Any
"""A session of ONNX Runtime; the package has no types."""


def add_padded(repository: Path, name: str, options: str) -> Oracle:
    """Add a model whose name begins with its computation. Returns a session of ONNX Runtime for the same model."""
    build = builders.masked_tokens if name.startswith("tokens") else builders.variable_length
    folder = add_model(repository, name, build)
    (folder / "model.yaml").write_text(options)
    return onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def oracles() -> dict[str, Oracle]:
    """Reference sessions by model; ``server`` fills the dictionary."""
    return {}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, oracles: dict[str, Oracle]) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("padded")
    for name, options in {
        "tokens": TOKENS + "instances: 2\n",
        "tokens_in_buckets": TOKENS + BUCKETS,
        "tokens_in_fours": TOKENS + FULL_ONLY,
        "sums": SUMS,
    }.items():
        oracles[name] = add_padded(repository, name, options)
    with serving(repository, *SHORT_WARMUP) as running:
        yield running


def request(model: str, rng: np.random.Generator, rows: int, length: int) -> dict[str, np.ndarray]:
    ids = rng.integers(1, 1000, (rows, length))
    return {"ids": ids, "mask": rng.integers(0, 2, (rows, length))} if model.startswith("tokens") else {"x": ids}


def assert_as_alone(oracle: Oracle, sent: dict[str, np.ndarray], answer: dict[str, np.ndarray]) -> None:
    names = [output.name for output in oracle.get_outputs()]
    assert sorted(answer) == sorted(names)
    for name, expected in zip(names, oracle.run(names, sent), strict=True):
        assert answer[name].dtype == expected.dtype
        np.testing.assert_array_equal(answer[name], expected)


@pytest.mark.parametrize("infer", ENCODINGS)
@pytest.mark.parametrize("model", ["tokens", "tokens_in_buckets", "sums"])
def test_answer_is_that_of_the_unpadded_request(
    server: ServerProcess, oracles: dict[str, Oracle], model: str, infer: Infer
) -> None:
    rng = np.random.default_rng(0)
    for rows, length in ((1, 1), (1, 15), (3, 16), (2, 17), (11, 5)):  # 11 rows exceed the largest bucket
        sent = request(model, rng, rows, length)
        assert_as_alone(oracles[model], sent, infer(server, model, sent))


@pytest.mark.parametrize("model", ["tokens", "tokens_in_buckets", "sums"])
def test_concurrent_requests_of_any_length_get_their_own_answers(
    server: ServerProcess, oracles: dict[str, Oracle], model: str
) -> None:
    rng = np.random.default_rng(1)
    sent = [request(model, rng, 1 + number % 3, int(rng.integers(1, 40))) for number in range(96)]

    def ask(number: int) -> dict[str, np.ndarray]:
        return (rest_binary, grpc_raw)[number % 2](server, model, sent[number])

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(len(sent))))
    for own, answer in zip(sent, answers, strict=True):
        assert_as_alone(oracles[model], own, answer)


def test_requests_whose_padded_lengths_are_equal_run_in_one_batch(
    server: ServerProcess, oracles: dict[str, Oracle]
) -> None:
    model = "tokens_in_fours"
    rng = np.random.default_rng(2)
    sent = [request(model, rng, 1, length) for length in (1, 9, 12, 16)]
    with ThreadPoolExecutor(len(sent)) as pool:
        answers = list(pool.map(lambda own: rest_json(server, model, own), sent))
    for own, answer in zip(sent, answers, strict=True):
        assert_as_alone(oracles[model], own, answer)
    samples = read_metrics(server)
    labels = {"model": model, "version": "1"}
    assert samples.value("ortserve_batch_rows_count", **labels) == 1
    assert samples.value("ortserve_batch_rows_sum", **labels) == 4
    assert samples.value("ortserve_staged_elements_total", **labels) == 2 * 4 * 16
    assert samples.value("ortserve_padded_elements_total", **labels) == 2 * (15 + 7 + 4)


def test_inputs_of_different_lengths_are_rejected_before_padding(server: ServerProcess) -> None:
    sent = {"ids": np.ones((1, 3), np.int64), "mask": np.ones((1, 2), np.int64)}
    document = {"inputs": [json_input(name, array) for name, array in sent.items()]}
    answer = httpx.post(rest_url(server, "tokens"), json=document, timeout=LONG_S)
    assert answer.status_code == 400
    assert answer.json()["error"].endswith(
        "input 'mask' has length 2 on axis 1, but input 'ids' has 3 on axis 1: both axes are dimension 'seq'"
    )


def test_padding_of_axes_and_of_buckets_is_counted(tmp_path: Path) -> None:
    add_padded(tmp_path, "sums", SUMS + BUCKETS)
    add_padded(tmp_path, "sums_in_buckets", BUCKETS)
    add_padded(tmp_path, "sums_alone", "")
    with serving(tmp_path, *SHORT_WARMUP) as server:
        for model in ("sums", "sums_in_buckets", "sums_alone"):
            for rows, length in ((1, 8), (3, 5)):
                rest_json(server, model, {"x": np.ones((rows, length), np.int64)})
        samples = read_metrics(server)
    staged = samples.by_labels("ortserve_staged_elements_total", "model")
    padded = samples.by_labels("ortserve_padded_elements_total", "model")
    # A row with a new shape is first tried alone, without padding.
    assert staged == {"sums": 8 + 4 * 8, "sums_in_buckets": 8 + 5 + 4 * 5}
    assert padded == {"sums": 4 * 8 - 3 * 5, "sums_in_buckets": 5}


def test_padding_that_does_not_fit_the_model_fails_its_load_with_the_key(tmp_path: Path) -> None:
    add_padded(tmp_path, "tokens_half", "pad: {ids: {axis: 1, multiple: 16, value: 0}}")
    add_padded(tmp_path, "sums_half", "pad: {x: {axis: 1, multiple: 16, value: 0.5}}")
    dependent = add_model(tmp_path, "mixer", builders.row_mixer, width="seq")
    (dependent / "model.yaml").write_text("pad: {x: {axis: 1, multiple: 16, value: 0}}")
    with starting(tmp_path, *SHORT_WARMUP) as server:
        server.wait_for_line("model cannot be served", "model=tokens_half", "model.yaml: pad.mask: axis 1 of 'mask' is")
        server.wait_for_line("model cannot be served", "model=sums_half", "pad.x.value: expected a value of INT64")
        server.wait_for_line("model cannot be served", "model=mixer", "pad: expected rows on axis 0 of all inputs and")
