"""The modes of a repository service, and the requests that are valid in each."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from apart import UnavailableError
from hung_folders import hung
from loop_turns import run_counting_turns
from models import builders
from ortserve.codecs.json_text import LoadParameter
from ortserve.config.model import LoadOptions
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry import source_reader
from ortserve.registry.registry import Registry
from ortserve.service.repository import ControlMode, IndexEntry, RepositoryService
from ortserve.telemetry.metrics import Metrics
from servers import LONG_S


@pytest_asyncio.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    """The models ``a`` and ``b``, not loaded yet."""
    for name in ("a", "b"):
        builders.identity(tmp_path / f"{name}.onnx")
    registry = Registry([tmp_path], LoadOptions(warmup_s=0), Metrics(CollectorRegistry()), time.monotonic_ns)
    yield registry
    await registry.close()


@pytest.mark.parametrize(
    ("mode", "names", "ready"),
    [
        ("none", (), ["a", "b"]),
        ("poll", (), ["a", "b"]),
        ("explicit", (), []),
        ("explicit", ("b",), ["b"]),
        ("explicit", ("*",), ["a", "b"]),
    ],
)
async def test_mode_decides_the_models_that_are_loaded_at_the_start(
    registry: Registry, mode: ControlMode, names: tuple[str, ...], ready: list[str]
) -> None:
    service = RepositoryService(registry, mode=mode, load_models=names)
    await service.start()
    assert registry.is_loaded
    assert [entry.name async for entry in service.index(only_ready=True)] == ready
    assert [entry.name async for entry in service.index()] == ["a", "b"]


class CountedName(str):
    """A name that counts comparisons with others."""

    __slots__ = ()
    comparisons = 0

    def __lt__(self, other: str) -> bool:
        CountedName.comparisons += 1
        return super().__lt__(other)


async def test_index_of_many_models_does_not_sort_their_names_anew(registry: Registry) -> None:
    """Sorting 20,000 names that are out of order would take 5 ms of the event loop."""
    names = sorted(CountedName(f"model-{number}") for number in range(1000))

    async def found() -> list[str]:
        return [*names]

    registry.names_in_repositories = found  # type: ignore[misc]
    service = RepositoryService(registry, mode="explicit")
    CountedName.comparisons = 0
    assert [entry.name async for entry in service.index()] == names
    assert CountedName.comparisons < 1100


async def test_missing_model_is_listed_and_does_not_prevent_other_loads(registry: Registry) -> None:
    service = RepositoryService(registry, mode="explicit", load_models=("none", "a"))
    await service.start()
    assert [entry async for entry in service.index()] == [
        IndexEntry("a", "1", "READY"),
        IndexEntry("b"),
        IndexEntry("none", "", "UNAVAILABLE", "it is in no repository"),
    ]


@pytest.mark.parametrize(
    ("name", "parameters", "text"),
    [
        ("", {}, "Model name cannot be empty. Please enter a valid name to deploy."),
        ("../a", {}, "invalid model name '../a', model name must not contain path traversal characters"),
        ("..", {}, "invalid model name '..', model name must not contain path traversal characters"),
        ("a", {"made_up": 1}, "unrecognized load parameter 'made_up'."),
        (
            "a",
            {f"file:1/{number}": b"" for number in range(16_385)},
            "load: expected at most 16384 parameters, got 16385",
        ),
        ("a", {"config": 1}, "parameter 'config': expected JSON text, got int"),
        ("a", {"config": b"{}"}, "parameter 'config': expected JSON text, got bytes"),
        ("a", {"config": "{}", "file:1/x": "y"}, "parameter 'file:1/x': expected bytes, got str"),
    ],
)
async def test_invalid_load_is_rejected(
    registry: Registry, name: str, parameters: dict[str, LoadParameter], text: str
) -> None:
    service = RepositoryService(registry, mode="explicit")
    with pytest.raises(ServeError) as caught:
        await service.load(name, parameters)
    assert (caught.value.kind, caught.value.message) == (ErrorKind.INVALID_INPUT, text)
    assert not registry.knows(name)


async def test_index_of_many_models_leaves_the_loop_to_others(tmp_path: Path) -> None:
    registry = Registry([], LoadOptions(), Metrics(CollectorRegistry()), time.monotonic_ns)
    await registry.load_all({f"m{number}" for number in range(1000)})
    service = RepositoryService(registry, mode="explicit")

    async def list_all() -> list[IndexEntry]:
        return [entry async for entry in service.index()]

    entries, turns = await run_counting_turns(list_all())
    assert len(entries) == 1000
    assert turns >= 4
    await registry.close()


async def test_folder_that_does_not_answer_delays_only_its_own_calls(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder of a server that is gone, such as NFS, blocks each thread that reads it."""
    await registry.load_all({"a"})
    answers = threading.Event()

    def blocked(*_: object) -> list[Any]:
        answers.wait()
        return []

    for read in ("read_repositories", "read_sources"):
        monkeypatch.setattr(source_reader, read, blocked)
    monkeypatch.setattr(source_reader, "_LISTING_S", 0.1)
    monkeypatch.setattr(source_reader, "_REPORT_S", 0.05)
    service = RepositoryService(registry, mode="poll")
    watching = asyncio.create_task(service.watch(0))

    async def list_all() -> list[IndexEntry]:
        return [entry async for entry in service.index()]

    try:
        began_s = time.monotonic()
        callers = 2 * ((os.cpu_count() or 1) + 4)  # more than the threads of the loop
        assert (
            await asyncio.gather(*(list_all() for _ in range(callers))) == [[IndexEntry("a", "1", "READY")]] * callers
        )
        assert await asyncio.to_thread(int) == 0  # the threads of the loop are free
        reports = caplog.messages.count("the folders of the repositories are still being read")
        assert 1 <= reports <= (time.monotonic() - began_s) / 0.05 + 1
        reasons = {record.__dict__["fields"]["reason"] for record in caplog.records if "known" in record.message}
        late = "the folders of the repositories have not been read within 0."
        assert all(reason.startswith(late) for reason in reasons)
    finally:
        answers.set()  # the threads that wait would keep the process
        watching.cancel()


