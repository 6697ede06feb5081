"""config.pbtxt, protobuf's text format."""

import pytest

from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.codecs.model_config_text import parse_config_text
from ortserve.errors import ErrorKind, ServeError


def test_both_spellings_of_lists_and_messages_are_read() -> None:
    one = parse_config_text(b'input [ { name: "x", dims: [ -1, 16 ] }, { name: "y" dims: 3 } ] # and a comment\n')
    other = parse_config_text(b'input: { name: "x" dims: -1 dims: 16 } input { name: "y" dims: [3] }')
    assert one == other
    assert [list(tensor.dims) for tensor in one.input] == [[-1, 16], [3]]


def test_empty_file_says_nothing() -> None:
    assert parse_config_text(b"") == ModelConfig()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\nmax_batch: 3", '2:1 : Message type "ModelConfig" has no field named "max_batch".'),
        (b'max_batch_size: "a"', "Couldn't parse integer"),
        (b"input [ { data_type: TYPE_FOO } ]", 'Enum type "DataType" has no value named TYPE_FOO.'),
        (b"input [ {", 'Expected "}"'),
        (b'name: "a" name: "b"', 'should not have multiple "name" fields'),
        (b"dynamic_batching {} sequence_batching {}", "scheduling_choice"),
        (b"\xff", "is not a text in UTF-8"),
    ],
)
def test_what_is_not_understood_is_told_with_its_place(content: bytes, problem: str) -> None:
    with pytest.raises(ServeError) as caught:
        parse_config_text(content)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert problem in caught.value.message
