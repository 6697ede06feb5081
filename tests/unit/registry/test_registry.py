"""A registry over repositories on disk, with the real ONNX Runtime."""

import asyncio
import gc
import json
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from fakes.inflight import submit_to
from held_files import HeldFile, held_file
from interpreted import interpreted_only
from models import builders, interfaces, members
from ortserve.batching.response_cache import ResponseCache
from ortserve.config.model import LoadOptions
from ortserve.core.batch import Batch, BatchDone, BatchResult
from ortserve.core.inflight import InflightRequest, Scheduling, Terms
from ortserve.core.thread_pool import ThreadPool
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, NotInMemoryError, ServeError, invalid_input
from ortserve.registry import changes, version_loader
from ortserve.registry.catalog import ON_DEMAND, State, VersionRecord
from ortserve.registry.ensemble.served_ensemble import ServedEnsemble
from ortserve.registry.load.loaded_model import LoadedModel
from ortserve.registry.load.progress import WAITING
from ortserve.registry.registry import Registry
from ortserve.registry.served_model import ServedModel
from ortserve.registry.version_loader import VersionLoader
from ortserve.registry.versions import MAX_ABANDONED
from ortserve.telemetry.metrics import Metrics
from servers import LONG_S

Load = Callable[..., Awaitable[Registry]]

FAILED_1 = "load failed for model 'm': version 1 is at UNAVAILABLE state: "


@pytest.fixture
def prometheus() -> CollectorRegistry:
    return CollectorRegistry()


@pytest_asyncio.fixture
async def load(tmp_path: Path, prometheus: CollectorRegistry) -> AsyncIterator[Load]:
    """Loads the models of ``tmp_path`` and closes them after the test."""
    registries: list[Registry] = []

    async def load_all(cache: ResponseCache | None = None, *, is_polled: bool = False, **defaults: object) -> Registry:
        options, metrics = LoadOptions.model_validate({"warmup_s": 0.05} | defaults), Metrics(prometheus)
        registries.append(Registry([tmp_path], options, metrics, time.monotonic_ns, cache=cache, is_polled=is_polled))
        await registries[-1].load_all()
        return registries[-1]

    yield load_all
    for registry in registries:
        await registry.close()


def put(root: Path, build: Callable[[Path], Path], name: str, version: int = 1, options: str = "") -> None:
    path = root / name / str(version) / "model.onnx"
    path.parent.mkdir(parents=True)
    build(path)
    if options:
        (root / name / "model.yaml").write_text(options)


def move(folder: Path, target: Path) -> None:
    folder.rename(target)


def state_of(registry: Registry, name: str) -> dict[int, tuple[State, str]]:
    return {record.version: (record.state, record.reason) for record in registry.records() if record.model == name}


async def double(registry: Registry, name: str, version: str = "") -> np.ndarray:
    rows = np.ones((1, 4), np.float32)
    (output,) = await submit_to(registry.find(name, version), (rows,), 1)
    return output


def refusal(registry: Registry, name: str, version: str = "") -> ServeError:
    with pytest.raises(ServeError) as caught:
        registry.find(name, version)
    return caught.value


async def test_broken_models_do_not_block_other_models(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.not_onnx, "a_broken")
    put(tmp_path, builders.unnamed_dims, "b_good")
    put(tmp_path, interfaces.float8_output, "c_unserved")
    put(tmp_path, builders.identity, "d_options", options="max_rows: many")
    put(tmp_path, builders.identity, "e_policy", options="version_policy: {specific: [4]}")
    (tmp_path / "f_empty").mkdir()
    put(tmp_path, builders.identity, "g_provider", options="execution_providers: [no_such]")
    builders.unnamed_dims(tmp_path / "z_good.onnx")
    registry = await load()

    assert registry.is_loaded
    for name in ("b_good", "z_good"):
        assert state_of(registry, name) == {1: (State.READY, "")}
        np.testing.assert_array_equal(await double(registry, name), np.full((1, 4), 2))
    reasons = {
        "a_broken": (1, "Protobuf parsing failed"),
        "c_unserved": (1, "output 'y' has type tensor(float8e4m3fn), which is not supported"),
        "d_options": (0, "model.yaml: max_rows: expected integer, 1 to 65536, in rows, got 'many'"),
        "e_policy": (4, "version_policy: expected versions out of 1, got 4"),
        "f_empty": (0, "no version folder"),
        "g_provider": (1, "none of no_such can be used"),
    }
    for name, (version, text) in reasons.items():
        ((known, (state, reason)),) = state_of(registry, name).items()
        assert known == version
        assert state is State.FAILED
        assert text in reason
        assert str(tmp_path) not in reason
        assert registry.knows(name)


async def test_missing_policy_version_does_not_block_others(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.identity, "m", options="version_policy: {specific: [1, 7]}")
    registry = await load()
    missing = "version_policy: expected versions out of 1, got 7"
    assert state_of(registry, "m") == {1: (State.READY, ""), 7: (State.FAILED, missing)}
    builders.identity(tmp_path / "m" / "1" / "model.onnx")
    (tmp_path / "m" / "7").mkdir()
    builders.identity(tmp_path / "m" / "7" / "model.onnx")
    await registry.poll()
    assert state_of(registry, "m") == {1: (State.READY, ""), 7: (State.READY, "")}


async def test_model_without_readable_versions_serves_no_version(tmp_path: Path, load: Load) -> None:
    (tmp_path / "m").mkdir()
    registry = await load()
    with pytest.raises(ServeError) as caught:
        registry.find("m", "0")
    assert caught.value.kind is ErrorKind.NOT_FOUND
    assert refusal(registry, "m").kind is ErrorKind.NOT_READY


async def test_highest_ready_version_answers_for_the_name(tmp_path: Path, load: Load) -> None:
    policy = "version_policy: {all: true}"
    put(tmp_path, builders.unnamed_dims, "m", 2, policy)
    put(tmp_path, builders.identity, "m", 10)
    put(tmp_path, builders.not_onnx, "m", 11)
    registry = await load()
    assert registry.find("m", "").version == "10"
    assert registry.find("m", "10") is registry.find("m", "")
    assert registry.find("m", "2").version == "2"
    assert registry.ready_versions("m") == [2, 10]
    assert (await double(registry, "m", "2")).tolist() == [[2, 2, 2, 2]]
    assert (await double(registry, "m")).tolist() == [[1, 1, 1, 1]]


async def test_only_the_latest_version_is_served_by_default(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.identity, "m", 9)
    put(tmp_path, builders.identity, "m", 10)
    registry = await load()
    assert [record.version for record in registry.records()] == [10]


async def test_unavailable_models_are_reported_in_tritons_words(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.identity, "good")
    put(tmp_path, interfaces.float8_output, "bad")
    registry = await load()
    (reason,) = (record.reason for record in registry.records() if record.model == "bad")
    expected = {
        ("none", ""): (ErrorKind.NOT_FOUND, "Request for unknown model: 'none' is not found"),
        ("none", "1"): (ErrorKind.NOT_FOUND, "Request for unknown model: 'none' is not found"),
        ("good", "2"): (ErrorKind.NOT_FOUND, "Request for unknown model: 'good' version 2 is not found"),
        ("good", "01"): (ErrorKind.NOT_FOUND, "Request for unknown model: 'good' version 01 is not found"),
        ("good", "x"): (ErrorKind.NOT_FOUND, "Request for unknown model: 'good' version x is not found"),
        ("good", "²"): (ErrorKind.NOT_FOUND, "Request for unknown model: 'good' version ² is not found"),
        ("bad", ""): (
            ErrorKind.NOT_READY,
            f"Request for unknown model: 'bad' has no available versions: FAILED ({reason})",
        ),
        ("bad", "1"): (
            ErrorKind.NOT_READY,
            f"Request for unknown model: 'bad' version 1 is not at ready state: FAILED ({reason})",
        ),
    }
    for (name, version), (kind, text) in expected.items():
        error = refusal(registry, name, version)
        assert (error.kind, error.message) == (kind, text)
        assert error.retry_after_s is None, "nothing loads the model again"
    assert refusal(registry, "good", "9" * 5000).kind is ErrorKind.NOT_FOUND  # int() rejects so many digits


