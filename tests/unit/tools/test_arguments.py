"""Numbers among arguments."""

import argparse

import pytest

from ortserve.tools.arguments import number, several


def test_numbers_within_their_bounds_are_read() -> None:
    assert several(number(int, 1))("1,32") == [1, 32]
    assert number(float, 0, 1)("0.25") == 0.25
    assert [number(float, 0, 1)(text) for text in ("0", "1")] == [0, 1]


@pytest.mark.parametrize("text", ["-1", "1.5", "nan", "inf", "", "x", "1,0.5,", "1e999"])
def test_others_are_refused_with_the_bounds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a number from 0 to 1, got"):
        number(float, 0, 1)(text)


def test_bounds_are_written_as_they_are() -> None:
    for kind, most, bounds in ((int, 1 << 20, "1 to 1,048,576"), (float, 99.9999, "1 to 99.9999")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"from {bounds}, got '0'"):
            number(kind, 1, most)("0")


@pytest.mark.parametrize("text", ["0", "1,", "2.0", "1000000"])
def test_lists_are_refused_for_any_of_their_numbers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected an integer from 1 to 999,999, got"):
        several(number(int, 1))(text)
