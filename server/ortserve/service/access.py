"""Access control: keys for groups of calls, and the check of a caller's key.

``key_files`` reads the keys, and ``frontends/access`` assigns calls to groups. A group without keys is open and has no
guard.
"""

import hmac
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Final

from ortserve.errors import ErrorKind, ServeError, invalid_input

_SCHEME: Final = b"bearer"


class Group(StrEnum):
    """Groups of calls that share keys; also the ``group`` label of metrics. Health calls have no group and are open."""

    INFER = "infer"
    """Inference and generation, unary and streamed."""
    METADATA = "metadata"
    """Metadata, configurations, statistics, the index, the documentation and reflection."""
    CONTROL = "control"
    """Loading, changes of labels, and both reading and changing shared memory, trace settings and log settings."""
    METRICS = "metrics"
    """The metrics port."""


def digest_of(key: bytes) -> bytes:
    """The digest that is stored for a key. Keys are long and random, so a plain hash is as safe as a slow one."""
    return sha256(key).digest()


class RefusedKeyError(ServeError):
    """A call is rejected for its key: unauthenticated, or forbidden if the key belongs to other groups only."""

    def __init__(self, group: Group, kind: ErrorKind, message: str, *, has_key: bool) -> None:
        super().__init__(kind, message)
        self.group = group
        self.has_key = has_key
        """Whether the call had a key."""


class Keyring:
    """The digests of all keys, and the groups that each key opens."""

    def __init__(
        self,
        digests: Mapping[Group, Collection[bytes]],
        *,
        compare: Callable[[bytes, bytes], bool] = hmac.compare_digest,
    ) -> None:
        """``compare`` must take the same time for all bytes of one length."""
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
        """The groups that a key opens; empty for an unknown key.

        The key is compared with all known keys, so that the time does not depend on which of them matches.
        """
        digest = digest_of(key)
        compare = self._compare
        opened = 0
        for known, mask in self._known:
            opened |= compare(known, digest) * mask
        return self._opened[opened]


class Guard:
    """Checks the keys of calls to one group. Any thread."""

    def __init__(self, access: "Access", group: Group) -> None:
        self.group: Final = group
        self._access = access

    def refusal(self, authorizations: Sequence[str | bytes]) -> ServeError | None:
        """Check that a call has a key of the group: ``Bearer KEY``.

        Args:
            authorizations: All values of the call's ``authorization`` header.

        Returns:
            None if it has. Otherwise a RefusedKeyError: unauthenticated without a known key, forbidden with a key of
            other groups only. For several values invalid_input, because proxies on the path could use different ones.
        """
        if len(authorizations) > 1:
            return invalid_input(f"authorization: expected one value, got {len(authorizations)}")
        key = _bearer(authorizations[0]) if authorizations else None
        if key is None:
            return self._refuse(ErrorKind.UNAUTHENTICATED, "expected 'Authorization: Bearer KEY', got no key")
        opened = self._access.keyring.groups_of(key)
        if self.group in opened:
            return None
        if opened:
            text = "expected a key of this group, got a key of another group"
            return self._refuse(ErrorKind.FORBIDDEN, text, has_key=True)
        text = "expected a key of this group, got an unknown key"
        return self._refuse(ErrorKind.UNAUTHENTICATED, text, has_key=True)

    def _refuse(self, kind: ErrorKind, text: str, *, has_key: bool = False) -> RefusedKeyError:
        self._access.on_refusal(self.group, kind)
        return RefusedKeyError(
            self.group, kind, f"calls of the group '{self.group}' need a key: {text}", has_key=has_key
        )


class Access:
    """The guards of the groups that have keys. Keys may change later; the guarded groups may not."""

    def __init__(
        self, guarded: Collection[Group], keyring: Keyring, *, on_refusal: Callable[[Group, ErrorKind], None]
    ) -> None:
        """``on_refusal`` is called for each rejected call, on the thread of the check."""
        self.keyring = keyring
        """The keys that are valid now; replaced as a whole."""
        self.on_refusal: Final = on_refusal
        self.guards: Final[Mapping[Group, Guard]] = {group: Guard(self, group) for group in Group if group in guarded}
        """The guards by group; the other groups are open."""


def _bearer(authorization: str | bytes) -> bytes | None:
    """The key in a value of ``authorization`` (RFC 6750, section 2.1); None if it has no key."""
    value = authorization if isinstance(authorization, bytes) else authorization.encode()
    scheme, _, key = value.strip().partition(b" ")
    return key.strip() or None if scheme.lower() == _SCHEME else None
