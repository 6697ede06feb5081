"""Reads key files at the start, and again while the server runs.

Keys are accepted from files only. A command line or an environment is visible to users that may list processes or
describe a pod, is inherited by child processes and cannot change while the server runs.
"""

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from ortserve.errors import ServeError, invalid_input
from ortserve.paths import is_file, is_folder
from ortserve.service.access import Access, Group, Keyring, digest_of
from ortserve.service.followed_files import FollowedFiles
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_MAX_FILE_BYTES: Final = 64 * 1024
_MAX_KEYS: Final = 64
"""Maximum number of keys of a group: the event loop compares each call's key with all of them."""
_MIN_KEY_BYTES: Final = 16
_MAX_KEY_BYTES: Final = 512
_IS_KEY: Final = re.compile(rb"[A-Za-z0-9\-._~+/]+=*").fullmatch
"""A ``b64token`` (RFC 6750, section 2.1), which every client can send."""


def read_keys(path: Path) -> frozenset[bytes]:
    """Read the keys in a file, or in the files of a folder such as a mounted Kubernetes Secret. Returns their digests.

    Each line holds one key; empty lines and lines that begin with ``#`` are ignored. In a folder, files whose names
    begin with a dot are ignored.

    Raises:
        ServeError: invalid_input. The message contains neither keys nor the path, because an operator may have given a
            key instead of the path.
    """
    digests: set[bytes] = set()
    try:
        for file, name in _files(path):
            with file.open("rb") as opened:
                content = opened.read(_MAX_FILE_BYTES + 1)
            digests.update(_digests(content, name))
    except OSError as error:
        # The message omits the path, which may be a key given by mistake.
        raise invalid_input(f"expected a file of keys, or a folder of such files: {error.strerror}") from None
    if not digests:
        raise invalid_input("expected at least one key, got none")
    if len(digests) > _MAX_KEYS:
        raise invalid_input(f"expected at most {_MAX_KEYS} keys, got {len(digests)}")
    return frozenset(digests)


def _files(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files to read, each with its name for messages."""
    if not is_folder(path):
        yield path, ""
        return
    for file in sorted(path.iterdir()):
        if not file.name.startswith(".") and is_file(file):
            yield file, f"file '{file.name}', "


def _digests(content: bytes, name: str) -> Iterator[bytes]:
    if len(content) > _MAX_FILE_BYTES:
        raise invalid_input(f"{name}expected at most {_MAX_FILE_BYTES} bytes, got more")
    for number, line in enumerate(content.splitlines(), 1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if not (_MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES and _IS_KEY(key)):
            raise invalid_input(
                f"{name}line {number}: expected a key of {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} letters, digits and "
                f"-._~+/, got a key of {len(key)} bytes"
            )
        yield digest_of(key)


class KeyFiles:
    """The keys of each group, from the last valid content of its files that two consecutive checks found."""

    def __init__(self, paths: Mapping[Group, Path]) -> None:
        """Read all files; ``paths`` holds the guarded groups.

        Raises:
            ServeError: invalid_input, naming the option whose file cannot be used.
        """
        self._paths = dict(paths)
        self._digests: dict[Group, frozenset[bytes]] = {}
        for group, path in self._paths.items():
            try:
                self._digests[group] = read_keys(path)
            except ServeError as error:
                raise invalid_input(f"{group}_keys_file: {error.message}") from None

    def keyring(self) -> Keyring:
        """The keys that are valid now."""
        return Keyring(self._digests)

    def followed(self, access: Access) -> list[FollowedFiles[frozenset[bytes]]]:
        """Follow the files of each group separately, and replace the keyring of ``access`` when they change.

        If a file is missing, empty or malformed, its old keys stay valid and one log line reports it, so that a mistake
        in a file neither locks callers out nor opens a group.
        """
        return [
            FollowedFiles(
                self._digests[group],
                read=partial(read_keys, path),
                accept=partial(self._accept, access, group),
                reject=partial(self._reject, group),
                recover=partial(self._recover, group),
            )
            for group, path in self._paths.items()
        ]

    async def follow(self, access: Access, interval_s: float) -> None:
        """Keep the keyring of ``access`` up to date until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for files in self.followed(access):
                tasks.create_task(files.follow(interval_s))

    async def _accept(self, access: Access, group: Group, digests: frozenset[bytes]) -> None:
        old, self._digests[group] = self._digests[group], digests
        access.keyring = self.keyring()
        counts = {"keys": len(digests), "added": len(digests - old), "gone": len(old - digests)}
        log_event(logger, logging.INFO, "keys have changed", group=group, **counts)

    def _reject(self, group: Group, reason: str) -> None:
        message = "the new keys cannot be used; the old keys stay valid"
        log_event(logger, logging.WARNING, message, group=group, reason=reason)

    def _recover(self, group: Group) -> None:
        log_event(logger, logging.INFO, "keys can be read again", group=group, keys=len(self._digests[group]))
