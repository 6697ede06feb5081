"""No call has two handlers."""

import pytest

from fakes.service import FakeModelService
from ortserve.frontends.grpc.metadata_calls import MetadataCalls
from ortserve.frontends.grpc.router import Router


def test_method_with_two_handlers_is_refused_at_the_start() -> None:
    calls = MetadataCalls(FakeModelService())
    with pytest.raises(ValueError, match="two handlers for /inference"):
        Router([calls, calls])
