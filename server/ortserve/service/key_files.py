"""Where keys come from: files that are read at the start and again while the server runs.

Keys come by file alone. What stands on a command line or in the environment is seen by whoever may list processes or
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
from ortserve.service.access import Access, Group, Keyring, digest_of
from ortserve.service.followed_files import FollowedFiles
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_MAX_FILE_BYTES: Final = 64 * 1024
_MAX_KEYS: Final = 64
"""Of a group: each call is compared with all of them, on the event loop."""
_MIN_KEY_BYTES: Final = 16
_MAX_KEY_BYTES: Final = 512
_IS_KEY: Final = re.compile(rb"[A-Za-z0-9\-._~+/]+=*").fullmatch
"""A ``b64token`` (RFC 6750, section 2.1), so that every client can send it."""


def read_keys(path: Path) -> frozenset[bytes]:
    """The digests of the keys in a file, or in the files of a folder, such as a mounted Kubernetes Secret.

    One key a line; empty lines and lines that begin with ``#`` do not count. Of a folder, files whose names begin with
    a dot are left out.

    Raises:
        ServeError: invalid_input; the message holds neither keys nor the path, in the place of which someone may have
            given a key.
    """
    digests: set[bytes] = set()
    try:
        for file, name in _files(path):
            with file.open("rb") as opened:
                content = opened.read(_MAX_FILE_BYTES + 1)
            digests.update(_digests(content, name))
    except OSError as error:
        # Without what came, which may be a key in the place of a path.
        raise invalid_input(f"expected a file of keys, or a folder of such files: {error.strerror}") from None
    if not digests:
        raise invalid_input("expected at least one key, got none")
    if len(digests) > _MAX_KEYS:
        raise invalid_input(f"expected at most {_MAX_KEYS} keys, got {len(digests)}")
    return frozenset(digests)


def _files(path: Path) -> Iterator[tuple[Path, str]]:
    """Files to read, each with what messages call it."""
    if not path.is_dir():
        yield path, ""
        return
    for file in sorted(path.iterdir()):
        if not file.name.startswith(".") and file.is_file():
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
                f"-._~+/, got one of {len(key)} bytes"
            )
        yield digest_of(key)


class KeyFiles:
    """The keys of each group. What was read last, settled and was good counts."""

    def __init__(self, paths: Mapping[Group, Path]) -> None:
        """Read all files; ``paths`` holds the groups that are guarded.

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
        """The keys that count now."""
        return Keyring(self._digests)

    def followed(self, access: Access) -> list[FollowedFiles[frozenset[bytes]]]:
        """What has ``access`` go by the files of each group, whatever becomes of those of the others.

        Where a file is gone, empty or malformed its old keys go on to count, and the log says so once: a mistake there
        shall lock nobody out, nor let anybody in.
        """
        return [
            FollowedFiles(
                self._digests[group],
                read=partial(read_keys, path),
                take=partial(self._take, access, group),
                refuse=partial(self._refuse, group),
                recover=partial(self._recover, group),
            )
            for group, path in self._paths.items()
        ]

    async def follow(self, access: Access, interval_s: float) -> None:
        """Have ``access`` go by the files for as long as the server runs."""
        async with asyncio.TaskGroup() as tasks:
            for files in self.followed(access):
                tasks.create_task(files.follow(interval_s))

    async def _take(self, access: Access, group: Group, digests: frozenset[bytes]) -> None:
        old, self._digests[group] = self._digests[group], digests
        access.keyring = self.keyring()
        counts = {"keys": len(digests), "added": len(digests - old), "gone": len(old - digests)}
        log_event(logger, logging.INFO, "keys have changed", group=group, **counts)

    def _refuse(self, group: Group, reason: str) -> None:
        message = "new keys cannot be used, old ones still count"
        log_event(logger, logging.WARNING, message, group=group, reason=reason)

    def _recover(self, group: Group) -> None:
        log_event(logger, logging.INFO, "keys can be read again", group=group, keys=len(self._digests[group]))
