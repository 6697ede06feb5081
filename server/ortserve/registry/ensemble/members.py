"""Finds the members of an ensemble among the versions that serve."""

from ortserve.config.ensemble import LATEST
from ortserve.errors import ErrorKind, NotInMemoryError, ServeError, invalid_input
from ortserve.registry.catalog import Catalog, VersionRecord
from ortserve.registry.ensemble.plan import Plan
from ortserve.registry.ensemble.served_ensemble import ServedEnsemble
from ortserve.registry.served_version import ServedVersion


class MembersDisagreeError(ServeError):
    """Members of an ensemble use different loads of a model, until all of them are reconnected to the new one."""


def find_members(name: str, plan: Plan, catalog: Catalog) -> tuple[ServedVersion, ...]:
    """Find the member of each step: the version that it names, or the one that answers requests without a version.

    Raises:
        NotInMemoryError: A member is loaded by the next request for it, or is being loaded for requests.
        MembersDisagreeError: A request would use two loads of a model.
        ServeError: invalid_input, naming the ensemble and the models or the version that it lacks.
    """
    names = dict.fromkeys(step.model for step in plan.steps)
    if unknown := [model for model in names if not catalog.of(model)]:
        raise invalid_input(
            f"ensemble {name} contains models that are not available or ambiguous: {', '.join(unknown)}"
        )
    for model in names:
        if not catalog.ready(model) and not any(one.makes_requests_wait for one in catalog.of(model).values()):
            raise invalid_input(
                f"ensemble '{name}' depends on '{model}' which has no loaded version. Model '{model}' loading failed "
                f"with error: {' '.join(map(_describe, catalog.of(model).values()))}"
            )
    members = tuple([_find(name, step.model, step.version, catalog) for step in plan.steps])
    different = _find_different_loads(plan, members, {})
    if different is not None:
        text = f"members of ensemble '{name}' use different loads of '{different}' until all of them are reconnected"
        raise MembersDisagreeError(ErrorKind.NOT_READY, text, retry_after_s=1)
    return members


def is_connected(ensemble: ServedEnsemble, catalog: Catalog) -> bool:
    """Whether the steps of an ensemble use the versions that answer requests, as far as these agree."""
    try:
        return find_members(ensemble.name, ensemble.plan, catalog) == ensemble.members
    except MembersDisagreeError:
        return True
    except ServeError:
        return False


def _find_different_loads(
    plan: Plan, members: tuple[ServedVersion, ...], loads: dict[tuple[str, int], ServedVersion]
) -> str | None:
    """The first model of which steps use different loads, also steps of ensembles that are members.

    ``loads`` has the member of each model and version in earlier steps. Those of these steps are added.
    """
    for step, member in zip(plan.steps, members, strict=True):
        key = step.model, step.version
        if key not in loads:
            loads[key] = member
            if isinstance(member, ServedEnsemble):
                found = _find_different_loads(member.plan, member.members, loads)
                if found is not None:
                    return found
        elif loads[key] is not member:
            return step.model
    return None


def _find(name: str, model: str, version: int, catalog: Catalog) -> ServedVersion:
    try:
        return catalog.find(model, "" if version == LATEST else str(version))
    except NotInMemoryError:
        raise NotInMemoryError(f"ensemble '{name}' depends on '{model}', which is not in memory") from None
    except ServeError:
        raise invalid_input(
            f"ensemble '{name}' depends on '{model}' whose required version {version} is not loaded."
        ) from None


def _describe(record: VersionRecord) -> str:
    return f"version {record.shown_version or '-'} is at UNAVAILABLE state: {record.explanation};"
