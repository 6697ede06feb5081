"""The table of fields: complete, and applied."""

from collections.abc import Iterator
from typing import cast

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor

from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.repository.triton_fields import FIELDS, Support, check_fields, support_of


def leaf_fields(message: Descriptor, above: str = "") -> Iterator[str]:
    """The paths of all fields of a message type that hold a value instead of a message."""
    for field in message.fields:
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
        if inner is None or not inner.fields:
            yield above + field.name
        else:
            yield from leaf_fields(inner, f"{above}{field.name}.")


LEAVES = sorted(leaf_fields(cast("Descriptor", ModelConfig.DESCRIPTOR)))

# One value for each rejected or reported entry of the table.
REFUSED = {
    "input.is_shape_tensor": "input { is_shape_tensor: true }",
    "input.is_non_linear_format_io": "input { is_non_linear_format_io: true }",
    "output.is_shape_tensor": "output { is_shape_tensor: true }",
    "output.is_non_linear_format_io": "output { is_non_linear_format_io: true }",
    "sequence_batching.iterative_sequence": "sequence_batching { iterative_sequence: true }",
    "instance_group.profile": 'instance_group { profile: "1" }',
    "instance_group.passive": "instance_group { passive: true }",
    "instance_group.secondary_devices": "instance_group { secondary_devices {} }",
    "model_transaction_policy.decoupled": "model_transaction_policy { decoupled: true }",
    "model_repository_agents": 'model_repository_agents { agents { name: "a" } }',
}
REPORTED = {
    "runtime": 'runtime: "libtriton_onnxruntime.so"',
    "optimization.cuda.busy_wait_events": "optimization { cuda { busy_wait_events: true } }",
    "optimization.cuda.graph_spec": "optimization { cuda { graph_spec { batch_size: 4 } } }",
    "optimization.cuda.output_copy_stream": "optimization { cuda { output_copy_stream: true } }",
    "optimization.input_pinned_memory": "optimization { input_pinned_memory { enable: false } }",
    "optimization.output_pinned_memory": "optimization { output_pinned_memory { enable: true } }",
    "optimization.gather_kernel_buffer_threshold": "optimization { gather_kernel_buffer_threshold: 1 }",
    "optimization.eager_batching": "optimization { eager_batching: true }",
    "dynamic_batching.preserve_ordering": "dynamic_batching { preserve_ordering: true }",
    "sequence_batching.oldest.preserve_ordering": "sequence_batching { oldest { preserve_ordering: true } }",
    "sequence_batching.state.use_same_buffer_for_input_output": (
        "sequence_batching { state { use_same_buffer_for_input_output: true } }"
    ),
    "sequence_batching.state.use_growable_memory": "sequence_batching { state { use_growable_memory: true } }",
    "ensemble_scheduling.step.model_namespace": 'ensemble_scheduling { step { model_namespace: "n" } }',
    "instance_group.rate_limiter": "instance_group { rate_limiter { priority: 1 } }",
    "instance_group.host_policy": 'instance_group { host_policy: "p" }',
    "model_metrics": 'model_metrics { metric_control { metric_identifier { family: "f" } } }',
}


def parse(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def test_all_set_fields_are_checked() -> None:
    assert len(LEAVES) == len(set(LEAVES))
    for path in ("name", "input.reshape.shape", "version_policy.all", "model_warmup.inputs.zero_data", "metric_tags"):
        assert path in LEAVES


@pytest.mark.parametrize("path", LEAVES)
def test_every_field_has_a_rule(path: str) -> None:
    assert support_of(path) is not None, f"say in the table what becomes of {path}"


def test_table_names_only_existing_fields() -> None:
    assert [path for path in FIELDS if not any(f"{leaf}.".startswith(f"{path}.") for leaf in LEAVES)] == []


def test_every_rejection_and_report_has_a_case() -> None:
    assert {path for path, (fate, _) in FIELDS.items() if fate is Support.REFUSED} == REFUSED.keys()
    assert {path for path, (fate, _) in FIELDS.items() if fate is Support.REPORTED} == REPORTED.keys()


@pytest.mark.parametrize(("path", "text"), REFUSED.items())
def test_unsupported_field_is_rejected_by_name(path: str, text: str) -> None:
    with pytest.raises(ServeError) as caught:
        check_fields(parse(text))
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert caught.value.message == f"{path} is not supported: {FIELDS[path][1]}"


@pytest.mark.parametrize(("path", "text"), REPORTED.items())
def test_field_without_effect_is_reported_once(path: str, text: str) -> None:
    assert check_fields(parse(text)) == [f"{path}: {FIELDS[path][1]}"]


def test_all_refused_fields_are_named_together() -> None:
    with pytest.raises(ServeError) as caught:
        check_fields(parse("sequence_batching { iterative_sequence: true } input { is_shape_tensor: true }"))
    assert caught.value.message.count("is not supported") == 2


def test_false_sets_no_feature() -> None:
    assert (
        check_fields(
            parse(
                "model_transaction_policy { decoupled: false } response_cache { enable: false } "
                "input { optional: false is_shape_tensor: false }"
            )
        )
        == []
    )
