"""Values from JSON that match a declaration, or do not."""

import pytest

from ortserve.config.declaration import InvalidValuesError, validate
from ortserve.config.rollout import RolloutOptions
from ortserve.config.yaml_file import MAX_LEVELS


def nested(levels: int) -> object:
    value: object = 1
    for number in range(levels):
        value = [value] if number % 2 else {"a": value}
    return value


def test_lists_count_as_tuples_but_texts_not_as_numbers() -> None:
    assert validate(RolloutOptions, {"candidate": 2}).candidate == 2
    with pytest.raises(InvalidValuesError, match=r"^candidate: expected integer, 1 to 9223372036854775807, got '2'$"):
        validate(RolloutOptions, {"candidate": "2"})


@pytest.mark.parametrize("given", [{}, {"candidate": None}])
def test_required_key_that_is_missing_or_null_is_named(given: dict[str, object]) -> None:
    with pytest.raises(InvalidValuesError, match=r"^candidate: expected integer, 1 to \d+, got nothing$"):
        validate(RolloutOptions, given)


@pytest.mark.parametrize("levels", [MAX_LEVELS + 1, 300, 3000])
def test_key_with_a_deeply_nested_value_is_named(levels: int) -> None:
    with pytest.raises(InvalidValuesError, match=r"^share: nested too deep: expected at most 64 levels$"):
        validate(RolloutOptions, {"candidate": 2, "share": nested(levels)})
    with pytest.raises(InvalidValuesError, match=r"^share: expected number, 0 to 1, got "):
        validate(RolloutOptions, {"candidate": 2, "share": nested(MAX_LEVELS - 1)})
