"""The table of all fields of a ``config.pbtxt``: whether each is honoured, reported or refused.

A field that would change what clients see or receive is refused, never ignored, if this server does not support it. A
field that only changes how Triton itself works is reported once per load, and the model is served.

``python -m ortserve.registry.repository.triton_fields`` writes the reference page from the table.
"""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

from ortserve._pb import model_config_pb2 as pb
from ortserve.codecs.model_config import set_fields
from ortserve.core.dtypes import DataType
from ortserve.errors import ErrorKind, ServeError, invalid_input


class Support(Enum):
    """The effect of a field that is set."""

    HONOURED = "honoured"
    """The field takes effect, or the load fails if it cannot."""
    REPORTED = "reported"
    """The field has no effect here and does no harm. The log reports it."""
    REFUSED = "refused"
    """The load fails, because the model would behave differently from its configuration."""


FIELDS: Final[Mapping[str, tuple[Support, str]]] = {
    "name": (Support.HONOURED, "the name of the folder"),
    "platform": (Support.HONOURED, "onnxruntime_onnx, or unset; ensemble for an ensemble"),
    "backend": (Support.HONOURED, "onnxruntime, or unset"),
    "runtime": (Support.REPORTED, "there is only one runtime"),
    "version_policy": (Support.HONOURED, "version_policy"),
    "max_batch_size": (Support.HONOURED, "max_rows, batched"),
    "input.name": (Support.HONOURED, "inputs"),
    "input.data_type": (Support.HONOURED, "checked against the model"),
    "input.format": (Support.HONOURED, "shown to clients"),
    "input.dims": (Support.HONOURED, "checked against the model"),
    "input.reshape": (Support.HONOURED, "inputs"),
    "input.is_shape_tensor": (Support.REFUSED, "shape tensors are TensorRT's"),
    "input.allow_ragged_batch": (Support.HONOURED, "inputs"),
    "input.optional": (Support.HONOURED, "if the input is optional in the model"),
    "input.is_non_linear_format_io": (Support.REFUSED, "it is TensorRT's"),
    "output.name": (Support.HONOURED, "served_outputs"),
    "output.data_type": (Support.HONOURED, "checked against the model"),
    "output.dims": (Support.HONOURED, "checked against the model"),
    "output.label_filename": (Support.HONOURED, "outputs"),
    "output.reshape": (Support.HONOURED, "outputs"),
    "output.is_shape_tensor": (Support.REFUSED, "shape tensors are TensorRT's"),
    "output.is_non_linear_format_io": (Support.REFUSED, "it is TensorRT's"),
    "batch_input": (Support.HONOURED, "batch_inputs"),
    "batch_output": (Support.HONOURED, "batch_outputs"),
    "optimization.graph.level": (Support.HONOURED, "session.graph_optimization"),
    "optimization.priority": (Support.HONOURED, "thread_nice"),
    "optimization.cuda.graphs": (Support.HONOURED, "graph_replay"),
    "optimization.cuda.busy_wait_events": (Support.REPORTED, "threads that wait for a GPU sleep"),
    "optimization.cuda.graph_spec": (Support.REPORTED, "there is a graph for each size that batches are padded to"),
    "optimization.cuda.output_copy_stream": (Support.REPORTED, "the server chooses how it copies outputs"),
    "optimization.execution_accelerators": (Support.HONOURED, "execution_providers"),
    "optimization.input_pinned_memory": (Support.REPORTED, "the server chooses how it stages inputs"),
    "optimization.output_pinned_memory": (Support.REPORTED, "the server chooses how it stages outputs"),
    "optimization.gather_kernel_buffer_threshold": (Support.REPORTED, "the server chooses how it stages inputs"),
    "optimization.eager_batching": (Support.REPORTED, "the server chooses how it stages inputs"),
    "dynamic_batching.preferred_batch_size": (Support.HONOURED, "preferred_rows"),
    "dynamic_batching.max_queue_delay_microseconds": (Support.HONOURED, "queue_delay_s"),
    "dynamic_batching.preserve_ordering": (Support.REPORTED, "each response is sent when it is ready"),
    "dynamic_batching.priority_levels": (Support.HONOURED, "priority_levels"),
    "dynamic_batching.default_priority_level": (Support.HONOURED, "default_priority_level"),
    "dynamic_batching.default_queue_policy": (Support.HONOURED, "queue_policy"),
    "dynamic_batching.priority_queue_policy": (Support.HONOURED, "priority_queue_policies"),
    "sequence_batching": (Support.HONOURED, "sequences"),
    "sequence_batching.oldest.preferred_batch_size": (Support.HONOURED, "preferred_rows"),
    "sequence_batching.oldest.max_queue_delay_microseconds": (Support.HONOURED, "queue_delay_s"),
    "sequence_batching.oldest.preserve_ordering": (Support.REPORTED, "each response is sent when it is ready"),
    "sequence_batching.direct.max_queue_delay_microseconds": (Support.HONOURED, "queue_delay_s"),
    "sequence_batching.state.use_same_buffer_for_input_output": (Support.REPORTED, "the server places states itself"),
    "sequence_batching.state.use_growable_memory": (Support.REPORTED, "the server places states itself"),
    "sequence_batching.iterative_sequence": (Support.REFUSED, "the client sends each request of a sequence"),
    "ensemble_scheduling": (Support.HONOURED, "ensemble"),
    "ensemble_scheduling.step.model_namespace": (Support.REPORTED, "models have one namespace"),
    "ensemble_scheduling.max_inflight_requests": (Support.HONOURED, "ensemble.max_inflight_requests"),
    "instance_group.name": (Support.HONOURED, "shown to clients"),
    "instance_group.count": (Support.HONOURED, "instances"),
    "instance_group.gpus": (Support.HONOURED, "gpus"),
    "instance_group.kind": (
        Support.HONOURED,
        "execution_providers; the same in all groups; KIND_GPU fails the load without a GPU; KIND_MODEL is refused",
    ),
    "instance_group.profile": (Support.REFUSED, "it is TensorRT's"),
    "instance_group.rate_limiter": (Support.REPORTED, "it is also off in Triton by default"),
    "instance_group.passive": (Support.REFUSED, "every instance takes requests"),
    "instance_group.secondary_devices": (Support.REFUSED, "there are none here"),
    "instance_group.host_policy": (Support.REPORTED, "the server runs where its affinity mask says"),
    "default_model_filename": (Support.HONOURED, "model_file"),
    "cc_model_filenames": (Support.HONOURED, "without effect on the CPU; refused on a GPU"),
    "metric_tags": (Support.HONOURED, "metric_tags"),
    "parameters": (Support.HONOURED, "those of the ONNX Runtime backend; others are reported, and shown to clients"),
    "model_warmup": (Support.HONOURED, "warmup_samples"),
    "model_operations.op_library_filename": (Support.HONOURED, "session.operator_libraries"),
    "model_transaction_policy.decoupled": (Support.REFUSED, "every request has one response"),
    "model_repository_agents": (Support.REFUSED, "there are none here"),
    "response_cache.enable": (Support.HONOURED, "response_cache"),
    "model_metrics": (Support.REPORTED, "metrics have the buckets of the reference"),
}
"""Support and text of each field, by path. A field that is not listed is treated like the message that contains it. The
text names the option that the field sets, or the reason why it is not honoured."""


