"""Which of a model's versions should be served: a pure policy."""

from collections.abc import Collection

from ortserve.config.model import AllVersions, LatestVersions, VersionPolicy


def choose_versions(policy: VersionPolicy, available: Collection[int]) -> list[int]:
    """The versions to serve, ascending; those that the policy names, also where they are not available."""
    versions = sorted(available)
    if isinstance(policy, AllVersions):
        return versions
    if isinstance(policy, LatestVersions):
        return versions[-policy.latest :]
    return sorted(set(policy.specific))
