"""The states of a version."""

import pytest

from ortserve.registry.catalog import State, VersionRecord
from ortserve.registry.load.progress import Progress


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


def test_next_state_clears_the_reason() -> None:
    record = in_state(State.LOADING)
    record.advance(State.READY, "why")
    record.advance(State.DRAINING)
    assert record.reason == ""


def test_explanation_is_the_step_of_a_load_until_it_ends() -> None:
    record = in_state(State.LOADING)
    assert record.explanation == "waiting for its turn"
    record.progress = Progress(lambda: 0)
    record.progress.begin("opening the session")
    assert record.explanation == "opening the session, for 0 s"
    record.advance(State.WARMING)
    assert record.explanation == "opening the session, for 0 s"
    record.advance(State.READY)
    assert record.explanation == ""
    record.advance(State.FAILED, "why")
    assert record.explanation == "why"