async def test_calls_on_a_folder_that_hangs_fail_and_further_ones_at_once(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await registry.load_all({"a"})
    monkeypatch.setattr(source_reader, "_LISTING_S", 0.1)
    monkeypatch.setattr(source_reader, "_LOAD_S", 0.5)
    service = RepositoryService(registry, mode="explicit")
    no_answer = "failed to load 'b', failed to poll from model repository: the folders of the repositories have not"

    async def list_all() -> list[IndexEntry]:
        return [entry async for entry in service.index()]

    async def load(parameters: Mapping[str, LoadParameter]) -> None:
        with pytest.raises(ServeError, match=f"{no_answer} been read within 0.") as caught:
            await service.load("b", parameters)
        assert caught.value.kind is ErrorKind.INTERNAL

    content = (tmp_path / "a.onnx").read_bytes()
    try:
        with hung(tmp_path):
            await asyncio.gather(*(list_all() for _ in range(8)), load({}), load({"config": "{}"}))
            monkeypatch.setattr(registry._reader._threads, "submit", None)  # no further read begins
            assert await list_all() == [IndexEntry("a", "1", "READY")]
            await load({})
            monkeypatch.undo()
            await service.load("sent", {"config": "{}", "file:1/model.onnx": content})
    except UnavailableError as error:
        pytest.skip(str(error))
    await service.load("b", {})
    assert [entry.name for entry in await list_all()] == ["a", "b", "sent"]


async def test_timeout_that_a_file_system_reports_is_no_folder_that_hangs(registry: Registry) -> None:
    def read() -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    with pytest.raises(TimeoutError, match="Connection timed out"):
        await registry._reader._on_disk(read, within_s=LONG_S)
    assert not registry._reader._late


async def test_load_on_demand_from_a_folder_that_hangs_takes_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders.identity(tmp_path / "a.onnx")
    defaults = LoadOptions(warmup_s=0, load_policy="on_demand")
    registry = Registry([tmp_path], defaults, Metrics(CollectorRegistry()), time.monotonic_ns)
    await registry.load_all()
    monkeypatch.setattr(source_reader, "_LOAD_S", 0.2)
    try:
        with hung(tmp_path):
            for _ in range(2):
                with pytest.raises(
                    ServeError, match="load failed for model 'a': the folders of the repositories have not"
                ):
                    await registry.wait_for("a", "")
        assert not registry.is_changing
        monkeypatch.undo()
        await registry.wait_for("a", "")
    except UnavailableError as error:
        pytest.skip(str(error))
    finally:
        await registry.close()


@pytest.mark.parametrize("mode", ["none", "poll"])
async def test_only_the_explicit_mode_accepts_loads_and_unloads(registry: Registry, mode: ControlMode) -> None:
    service = RepositoryService(registry, mode=mode)
    for change in (service.load("a", {}), service.unload("a", {})):
        with pytest.raises(ServeError, match="explicit model load / unload is not allowed if polling") as caught:
            await change
        assert caught.value.kind is ErrorKind.NOT_READY


async def test_watch_returns_at_once_outside_the_poll_mode(registry: Registry) -> None:
    await RepositoryService(registry, mode="explicit").watch(3600)
    await RepositoryService(registry, mode="none").watch(3600)
