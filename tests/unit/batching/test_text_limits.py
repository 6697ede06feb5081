"""Limits on the text in a batch."""

import numpy as np
import pytest

from ortserve.batching.large_requests import MAX_TEXT_UNITS, most_rows, text_units


def texts(text: str, *shape: int) -> np.ndarray:
    return np.full(shape, text, object)


@pytest.mark.parametrize(
    ("inputs", "units"),
    [
        ((np.zeros((1000, 4)),), 0),
        ((texts("a", 0),), 0),
        ((texts("a", 10, 2),), 20),
        ((texts("a" * 640, 10),), 10 + 200),
        ((texts("é" * 640, 10),), 10 + 600),
        ((texts("a", 10), texts("b", 10), np.zeros(10)), 20),
        ((texts("a" * 640, 100_000),), 100_000 + 2_000_000),  # estimated
    ],
)
def test_texts_count_by_number_and_length(inputs: tuple[np.ndarray, ...], units: int) -> None:
    assert text_units(inputs) == units


def test_a_few_long_texts_among_many_are_seen_on_average() -> None:
    many = texts("", 1024)
    many[7] = "a" * 64_000
    assert text_units((many,)) == 1024 + 2000


@pytest.mark.parametrize(
    ("units", "rows", "most"),
    [
        (MAX_TEXT_UNITS, 64, 64),
        (2 * MAX_TEXT_UNITS, 64, 32),
        (2 * MAX_TEXT_UNITS, 100, 50),
        (2 * MAX_TEXT_UNITS, 1000, 64),  # of a batch of 64 rows
        (9 * MAX_TEXT_UNITS, 3, 1),
    ],
)
def test_much_text_makes_fewer_rows(units: int, rows: int, most: int) -> None:
    assert most_rows(units, rows, 64) == most
