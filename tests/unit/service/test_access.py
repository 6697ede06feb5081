"""Accepted and rejected keys, their errors, and checks whose duration does not depend on the key."""

import hmac
from collections.abc import Iterable

import pytest

from interpreted import interpreted_only
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.access import Access, Group, Keyring, RefusedKeyError, digest_of

KEY, OTHER, BOTH = b"infer-key-0123456789", b"control-key-0123456789", b"key-of-both-0123456789"


def access(counted: list[tuple[Group, ErrorKind]] | None = None) -> Access:
    digests = {Group.INFER: [digest_of(KEY), digest_of(BOTH)], Group.CONTROL: [digest_of(OTHER), digest_of(BOTH)]}
    counts = counted if counted is not None else []
    return Access(digests, Keyring(digests), on_refusal=lambda group, kind: counts.append((group, kind)))


def refusal(access: Access, group: Group, authorizations: Iterable[str | bytes]) -> ServeError:
    error = access.guards[group].refusal(list(authorizations))
    assert error is not None
    return error


@pytest.mark.parametrize("key", [KEY, BOTH])
@pytest.mark.parametrize("spelled", ["Bearer %s", "bearer %s", "BEARER   %s  "])
def test_key_of_the_group_is_accepted(key: bytes, spelled: str) -> None:
    value = spelled % key.decode()
    assert access().guards[Group.INFER].refusal([value]) is None
    assert access().guards[Group.INFER].refusal([value.encode()]) is None


@pytest.mark.parametrize("values", [[], [""], ["Bearer"], ["Bearer "], [KEY.decode()], ["Basic dXNlcjpwYXNz"]])
def test_caller_without_a_key_is_unauthenticated(values: list[str]) -> None:
    error = refusal(access(), Group.INFER, values)
    assert isinstance(error, RefusedKeyError)
    assert (error.kind, error.has_key, error.group) == (ErrorKind.UNAUTHENTICATED, False, Group.INFER)


@pytest.mark.parametrize("key", [KEY[:-1], KEY + b"0", KEY.upper(), b"x", b"\xff" * 16, b"x" * 100_000])
def test_caller_with_an_unknown_key_is_unauthenticated(key: bytes) -> None:
    error = refusal(access(), Group.INFER, [b"Bearer " + key])
    assert isinstance(error, RefusedKeyError)
    assert (error.kind, error.has_key) == (ErrorKind.UNAUTHENTICATED, True)


def test_key_of_another_group_is_forbidden() -> None:
    error = refusal(access(), Group.INFER, [b"Bearer " + OTHER])
    assert error.kind is ErrorKind.FORBIDDEN
    assert "group 'infer'" in error.message


def test_two_authorizations_are_rejected_even_if_both_are_valid() -> None:
    value = b"Bearer " + KEY
    error = refusal(access(), Group.INFER, [value, value])
    assert error.kind is ErrorKind.INVALID_INPUT
    assert "expected one value, got 2" in error.message


def test_groups_without_keys_have_no_guard() -> None:
    assert set(access().guards) == {Group.INFER, Group.CONTROL}


def test_rejections_are_counted_by_group_and_kind() -> None:
    counted: list[tuple[Group, ErrorKind]] = []
    asked = access(counted)
    for value in (None, b"Bearer " + OTHER, b"Bearer unknown"):
        refusal(asked, Group.INFER, [] if value is None else [value])
    assert asked.guards[Group.INFER].refusal([b"Bearer " + KEY]) is None
    assert counted == [
        (Group.INFER, ErrorKind.UNAUTHENTICATED),
        (Group.INFER, ErrorKind.FORBIDDEN),
        (Group.INFER, ErrorKind.UNAUTHENTICATED),
    ]


def test_guards_use_the_current_keys() -> None:
    asked = access()
    new = b"a-new-key-0123456789"
    asked.keyring = Keyring({Group.INFER: [digest_of(new)]})
    assert asked.guards[Group.INFER].refusal([b"Bearer " + new]) is None
    assert refusal(asked, Group.INFER, [b"Bearer " + KEY]).kind is ErrorKind.UNAUTHENTICATED


@pytest.mark.parametrize("shown", ["first", "middle", "last", "unknown"])
def test_every_key_is_compared_whichever_matches(shown: str) -> None:
    keys = [b"key-number-%06d" % number for number in range(20)]
    compared: list[bytes] = []

    def compare(known: bytes, digest: bytes) -> bool:
        compared.append(known)
        return hmac.compare_digest(known, digest)

    digests = {Group.INFER: [digest_of(key) for key in keys[:12]], Group.METRICS: [digest_of(key) for key in keys[12:]]}
    key = {"first": keys[0], "middle": keys[10], "last": keys[-1], "unknown": b"x" * 16}[shown]
    opened = Keyring(digests, compare=compare).groups_of(key)
    assert compared == [digest_of(key) for key in keys]
    assert opened == {"last": {Group.METRICS}, "unknown": set()}.get(shown, {Group.INFER})


@interpreted_only
def test_no_object_and_no_error_contains_a_key() -> None:
    asked = access()
    errors = [refusal(asked, Group.INFER, values) for values in ([b"Bearer " + OTHER], [b"Bearer secret"], [KEY])]
    guard = asked.guards[Group.INFER]
    kept = [vars(asked), vars(asked.keyring), vars(guard), *(vars(error) for error in errors)]
    text = repr([asked, asked.keyring, guard, *errors, kept])
    for key in (KEY, OTHER, BOTH, b"secret"):
        assert key.decode() not in text