def support_of(path: str) -> tuple[str, Support, str] | None:
    """The table's entry for a field or the message that contains it: path, support, text. None for unknown fields."""
    while path:
        if path in FIELDS:
            return path, *FIELDS[path]
        path = path.rpartition(".")[0]
    return None


def check_fields(config: pb.ModelConfig) -> list[str]:
    """Check that no field that is set is refused.

    Returns:
        For each field that has no effect, its path and the reason.

    Raises:
        ServeError: unsupported, naming every refused field.
    """
    found: dict[Support, dict[str, str]] = {support: {} for support in Support}
    for path in set_fields(config):
        if entry := support_of(path):
            key, support, why = entry
            found[support][key] = why
    if refused := found[Support.REFUSED]:
        raise ServeError(
            ErrorKind.UNSUPPORTED, "; ".join(f"{path} is not supported: {why}" for path, why in refused.items())
        )
    return [f"{path}: {why}" for path, why in found[Support.REPORTED].items()]


class NamedNumbers(Protocol):
    """An enumeration in generated protobuf code."""

    def Name(self, number: int) -> str: ...  # noqa: N802 - protobuf's name
    def keys(self) -> list[str]: ...


def value_name(values: NamedNumbers, number: int, path: str) -> str:
    """The name of an enumerated value. Files and clients may contain any number.

    Raises:
        ServeError: invalid_input, with the path and the known names, if the number is unknown.
    """
    try:
        return values.Name(number)
    except ValueError:
        raise invalid_input(f"{path}: expected one of {', '.join(values.keys())}, got {number}") from None


def datatype_name(number: int, path: str) -> str:
    """The protocol's name of a configured datatype. Raises the errors of ``value_name``."""
    name = value_name(pb.DataType, number, path).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def type_name(datatype: DataType) -> str:
    """The name of a datatype in a configuration: ``TYPE_FP32``."""
    return "TYPE_STRING" if datatype is DataType.BYTES else f"TYPE_{datatype.value}"


PAGE: Final = Path(__file__).parents[4] / "docs" / "reference" / "config_pbtxt.md"
"""Path of the reference page in the source tree. An installed package does not contain the page."""

_INTRODUCTION: Final = """\
# config.pbtxt

Generated by `python -m ortserve.registry.repository.triton_fields`; edit the table in that module instead.

A model repository made for Triton is served unchanged: `config.pbtxt` sets the same options as
[`model.yaml`](options.md#one-model), which the table names. A model may have one of the two files. Fields that a file
does not set are completed from the model. Models of other backends fail to load; ensembles are served.
[`ortserve check`](../tools/check.md) lists all models and fields of a repository that are refused or have no effect.

- honoured: the field takes effect, or the load fails if it cannot;
- reported: the field has no effect here and does no harm; the log reports it at each load;
- refused: the load fails and names the field, because the model would behave differently from its configuration.

Batches are formed with and without `dynamic_batching`; it sets preferred sizes, delay, priorities and queue policies.
`max_batch_size: 0` with the shape of an input or output means, as with Triton, that there is no batch dimension and
each request runs alone. A request's `timeout` applies if no queue policy is set.

| field | support | option that it sets, or note |
|---|---|---|
"""


def render() -> str:
    """Render the reference page."""
    rows = [f"| `{path}` | {support.value} | {_note(support, why)} |\n" for path, (support, why) in FIELDS.items()]
    return _INTRODUCTION + "".join(rows)


def _note(support: Support, why: str) -> str:
    words = why.split(", ")
    is_key = support is Support.HONOURED and all(word.replace("_", "").replace(".", "").isalpha() for word in words)
    return ", ".join(f"`{key}`" for key in words) if is_key else why


if __name__ == "__main__":
    PAGE.write_text(render())
