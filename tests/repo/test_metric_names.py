"""Names of metrics follow Prometheus' conventions (https://prometheus.io/docs/practices/naming/)."""

import re
from typing import Final

from ortserve.core.timing import PHASES
from ortserve.errors import ErrorKind
from ortserve.service.access import Group
from ortserve.telemetry.declarations import DECLARATIONS, MODEL_STATES

UNITS: Final = (
    "seconds",
    "bytes",
    "rows",
    "elements",
    "requests",
    "loads",
    "entries",
    "sequences",
    "decisions",
    "streams",
    "batches",
    "captures",
    "reloads",
    "answers",
    "errors",
    "failures",
    "spans",
    "stalls",
    "polls",
    "evictions",
)
"""Counted or measured quantities, in base units and in the plural; they precede ``_total`` in a counter's name."""
UNITLESS: Final = {
    "ortserve_saturation": "a ratio, which has no unit; 1 is all",
    "ortserve_device_utilization": "likewise",
    "ortserve_model_state": "1 or 0 by a label, as kube-state-metrics' phases are",
    "ortserve_store_up": "1 or 0, as Prometheus' own up",
    "ortserve_build_info": "1, for its labels",
    "ortserve_rollout_active": "likewise",
    "ortserve_rollout_worst_error": "in the unit of the model's output, or a ratio",
}
NO_BASE_UNITS: Final = r"(milli|micro|nano)seconds|minutes|percent|(kilo|mega)bytes|_(ms|us|ns|mb|kb)(_|$)"

NO_OUTCOMES: Final = {ErrorKind.UNAUTHENTICATED, ErrorKind.FORBIDDEN, ErrorKind.HEADERS_TOO_LARGE}
"""Kinds of rejections that occur before a request can be timed (``test_keys.py``, ``test_http_limits.py``)."""

BOUNDED_LABELS: Final = {
    "model": "those that are served, by the registry",
    "version": "those that are served, by the registry",
    "protocol": 2,
    "outcome": 1 + len(ErrorKind) - len(NO_OUTCOMES),
    "reason": len(ErrorKind),
    "group": len(Group),
    "phase": len(PHASES),
    "state": len(MODEL_STATES),
    "decision": 12,
    "device": "those of the machine",
    "kind": 2,
    "owner": "instances that are loaded",
    "purpose": 3,
    "way": 6,
    "cause": 21,  # four causes, and the statuses of gRPC
    "code": 14,
    "result": 3,
    "direction": 2,
    "rows": "powers of two up to the largest batch",
    "mode": 2,
    "measure": 4,
    "side": 2,
    "repository": "those that the operator names",
    "operation": 2,
    "python": 1,
    "onnxruntime": 1,
}
"""Every label, with the number of its values or the reason why it is bounded. Callers cannot choose any of them."""


def test_name_has_the_prefix_and_snake_case() -> None:
    for declared in DECLARATIONS:
        assert re.fullmatch(r"ortserve(_[a-z]+)+", declared.name), declared.name
        assert not re.search(NO_BASE_UNITS, declared.name), declared.name


def test_name_ends_with_its_unit_and_counters_with_total() -> None:
    for declared in DECLARATIONS:
        stem = declared.name.removesuffix("_total")
        assert declared.name.endswith("_total") == (declared.type == "counter"), declared.name
        # The text format appends these suffixes to the samples of histograms.
        assert not stem.endswith(("_count", "_sum", "_bucket", "_created")), declared.name
        assert (declared.name in UNITLESS) != stem.endswith(UNITS), declared.name


def test_name_repeats_no_label() -> None:
    for declared in DECLARATIONS:
        words = declared.name.removeprefix("ortserve_").split("_")
        assert not {"protocol", "version", "outcome", "reason"} & set(words), declared.name


def test_labels_are_bounded_and_avoid_reserved_names() -> None:
    for declared in DECLARATIONS:
        assert set(declared.labels) <= BOUNDED_LABELS.keys(), declared.name
        assert not {"le", "quantile", "job", "instance"} & set(declared.labels), declared.name
        # A histogram's buckets multiply with its labels; the case is a model with requests of every kind.
        counts = [BOUNDED_LABELS[label] for label in declared.labels]
        series = (len(declared.buckets) + 3) if declared.buckets else 1
        for count in counts:
            series *= count if isinstance(count, int) else 1
        assert series <= 550, declared.name


def test_buckets_rise_and_cover_three_orders_of_magnitude() -> None:
    for declared in DECLARATIONS:
        buckets = declared.buckets
        assert list(buckets) == sorted(set(buckets)), declared.name
        assert not buckets or buckets[-1] / buckets[0] >= 1000, declared.name


def test_names_are_declared_once() -> None:
    names = [declared.name for declared in DECLARATIONS]
    assert len(set(names)) == len(names)
