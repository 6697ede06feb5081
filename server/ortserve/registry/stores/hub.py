"""Reads a model from a hub with Hugging Face's HTTP interface. Only this module imports huggingface_hub.

``hf://OWNER/MODEL@REVISION`` is a repository of one model, named ``MODEL``. Its version 1 is the file ``model.onnx`` or
``onnx/model.onnx`` of the revision, with its weights. A revision that has the layout of a repository,
``<model>/<version>/model.onnx``, is served as a repository.
"""

import hashlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import closing, contextmanager, suppress
from typing import Any, Final
from urllib.parse import quote

from ortserve.config.repository_url import RepositoryUrl
from ortserve.core.thread_pool import ThreadPool
from ortserve.registry.repository.model_files import MODEL_FILE, OPTIONS_FILE, TRITON_OPTIONS_FILE
from ortserve.registry.stores.object_store import redact
from ortserve.registry.stores.objects import (
    FILES_SIDE_BY_SIDE,
    LISTING_TIMEOUTS,
    MAX_OBJECTS,
    StoredObject,
    StoreError,
    unless_slow,
)

_FOLDERS: Final = ("", "onnx/")
_VERSIONED: Final = re.compile(r"[^/]+/[1-9][0-9]*/.+\.onnx")
_GIT_DIGEST: Final = re.compile("[0-9a-f]{40}")
_WEIGHTS: Final = re.compile(r"[^/]*(\.onnx_data(_\d+)?|\.data|\.bin|\.pb|\.weights)")


class HubStore:
    """The files of one revision as the objects of a repository."""

    def __init__(self, url: RepositoryUrl, timeout_s: float) -> None:
        """Connect to nothing yet. ``HF_ENDPOINT``, ``HF_TOKEN`` and the hub's own login choose host and account."""
        from huggingface_hub import constants

        self._endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        self._url = url
        self._timeout_s = timeout_s
        self._opening_threads = ThreadPool(FILES_SIDE_BY_SIDE + 1, "hub answers")  # and one for a listing
        self._idle_clients: list[_Client] = []
        """Clients whose last answer was read whole. Their connections serve further answers."""
        self._commit = ""
        self._paths: dict[str, str] = {}
        """Paths on the hub, by path in the repository."""

    def list(self, known: Mapping[str, StoredObject]) -> list[StoredObject]:
        from huggingface_hub import ModelInfo
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

        url = f"{self._endpoint}/api/models/{self._url.host}/revision/{quote(self._url.path, safe='')}?blobs=true"
        try:
            with self._answer(url, is_listing=True) as answer:
                hf_raise_for_status(answer)
                info = ModelInfo(**answer.json())  # type: ignore[no-untyped-call]
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - the library has errors of many classes
            raise _explain(error) from None
        siblings = info.siblings or []
        if len(siblings) > MAX_OBJECTS:
            raise StoreError(f"expected at most {MAX_OBJECTS} files, got more", is_final=True)
        self._commit = info.sha or self._url.path
        self._paths = plan_paths(self._url.host.partition("/")[2], [file.rfilename for file in siblings])
        files = {file.rfilename: file for file in siblings}
        found = []
        for path, name in self._paths.items():
            file = files[name]
            digest = file.lfs.sha256 if file.lfs is not None else ""
            found.append(StoredObject(path, file.size or 0, digest or file.blob_id or f"of {self._commit}", digest))
        return found

    def read(self, found: StoredObject) -> Iterator[bytes]:
        from huggingface_hub import hf_hub_url

        name = self._paths.get(found.path)
        if name is None:
            raise StoreError("the revision no longer has this file", is_final=True)
        digest = hashlib.sha1(b"blob %d\0" % found.size, usedforsecurity=False)  # git's digest of a blob
        url = hf_hub_url(self._url.host, name, revision=self._commit, endpoint=self._endpoint)
        try:
            with self._answer(url) as answer:
                answer.raise_for_status()
                for piece in unless_slow(answer.iter_bytes(), self._timeout_s):
                    digest.update(piece)
                    yield piece
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001
            raise _explain(error) from None
        # The caller checks files that have a SHA-256 digest. Others must not belong to a revision listed later.
        if not found.sha256 and _GIT_DIGEST.fullmatch(found.tag) and digest.hexdigest() != found.tag:
            raise StoreError(f"expected the git digest {found.tag}, got {digest.hexdigest()}")

    @contextmanager
    def _answer(self, url: str, *, is_listing: bool = False) -> Iterator[Any]:
        """Ask the hub for a content. The context begins with the headers of the answer, for a listing with all of it.

        Both may trickle for days, because the library limits only silence. Each answer has a client of its own
        meanwhile. After an error the client is closed, which would end the other answers of a shared client.

        Raises:
            StoreError: The context did not begin in time.
        """
        limit_s, limit = self._timeout_s, "store_timeout_s"
        if is_listing:
            limit_s, limit = LISTING_TIMEOUTS * limit_s, f"{LISTING_TIMEOUTS} times {limit}"
        try:
            client = self._idle_clients.pop()
        except IndexError:
            client = _Client(self._timeout_s)
        opening = self._opening_threads.submit(client.open, url, is_streamed=not is_listing)
        if wait([opening], limit_s).not_done:
            opening.cancel()
            client.end()
            opening.add_done_callback(lambda _: client.close())
            raise StoreError(f"expected an answer within {limit_s:g} s ({limit})")
        try:
            with closing(opening.result()) as answer:
                yield answer
        except BaseException:
            client.close()
            raise
        self._idle_clients.append(client)

    def settle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle_clients.pop().close()


