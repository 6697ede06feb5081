"""The versions that a policy selects, by literals."""

import pytest

from ortserve.config.versions import AllVersions, LatestVersions, SpecificVersions, VersionPolicy
from ortserve.registry.repository.source import choose_versions


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        (LatestVersions(latest=1), [10]),
        (LatestVersions(latest=2), [9, 10]),
        (LatestVersions(latest=99), [1, 2, 9, 10]),
        (AllVersions(all=True), [1, 2, 9, 10]),
        (SpecificVersions(specific=(9, 1)), [1, 9]),
        (SpecificVersions(specific=(2, 2)), [2]),
    ],
)
def test_chosen_versions_are_ascending_by_number(policy: VersionPolicy, chosen: list[int]) -> None:
    assert choose_versions(policy, {10, 2, 9, 1}) == chosen


def test_named_version_is_chosen_even_if_missing() -> None:
    assert choose_versions(SpecificVersions(specific=(3, 1, 7)), {10, 2, 9, 1}) == [1, 3, 7]
