"""Reads S3, Google Cloud Storage and Azure Blob Storage by obstore, which only this module and ``archive`` import.

Credentials come from each provider's own chain: environment variables, web identity tokens, container credentials and
metadata services.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ortserve.config.repository_url import RepositoryUrl
from ortserve.core.thread_pool import ThreadPool
from ortserve.registry.stores.objects import (
    LISTING_TIMEOUTS,
    MAX_OBJECTS,
    StoredObject,
    StoreError,
    path_problem,
    unless_slow,
)
from ortserve.telemetry.logs import log_event

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

logger: Final = logging.getLogger(__name__)

_LIST_OBJECTS: Final = 1000
_MAX_RETRIES: Final = 3
_CONNECT_S: Final = 5.0
_CONTENT_S: Final = 86400.0
"""Time limit of one object of any size. ``store_timeout_s`` ends silent fetches, and ``unless_slow`` slow ones."""
_MAX_REASON: Final = 300
_SECRET_NAMES: Final = re.compile("SECRET|TOKEN|KEY|PASSWORD|SIGNATURE|SAS|CREDENTIAL")
_MIN_SECRET: Final = 4
"""Minimum length of a value to redact. Shorter values might be words of the message."""
_MODIFIED: Final = "modified "
_Objects: TypeAlias = list[StoredObject]
_UNUSABLE: Final = re.compile(r'invalid path: .*?Path "(.*?)"(?: contained|: Encountered)', re.DOTALL)
"""The client's error about a key that it cannot represent: one with an empty part, a part ``.`` or ``..``, or a control
character."""
_AFTER_UNUSABLE: Final = "0"
"""A path after all paths that begin with an empty part, ``.`` or ``..``."""
_BEFORE: Final = "!\"#$%&'()*+,-."
"""The characters before ``_AFTER_UNUSABLE`` with which names of models may begin."""
_LISTINGS_SIDE_BY_SIDE: Final = 8
"""Maximum number of models that are listed at a time, if they are listed one by one."""
_TRUE: Final = ("1", "true", "yes", "on")


def client_config(timeout_s: float, answer_s: float = _CONTENT_S) -> "ClientConfig":
    """Options of the client: time limits of connections and whole answers.

    Plain HTTP is allowed only by a variable of the provider.
    """
    allows_http = any(
        os.environ.get(f"{provider}_ALLOW_HTTP", "").lower() in _TRUE for provider in ("AWS", "AZURE", "GOOGLE")
    )
    return {
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, timeout_s)),
        "read_timeout": timedelta(seconds=timeout_s),
        "timeout": timedelta(seconds=answer_s),
        "user_agent": "ortserve",
        "allow_http": allows_http,
    }


def retry_config(timeout_s: float) -> "RetryConfig":
    """Options for retries, with backoff, of connection errors and of 5xx and 429 answers."""
    return {
        "max_retries": _MAX_RETRIES,
        "retry_timeout": timedelta(seconds=timeout_s),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
    }


class _UnusableKeyError(StoreError):
    """A key that the client cannot represent is among those to list. ``path`` is relative to the repository."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message, is_final=True)
        self.path: Final = path


class ObjectStore:
    """A store of the objects with a prefix in a bucket."""

    def __init__(self, url: RepositoryUrl, timeout_s: float) -> None:
        """Connect to nothing yet.

        Raises:
            StoreError: The environment variables of the client are unusable.
        """
        from obstore.store import from_url

        place = f"{url.scheme}://{url.host}/{url.path}".rstrip("/")
        try:
            self._listings, self._contents = (
                from_url(place, client_options=client_config(timeout_s, answer_s), retry_config=retry_config(timeout_s))
                for answer_s in (LISTING_TIMEOUTS * timeout_s, _CONTENT_S)
            )
        except Exception as error:  # noqa: BLE001 - the library has errors of many classes
            raise explain(error) from None
        self._timeout_s = timeout_s
        self._url = url.text
        self._said = ""
        """What was last logged about how the store is listed."""
        self._prefix = f"{url.path}/" if url.path else ""

    def list(self, known: Mapping[str, StoredObject]) -> _Objects:
        """List all objects. The client fails a page with a key that it cannot represent, such as ``m//1/x``.

        Models are then listed one by one, several at a time, and the key stands for all objects of its model. If the
        name of a model is such a key, stores that can begin a listing after it list what follows. The models that the
        last listing had are listed one by one where that is not possible; new ones are left out.
        """
        try:
            found = self._list()
        except _UnusableKeyError as error:
            return self._list_around(error.path, known)
        self._said = ""
        return found

    def _list_around(self, key: str, known: Mapping[str, StoredObject]) -> _Objects:
        try:
            found = self._list_each_model()
        except _UnusableKeyError as error:
            found = [StoredObject(error.path, 0, "")]
            try:
                found += self._list(offset=_AFTER_UNUSABLE)
                left_out = f"new models whose names begin with {_BEFORE}"
            except _UnusableKeyError:
                if not known:
                    raise
                left_out = "new models"
            listed = {one.entry for one in found}
            found += self._list_known([one for one in known.values() if one.entry not in listed])
            self._warn(f"a key is not the path of a file; {left_out} are left out", key)
        else:
            self._warn("a key is not the path of a file; each listing takes a request for each model", key)
        return found

    def _warn(self, message: str, key: str) -> None:
        """Log how the store is listed: once, not at every poll."""
        if message != self._said:
            self._said = message
            log_event(logger, logging.WARNING, message, repository=self._url, key=repr(key[:200]))

    def _list(self, folder: str | None = None, offset: str | None = None) -> _Objects:
        found: _Objects = []
        with self._explained():
            for chunk in self._listings.list(folder, offset=offset, chunk_size=_LIST_OBJECTS):
                found += map(_object, chunk)
                _check_count(found)
        return found

    def _list_each_model(self) -> _Objects:
        with self._explained():
            result = self._listings.list_with_delimiter()
        found = [_object(meta) for meta in result["objects"]]
        return found + self._list_models(self._list_model, result["common_prefixes"])

    def _list_known(self, known: _Objects) -> _Objects:
        """The present objects of models that the last listing had."""
        entries = {one.entry for one in known if one.entry != one.path and not path_problem(one.entry)}
        files = [one.path for one in known if one.entry == one.path and not path_problem(one.path)]
        return self._list_models(self._list_model, entries) + self._list_models(self._find_file, files)

    def _list_models(self, list_one: Callable[[str], _Objects], names: Iterable[str]) -> _Objects:
        found: _Objects = []
        with ThreadPool(_LISTINGS_SIDE_BY_SIDE, "store listing") as threads:
            for objects in threads.map(list_one, names):
                found += objects
                _check_count(found)
        return found

    def _find_file(self, path: str) -> _Objects:
        with self._explained(), suppress(FileNotFoundError):
            return [_object(self._listings.head(path))]
        return []

    def _list_model(self, folder: str) -> _Objects:
        try:
            return self._list(folder)
        except _UnusableKeyError as error:
            return [StoredObject(error.path, 0, "")]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001
            if unusable := _UNUSABLE.search(str(error)):
                raise _UnusableKeyError(explain(error).message, unusable[1].removeprefix(self._prefix)) from None
            raise explain(error) from None

    def read(self, found: StoredObject) -> Iterator[bytes]:
        return read_object(self._contents, found.path, found.size, found.tag, self._timeout_s)

    def settle(self) -> None:
        pass


