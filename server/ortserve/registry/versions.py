"""Which of a model's versions should be served: a pure policy."""

from collections.abc import Collection

from ortserve.config.model import AllVersions, LatestVersions, VersionPolicy
from ortserve.errors import invalid_input


def choose_versions(policy: VersionPolicy, available: Collection[int]) -> list[int]:
    """The versions to serve, ascending.

    Raises:
        ServeError: invalid_input, when the policy names versions that are not there.
    """
    versions = sorted(available)
    if isinstance(policy, AllVersions):
        return versions
    if isinstance(policy, LatestVersions):
        return versions[-policy.latest :]
    missing = [str(version) for version in policy.specific if version not in available]
    if missing:
        raise invalid_input(
            f"version_policy: expected versions out of {', '.join(map(str, versions))}, got {', '.join(missing)}"
        )
    return sorted(set(policy.specific))
