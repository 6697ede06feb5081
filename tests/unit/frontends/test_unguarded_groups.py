"""What is said to be open to everybody."""

import pytest

from ortserve.frontends.access import unguarded_groups
from ortserve.service.access import Group


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST"])
def test_nothing_is_open_on_the_loopback_address(host: str) -> None:
    assert unguarded_groups(host, (), loads_models=True, shares_memory=True) == ()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0", "server.example.com"])
def test_all_groups_without_keys_are_open_elsewhere(host: str) -> None:
    told = unguarded_groups(host, (), loads_models=False, shares_memory=False)
    assert told == ("infer", "metadata", "control (log settings)", "metrics")


def test_groups_with_keys_are_not_open() -> None:
    assert unguarded_groups("::", (Group.INFER, Group.METADATA), loads_models=True, shares_memory=True) == (
        "control (log settings, loading models, shared memory)",
        "metrics",
    )
    assert unguarded_groups("::", tuple(Group), loads_models=True, shares_memory=True) == ()


def test_profiling_is_named() -> None:
    told = unguarded_groups("::", (), loads_models=False, shares_memory=False, profiles=True)
    assert any("profiling" in group for group in told)
