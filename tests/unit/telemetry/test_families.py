"""Families as prometheus_client has them, and as they are written fast."""

import math

import pytest

from ortserve.telemetry.families import Declaration, Family, prometheus_type, spell_number
from ortserve.telemetry.histogram import HistogramSeries

SIZES = Declaration("sizes_rows", "histogram", ("model",), "Sizes.", (1.0, 4.0))


def test_histogram_that_counted_nothing_does_not_show() -> None:
    counted, idle = HistogramSeries([1, 4]), HistogramSeries([1, 4])
    for value in (1, 3, 4, 5):
        counted.observe(value)

    family = Family(SIZES, histograms=[(("a",), counted), (("b",), idle)])

    assert [(sample.name, sample.labels, sample.value) for sample in family.samples] == [
        ("sizes_rows_bucket", {"model": "a", "le": "1.0"}, 1),
        ("sizes_rows_bucket", {"model": "a", "le": "4.0"}, 3),
        ("sizes_rows_bucket", {"model": "a", "le": "+Inf"}, 4),
        ("sizes_rows_count", {"model": "a"}, 4),
        ("sizes_rows_sum", {"model": "a"}, 13),
    ]


def test_family_holds_what_was_counted_when_it_was_made() -> None:
    series = HistogramSeries([1, 4])
    series.observe(1)
    family = Family(SIZES, histograms=[(("a",), series)])
    series.observe(2)
    assert [sample.value for sample in family.samples] == [1, 1, 1, 1, 1]


def test_counter_without_its_suffix_has_no_type_of_its_own() -> None:
    assert prometheus_type(Declaration("nv_inference_count", "counter", (), "Rows.")) == "unknown"
    assert prometheus_type(Declaration("runs_total", "counter", (), "Runs.")) == "counter"


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (0.25, "0.25"), (1e-9, "1e-09"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN")],
)
def test_numbers_are_spelled_as_go_reads_them(value: float, text: str) -> None:
    assert spell_number(value) == text
