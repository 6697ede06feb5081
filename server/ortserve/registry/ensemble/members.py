"""Finds the members of an ensemble among the versions that serve."""

from ortserve.config.ensemble import LATEST
from ortserve.errors import NotInMemoryError, ServeError, invalid_input
from ortserve.registry.catalog import Catalog, VersionRecord
from ortserve.registry.ensemble.plan import Plan
from ortserve.registry.serving import ServedVersion


def find_members(name: str, plan: Plan, catalog: Catalog) -> tuple[ServedVersion, ...]:
    """Find the member of each step: the version that it names, or the one that answers requests without a version.

    Raises:
        NotInMemoryError: A member is loaded by the next request for it, or is being loaded for requests.
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
    return tuple([_find(name, step.model, step.version, catalog) for step in plan.steps])


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
    return f"version {record.label or '-'} is at UNAVAILABLE state: {record.explanation};"
