"""Paths of fields."""

from google.protobuf import text_format

from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.codecs.model_config_fields import set_fields


def test_what_is_set_is_listed_by_its_path_whatever_list_or_map_it_is_in() -> None:
    config = text_format.Parse(
        'max_batch_size: 1 input { name: "x" } input { optional: true } dynamic_batching {} '
        'parameters { key: "k" value { string_value: "v" } } metric_tags { key: "k" value: "v" } '
        "optimization { eager_batching: false }",
        ModelConfig(),
    )
    assert sorted(set(set_fields(config))) == [
        "dynamic_batching",
        "input",
        "input.name",
        "input.optional",
        "max_batch_size",
        "metric_tags",
        "optimization",
        "parameters",
        "parameters.string_value",
    ]
