"""The handler of each call, and the limit on its message size."""

from typing import Any

import pytest

from fakes.service import FakeModelService
from ortserve.frontends.access import GRPC_GROUPS
from ortserve.frontends.grpc.model_calls import ModelCalls
from ortserve.frontends.grpc.router import SMALL_MESSAGE_BYTES, Router, is_small, max_message_bytes, too_large


def test_method_with_two_handlers_stops_the_start() -> None:
    models: Any = FakeModelService()
    calls = ModelCalls(models)
    with pytest.raises(ValueError, match="two handlers for /inference"):
        Router([calls, calls])


def test_only_tensor_and_model_calls_accept_large_messages() -> None:
    large = {path.rpartition("/")[2] for path in GRPC_GROUPS if not is_small(path)}
    assert large == {"ModelInfer", "ModelStreamInfer", "RepositoryModelLoad"}
    assert is_small("/nothing/Here")


@pytest.mark.parametrize("max_body_bytes", [1000, 10**9])
def test_no_call_accepts_more_than_max_body_bytes(max_body_bytes: int) -> None:
    assert max_message_bytes("/inference.GRPCInferenceService/ModelInfer", max_body_bytes) == max_body_bytes
    assert max_message_bytes("/grpc.health.v1.Health/Check", max_body_bytes) == min(max_body_bytes, SMALL_MESSAGE_BYTES)


def test_rejection_names_the_limiting_option() -> None:
    assert too_large(1000, 1001).message == "message larger than max_body_bytes: expected at most 1000 bytes, got 1001"
    text = "decompressed message larger than such a call takes: expected at most 65536 bytes, got more"
    assert too_large(SMALL_MESSAGE_BYTES, None, "decompressed message").message == text
