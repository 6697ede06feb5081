"""Reads the sources of models from folders, from stores, or from a client's request."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from ortserve.config.model import LoadOptions
from ortserve.core.thread_pool import ThreadPool
from ortserve.engine.thread_priority import LONGEST_SLICE_NS, set_slice
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.ensemble_sources import members_of
from ortserve.registry.repository.client_model import client_source, read_client_model
from ortserve.registry.repository.model_files import read_repositories
from ortserve.registry.repository.source import ModelSource, read_source, read_sources
from ortserve.registry.stores.mirrors import Mirrors
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

Read = TypeVar("Read")

NOT_POLLED: Final = "failed to poll from model repository"

_READS: Final = 4
"""Maximum number of reads of the repositories at a time. A folder on a file server that does not answer, such as NFS,
blocks the thread that reads it without limit. On threads of their own, reads block no requests."""

_REPORT_S: Final = 10.0
"""Time after which a read is logged, again and again."""

_LISTING_S: Final = 5.0
"""Maximum time that a caller waits for the names of the models in the repositories."""

_LOAD_S: Final = 30.0
"""Maximum time that a load by a client waits for a read of the model's files, up to 10,000 for each version."""


@dataclass(frozen=True, slots=True)
class RequestedLoad:
    """A load by a client.

    Attributes:
        name: Name of the model.
        config: JSON of a configuration that replaces the model's own until the next load; None to use that.
        files: The model's files by ``file:<version>/<file>``, which replace its folder; empty to use that.
    """

    name: str
    config: str | None = None
    files: Mapping[str, bytes | memoryview] = field(default_factory=dict)


