"""The generated messages are current and coexist with a client library for the same protocol."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

ROUND_TRIP = """
message = ours.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"abcd"])
message.parameters["priority"].uint64_param = 3
message.inputs.add(name="x", datatype="FP32", shape=[1])
theirs_message = theirs.ModelInferRequest.FromString(message.SerializeToString())
assert theirs_message.inputs[0].shape == [1]
assert ours.ModelInferRequest.FromString(theirs_message.SerializeToString()) == message
"""
IMPORT_OURS = "import ortserve._pb.grpc_service_pb2 as ours\n"
IMPORT_THEIRS = "import tritonclient.grpc\nimport tritonclient.grpc.service_pb2 as theirs\n"


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_committed_messages_equal_the_generated_ones() -> None:
    check = subprocess.run(
        [sys.executable, ROOT / "protos" / "generate.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("imports", [IMPORT_OURS + IMPORT_THEIRS, IMPORT_THEIRS + IMPORT_OURS], ids=["ours", "theirs"])
def test_messages_coexist_with_tritonclient_in_any_import_order(imports: str) -> None:
    run = subprocess.run([sys.executable, "-c", imports + ROUND_TRIP], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


SAME_CONTRACT = """
import tritonclient.grpc.model_config_pb2 as theirs
import ortserve._pb.model_config_pb2 as ours

def shape(message, seen):
    if message.name in seen:
        return
    seen[message.name] = {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.containing_oneof.name if field.containing_oneof else None,
            {value.name: value.number for value in field.enum_type.values} if field.enum_type else None,
        )
        for field in message.fields
    }
    for field in message.fields:
        if field.message_type:
            shape(field.message_type, seen)
    return seen

assert shape(theirs.ModelConfig.DESCRIPTOR, {}) == shape(ours.ModelConfig.DESCRIPTOR, {})
"""


def test_configurations_have_the_public_fields_and_numbers() -> None:
    run = subprocess.run([sys.executable, "-c", SAME_CONTRACT], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
