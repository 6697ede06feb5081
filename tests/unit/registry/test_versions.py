"""Which versions are served, by literals."""

import pytest

from ortserve.config.model import AllVersions, LatestVersions, SpecificVersions, VersionPolicy
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.versions import choose_versions


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


def test_version_that_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(ServeError) as caught:
        choose_versions(SpecificVersions(specific=(3, 1, 7)), {10, 2, 9, 1})
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == "version_policy: expected versions out of 1, 2, 9, 10, got 3, 7"
