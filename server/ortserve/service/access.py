"""Who may come in: keys for groups of calls, and whether a caller has shown one.

Free of files (``key_files`` reads them) and of paths (``frontends/access`` says to which group a call belongs). A group
without keys is open: it has no guard, and nobody asks.
"""

import hmac
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Final

from ortserve.errors import ErrorKind, ServeError, invalid_input

_SCHEME: Final = b"bearer"


class Group(StrEnum):
    """Calls that are opened together; also the ``group`` label of metrics. Health belongs to none and is open."""

    INFER = "infer"
    """Inference and generation, unary and streamed."""
    METADATA = "metadata"
    """What there is and how it runs: metadata, configurations, statistics, the index, the documentation, reflection."""
    CONTROL = "control"
    """What changes the server: loading, shared memory, trace and log settings; their readings go with them."""
    METRICS = "metrics"
    """The metrics port."""


def digest_of(key: bytes) -> bytes:
    """What is kept of a key. Keys are long and random, so that a plain hash hides them as well as a slow one."""
    return sha256(key).digest()


class RefusedKeyError(ServeError):
    """A caller who may not come in: unauthenticated, or forbidden where the key is one of another group."""

    def __init__(self, group: Group, kind: ErrorKind, message: str, *, has_key: bool) -> None:
        super().__init__(kind, message)
        self.group = group
        self.has_key = has_key
        """Whether a key was shown at all."""


class Keyring:
    """The digests of all keys, and the groups that each opens."""

    def __init__(
        self,
        digests: Mapping[Group, Collection[bytes]],
        *,
        compare: Callable[[bytes, bytes], bool] = hmac.compare_digest,
    ) -> None:
        """``compare`` takes as long whatever the bytes are."""
        groups = tuple(Group)
        masks: dict[bytes, int] = {}
        for group, known in digests.items():
            for digest in known:
                masks[digest] = masks.get(digest, 0) | 1 << groups.index(group)
        self._known = tuple(masks.items())
        self._compare = compare
        self._opened = {
            mask: frozenset(group for number, group in enumerate(groups) if mask >> number & 1)
            for mask in range(1 << len(groups))
        }

    def groups_of(self, key: bytes) -> frozenset[Group]:
        """The groups that a key opens; none for an unknown one.

        It is compared with every key there is, whichever it is: the time says nothing of which one came near.
        """
        digest = digest_of(key)
        compare = self._compare
        opened = 0
        for known, mask in self._known:
            opened |= compare(known, digest) * mask
        return self._opened[opened]


class Guard:
    """Asks the callers of one group for its key. Any thread."""

    def __init__(self, access: "Access", group: Group) -> None:
        self.group: Final = group
        self._access = access

    def check(self, authorizations: Sequence[str | bytes]) -> None:
        """Let a call pass whose ``authorization`` (all values of that name) shows a key of the group: ``Bearer KEY``.

        Raises:
            RefusedKeyError: unauthenticated without a key that is known, forbidden with one of other groups alone.
            ServeError: invalid_input, for more than one value.
        """
        group = self.group
        key = _bearer(authorizations)
        if key is None:
            raise self._refused(ErrorKind.UNAUTHENTICATED, "expected 'Authorization: Bearer KEY', got no key")
        opened = self._access.keyring.groups_of(key)
        if group in opened:
            return
        if opened:
            raise self._refused(ErrorKind.FORBIDDEN, "expected a key of that group, got one of another", has_key=True)
        raise self._refused(ErrorKind.UNAUTHENTICATED, "expected a key of that group, got an unknown one", has_key=True)

    def _refused(self, kind: ErrorKind, text: str, *, has_key: bool = False) -> RefusedKeyError:
        self._access.on_refusal(self.group, kind)
        return RefusedKeyError(
            self.group, kind, f"calls of the group '{self.group}' need a key: {text}", has_key=has_key
        )


class Access:
    """Guards the groups that have keys, from construction on. Keys may change, what is guarded may not."""

    def __init__(
        self, guarded: Collection[Group], keyring: Keyring, *, on_refusal: Callable[[Group, ErrorKind], None]
    ) -> None:
        """``on_refusal`` is told of each refusal, on the thread that refuses."""
        self.keyring = keyring
        """Those that count from now on; replaced as a whole."""
        self.on_refusal: Final = on_refusal
        self.guards: Final[Mapping[Group, Guard]] = {group: Guard(self, group) for group in Group if group in guarded}
        """By group; the others are open."""


def _bearer(authorizations: Sequence[str | bytes]) -> bytes | None:
    """The key among a caller's headers (RFC 6750, section 2.1); None where there is none.

    Raises:
        ServeError: invalid_input; which of several would count is no question to leave to each proxy on the way.
    """
    if not authorizations:
        return None
    if len(authorizations) > 1:
        raise invalid_input(f"authorization: expected one value, got {len(authorizations)}")
    value = authorizations[0]
    scheme, _, key = (value if isinstance(value, bytes) else value.encode()).strip().partition(b" ")
    return key.strip() or None if scheme.lower() == _SCHEME else None
