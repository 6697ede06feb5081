"""The address of a model repository: a folder, or the URL of a store that is copied to a cache."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeAlias
from urllib.parse import unquote, urlsplit

from pydantic import PlainValidator

_FORMS: Final = (
    "s3://BUCKET[/PREFIX], gs://BUCKET[/PREFIX], az://CONTAINER[/PREFIX], https://HOST/FILE.tar, .tar.gz or .tgz, or "
    "hf://OWNER/MODEL[@REVISION]"
)
_BUCKET_SCHEMES: Final = ("s3", "gs", "az")
_ARCHIVE: Final = re.compile(r"\.(tar|tar\.gz|tgz)$")
_SHA256: Final = re.compile(r"sha256=([0-9a-f]{64})")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HUB_REVISION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")


@dataclass(frozen=True, slots=True)
class RepositoryUrl:
    """The URL of a repository in a store. It contains no credentials, so that logs may show it.

    Attributes:
        text: The whole URL.
        scheme: ``s3``, ``gs``, ``az``, ``https``, ``http`` or ``hf``.
        host: The bucket or container, the host with its port, or ``OWNER/MODEL``.
        path: The prefix, the path of the archive, or the revision; without leading and trailing slashes.
        sha256: Expected SHA-256 digest of an archive; empty if none is given.
    """

    text: str
    scheme: str
    host: str
    path: str = ""
    sha256: str = ""

    def __str__(self) -> str:
        return self.text


def parse_repository(given: object) -> Path | RepositoryUrl:
    """Parse the folder or URL of a repository.

    Raises:
        ValueError: The URL has no known form, or contains credentials.
    """
    if isinstance(given, Path | RepositoryUrl):
        return given
    if not isinstance(given, str) or not given:
        raise ValueError(f"expected a folder or a URL, got {given!r}")
    return _parse_url(given) if "://" in given else Path(given)


def _parse_url(text: str) -> RepositoryUrl:
    scheme, _, rest = text.partition("://")
    if "?" in rest or (scheme != "hf" and "@" in rest.partition("/")[0]):
        # The error omits these parts: they may hold a password or the signature of a URL.
        raise ValueError(f"expected a URL without user, password or query, got one with them ({scheme}://…)")
    if not text.isprintable() or len(text) > 2000 or any(part == ".." for part in rest.split("/")):
        raise ValueError(f"expected a URL of at most 2000 printable characters, without '..', got {text[:200]!r}")
    if scheme in _BUCKET_SCHEMES:
        bucket, _, prefix = rest.partition("/")
        if _BUCKET.fullmatch(bucket) and "#" not in rest:
            return RepositoryUrl(text, scheme, bucket, prefix.strip("/"))
    elif scheme in ("https", "http"):
        return _parse_archive(text, scheme)
    elif scheme == "hf":
        name, _, revision = rest.strip("/").partition("@")
        parts = name.split("/")
        is_name = len(parts) == 2 and all(_HUB_NAME.fullmatch(part) for part in parts)
        if is_name and _HUB_REVISION.fullmatch(revision or "main"):
            return RepositoryUrl(text, scheme, name, revision or "main")
    raise ValueError(f"expected a folder or {_FORMS}, got {text!r}")


def _parse_archive(text: str, scheme: str) -> RepositoryUrl:
    parts = urlsplit(text)
    path = unquote(parts.path).strip("/")
    pinned = _SHA256.fullmatch(parts.fragment)
    if not parts.hostname or not _ARCHIVE.search(path) or (parts.fragment and pinned is None):
        expected = f"{scheme}://HOST/FILE.tar, .tar.gz or .tgz, with #sha256=DIGEST at its end if that is known"
        raise ValueError(f"expected {expected}, got {text!r}")
    if scheme == "http" and pinned is None:
        raise ValueError(f"expected https://, or #sha256=DIGEST at the end of an http:// URL, got {text!r}")
    return RepositoryUrl(text, scheme, parts.netloc, path, pinned[1] if pinned else "")


Repository: TypeAlias = Annotated[Path | RepositoryUrl, PlainValidator(parse_repository)]
