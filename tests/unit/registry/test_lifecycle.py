"""The states of a version."""

import pytest

from ortserve.registry.lifecycle import State, VersionRecord


def in_state(state: State) -> VersionRecord:
    record = VersionRecord("m", 1, lambda: None)
    if state is not State.LOADING:
        record.advance(state)
    return record


@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("after", State)
def test_states_only_move_forward(before: State, after: State) -> None:
    record = in_state(before)
    if after > before:
        record.advance(after, "why")
        assert (record.state, record.reason) == (after, "why")
    else:
        with pytest.raises(AssertionError, match=f"m/1 cannot go from {before.name} to {after.name}"):
            record.advance(after)
        assert record.state is before


def test_reason_of_a_state_is_forgotten_in_the_next() -> None:
    record = in_state(State.LOADING)
    record.advance(State.READY, "why")
    record.advance(State.DRAINING)
    assert record.reason == ""
