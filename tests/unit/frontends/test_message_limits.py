"""Which calls take large messages."""

import pytest

from ortserve.frontends.access import GRPC_GROUPS
from ortserve.frontends.grpc.message_limits import SMALL_MESSAGE_BYTES, is_small, max_message_bytes, too_large


def test_all_calls_but_those_that_bring_tensors_or_models_take_small_messages() -> None:
    large = {path.rpartition("/")[2] for path in GRPC_GROUPS if not is_small(path)}
    assert large == {"ModelInfer", "ModelStreamInfer", "RepositoryModelLoad"}
    assert is_small("/nothing/Here")


@pytest.mark.parametrize("max_body_bytes", [1000, 10**9])
def test_no_call_takes_more_than_max_body_bytes(max_body_bytes: int) -> None:
    assert max_message_bytes("/inference.GRPCInferenceService/ModelInfer", max_body_bytes) == max_body_bytes
    assert max_message_bytes("/grpc.health.v1.Health/Check", max_body_bytes) == min(max_body_bytes, SMALL_MESSAGE_BYTES)


def test_refusal_names_the_option_where_it_was_the_option() -> None:
    assert too_large(1000, 1001).message == "message larger than max_body_bytes: expected at most 1000 bytes, got 1001"
    text = "decompressed message larger than such a call takes: expected at most 65536 bytes, got more"
    assert too_large(SMALL_MESSAGE_BYTES, None, "decompressed message").message == text
