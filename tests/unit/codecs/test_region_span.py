"""The parameters that name a place in shared memory."""

from typing import Final

import pytest

from ortserve.codecs.region_span import read_span
from ortserve.core.region import RegionSpan
from ortserve.core.request import Parameter
from ortserve.errors import ErrorKind, ServeError

GIVEN: Final[dict[str, Parameter]] = {"shared_memory_region": "r", "shared_memory_byte_size": 8}


def test_offset_is_zero_where_none_is_given() -> None:
    assert read_span(GIVEN, "input 'x'") == RegionSpan("r", 0, 8)
    assert read_span(GIVEN | {"shared_memory_offset": 3}, "input 'x'") == RegionSpan("r", 3, 8)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"shared_memory_region": 1}, "Unable to parse 'shared_memory_region': expected a string for input 'x', got 1"),
        ({"shared_memory_byte_size": "8"}, "'shared_memory_byte_size': expected an unsigned integer for input 'x'"),
        ({"shared_memory_byte_size": -8}, "'shared_memory_byte_size': expected an unsigned integer for input 'x'"),
        ({"shared_memory_byte_size": True}, "'shared_memory_byte_size': expected an unsigned integer for input 'x'"),
        ({"shared_memory_offset": 1.0}, "'shared_memory_offset': expected an unsigned integer for input 'x', got 1.0"),
    ],
)
def test_value_of_another_type_is_refused(changed: dict[str, Parameter], text: str) -> None:
    with pytest.raises(ServeError) as caught:
        read_span(GIVEN | changed, "input 'x'")
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert text in caught.value.message


def test_region_without_a_size_is_refused() -> None:
    with pytest.raises(ServeError, match="output 'y': 'shared_memory_region' needs 'shared_memory_byte_size'"):
        read_span({"shared_memory_region": "r"}, "output 'y'")