async def test_states_move_forward_and_metrics_show_them(
    tmp_path: Path, load: Load, prometheus: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[State]] = {}
    advance = VersionRecord.advance

    def watch(record: VersionRecord, state: State, reason: str = "") -> None:
        seen.setdefault(record.model, [record.state]).append(state)
        advance(record, state, reason)

    monkeypatch.setattr(VersionRecord, "advance", watch)
    put(tmp_path, builders.identity, "good")
    put(tmp_path, builders.not_onnx, "bad")
    registry = await load()

    def shown(name: str, state: str) -> float | None:
        labels = {"model": name, "version": "1", "state": state}
        return prometheus.get_sample_value("ortserve_model_state", labels)

    assert (shown("good", "ready"), shown("good", "loading")) == (1, 0)
    assert (shown("bad", "failed"), shown("bad", "ready")) == (1, 0)
    await registry.close()
    assert shown("good", "gone") == 1
    assert seen == {
        "good": [State.LOADING, State.WARMING, State.READY, State.DRAINING, State.GONE],
        "bad": [State.LOADING, State.FAILED],
    }


async def test_models_queued_for_loading_are_known_but_not_ready(tmp_path: Path) -> None:
    put(tmp_path, builders.identity, "a")
    put(tmp_path, builders.identity, "b")
    registry = Registry([tmp_path], LoadOptions(warmup_s=0.05), Metrics(CollectorRegistry()), time.monotonic_ns)
    assert not registry.is_loaded
    loading = asyncio.create_task(registry.load_all())
    while not registry.knows("a"):  # noqa: ASYNC110 - there is no event for it, and a turn of the loop is no wait
        await asyncio.sleep(0)
    error = refusal(registry, "a")
    assert error.kind is ErrorKind.NOT_READY
    assert re.fullmatch(
        r"Request for unknown model: 'a' has no available versions: LOADING \(.+, for \d+ s\)", error.message
    )
    assert not registry.is_loaded
    await loading
    assert registry.is_loaded
    assert registry.find("a", "").name == "a"
    await registry.close()


@pytest.fixture
def slow_file(tmp_path: Path) -> Iterator[Callable[[str], HeldFile]]:
    """Creates models whose opening lasts until the test releases them."""
    with ExitStack() as files:
        yield lambda name: files.enter_context(held_file(builders.unnamed_dims(tmp_path / f"{name}.onnx")))


