"""The members of ensembles, by the sources of models. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ortserve.config.ensemble import LATEST
from ortserve.registry.ensemble.plan import circular, find_cycle, member_names
from ortserve.registry.repository.source import ModelSource


def members_of(source: ModelSource | None) -> tuple[str, ...]:
    """The members of an ensemble; empty for other models, and for a source that cannot be loaded."""
    if source is None:
        return ()
    version = next(iter(source.versions.values()), None)
    return () if version is None else member_names(version.configuration.options)


def closure_of(names: Iterable[str], found: Mapping[str, ModelSource]) -> list[str]:
    """The names in order, each followed by its members at any depth, in the order of its steps."""
    wanted: dict[str, None] = {}
    pending = list(names)[::-1]
    while pending:
        name = pending.pop()
        if name not in wanted:
            wanted[name] = None
            pending += [member for member in members_of(found.get(name))[::-1] if member in found]
    return list(wanted)


def lacks_members(name: str, found: Mapping[str, ModelSource]) -> bool:
    """Whether a model is an ensemble of which a member at any depth is not in ``found``."""
    return any(member not in found for one in closure_of([name], found) for member in members_of(found[one]))


def _required_versions(source: ModelSource, member: str) -> list[int]:
    """The versions of a member that an ensemble names. ``LATEST`` stands for no particular version."""
    found: set[int] = set()
    for version in source.versions.values():
        ensemble = version.configuration.options.ensemble
        assert ensemble is not None
        found |= {step.version for step in ensemble.steps if step.model == member}
    return sorted(found or {LATEST})


def missing_members(ensemble: ModelSource, serves: Callable[[str, str], bool]) -> list[str]:
    """The members of an ensemble of which a required version does not serve.

    ``serves`` gets the name of a model and a version, which is empty for any version.
    """
    return [
        member
        for member in members_of(ensemble)
        for versions in [_required_versions(ensemble, member)]
        if not all(serves(member, "" if version == LATEST else str(version)) for version in versions)
    ]


def reject_cycles(sources: Iterable[ModelSource], known: Mapping[str, ModelSource]) -> list[ModelSource]:
    """The sources. For each ensemble that contains itself, the source has a problem instead of versions.

    ``known`` are the sources of other models.
    """
    loading = list(sources)
    found = {**known, **{source.name: source for source in loading}}
    members = {name: members_of(found[name]) for name in closure_of([source.name for source in loading], found)}
    return [
        replace(source, versions={}, problem=circular(cycle)) if (cycle := find_cycle(source.name, members)) else source
        for source in loading
    ]
