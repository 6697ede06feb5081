"""Loads and drains that lead from the served versions to the wanted ones."""

from pathlib import Path

import pytest

from ortserve.config.model import ModelOptions
from ortserve.registry.repository.configuration import Configuration
from ortserve.registry.repository.fingerprints import Fingerprint
from ortserve.registry.repository.source import VersionChanges, VersionSource, plan_changes


def source(changed_at: int = 0, **options: object) -> VersionSource:
    configuration = Configuration(ModelOptions.model_validate(options))
    return VersionSource(Path("m"), None, configuration, (Fingerprint("m", 1, 0, 2, changed_at, 0),))


@pytest.mark.parametrize(
    ("serving", "wanted", "swap"),
    [
        ({}, {1: source(), 3: source()}, VersionChanges((1, 3), ())),
        ({1: source()}, {1: source()}, VersionChanges((), ())),
        ({1: source()}, {2: source()}, VersionChanges((2,), (1,))),
        ({1: source(), 2: source()}, {2: source(), 3: source()}, VersionChanges((3,), (1,))),
        ({1: source(1)}, {1: source(2)}, VersionChanges((1,), ())),
        ({1: source()}, {1: source(max_rows=3)}, VersionChanges((1,), ())),
        ({2: source(), 1: source()}, {}, VersionChanges((), (1, 2))),
    ],
)
def test_changed_versions_are_loaded_and_unwanted_ones_retired(
    serving: dict[int, VersionSource], wanted: dict[int, VersionSource], swap: VersionChanges
) -> None:
    assert plan_changes(serving, wanted) == swap