async def is_reached(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError


UNMEASURED = LoadOptions(warmup_s=0, intra_op_threads=1)


async def test_models_are_opened_concurrently(
    tmp_path: Path, slow_file: Callable[[str], HeldFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_loader, "cpu_budget", lambda: 3)
    slow = [slow_file("a_slow"), slow_file("b_slow")]
    put(tmp_path, builders.not_onnx, "c_broken")
    names = [f"m{number}" for number in range(8)]
    for name in names:
        put(tmp_path, builders.unnamed_dims, name)
    registry = Registry([tmp_path], UNMEASURED, Metrics(CollectorRegistry()), time.monotonic_ns)
    loading_all = asyncio.create_task(registry.load_all())
    await is_reached(lambda: all(registry.ready_versions(name) for name in names))
    assert state_of(registry, "c_broken")[1][0] is State.FAILED
    assert all(file.is_awaited for file in slow)
    for name in names:
        np.testing.assert_array_equal(await double(registry, name), np.full((1, 4), 2))
    await registry.unload("m1")
    assert registry.ready_versions("m1") == []
    unloading = asyncio.create_task(registry.unload("a_slow"))
    for file in slow:
        file.release()
    await loading_all
    await unloading
    assert registry.ready_versions("a_slow") == []
    np.testing.assert_array_equal(await double(registry, "b_slow"), np.full((1, 4), 2))
    await registry.close()


async def test_cancelled_loading_starts_no_further_model(
    tmp_path: Path, slow_file: Callable[[str], HeldFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_loader, "cpu_budget", lambda: 2)
    slow = [slow_file("a_slow"), slow_file("b_slow")]
    put(tmp_path, builders.unnamed_dims, "m")
    registry = Registry([tmp_path], UNMEASURED, Metrics(CollectorRegistry()), time.monotonic_ns)
    loading_all = asyncio.create_task(registry.load_all())
    for file in slow:
        await file.wait()
    loading_all.cancel()
    await asyncio.gather(loading_all, return_exceptions=True)
    await asyncio.wait_for(registry.close(), 30)
    for file in slow:
        file.release()
    assert state_of(registry, "m") == {1: (State.LOADING, "")}
    assert [record.explanation for record in registry.models()["m"]] == [WAITING]


async def test_repository_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    registry = Registry([tmp_path / "none"], LoadOptions(), Metrics(CollectorRegistry()), time.monotonic_ns)
    with pytest.raises(ServeError, match="expected a folder of models"):
        await registry.load_all()
    assert not registry.is_loaded


async def test_model_options_override_server_options(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.unnamed_dims, "own", options="max_rows: 3\nrequired: true")
    put(tmp_path, builders.unnamed_dims, "default")
    registry = await load(max_rows=5)
    rows = np.ones((4, 2), np.float32)
    with pytest.raises(ServeError) as caught:
        await submit_to(registry.find("own", ""), (rows,), 4)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == "inference request batch-size must be <= 3 for 'own', got 4"
    (output,) = await submit_to(registry.find("default", ""), (rows,), 4)
    assert output.tolist() == [[2, 2]] * 4
    assert {record.model: record.is_required for record in registry.records()} == {"default": False, "own": True}


async def test_properties_describe_serving_and_reasons(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.identity, "batched")
    put(tmp_path, builders.row_mixer, "mixer")
    put(tmp_path, builders.fixed_batch, "fixed")
    put(tmp_path, builders.in_sequence, "tried")
    put(tmp_path, partial(builders.refuses_synthetic, is_proven=False), "refuses")
    put(tmp_path, builders.in_sequence, "cold", options="warmup_s: 0")
    put(tmp_path, builders.in_sequence, "believed", options="warmup_s: 0\nbatched: true")
    registry = await load(intra_op_threads=1, warmup_s=1)
    names = ("batched", "mixer", "fixed", "tried", "refuses", "cold", "believed")
    properties = {name: registry.find(name, "").properties for name in names}
    for described in properties.values():
        assert described["execution_provider"] == "CPUExecutionProvider"
        assert described["intra_op_threads"] == "1"
    assert properties["batched"]["batching"].endswith(" rows run together, proven: the model's graph keeps rows apart")
    unknown = "the graph does not show whether rows are independent: node 'SequenceConstruct #0': "
    assert re.search(
        " rows run together, tried on [1-4] sets? of inputs, of up to [0-9]+ rows: a row alone and among others "
        f"differs by 0.0e[+]00 at most; {unknown}",
        properties["tried"]["batching"],
    )
    assert properties["batched"]["warm_up"].startswith("1: ")
    assert properties["mixer"]["batching"] == (
        "not batched because rows may depend on each other: node 'ReduceMean #0': ReduceMean reduces along the axis of "
        "the rows"
    )
    assert properties["fixed"]["batching"] == "not batched because the first dimension of input 'x' is fixed at 1"
    unknown_node = unknown.replace("#0", "#.")
    untried = f"not batched because {unknown_node}.*; rows could not be tried, as the model {{}}; 'batched: true' says "
    assert re.match(untried.format("rejects synthetic inputs"), properties["refuses"]["batching"])
    assert properties["believed"]["batching"].startswith(
        f"up to 64 rows run together, configured; not tried; {unknown}"
    )
    assert properties["refuses"]["warm_up"].startswith("not warmed up: the model rejects synthetic inputs: ")
    assert re.match(untried.format("was not warmed up"), properties["cold"]["batching"])
    assert properties["cold"]["warm_up"] == "not warmed up"


async def test_model_that_rejects_synthetic_inputs_answers_real_ones(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.refuses_synthetic, "m")
    registry = await load()
    (output,) = await submit_to(registry.find("m", ""), (np.full((2, 4), 4),), 2)
    assert output.tolist() == [[1] * 4] * 2


async def test_dependent_rows_never_run_together(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.row_mixer, "m")
    served = (await load(max_rows=8)).find("m", "")
    rows = [np.full((1, 4), value, np.float32) for value in range(8)]
    answers = await asyncio.gather(*(submit_to(served, (row,), 1) for row in rows))
    assert all((output == 0).all() for (output,) in answers)


async def test_request_larger_than_the_learned_maximum_is_answered_whole(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.unnamed_dims, "m", options="warmup_s: 0")
    served = (await load()).find("m", "")
    rows = np.arange(600, dtype=np.float32).reshape(300, 2)
    (output,) = await submit_to(served, (rows,), 300)
    np.testing.assert_array_equal(output, rows * 2)


async def test_shapes_that_differ_do_not_disturb_each_other(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.variable_length, "m")
    served = (await load()).find("m", "")
    rows = [np.full((1, length), 1) for length in (3, 5, 3, 1, 5)]
    answers = await asyncio.gather(*(submit_to(served, (row,), 1) for row in rows))
    assert [output.tolist() for (output,) in answers] == [[3], [5], [3], [1], [5]]


async def test_cancelled_request_frees_its_place_during_the_run_before(tmp_path: Path, load: Load) -> None:
    put(tmp_path, lambda path: builders.slow(path, steps=30_000), "m", options="max_rows: 1\nwarmup_s: 0")
    served = (await load()).find("m", "")
    rows = np.zeros((1, 4), np.float32)
    running, *waiting = [submit_to(served, (rows,), 1) for _ in range(4)]
    await asyncio.sleep(0)  # in this iteration the first is chosen
    assert (served.learned().decisions.batches, served.learned().queued_rows) == (1, 3)
    for outcome in waiting:
        outcome.cancel()
    assert (served.learned().decisions.left, served.learned().queued_rows) == (3, 0)
    assert all(outcome.cancelled() for outcome in waiting)
    assert not running.done()
    await running


async def test_close_answers_admitted_requests_and_rejects_later_ones(tmp_path: Path, load: Load) -> None:
    put(tmp_path, lambda path: builders.slow(path, steps=3000), "m", options="max_rows: 1\nwarmup_s: 0")
    registry = await load()
    served = registry.find("m", "")
    rows = np.zeros((1, 4), np.float32)
    running = [submit_to(served, (rows,), 1) for _ in range(4)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(registry.close())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert state_of(registry, "m")[1][0] is State.DRAINING
    error = refusal(registry, "m")
    assert error.message == "Request for unknown model: 'm' has no available versions: DRAINING"
    with pytest.raises(ServeError, match="stopped accepting new inference requests"):
        await submit_to(served, (rows,), 1)
    await closing
    assert [task.done() and task.exception() is None for task in running] == [True] * 4
    assert state_of(registry, "m")[1][0] is State.GONE
    assert refusal(registry, "m", "1").message == (
        "Request for unknown model: 'm' version 1 is not at ready state: GONE"
    )
    assert registry.ready_versions("m") == []


async def test_close_answers_requests_that_are_enqueued_late(tmp_path: Path, load: Load) -> None:
    """Requests that yield to others are enqueued again; large ones are looked up in the cache before."""
    policy = "queue_policy: {timeout_s: 0.001, timeout_action: delay}\nresponse_cache: true"
    put(tmp_path, lambda path: builders.slow(path, steps=3000), "m", options=f"max_rows: 1\nwarmup_s: 0\n{policy}")
    put(tmp_path, builders.variable_length, "lengths", options="warmup_s: 0\nresponse_cache: true")
    registry = await load(ResponseCache(1 << 20))
    served, lengths = registry.find("m", ""), registry.find("lengths", "")
    terms = served.terms(time.monotonic_ns())
    assert terms.yields_when_late
    rows = [np.full((1, 4), number, np.float32) for number in range(4)]
    running = [submit_to(served, (row,), 1, terms=terms) for row in rows]
    large = submit_to(lengths, (np.ones((1, 1_000_000), np.int64),), 1)
    await asyncio.sleep(0)
    await registry.close()
    assert [outcome.done() and outcome.exception() for outcome in (*running, large)] == [None] * 5
    assert (await large)[0].tolist() == [1_000_000]


@pytest.mark.parametrize(
    ("options", "asked", "terms"),
    [
        # the request: timeout, priority, queue timeout; all are received at 1000
        ("", (None, 0, None), Terms(1)),
        ("", (500, 0, None), Terms(1, answer_by_ns=1500)),
        ("", (None, 0, 700), Terms(1, start_by_ns=1700)),
        ("", (0, 0, None), Terms(1, answer_by_ns=1000)),
        ("slo_s: 0.25", (None, 0, None), Terms(1, answer_by_ns=250_001_000)),
        ("slo_s: 0.25", (500, 0, 700), Terms(1, answer_by_ns=1500, start_by_ns=1700)),
        ("slo_s: 0.25", (10**12, 0, None), Terms(1, answer_by_ns=10**12 + 1000)),
        ("", (None, 1, None), Terms(1)),
        ("", (None, 2, None), Terms(1)),  # without levels all priorities are equal
        ("priority_levels: 3\ndefault_priority_level: 2", (None, 0, None), Terms(2)),
        ("priority_levels: 3\ndefault_priority_level: 2", (None, 1, None), Terms(1)),
        ("priority_levels: 3\ndefault_priority_level: 2", (None, 3, None), Terms(3)),
        ("priority_levels: 3\ndefault_priority_level: 2", (None, 4, None), Terms(2)),
        ("priority_levels: 3\ndefault_priority_level: 2", (None, 2**63, None), Terms(2)),
    ],
)
async def test_request_terms_default_to_those_of_the_model(
    tmp_path: Path, load: Load, options: str, asked: tuple[int | None, int, int | None], terms: Terms
) -> None:
    put(tmp_path, builders.identity, "m", options=f"warmup_s: 0\n{options}")
    served = (await load()).find("m", "")
    timeout_ns, priority, queue_timeout_ns = asked
    assert served.terms(1000, timeout_ns, Scheduling(priority, queue_timeout_ns)) == terms


async def test_instances_run_concurrently_with_correct_answers(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.unnamed_dims, "m", options="instances: 3\nmax_rows: 2\nbuckets: [1, 2]")
    served = (await load()).find("m", "")
    rows = [np.full((1, 4), value, np.float32) for value in range(50)]
    answers = await asyncio.gather(*(submit_to(served, (row,), 1) for row in rows))
    for (output,), row in zip(answers, rows, strict=True):
        np.testing.assert_array_equal(output, row * 2)
    assert served.learned().max_rows == 2
    assert served.learned().decisions.batches > 0


async def test_options_of_batching_reach_the_batcher(tmp_path: Path, load: Load) -> None:
    options = "queue_delay_s: 0.02\npreferred_rows: [3, 2]\nbuckets: [8, 4]\nwarmup_s: 0\nbatched: true"
    put(tmp_path, builders.identity, "m", options=options)
    served = (await load()).find("m", "")
    assert served.learned().max_rows == 8
    row = np.ones((1, 4), np.float32)
    await asyncio.gather(*(submit_to(served, (row,), 1) for _ in range(2)))
    decisions = served.learned().decisions
    assert (decisions.batches, decisions.delayed, decisions.padding_rows) == (1, 0, 2)
    await submit_to(served, (row,), 1)
    assert served.learned().decisions.delayed >= 1


async def test_reload_swaps_when_warm_and_retires_unwanted_versions(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.identity, "m", 1)
    registry = await load()
    old = registry.find("m", "")
    put(tmp_path, builders.unnamed_dims, "m", 2)
    await registry.load("m")
    assert (registry.find("m", "").version, registry.ready_versions("m")) == ("2", [2])
    assert (await double(registry, "m")).tolist() == [[2, 2, 2, 2]]
    with pytest.raises(ServeError, match="stopped accepting"):
        await submit_to(old, (np.ones((1, 4), np.float32),), 1)
    assert refusal(registry, "m", "1").kind is ErrorKind.NOT_FOUND


async def test_old_version_serves_until_the_new_one_is_ready(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.identity, "m", 1)
    registry = await load()
    old = registry.find("m", "")
    put(tmp_path, builders.not_onnx, "m", 2)
    with pytest.raises(ServeError, match="load failed for model 'm': version 2 is at UNAVAILABLE state: ") as caught:
        await registry.load("m")
    assert caught.value.kind is ErrorKind.INTERNAL
    assert registry.find("m", "") is old
    assert [state for state, _ in state_of(registry, "m").values()] == [State.READY, State.FAILED]
    (tmp_path / "m" / "2" / "model.onnx").unlink()
    (tmp_path / "m" / "2").rmdir()
    await registry.load("m")
    assert state_of(registry, "m") == {1: (State.READY, "")}
    assert registry.find("m", "") is old, "nothing of it has changed"


async def test_load_continues_after_its_request_is_cancelled(tmp_path: Path, load: Load) -> None:
    registry = await load()
    put(tmp_path, builders.identity, "m")
    caller = asyncio.create_task(registry.load("m"))
    while not registry.knows("m"):  # noqa: ASYNC110 - there is no event for it, and a turn of the loop is no wait
        await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await registry.load("m")  # waits for the first load
    assert registry.ready_versions("m") == [1]


async def test_fault_after_loading_fails_the_version_and_frees_its_instances(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no properties")

    put(tmp_path, builders.identity, "m", options="instances: 2")
    with monkeypatch.context() as patch:
        patch.setattr("ortserve.registry.load.assembly.describe_properties", fail)
        registry = await load()
    assert state_of(registry, "m") == {1: (State.FAILED, "unexpected error")}
    (fault,) = (record for record in caplog.records if record.exc_info)
    assert vars(fault)["fields"] == {"model": "m", "version": "1"}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("run m/1")]
    await registry.load("m")
    assert state_of(registry, "m") == {1: (State.READY, "")}


async def test_unload_waits_for_requests_of_an_earlier_load(tmp_path: Path, load: Load) -> None:
    put(tmp_path, lambda path: builders.slow(path, steps=6000), "m", options="max_rows: 1\nwarmup_s: 0")
    registry = await load()
    served = registry.find("m", "")
    rows = np.zeros((1, 4), np.float32)
    running = [submit_to(served, (rows,), 1) for _ in range(25)]
    (tmp_path / "m" / "model.yaml").write_text("max_rows: 2\nwarmup_s: 0")
    await registry.load("m")
    assert not all(output.done() for output in running), "else nothing is tried here"
    await registry.unload("m")
    assert all(output.done() for output in running)


async def test_every_change_is_reported_after_it_happened(tmp_path: Path, load: Load) -> None:
    registry = await load()
    seen: list[tuple[State, str] | None] = []
    registry.on_change = lambda: seen.append(state_of(registry, "m").get(1))
    put(tmp_path, builders.identity, "m")
    await registry.load("m")
    await registry.unload("m")
    states = [state[0] for state in dict.fromkeys(state for state in seen if state is not None)]
    assert states == [State.LOADING, State.WARMING, State.READY, State.DRAINING, State.GONE]


@pytest.mark.parametrize("is_due", [False, True])
async def test_poll_retries_failed_loads_from_time_to_time(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch, is_due: bool
) -> None:
    monkeypatch.setattr(changes, "_FIRST_RETRY_S", 0.0 if is_due else 60.0)
    file = tmp_path / "m" / "1" / "model.onnx"
    put(tmp_path, builders.identity, "m")
    (tmp_path / ".link").hardlink_to(file)  # The time of the last change, which nothing can set, then does not count.
    good, stat = file.read_bytes(), file.stat()
    file.write_bytes(bytes(len(good)))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    registry = await load()
    file.write_bytes(good)  # as if the cause of the failure were elsewhere: by its stamp the file is unchanged
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    await registry.poll()
    ((state, _),) = state_of(registry, "m").values()
    assert state is (State.READY if is_due else State.FAILED)
    assert not registry._reconciler._retries.is_due("m", time.monotonic_ns())


async def test_problem_of_a_folder_counts_as_a_load_that_failed(
    tmp_path: Path, load: Load, prometheus: CollectorRegistry
) -> None:
    put(tmp_path, builders.identity, "m")
    registry = await load()
    (tmp_path / "m" / "model.yaml").write_text("max_rows: lots")
    await registry.poll()
    await registry.poll()
    assert state_of(registry, "m")[1][0] is State.READY
    assert prometheus.get_sample_value("ortserve_model_loads_total", {"model": "m", "outcome": "failed"}) == 1


async def test_ensemble_that_contains_itself_is_reported_once_and_not_at_each_poll(
    tmp_path: Path, load: Load, prometheus: CollectorRegistry
) -> None:
    for name, member in (("one", "two"), ("two", "one")):
        members.add_ensemble(tmp_path, name, ["x"], ["y"], [(member, {"x": "x"}, {"y": "y"})])
    registry = await load()
    await registry.poll()
    await registry.poll()
    assert "circular dependency between ensembles" in state_of(registry, "one")[0][1]
    for name in ("one", "two"):
        assert prometheus.get_sample_value("ortserve_model_loads_total", {"model": name, "outcome": "failed"}) == 1


async def test_ensemble_that_changes_with_the_member_of_its_member_uses_the_new_load_of_both(
    tmp_path: Path, load: Load
) -> None:
    put(tmp_path, members.affine, "m")
    members.add_ensemble(tmp_path, "inner", ["x"], ["y"], [("m", {"a": "x"}, {"b": "y"})])
    members.add_ensemble(tmp_path, "outer", ["x"], ["y"], [("inner", {"x": "x"}, {"y": "y"})])
    registry = await load()
    members.affine(tmp_path / "m" / "1" / "model.onnx", 3, 0)
    with (tmp_path / "outer" / "model.yaml").open("a") as file:
        file.write("\nmax_rows: 4")
    await registry.poll()
    inner, outer = registry.find("inner", ""), registry.find("outer", "")
    assert isinstance(inner, ServedEnsemble)
    assert isinstance(outer, ServedEnsemble)
    assert outer.members == (inner,)
    assert inner.members == (registry.find("m", ""),)


async def test_ensemble_that_became_ready_before_its_member_changed_follows_the_member(
    tmp_path: Path, load: Load
) -> None:
    """A change contains both, because the ensemble did not serve when a poll began it; a request loaded it since."""
    put(tmp_path, members.affine, "m")
    members.add_ensemble(tmp_path, "chain", ["x"], ["y"], [("m", {"a": "x"}, {"b": "y"})])
    registry = await load(warmup_s=0, intra_op_threads=1)
    before = registry.find("m", "")
    members.affine(tmp_path / "m" / "1" / "new", 2).replace(tmp_path / "m" / "1" / "model.onnx")
    await registry._reconciler.apply_all(await registry._reader.poll(), forced=())
    chain, member = registry.find("chain", ""), registry.find("m", "")
    assert isinstance(chain, ServedEnsemble)
    assert chain.members == (member,)
    assert member is not before
    await is_reached(lambda: not before.is_held)


@pytest.mark.parametrize("is_called", [False, True])
async def test_ensemble_that_ends_because_a_member_changed_fails_its_load_and_is_tried_again(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch, prometheus: CollectorRegistry, is_called: bool
) -> None:
    """The change of the ensemble loads nothing, because its earlier options are restored; nor does a load by a call."""
    monkeypatch.setattr(changes, "_FIRST_RETRY_S", 0.0)
    put(tmp_path, members.affine, "m")
    options = members.add_ensemble(tmp_path, "chain", ["x"], ["y"], [("m", {"a": "x"}, {"b": "y"})]) / "model.yaml"
    registry = await load(is_polled=True)
    good = options.read_text()
    options.write_text("max_rows: lots")
    await registry.poll()
    options.write_text(good)
    members.sums(tmp_path / "m" / "1" / "model.onnx")
    loads: list[asyncio.Task[None]] = []

    def load_chain(name: str) -> None:
        if name == "m":  # the last call comes when the new member serves, and before the poll reaches the ensemble
            loads.append(asyncio.ensure_future(registry.load("chain")))

    if is_called:
        registry.on_model_change = load_chain
    await registry.poll()
    if is_called:
        await asyncio.wait(loads)
        with pytest.raises(ServeError, match=r"at UNAVAILABLE state: .* non-existing output b in model m"):
            loads[-1].result()
        return
    counted = "ortserve_model_loads_total", {"model": "chain", "outcome": "failed"}
    before = prometheus.get_sample_value(*counted) or 0
    await registry.poll()
    assert prometheus.get_sample_value(*counted) == before + 1


async def test_poll_during_a_load_supersedes_it_once(
    tmp_path: Path, slow_file: Callable[[str], HeldFile], load: Load
) -> None:
    registry = await load(warmup_s=0, intra_op_threads=1)
    file = slow_file("slow")
    loading = await registry.begin_poll()
    await file.wait()
    (tmp_path / "slow.onnx").rename(tmp_path / ".kept")
    for number in range(3):
        builders.unnamed_dims(tmp_path / "slow.onnx")
        os.utime(tmp_path / "slow.onnx", ns=(number, number))
        superseding = await registry.begin_poll()
        unchanged = await registry.begin_poll()
        await asyncio.wait_for(unchanged, 30)
        assert not superseding.done()
    file.release()
    await asyncio.wait_for(asyncio.gather(loading, superseding), 30)
    assert state_of(registry, "slow") == {1: (State.READY, "")}
    assert registry.records_of("slow")[0].source == registry._sources["slow"].versions[1]
    await registry.poll()
    assert state_of(registry, "slow") == {1: (State.READY, "")}


async def test_backup_that_links_the_files_of_a_model_reloads_nothing(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.identity, "m", options="version_policy: {all: true}")
    registry = await load()
    serving = registry.find("m", "1")
    backup, file = tmp_path.with_suffix(".backup"), tmp_path / "m" / "1" / "model.onnx"
    for _ in range(2):
        backup.hardlink_to(file)
        await registry.poll()
        backup.unlink()
        await registry.poll()
    assert registry.find("m", "1") is serving
    put(tmp_path, builders.identity, "m", 2)
    await registry.poll()
    assert registry.find("m", "1") is serving
    file.chmod(0o600)
    await registry.poll()
    assert registry.find("m", "1") is not serving


@pytest.mark.parametrize("is_polled", [False, True])
async def test_client_of_a_model_that_failed_is_to_retry_only_if_a_load_may_follow(
    tmp_path: Path, load: Load, is_polled: bool
) -> None:
    builders.not_onnx(tmp_path / "m.onnx")
    registry = await load(is_polled=is_polled)
    assert refusal(registry, "m").retry_after_s == (1 if is_polled else None)
    builders.identity(tmp_path / "m.onnx")
    with held_file(tmp_path / "m.onnx") as file:
        loading = asyncio.create_task(registry.load("m"))
        await file.wait()
        assert refusal(registry, "m").retry_after_s == 1
    await loading


@pytest.mark.parametrize("name", ["m", "sent", "folder"])
async def test_load_that_cannot_begin_cancels_no_other_one(
    tmp_path: Path, load: Load, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is a file, was sent by a client before, or has a folder of its own."""
    registry = await load()
    is_newer, has_judged = registry._reader.is_newer, asyncio.Event()

    async def judge(*arguments: Any) -> bool:
        try:
            return await is_newer(*arguments)
        finally:
            has_judged.set()  # The load goes on in the same step.

    builders.identity(tmp_path / "m.onnx")
    content = (tmp_path / "m.onnx").read_bytes()
    put(tmp_path, builders.identity, "folder")
    is_folder = name == "folder"
    with held_file(tmp_path / "folder" / "1" / "model.onnx" if is_folder else tmp_path / "m.onnx") as file:
        held = asyncio.create_task(registry.load(name if is_folder else "m"))
        await file.wait()
        first, reason = held, "nonsense: unknown key" if is_folder else "no file of a version was sent"
        if is_folder:
            (tmp_path / name / "model.yaml").write_text("nonsense: 1")
        if name == "sent":  # waits for its turn
            registry._loader.slots._free = 0
            first = asyncio.create_task(registry.load(name, config="{}", files={"file:1/model.onnx": content}))
            reason = "it is in no repository"
            while not registry._versions.is_loading(name):  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.001)
        files = {"file:model.onnx": content} if name == "m" else {}
        monkeypatch.setattr(registry._reader, "is_newer", judge)
        second = asyncio.create_task(registry.load(name, config=None if is_folder else "{}", files=files))
        await asyncio.wait_for(has_judged.wait(), 30)
    with pytest.raises(ServeError, match=reason):
        await asyncio.wait_for(second, 30)
    await asyncio.wait_for(first, 30)
    await asyncio.wait_for(held, 30)
    assert registry.ready_versions(name) == [1]


async def test_poll_that_finds_wrong_options_cancels_no_load(tmp_path: Path, load: Load) -> None:
    registry = await load(is_polled=True)
    put(tmp_path, builders.identity, "m")
    with held_file(tmp_path / "m" / "1" / "model.onnx") as file:
        first = await registry.begin_poll()
        await file.wait()
        (tmp_path / "m" / "model.yaml").write_text("nonsense: 1")
        second = await registry.begin_poll()
        await asyncio.sleep(0)  # begins the changes
    await asyncio.wait_for(asyncio.gather(first, second), 30)
    assert state_of(registry, "m") == {1: (State.READY, "model.yaml: nonsense: unknown key")}


async def test_poll_retries_failed_loads_after_a_change(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.not_onnx, "m")
    put(tmp_path, builders.identity, "other")
    registry = await load()
    (failed,) = [record for record in registry.records() if record.model == "m"]
    other = registry.find("other", "")
    await registry.poll()
    assert failed in list(registry.records())
    builders.identity(tmp_path / "m" / "1" / "model.onnx")
    await registry.poll()
    assert state_of(registry, "m") == {1: (State.READY, "")}
    (tmp_path / "m" / "1" / "model.onnx").unlink()
    await registry.poll()
    ((state, reason),) = state_of(registry, "m").values()
    assert (state, reason) == (State.READY, "version folder 1 has no file model.onnx: it has nothing")
    (tmp_path / "m" / "1").rmdir()
    (tmp_path / "m").rmdir()
    await registry.poll()
    assert state_of(registry, "m") == {1: (State.GONE, "unloaded")}
    assert refusal(registry, "m").kind is ErrorKind.NOT_FOUND
    assert registry.find("other", "") is other


async def test_unreadable_repository_unloads_nothing(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.identity, "m")
    registry = await load()
    away = tmp_path.with_name(f"{tmp_path.name}-away")
    move(tmp_path, away)
    with pytest.raises(ServeError, match="expected a folder of models"):
        await registry.poll()
    assert registry.ready_versions("m") == [1]
    move(away, tmp_path)


async def test_series_restart_with_each_load_and_end_with_the_unload(
    tmp_path: Path, load: Load, prometheus: CollectorRegistry
) -> None:
    put(tmp_path, builders.identity, "m")
    registry = await load()
    name, labels = "ortserve_model_state", {"model": "m", "version": "1", "state": "ready"}
    first = registry.find("m", "").metrics
    put_again = tmp_path / "m" / "1" / "model.onnx"
    put_again.unlink()
    builders.unnamed_dims(put_again)
    await registry.load("m")
    assert registry.find("m", "").metrics is not first
    assert prometheus.get_sample_value(name, labels) == 1
    assert prometheus.get_sample_value("ortserve_model_loads_total", {"model": "m", "outcome": "ok"}) == 2
    await registry.unload("m")
    assert prometheus.get_sample_value(name, labels) is None
    assert prometheus.get_sample_value("ortserve_model_loads_total", {"model": "m", "outcome": "ok"}) is None


@interpreted_only
async def test_unloaded_version_keeps_neither_its_session_nor_its_buffers(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.unnamed_dims, "m")
    registry = await load()
    await double(registry, "m")
    served = registry.find("m", "")
    assert isinstance(served, ServedModel)
    parts: list[object] = [served, served._batcher, *served.loaded.instances]
    kept = [weakref.ref(part) for part in parts]
    del parts
    del served
    await registry.unload("m")
    assert [record.state for record in registry.records()] == [State.GONE]
    ends = time.monotonic() + LONG_S
    while any(ref() for ref in kept):  # a worker thread may still end
        assert time.monotonic() < ends
        await asyncio.sleep(0.01)
        gc.collect()


async def test_counts_of_a_version_outlive_it(tmp_path: Path, load: Load, prometheus: CollectorRegistry) -> None:
    put(tmp_path, builders.unnamed_dims, "m", options="buckets: [4]")
    registry = await load()
    await double(registry, "m")
    labels = {"model": "m", "version": "1"}
    staged = prometheus.get_sample_value("ortserve_staged_elements_total", labels)
    assert staged
    await registry.close()
    assert prometheus.get_sample_value("ortserve_model_state", labels | {"state": "gone"}) == 1
    assert prometheus.get_sample_value("ortserve_staged_elements_total", labels) == staged
    assert prometheus.get_sample_value("ortserve_saturation", labels) is None


@pytest.fixture
def stuck_runs_end() -> Iterator[None]:
    """Wait after the test for abandoned threads; otherwise the interpreter would exit during their runs."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("run long"):
            thread.join(60)


LONG_OPERATOR = "intra_op_threads: 1\nrun_timeout_s: 0.8\nrun_grace_s: 0.2\n"


async def multiply(registry: Registry, size: int) -> float:
    (output,) = await submit_to(registry.find("long", ""), (np.array([size]),), 1, Timing(time.monotonic_ns()))
    return float(output[0])


async def ready_again(registry: Registry, name: str, *, instead_of: object) -> None:
    """Wait until another load of a model answers."""
    for _ in range(600):
        if registry.ready_versions(name) and registry.find(name, "") is not instead_of:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{name} did not become ready again: {state_of(registry, name)}")


@pytest.mark.usefixtures("stuck_runs_end")
async def test_version_with_its_only_instance_stuck_is_unready_until_reloaded(
    load: Load, tmp_path: Path, prometheus: CollectorRegistry
) -> None:
    put(tmp_path, builders.multiplies, "long", options=LONG_OPERATOR)
    registry = await load()
    stuck = registry.find("long", "")
    is_gone = asyncio.Event()
    registry.on_change = lambda: None if registry.ready_versions("long") else is_gone.set()
    with pytest.raises(ServeError, match=r"was terminated after \d\.\d s: its limit is 0\.8 s") as caught:
        await multiply(registry, 4000)
    assert caught.value.kind is ErrorKind.DEADLINE
    await asyncio.wait_for(is_gone.wait(), 30)
    assert refusal(registry, "long").kind is ErrorKind.NOT_READY
    assert refusal(registry, "long").retry_after_s == 1
    await ready_again(registry, "long", instead_of=stuck)
    assert await multiply(registry, 4) == 4
    for outcome in ("terminated", "abandoned"):
        labels = {"model": "long", "outcome": outcome}
        assert prometheus.get_sample_value("ortserve_overdue_batches_total", labels) == 1


@pytest.mark.usefixtures("stuck_runs_end")
async def test_version_with_one_instance_left_serves_until_reloaded(load: Load, tmp_path: Path) -> None:
    put(tmp_path, builders.multiplies, "long", options=f"{LONG_OPERATOR}instances: 2\n")
    registry = await load()
    stuck = registry.find("long", "")
    states: list[bool] = []
    registry.on_change = lambda: states.append(bool(registry.ready_versions("long")))
    with pytest.raises(ServeError, match="was terminated"):
        await multiply(registry, 4000)
    assert await multiply(registry, 3) == 3
    await ready_again(registry, "long", instead_of=stuck)
    assert await multiply(registry, 4) == 4
    assert all(states)


@pytest.mark.usefixtures("stuck_runs_end")
async def test_version_that_cannot_be_reloaded_shows_the_reason(load: Load, tmp_path: Path) -> None:
    put(tmp_path, builders.multiplies, "long", options=LONG_OPERATOR)
    registry = await load()
    builders.not_onnx(tmp_path / "long" / "1" / "model.onnx")
    with pytest.raises(ServeError, match="was terminated"):
        await multiply(registry, 4000)
    for _ in range(600):
        (state, reason) = state_of(registry, "long")[1]
        if "cannot load the model" in reason:
            break
        await asyncio.sleep(0.05)
    assert state is State.FAILED
    assert "cannot load the model" in reason
    assert "cannot load the model" in refusal(registry, "long").message


async def test_version_replacements_are_limited(load: Load, tmp_path: Path) -> None:
    put(tmp_path, builders.identity, "long", options="warmup_s: 0\nbatched: true\n")
    registry = await load()
    for given_up in range(1, MAX_ABANDONED + 2):
        (record,) = registry.records()
        registry._versions._on_abandoned(record, _Stuck(), f"run {given_up} did not end", True)
        if given_up <= MAX_ABANDONED:
            await ready_again(registry, "long", instead_of=record.served)
    await asyncio.sleep(0)
    assert state_of(registry, "long")[1][0] is State.FAILED
    assert "4 runs of the model did not end; restart the server" in refusal(registry, "long").message


async def test_client_is_not_to_retry_after_a_lost_device_because_an_earlier_replacement_failed(
    load: Load, tmp_path: Path
) -> None:
    put(tmp_path, builders.identity, "m")
    registry = await load(warmup_s=0)
    (record,) = registry.records()
    builders.not_onnx(tmp_path / "broken").replace(tmp_path / "m" / "1" / "model.onnx")
    registry._versions._on_abandoned(record, _Stuck(), "its run did not end", False)
    await is_reached(lambda: not registry.is_changing)
    assert state_of(registry, "m")[1][0] is State.READY
    registry._versions._on_lost(record, "the device is lost")
    assert refusal(registry, "m").retry_after_s is None


async def test_version_that_fails_while_its_successor_loads_is_not_loaded_again(load: Load, tmp_path: Path) -> None:
    """The labels of the next version are held, so that its load lasts until the test ends it."""
    put(tmp_path, builders.identity, "m")
    registry = await load(warmup_s=0)
    (record,) = registry.records()
    put(tmp_path, builders.unnamed_dims, "m", 2, options="outputs: {y: {labels: labels.txt}}")
    (tmp_path / "m" / "labels.txt").touch()
    with held_file(tmp_path / "m" / "labels.txt") as file:
        loading = asyncio.ensure_future(registry.load("m"))
        await file.wait()
        registry._versions._on_abandoned(record, _Stuck(), "its run did not end", True)
    await asyncio.wait_for(loading, 30)
    while registry.is_changing:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.01)
    assert state_of(registry, "m") == {2: (State.READY, "")}


async def test_reload_that_fails_after_the_serving_load_did_is_not_logged_as_if_that_still_served(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, builders.identity, "m")
    registry = await load(warmup_s=0)
    (record,) = registry.records()
    (tmp_path / "m" / "model.yaml").write_text("outputs: {y: {labels: labels.txt}}")
    (tmp_path / "m" / "labels.txt").write_bytes(b"\xff")
    with held_file(tmp_path / "m" / "labels.txt") as file:
        loading = asyncio.ensure_future(registry.load("m"))
        await file.wait()
        registry._versions._on_abandoned(record, _Stuck(), "its run did not end", True)
    with pytest.raises(ServeError, match="expected text in UTF-8"):
        await asyncio.wait_for(loading, 30)
    assert "model cannot be served" in caplog.messages
    await ready_again(registry, "m", instead_of=record.served)


class _Stuck:
    """A runner with a run that does not end."""

    is_running = True

    def run(self, batch: Batch) -> BatchResult:
        raise AssertionError

    def start(self, batch: Batch, done: BatchDone) -> None:
        raise AssertionError

    def terminate(self, batch: Batch) -> None:
        raise AssertionError

    def abandon(self) -> None:
        raise AssertionError


async def test_unload_ends_a_load_under_way(tmp_path: Path, load: Load) -> None:
    registry = await load(warmup_s=0, intra_op_threads=1)
    with held_file(builders.identity(tmp_path / "m.onnx")) as file:
        loading = asyncio.ensure_future(registry.load("m"))
        await file.wait()
        unloading = asyncio.ensure_future(registry.unload("m"))
        for _ in range(3):
            await asyncio.sleep(0)
    with pytest.raises(ServeError, match="its load was cancelled: the model is unloaded"):
        await asyncio.wait_for(loading, 30)
    await asyncio.wait_for(unloading, 30)
    assert refusal(registry, "m").kind is ErrorKind.NOT_FOUND


async def test_load_with_an_invalid_configuration_ends_no_load_under_way(tmp_path: Path, load: Load) -> None:
    registry = await load(warmup_s=0, intra_op_threads=1)
    with held_file(builders.identity(tmp_path / "m.onnx")) as file:
        loading = asyncio.ensure_future(registry.load("m"))
        await file.wait()
        invalid = asyncio.ensure_future(registry.load("m", config="{max_batch_size"))
        while registry._changes.lock("m")._waiters is None:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
    await asyncio.wait_for(loading, 30)
    with pytest.raises(ServeError, match="failed to load 'm', failed to poll from model repository"):
        await asyncio.wait_for(invalid, 30)
    assert state_of(registry, "m") == {1: (State.READY, "")}


async def test_unload_ends_a_newer_load_that_still_compares_the_files(tmp_path: Path, load: Load) -> None:
    registry = await load()
    put(tmp_path, members.affine, "m")
    with held_file(tmp_path / "m" / "1" / "model.onnx") as file:
        loads = [asyncio.create_task(registry.load("m"))]
        await file.wait()
        loads.append(asyncio.create_task(registry.load("m")))
        unloading = asyncio.create_task(registry.unload("m"))  # begins in the turn in which the second load does
        while not registry.records_of("m")[0].cancelled_because:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
    await asyncio.wait_for(unloading, LONG_S)
    for error in await asyncio.wait_for(asyncio.gather(*loads, return_exceptions=True), LONG_S):
        assert "the model is unloaded" in str(error)
    assert state_of(registry, "m") == {}


async def test_unload_ends_the_load_of_an_ensemble_that_waits_for_a_member(tmp_path: Path, load: Load) -> None:
    registry = await load()
    put(tmp_path, members.affine, "m")
    members.add_ensemble(tmp_path, "chain", ["x"], ["y"], [("m", {"a": "x"}, {"b": "y"})])
    with held_file(tmp_path / "m" / "1" / "model.onnx") as file:
        loading = asyncio.create_task(registry.load("chain"))
        await file.wait()
        await asyncio.wait_for(registry.unload("chain"), LONG_S)
        with pytest.raises(ServeError, match="failed to load 'chain', its load was cancelled: the model is unloaded"):
            await asyncio.wait_for(loading, LONG_S)
        assert state_of(registry, "m")[1][0] is State.LOADING
    await is_reached(lambda: state_of(registry, "m") == {1: (State.READY, "")})
    assert state_of(registry, "chain") == {}
    await registry.load("chain")
    assert state_of(registry, "chain") == {1: (State.READY, "")}


async def test_measured_request_shares_no_batch_with_those_of_callers(tmp_path: Path, load: Load) -> None:
    """Otherwise a busy version could not be compared with its successor, which would pass the speed gate unseen."""
    put(tmp_path, partial(builders.heavy, steps=20, width=512), "m")
    registry = await load(intra_op_threads=1)
    served = registry.find("m", "")
    assert isinstance(served, ServedModel)
    requests = [InflightRequest(Timing(time.monotonic_ns()), (np.ones((1, 64), np.float32),), 1) for _ in range(9)]
    for number, request in enumerate(requests):
        submit = served.submit_own if number == 4 else served.submit
        submit(request, served.terms(time.monotonic_ns()))
    await asyncio.gather(*requests)
    rows = [request.timing.batch_rows for request in requests]
    assert rows.pop(4) == 1
    assert max(rows) > 1


@pytest.mark.parametrize(
    ("pipe", "reason"),
    [
        ("m.onnx", f"{FAILED_1}m.onnx: expected"),
        ("m/1/model.onnx", f"{FAILED_1}version folder 1: model.onnx: expected"),
        ("m/1/weights", f"{FAILED_1}weights: expected"),
        ("m/1/golden/golden.yaml", f"{FAILED_1}golden: golden.yaml: cannot be read: expected"),
        ("m/1/golden/a.npz", f"{FAILED_1}golden: a.npz: expected a file written by numpy.savez, got: expected"),
        ("m/ops.so", f"{FAILED_1}ops.so: expected"),
        ("m/labels.txt", f"{FAILED_1}labels of output 'y': 'labels.txt' cannot be read: expected"),
        ("m/warmup/row", f"{FAILED_1}warm-up sample '0': input 'x': 'warmup/row' cannot be read: expected"),
        ("m/config.pbtxt", "failed to load 'm', failed to poll from model repository: config.pbtxt: expected"),
    ],
)
async def test_pipe_in_place_of_a_file_fails_its_model_and_is_not_awaited(
    tmp_path: Path, load: Load, pipe: str, reason: str
) -> None:
    file = tmp_path / pipe
    options = {"ops.so": "session: {operator_libraries: [ops.so]}", "labels.txt": "outputs: {y: {labels: labels.txt}}"}
    options["row"] = "warmup_samples: [{inputs: {x: {file: row}}}]"
    if pipe != "m.onnx":
        build = partial(builders.external_weights, location="weights") if file.name == "weights" else builders.identity
        put(tmp_path, build, "m", options=options.get(file.name, ""))
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    registry = await load(warmup_s=0, intra_op_threads=1)
    with pytest.raises(ServeError, match=f"{reason} a file, got something else"):
        await asyncio.wait_for(registry.load("m"), 30)


async def test_failed_load_with_a_configuration_of_a_client_changes_no_label_and_no_rollout(
    tmp_path: Path, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests without a version would be answered by the highest one from then on."""
    put(tmp_path, builders.identity, "m", 1)
    put(
        tmp_path, builders.identity, "m", 2, "version_policy: {all: true}\nlabels: {stable: 1}\nrollout: {candidate: 2}"
    )
    registry = await load()
    caplog.clear()
    with pytest.raises(ServeError, match="unexpected inference input 'z'"):
        await registry.load("m", config='{"input": [{"name": "z", "data_type": "TYPE_FP32", "dims": [4]}]}')
    assert registry.labels("m") == {"stable": 1}
    assert registry.find("m", "").version == "1"
    assert registry.rollout("m") is not None
    assert "labels changed" not in caplog.text, "not even during the load"


async def test_load_with_a_configuration_of_a_client_that_fails_for_one_version_changes_no_label(
    tmp_path: Path, load: Load
) -> None:
    options = "version_policy: {all: true}\nlabels: {stable: 1}\nrollout: {candidate: 2}"
    put(tmp_path, builders.identity, "m", 1)
    put(tmp_path, builders.identity, "m", 2, options)
    registry = await load()
    (tmp_path / "m" / "2" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ServeError, match="version 2 is at UNAVAILABLE state"):
        await registry.load("m", config='{"version_policy": {"all": {}}}')
    assert registry.labels("m") == {"stable": 1}
    assert registry.find("m", "").version == "1"
    assert registry.rollout("m") is not None
    builders.identity(tmp_path / "m" / "2" / "model.onnx")
    await registry.load("m", config='{"version_policy": {"all": {}}}')
    assert registry.labels("m") == {}
    assert registry.find("m", "").version == "2"


@pytest.mark.parametrize("held", ["model.onnx", "labels.txt", "ensemble"])
async def test_load_whose_file_does_not_answer_is_given_up_and_delays_no_other(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    monkeypatch.setattr(version_loader, "cpu_budget", lambda: 1)
    monkeypatch.setattr(version_loader, "_SILENCE_S", 0.2)
    put(tmp_path, builders.identity, "other")
    registry = await load(warmup_s=0, intra_op_threads=1)
    if held == "ensemble":
        members.add_ensemble(tmp_path, "m", ["x"], ["y"], [("other", {"x": "x"}, {"y": "y"})])
        options = (tmp_path / "m" / "model.yaml").read_text()
        (tmp_path / "m" / "model.yaml").write_text(options.replace("y: {", "y: {labels: labels.txt, "))
    else:
        put(tmp_path, builders.identity, "m", options="outputs: {y: {labels: labels.txt}}")
    file = tmp_path / "m" / "1" / held if held == "model.onnx" else tmp_path / "m" / "labels.txt"
    (tmp_path / "m" / "labels.txt").touch()
    reason = f"{file.name} has not answered for 0.2 s"
    with held_file(file) as hold:
        with pytest.raises(ServeError, match=f"{FAILED_1}{reason}"):
            await asyncio.wait_for(registry.load("m"), 30)
        assert hold.is_awaited
        assert state_of(registry, "m") == {1: (State.FAILED, reason)}
        put(tmp_path, builders.unnamed_dims, "next")
        await asyncio.wait_for(registry.load("next"), 30)
        assert registry._room._ledger._loading == []
    await registry.load("m")
    assert registry.ready_versions("m") == [1]


async def test_model_that_was_opened_before_its_load_was_given_up_is_closed(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_loader, "_SILENCE_S", 0.2)
    find_silent = VersionLoader._find_silent

    async def find_after_the_model_is_open(loader: VersionLoader, *load: Any) -> str:
        return await find_silent(loader, *load) if is_open("m") else ""

    monkeypatch.setattr(VersionLoader, "_find_silent", find_after_the_model_is_open)
    registry = await load(warmup_s=0, intra_op_threads=1)
    close, is_unmeasured = LoadedModel.close, []

    def close_while_no_load_is_measured(loaded: LoadedModel) -> None:
        is_unmeasured.append(bool(registry._room._ledger._freeing))
        close(loaded)

    monkeypatch.setattr(LoadedModel, "close", close_while_no_load_is_measured)
    put(tmp_path, builders.identity, "m")
    provenance = tmp_path / "m" / "1" / "provenance.json"
    provenance.write_text("{}")
    with held_file(provenance):
        with pytest.raises(ServeError, match=r"provenance.json has not answered"):
            await asyncio.wait_for(registry.load("m"), 30)
        assert is_open("m")
    await is_reached(lambda: not is_open("m"))
    assert is_unmeasured == [True]


@interpreted_only
@pytest.mark.parametrize("because", ["the server stops", "a file does not answer"])
async def test_load_of_an_ensemble_that_ends_early_loses_no_error(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch, because: str
) -> None:
    """The error would be logged as one that was never retrieved, whenever the task is collected."""
    if because == "a file does not answer":
        monkeypatch.setattr(version_loader, "_SILENCE_S", 0.05)
    lost: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    closed = asyncio.Event()
    close = ServedEnsemble.close

    async def fail_to_close(served: ServedEnsemble) -> None:
        await close(served)
        closed.set()
        raise RuntimeError

    monkeypatch.setattr(ServedEnsemble, "close", fail_to_close)
    put(tmp_path, builders.identity, "member")
    registry = await load(warmup_s=0, intra_op_threads=1)
    members.add_ensemble(tmp_path, "m", ["x"], ["y"], [("member", {"x": "x"}, {"y": "y"})])
    golden = tmp_path / "m" / "1" / "golden"
    golden.mkdir()
    arrays: dict[str, Any] = {"input.x": np.ones((1, 4), np.float32), "output.y": np.ones((1, 4), np.float32)}
    np.savez(golden / "a.npz", **arrays)
    with held_file(golden / "a.npz") as file:
        loading = asyncio.ensure_future(registry.load("m"))
        await file.wait()
        if because == "the server stops":
            await asyncio.wait_for(registry.close(), 30)
            assert closed.is_set()
        await asyncio.wait({loading}, timeout=30)
        assert loading.cancelled() or loading.exception() is not None
        await asyncio.wait_for(closed.wait(), 30)
    del loading
    await asyncio.sleep(0)
    gc.collect()
    assert lost == []


async def test_load_is_not_given_up_because_no_thread_is_free_to_read_its_files(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_loader, "_SILENCE_S", 0.05)
    registry = await load(warmup_s=0, intra_op_threads=1)
    registry._loader.close()
    pool = registry._loader._threads = ThreadPool(1)
    put(tmp_path, builders.identity, "m")
    with held_file(tmp_path / "m" / "1" / "model.onnx") as file:
        loading = asyncio.ensure_future(registry.load("m"))
        await file.wait()
        await is_reached(lambda: loading.done() or pool._work_queue.qsize() > 1)
    await asyncio.wait_for(loading, 30)
    assert registry.ready_versions("m") == [1]


def is_open(name: str) -> bool:
    """Whether a version of a model has an instance."""
    return any(thread.name.startswith(f"run {name}/") for thread in threading.enumerate())


async def test_load_fails_if_the_model_file_is_replaced_meanwhile(tmp_path: Path, load: Load) -> None:
    """The graph was read before, so that the rows of the new model would run together without a proof."""
    registry = await load(warmup_s=0.05, intra_op_threads=1)
    put(tmp_path, builders.identity, "m", options="outputs: {y: {labels: .labels}}")
    (tmp_path / "m" / ".labels").touch()
    with held_file(tmp_path / "m" / ".labels") as file:
        loading = asyncio.ensure_future(registry.load("m"))
        await file.wait()  # the load, which has read the graph, reads labels
        builders.row_mixer(tmp_path / "m" / "1" / "model.onnx")
    with pytest.raises(ServeError, match=r"model.onnx changed while it was loaded: expected files that stay"):
        await asyncio.wait_for(loading, 30)
    await registry.load("m")
    assert registry.find("m", "").properties["batching"].startswith("not batched")


async def test_model_is_closed_if_the_system_cannot_tell_whether_a_file_has_changed(tmp_path: Path, load: Load) -> None:
    registry = await load(warmup_s=0, intra_op_threads=1)
    put(tmp_path, builders.identity, "m", options="outputs: {y: {labels: .labels}}")
    (tmp_path / "m" / ".labels").touch()
    note = tmp_path / "m" / "1" / "note"
    note.touch()
    with held_file(tmp_path / "m" / ".labels") as file:
        loading = asyncio.ensure_future(registry.load("m"))
        await file.wait()
        note.unlink()
        note.symlink_to("n" * 300)  # no file system has names of this length
    with pytest.raises(ServeError, match="unexpected error"):
        await asyncio.wait_for(loading, 30)
    assert not is_open("m")


@pytest.mark.parametrize("ending", ["drained", "too slow", "changed"])
async def test_measurement_of_a_load_waits_while_the_memory_of_another_one_is_freed(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    is_freed, may_end = threading.Event(), threading.Event()
    close = LoadedModel.close

    def close_slowly(loaded: LoadedModel) -> None:
        close(loaded)
        is_freed.set()
        assert may_end.wait(LONG_S)

    async def reject(*_: object) -> None:
        raise invalid_input("too slow")

    monkeypatch.setattr(LoadedModel, "close", close_slowly)
    if ending == "too slow":
        monkeypatch.setattr(version_loader, "check_speed", reject)
    if ending == "changed":
        monkeypatch.setattr(version_loader, "watch_files", lambda _: lambda: "model.onnx")
    registry = await load(warmup_s=0, intra_op_threads=1)
    put(tmp_path, builders.identity, "m")
    leaving: list[asyncio.Future[None]] = [asyncio.ensure_future(registry.load("m"))]
    if ending == "drained":
        await leaving[0]
        leaving.append(asyncio.ensure_future(registry.unload("m")))
    ledger = registry._loader._ledger
    coming = ledger.reserve(1, 1)
    assert await asyncio.to_thread(is_freed.wait, LONG_S)
    beginning = asyncio.ensure_future(asyncio.to_thread(ledger.begin, coming))
    has_begun, _ = await asyncio.wait({beginning}, timeout=0.1)
    may_end.set()
    await beginning
    assert not has_begun
    await asyncio.gather(*leaving, return_exceptions=True)
    assert ledger.total_bytes == coming.nbytes
    ledger.release(coming)


async def test_model_on_demand_is_loaded_once_evicted_and_loaded_again(
    tmp_path: Path, load: Load, prometheus: CollectorRegistry
) -> None:
    put(tmp_path, builders.identity, "m", options="load_policy: on_demand")
    registry = await load()
    assert state_of(registry, "m") == {1: (State.GONE, ON_DEMAND)}
    error = refusal(registry, "m")
    assert (type(error), error.kind) == (NotInMemoryError, ErrorKind.NOT_READY)
    served = await asyncio.gather(*(registry.wait_for("m", "") for _ in range(3)))
    assert len(set(map(id, served))) == 1
    registry._draining.evict("m")
    assert (await registry.wait_for("m", "1")) is not served[0]
    labels = {"model": "m", "outcome": "ok"}
    assert prometheus.get_sample_value("ortserve_model_loads_total", labels) == 2
    await registry.unload("m")
    assert refusal(registry, "m").kind is ErrorKind.NOT_FOUND
    with pytest.raises(ServeError, match="it was unloaded"):
        await registry.wait_for("m", "")


@pytest.mark.parametrize("is_polled", [False, True])
async def test_request_waits_for_a_model_whose_files_change_during_a_load(
    tmp_path: Path, load: Load, is_polled: bool
) -> None:
    put(tmp_path, builders.identity, "m", options="load_policy: on_demand")
    registry = await load(is_polled=is_polled, warmup_s=0, intra_op_threads=1)
    path = tmp_path / "m" / "1" / "model.onnx"
    with held_file(path) as file:
        waiting = asyncio.ensure_future(registry.wait_for("m", ""))
        await file.wait()
        builders.identity(tmp_path / "newer")
        (tmp_path / "newer").replace(path)
    assert (await asyncio.wait_for(waiting, 30)).version == "1"


async def test_request_does_not_wait_for_a_model_whose_files_change_during_each_load(
    tmp_path: Path, load: Load
) -> None:
    put(tmp_path, builders.identity, "m", options="load_policy: on_demand")
    registry = await load(is_polled=True, warmup_s=0, intra_op_threads=1)
    path = tmp_path / "m" / "1" / "model.onnx"
    file = HeldFile(path)
    waiting = asyncio.ensure_future(registry.wait_for("m", ""))
    for _ in range(20):  # a change may load the newer file before the load on demand does
        opened = asyncio.ensure_future(file.wait())
        await asyncio.wait({opened, waiting}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if waiting.done():
            break
        before, file = file, HeldFile(builders.identity(tmp_path / "newer"))
        (tmp_path / "newer").replace(path)
        await registry.begin_poll()
        before.release()
    try:
        with pytest.raises(ServeError, match="load failed for model 'm': newer changes superseded 4 loads"):
            await waiting
    finally:
        file.release()
    assert (await registry.wait_for("m", "")).version == "1"


async def test_label_of_a_model_on_demand_is_known_before_its_first_load(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.identity, "m", version=2)
    put(tmp_path, builders.identity, "m", options="{load_policy: on_demand, labels: {old: 1}}")
    registry = await load()
    assert (await registry.wait_for("m", "old")).version == "1"
    with pytest.raises(ServeError, match="version nosuch is not found"):
        await registry.wait_for("m", "nosuch")


async def test_changed_model_on_demand_is_not_loaded_before_it_is_asked_for(tmp_path: Path, load: Load) -> None:
    put(tmp_path, builders.identity, "m", options="load_policy: on_demand")
    registry = await load()
    put(tmp_path, builders.identity, "m", version=2)
    await registry.poll()
    assert state_of(registry, "m") == {2: (State.GONE, ON_DEMAND)}
    assert (await registry.wait_for("m", "")).version == "2"


async def test_configuration_with_thousands_of_options_without_effect_logs_a_few_lines(
    tmp_path: Path, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, builders.identity, "m")
    registry = await load()
    parameters = {f"unknown{number}": {"string_value": "x"} for number in range(1000)}
    await registry.load("m", config=json.dumps({"parameters": parameters}))
    messages = Counter(record.message for record in caplog.records)
    assert (messages["option has no effect"], messages["further options have no effect"]) == (16, 1)
    (rest,) = [record for record in caplog.records if record.message == "further options have no effect"]
    assert rest.__dict__["fields"] == {"model": "m", "options": 984}
