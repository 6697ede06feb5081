"""The table of statuses, repeated here: clients rely on it, so it must not change by accident."""

from grpc import StatusCode

from ortserve.errors import ErrorKind
from ortserve.frontends.status import STATUSES


def test_each_kind_of_error_has_its_status_on_both_protocols() -> None:
    assert {kind.value: (status.http, status.grpc) for kind, status in STATUSES.items()} == {
        "invalid_input": (400, StatusCode.INVALID_ARGUMENT),
        "unauthenticated": (401, StatusCode.UNAUTHENTICATED),
        "forbidden": (403, StatusCode.PERMISSION_DENIED),
        "not_found": (404, StatusCode.NOT_FOUND),
        "conflict": (409, StatusCode.FAILED_PRECONDITION),
        "already_exists": (400, StatusCode.ALREADY_EXISTS),
        "too_large": (413, StatusCode.RESOURCE_EXHAUSTED),
        "headers_too_large": (431, StatusCode.RESOURCE_EXHAUSTED),
        "too_slow": (408, StatusCode.CANCELLED),
        "overloaded": (429, StatusCode.RESOURCE_EXHAUSTED),
        "cancelled": (499, StatusCode.CANCELLED),
        "unsupported": (501, StatusCode.UNIMPLEMENTED),
        "not_ready": (503, StatusCode.UNAVAILABLE),
        "deadline": (504, StatusCode.DEADLINE_EXCEEDED),
        "rejected_by_model": (400, StatusCode.INVALID_ARGUMENT),
        "internal": (500, StatusCode.INTERNAL),
    }


def test_every_error_kind_has_a_status() -> None:
    assert set(STATUSES) == set(ErrorKind)