class SourceReader:
    """Reads the repositories of a server, and models that clients send. Loop thread only; reads files on threads."""

    def __init__(
        self,
        repositories: Sequence[Path],
        defaults: LoadOptions,
        mirrors: Mirrors | None,
        named_versions: Callable[[str], Collection[int]],
    ) -> None:
        """Read nothing yet.

        ``named_versions`` returns versions of a model that its source includes regardless of its policy, if they exist.
        It is called on any thread. ``mirrors`` synchronize some of the ``repositories`` with stores.
        """
        self._repositories = repositories
        self._defaults = defaults
        self._mirrors = mirrors
        self._folders_lock = nullcontext() if mirrors is None else mirrors.folders_lock
        self._named_versions = named_versions
        self._threads = ThreadPool(_READS, "repositories", set_slice, (LONGEST_SLICE_NS,))
        self._report_due_s = 0.0
        self._late: dict[Future[Any], float] = {}
        """The reads under way that took longer than their callers wait, and when each began."""
        if mirrors is not None:
            mirrors.set_named_versions(named_versions)

    async def names(self) -> list[str]:
        """Names of the models that the repositories contain now, sorted.

        Raises:
            ServeError: invalid_input, if a repository cannot be read; not_ready, if that takes too long.
        """
        found = await self._on_disk(_names, self._repositories, within_s=_LISTING_S)
        return found if self._mirrors is None else sorted({*found, *await self._mirrors.names()})

    async def read_all(
        self, only: Collection[str] | None, on_arrival: Callable[[list[ModelSource]], object]
    ) -> list[ModelSource]:
        """Read the sources of all models, whose current files are first fetched from their stores.

        Args:
            only: Models whose files are fetched, with those of their members; None for all. Others may be missing.
            on_arrival: Called after files have arrived, with the sources of the models whose files are all here.

        Raises:
            ServeError: A repository cannot be read.
        """
        wanted = None if only is None else set(only)
        while True:
            if self._mirrors is not None:
                async with aclosing(self._mirrors.arrivals(wanted)) as arrivals:
                    async for missing in arrivals:
                        on_arrival([source for source in await self._read_folders() if source.name not in missing])
            sources = await self._read_folders()
            if self._mirrors is None or wanted is None or not (more := _other_members(wanted, sources)):
                return sources
            wanted |= more

    async def poll(self) -> list[ModelSource]:
        """Read the sources of all models whose files are on this machine, and begin to fetch changes from stores.

        Raises:
            ServeError: A repository cannot be read.
        """
        if self._mirrors is not None:
            self._mirrors.begin_poll()
        return await self._read_folders()

    async def wait_for_poll(self, interval_s: float) -> None:
        """Wait for the time between two polls, or until files that the last poll began to fetch are there."""
        if self._mirrors is None:
            await asyncio.sleep(interval_s)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._mirrors.wait_for_files(), interval_s)

    async def read(self, name: str) -> ModelSource | None:
        """Read a model from the disk. Returns None if it does not exist, or if a repository cannot be read.

        Raises:
            ServeError: not_ready, if the folders of the repositories do not answer.
        """
        try:
            return await self._on_disk(self._read_source, name, within_s=_LOAD_S)
        except ServeError as error:
            if error.kind is ErrorKind.NOT_READY:
                raise
            return None

    async def is_newer(self, load: RequestedLoad, latest: ModelSource | None) -> bool:
        """Whether a load would read a valid model, with other options or files than those of ``latest``."""
        with suppress(ServeError):
            if load.files:
                return await asyncio.to_thread(self._is_valid, load)
            if load.config is not None:
                return await self._on_disk(self._is_valid, load, within_s=_LOAD_S)
            source = await self.read(load.name)
            return source is not None and not source.problem and source != latest
        return False

    @asynccontextmanager
    async def open(self, load: RequestedLoad) -> AsyncIterator[ModelSource]:
        """Read the current source of the model to load, and fetch it from its store if necessary.

        The files of a client exist until the context exits.

        Raises:
            ServeError: internal, as ``Registry.load``.
        """
        resources = ExitStack()
        find = partial(self._find_source, resources, load)
        try:
            if load.files:  # They need no repository, whose folders may not answer.
                yield await asyncio.to_thread(find)
                return
            if self._mirrors is not None:
                await self._fetch(self._mirrors, load.name, with_all_versions=load.config is not None)
            yield await _for_load(load.name, self._on_disk(find, within_s=_LOAD_S))
        finally:
            await asyncio.to_thread(resources.close)

    async def read_members(self, ensemble: ModelSource) -> dict[str, ModelSource]:
        """Read an ensemble and all models that it contains at any depth, by name. Fetches from stores where necessary.

        Raises:
            ServeError: internal, as ``Registry.load``.
        """
        wanted = {ensemble.name}
        try:
            while True:
                closure = await self._on_disk(self._find_members, ensemble, within_s=_LOAD_S)
                more = _other_members(wanted, closure.values())
                if self._mirrors is None or not more:
                    return closure
                await self._mirrors.sync(more)
                wanted |= more
        except ServeError:
            raise _unreadable(ensemble.name) from None

    def refuse_fetches(self, because: str) -> None:
        """Fetch no files any more, because the server stops."""
        if self._mirrors is not None:
            self._mirrors.refuse(because)

    def refusing_fetches(self, because: str, name: str) -> AbstractContextManager[None]:
        """A context in which no load of a model waits for a store."""
        return nullcontext() if self._mirrors is None else self._mirrors.refusing(because, name)

    async def release(self, name: str) -> None:
        """Release the files of an unloaded model."""
        if self._mirrors is not None:
            await self._mirrors.release(name)

    async def close(self) -> None:
        """Remove the folders of stores. Call it when no model is loaded any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._mirrors is not None:
            await self._mirrors.close()

    async def _on_disk(self, read: Callable[..., Read], *arguments: object, within_s: float | None = None) -> Read:
        """Read files on a thread of the reader. If reads take long, they are logged together, in one line.

        A read that does not end keeps its thread. No read with a time limit begins while an earlier one is that late.

        Args:
            read: The function that reads.
            arguments: Its arguments.
            within_s: Maximum time that the caller waits, or for which an earlier read may not have ended.

        Raises:
            ServeError: not_ready, if the folders do not answer in time.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        if within_s is not None:
            self._late = {late: since_s for late, since_s in self._late.items() if not late.done()}
            if (silent_s := began_s - min(self._late.values(), default=began_s)) >= within_s:
                raise _no_answer(silent_s)
        work = self._threads.submit(partial(read, *arguments))
        reading = asyncio.wrap_future(work)
        ends_s = math.inf if within_s is None else began_s + within_s
        now_s = began_s
        try:
            while not (await asyncio.wait({reading}, timeout=min(_REPORT_S, ends_s - now_s)))[0]:
                if (now_s := loop.time()) >= ends_s:
                    self._late[work] = began_s
                    raise _no_answer(now_s - began_s)
                if now_s >= self._report_due_s:
                    self._report_due_s = now_s + _REPORT_S
                    message = "the folders of the repositories are still being read"
                    log_event(logger, logging.WARNING, message, waited_s=round(now_s - began_s))
            return reading.result()
        finally:
            reading.cancel()

    async def _read_folders(self) -> list[ModelSource]:
        sources = await self._on_disk(self._read_sources)
        return sources if self._mirrors is None else self._mirrors.with_problems(sources)

    def _read_sources(self) -> list[ModelSource]:
        """Read all models. Blocks on the disk."""
        with self._folders_lock:
            return read_sources(self._repositories, self._defaults, self._named_versions)

    async def _fetch(self, mirrors: Mirrors, name: str, *, with_all_versions: bool) -> None:
        if not mirrors.may_have(name) and await _for_load(name, self.read(name)) is not None:
            return  # It is in a folder of the operator, and need not wait for any store.
        try:
            await mirrors.sync([name], with_all_versions=with_all_versions)
        except ServeError as error:
            if error.kind is ErrorKind.CANCELLED:
                raise load_failure(name, f"its load was cancelled: {error.message}") from None
            raise _unreadable(name) from None
        for source in mirrors.with_problems(()):
            if source.name == name:
                raise load_failure(name, f"{NOT_POLLED}: {source.problem}")

    def _read_source(self, name: str) -> ModelSource | None:
        """Read one model, as ``read_source`` does. Blocks on the disk."""
        with self._folders_lock:
            return read_source(name, self._repositories, self._defaults, self._named_versions(name))

    def _find_source(self, resources: ExitStack, load: RequestedLoad) -> ModelSource:
        """Find the source of the model to load. ``resources`` owns a client's files. Blocks on the disk."""
        name = load.name
        try:
            client = read_client_model(name, load.config, load.files, self._defaults)
            if client is not None:
                return resources.enter_context(client_source(client, self._repositories, self._named_versions(name)))
        except ServeError as error:
            raise load_failure(name, f"{NOT_POLLED}: {error.message}") from None
        try:
            source = self._read_source(name)
        except ServeError:
            raise _unreadable(name) from None
        if source is None:
            raise load_failure(name, f"{NOT_POLLED}: no repository has a model of this name")
        return source

    def _is_valid(self, load: RequestedLoad) -> bool:
        """Whether ``_find_source`` finds a source. Blocks on the disk."""
        with suppress(ServeError), ExitStack() as resources:
            self._find_source(resources, load)
            return True
        return False

    def _find_members(self, ensemble: ModelSource) -> dict[str, ModelSource]:
        """Find an ensemble and its members at any depth, by name. Blocks on the disk. Raises ServeError."""
        found: dict[str, ModelSource] = {ensemble.name: ensemble}
        pending = list(members_of(ensemble))
        while pending:
            name = pending.pop()
            if name not in found and (source := self._read_source(name)) is not None:
                found[name] = source
                pending += members_of(source)
        return found


