"""Parameters, the options that they change, and the conditions on which they depend."""

import itertools
from typing import Any

import pytest

from ortserve.config.model import LoadOptions, ModelOptions, make_model_options
from ortserve.tools.tune.space import (
    Conditions,
    apply_changes,
    changes_of,
    default_point,
    joint_points,
    key_path,
    make_space,
    value_of,
)

SMALL = Conditions(2, ((0, 1),), is_batched=True, slo_s=0.02)
LARGE = Conditions(
    8, ((0, 1, 2, 3), (4, 5, 6, 7)), is_batched=True, has_convolutions=True, offered=("cuda", "tensorrt")
)


def options(**given: Any) -> ModelOptions:
    return make_model_options(given, LoadOptions(), "test")


CURRENT = [
    options(),
    options(max_rows=1, intra_op_threads=16, session={"spinning": True, "thread_affinities": "2;3"}),
    options(session={"entries": {"session.intra_op.spin_duration_us": 9, "session.dynamic_block_base": 4}}),
]


@pytest.mark.parametrize("current", CURRENT)
@pytest.mark.parametrize("conditions", [SMALL, LARGE])
def test_every_choice_is_a_valid_change_that_has_an_effect(current: ModelOptions, conditions: Conditions) -> None:
    space = make_space(current, conditions, "throughput")
    assert len({parameter.name for parameter in space}) == len(space)
    for parameter in space:
        found = [apply_changes(current, choice) for choice in parameter.choices]
        assert found[0] == current
        assert all(one != other for one, other in itertools.combinations(found, 2)), parameter
        for changes, changed in zip(parameter.choices, found, strict=True):
            assert all(value_of(changed, key) == value for key, value in changes.items())


def test_what_was_set_can_return_to_the_default() -> None:
    space = make_space(CURRENT[1], SMALL, "throughput")
    restored = apply_changes(CURRENT[1], changes_of(space, default_point(space)))
    assert (restored.max_rows, restored.intra_op_threads) == (None, None)
    assert (restored.session.spinning, restored.session.thread_affinities) == (False, None)
    assert default_point(make_space(options(), SMALL, "throughput")) == {}


def test_other_keys_stay() -> None:
    space = make_space(CURRENT[2], SMALL, "throughput")
    (number,) = [point for point in [default_point(space)] if point]
    changed = apply_changes(CURRENT[2], changes_of(space, number))
    assert dict(changed.session.entries)["session.dynamic_block_base"] == 4
    assert key_path("session.entries.session.a.b") == ("session", "entries", "session.a.b")


def test_the_machine_and_the_model_decide_what_is_tried() -> None:
    def names(conditions: Conditions) -> set[str]:
        return {parameter.name for parameter in make_space(options(), conditions, "throughput")}

    assert names(LARGE) - names(SMALL) == {"providers", "replay"}
    alone = names(Conditions(1, ((0,),), is_batched=False))
    assert not alone & {"max_rows", "delay", "buckets", "spinning", "execution", "providers"}
    choices = {one.name: one.choices for one in make_space(options(), LARGE, "throughput")}
    pinned = [choice for choice in choices["threads"] if "session.thread_affinities" in choice]
    assert {"intra_op_threads": 4, "session.thread_affinities": "6;7;8"} in pinned
    delays = {one.name: one.choices for one in make_space(options(), SMALL, "throughput")}["delay"]
    assert [choice.get("queue_delay_s") for choice in delays] == [None, 0.001, 0.002, 0.005]


def test_several_instances_of_one_thread_are_tried_together() -> None:
    space = make_space(options(), LARGE, "throughput")
    (point,) = joint_points(space)
    assert changes_of(space, point) == {"intra_op_threads": 1, "instances": 8}