def _check_count(found: _Objects) -> None:
    if len(found) > MAX_OBJECTS:
        raise StoreError(f"expected at most {MAX_OBJECTS} objects, got more", is_final=True)


def _object(meta: Mapping[str, Any]) -> StoredObject:
    return StoredObject(meta["path"], meta["size"], tag_of(meta))


def tag_of(meta: Mapping[str, Any]) -> str:
    """The ETag of an object without quotes, or its modification time. Some listings have no quotes around ETags."""
    return (meta["e_tag"] or "").strip('"') or _MODIFIED + meta["last_modified"].isoformat()


def read_object(store: Any, path: str, size: int, tag: str, timeout_s: float) -> Iterator[bytes]:
    """Read the content of an object with this size and tag, in pieces as they arrive.

    Larger pieces would save no time, and a slow object would neither show progress nor end when it is outdated.

    Raises:
        StoreError: The object cannot be read, arrives too slowly, or has changed.
    """
    import obstore

    # If-Match never matches a weak ETag (RFC 9110, 13.1.1).
    is_strong = not tag.startswith((_MODIFIED, "W/"))
    try:
        result = obstore.get(store, path, options={"if_match": f'"{tag}"'} if is_strong else {})
        meta = result.meta
    except Exception as error:  # noqa: BLE001
        raise explain(error) from None
    if (meta["size"], tag_of(meta)) != (size, tag):  # for servers that ignore If-Match
        raise StoreError("it changed while it was fetched", is_final=True)
    try:
        yield from unless_slow(map(bytes, result.stream(min_chunk_size=1)), timeout_s)
    except StoreError:
        raise
    except Exception as error:  # noqa: BLE001
        raise StoreError(f"its content ended early: {explain(error).message}") from None


_CAUSE: Final = re.compile(r'\b(?:error|message): "([^"]+)"|\b(Invalid(?:Certificate|Message)\(\s*\w+)')
"""What the system or TLS says about a connection that failed, in the debugging text of the client's errors."""


def explain(error: Exception) -> StoreError:
    """Convert an error of the client to one line without addresses, queries and values of secret variables.

    The error is final, because the client has already retried.
    """
    from obstore.exceptions import PreconditionError

    if isinstance(error, PreconditionError):
        return StoreError("it changed while it was fetched", is_final=True)
    text = str(error).partition("\n\nDebug source")[0]
    status = re.search(r"status code: (\d{3}[A-Za-z ]*)", text)
    parts = [status[1].strip()] if status else []
    parts += re.findall("<(?:Code|Message)>([^<]*)<", text)
    if not parts:
        parts = [re.sub(r"^.*? - ", "", text.replace("\n", " "))]
        parts += re.findall(r"kind: (Timeout|Connect)\b", str(error))[:1]
        if cause := _CAUSE.search(str(error)):
            parts.append(cause[1] or re.sub(r"\(\s*", ": ", cause[2]))
    return StoreError(redact(": ".join(parts)), is_final=True)


def redact(text: str) -> str:
    """Remove addresses and the values of secret variables from a text, for clients and logs. Returns one line."""
    text = re.sub(r"\S*://\S*", "…", text)
    for name, value in os.environ.items():
        if len(value) >= _MIN_SECRET and _SECRET_NAMES.search(name.upper()):
            text = text.replace(value, "…")
    return "".join(sign if sign.isprintable() else " " for sign in text)[:_MAX_REASON]
