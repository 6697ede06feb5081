"""Labels of versions: which version each label of a model names. Pure.

Labels come from ``model.yaml`` and from calls, whose labels hold instead of the file's.
"""

from collections.abc import Collection, Mapping

from ortserve.config.model import ModelOptions
from ortserve.registry.repository.source import ModelSource, choose_versions


def follow_file(before: Mapping[str, int], given: Mapping[str, int], ready: Collection[int]) -> dict[str, int]:
    """The labels of a ``model.yaml`` that are in effect after a change of the file.

    A label moves to its new version when that version serves, so that a version that fails to load takes no requests
    from one that serves.

    Args:
        before: In effect until now.
        given: In the file.
        ready: The versions that serve.
    """
    return {label: version if version in ready else before.get(label, version) for label, version in given.items()}


def needed_versions(source: ModelSource, named: Collection[int]) -> set[int]:
    """The versions of a model that should serve: those that its policy chooses, and those that labels name.

    Args:
        source: Of the model, with all these versions.
        named: By labels in effect, or as a place to go back to.
    """
    options: ModelOptions | None = next((one.configuration.options for one in source.versions.values()), None)
    if options is None:
        return set()
    return {*choose_versions(options.version_policy, source.versions), *named} & source.versions.keys()
