"""Unexposed names are detected, so that the tests of rules and panels can fail."""

import pytest

from monitoring_expressions import labels_of, metrics_of, unknown_labels, unknown_metrics


@pytest.mark.parametrize(
    ("expression", "metrics", "labels"),
    [
        (
            'sum by (model, le) (rate(a_bucket{job=~"$job", phase!="x, y"}[5m])) > 0.5',
            {"a_bucket"},
            {"model", "le", "job", "phase"},
        ),
        ("a and on (instance) sum by (instance) (b)", {"a", "b"}, {"instance"}),
        ("(a:b:rate5m or vector(0)) / c", {"a:b:rate5m", "c"}, set()),
        ('a{job="b"} > 0 unless c offset 15m', {"a", "c"}, {"job"}),
    ],
)
def test_metrics_and_labels_are_found(expression: str, metrics: set[str], labels: set[str]) -> None:
    assert metrics_of(expression) == metrics
    assert labels_of(expression) == labels


def test_unexposed_names_are_detected() -> None:
    assert unknown_metrics("rate(ortserve_nope_total[5m]) / ortserve_queue_rows", set()) == {"ortserve_nope_total"}
    assert unknown_metrics("ortserve_request_duration_seconds", set()) == {"ortserve_request_duration_seconds"}
    assert unknown_metrics("level:recorded:rate", {"level:recorded:rate"}) == set()
    assert unknown_labels("sum by (nope, job) (ortserve_queue_rows)") == {"nope"}
    assert unknown_labels('ortserve_queue_rows{phase="queue", model="m"}') == {"phase"}