class _Client:
    """An HTTP client for one answer at a time, which another thread can end while it opens the answer."""

    def __init__(self, timeout_s: float) -> None:
        from huggingface_hub import get_session

        session = get_session()
        self._client = type(session)(event_hooks=session.event_hooks, timeout=timeout_s, follow_redirects=True)
        self._connections: list[socket.socket] = []
        """Connections of the last answer, which may serve the next one."""
        self._opening: list[socket.socket] = []
        """Duplicates of the connections that the request under way may use."""
        self._is_ended = False

    def open(self, url: str, *, is_streamed: bool) -> Any:
        """Ask for a content. Blocks until the headers of the answer are there, or all of it unless ``is_streamed``."""
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        headers = build_hf_headers(library_name="ortserve")  # its client sends the token to no other host
        try:
            for connection in self._connections:
                self._add(connection)
            request = self._client.build_request("GET", url, headers=headers, extensions={"trace": self._observe})
            answer = self._client.send(request, stream=is_streamed)
            streams = [each.extensions["network_stream"] for each in (*answer.history, answer)]
            self._connections = [stream.get_extra_info("socket") for stream in streams]
            return answer
        finally:
            opening, self._opening = self._opening, []
            for duplicate in opening:
                duplicate.close()

    def _observe(self, event: str, info: Mapping[str, Any]) -> None:
        """Called by the library for each step of a request."""
        if event.endswith(".connect_tcp.complete"):  # also of a SOCKS proxy, whose events have another prefix
            self._add(info["return_value"].get_extra_info("socket"))

    def _add(self, connection: socket.socket) -> None:
        if connection.fileno() >= 0:
            self._opening.append(socket.fromfd(connection.fileno(), connection.family, connection.type))
        if self._is_ended:
            self.end()

    def end(self) -> None:
        """Let ``open`` on another thread end with an error.

        Its connections are not closed: OpenSSL would read on, from the next connection of the process that gets the
        same file descriptor.
        """
        self._is_ended = True
        for duplicate in tuple(self._opening):
            with suppress(OSError):  # it is closed already
                duplicate.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections. No other thread may use the client."""
        self._client.close()


def plan_paths(model: str, names: list[str]) -> dict[str, str]:
    """The files of a revision that are served, by path in the repository.

    Raises:
        StoreError: No file can be served.
    """
    if any(_VERSIONED.fullmatch(name) for name in names):
        return {name: name for name in names}
    folder = next((folder for folder in _FOLDERS if folder + MODEL_FILE in names), None)
    if folder is None:
        raise StoreError(f"the revision has neither {MODEL_FILE}, onnx/{MODEL_FILE} nor a repository", is_final=True)
    beside = {name.removeprefix(folder): name for name in names if name.startswith(folder)}
    paths = {
        f"{model}/1/{short}": name
        for short, name in beside.items()
        if short == MODEL_FILE or (_WEIGHTS.fullmatch(short) and short.startswith("model"))
    }
    return paths | {f"{model}/{name}": name for name in (OPTIONS_FILE, TRITON_OPTIONS_FILE) if name in names}


def _explain(error: Exception) -> StoreError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = f"{status} " if status else ""
    return StoreError(redact(f"{reason}{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))