def _no_answer(silent_s: float) -> ServeError:
    message = f"the folders of the repositories have not been read within {silent_s:.3g} s"
    return ServeError(ErrorKind.NOT_READY, message)


async def _for_load(name: str, reading: Awaitable[Read]) -> Read:
    """Wait for a read of a load by a client. Raises ServeError: internal, if the folders do not answer."""
    try:
        return await reading
    except ServeError as error:
        if error.kind is ErrorKind.NOT_READY:
            raise load_failure(name, f"{NOT_POLLED}: {error.message}") from None
        raise


def load_failure(name: str, reason: str) -> ServeError:
    """The error of a load without a version to load. Its first words are Triton's, which clients search for."""
    return ServeError(ErrorKind.INTERNAL, f"failed to load '{name}', {reason}")


def _unreadable(name: str) -> ServeError:
    """The error for an unreadable repository. It does not name the repository, which clients must not learn."""
    return load_failure(name, f"{NOT_POLLED}: a repository cannot be read")


def _other_members(names: Collection[str], sources: Iterable[ModelSource]) -> set[str]:
    """The members of the named models that are not in ``names`` themselves."""
    return {member for source in sources if source.name in names for member in members_of(source)}.difference(names)


def _names(repositories: Sequence[Path]) -> list[str]:
    """The names of all models, sorted. On a thread: thousands of records are freed here, too."""
    return [files.name for files in read_repositories(repositories)]
