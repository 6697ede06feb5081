"""What becomes of each field of a ``config.pbtxt``: the one table.

A field that changes what clients see or get, and that is not served here, is refused by its name, never ignored. One
that only changes how Triton itself goes about its work is reported, once a load, and the model is served.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final, Protocol

from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.codecs.model_config import set_fields
from ortserve.errors import ErrorKind, ServeError, invalid_input


class Fate(Enum):
    """What a field does that is set."""

    HONOURED = "honoured"
    """It takes effect, or fails the load where it cannot."""
    REPORTED = "reported"
    """It has no effect here and does no harm: it is told in the log."""
    REFUSED = "refused"
    """It fails the load: the model would not do what its configuration says."""


FIELDS: Final[Mapping[str, tuple[Fate, str]]] = {
    "name": (Fate.HONOURED, "that of the folder"),
    "platform": (Fate.HONOURED, "onnxruntime_onnx, or unset"),
    "backend": (Fate.HONOURED, "onnxruntime, or unset"),
    "runtime": (Fate.REPORTED, "there is one runtime only"),
    "version_policy": (Fate.HONOURED, "version_policy"),
    "max_batch_size": (Fate.HONOURED, "max_rows, batched"),
    "input.name": (Fate.HONOURED, "inputs"),
    "input.data_type": (Fate.HONOURED, "checked against the model"),
    "input.format": (Fate.HONOURED, "shown to clients"),
    "input.dims": (Fate.HONOURED, "checked against the model"),
    "input.reshape": (Fate.HONOURED, "inputs"),
    "input.is_shape_tensor": (Fate.REFUSED, "shape tensors are TensorRT's"),
    "input.allow_ragged_batch": (Fate.REFUSED, "requests of different shapes run in batches of their own; see pad"),
    "input.optional": (Fate.HONOURED, "where the model can do without the input"),
    "input.is_non_linear_format_io": (Fate.REFUSED, "it is TensorRT's"),
    "output.name": (Fate.HONOURED, "served_outputs"),
    "output.data_type": (Fate.HONOURED, "checked against the model"),
    "output.dims": (Fate.HONOURED, "checked against the model"),
    "output.label_filename": (Fate.HONOURED, "outputs"),
    "output.reshape": (Fate.HONOURED, "outputs"),
    "output.is_shape_tensor": (Fate.REFUSED, "shape tensors are TensorRT's"),
    "output.is_non_linear_format_io": (Fate.REFUSED, "it is TensorRT's"),
    "batch_input": (Fate.REFUSED, "no input is made from the others"),
    "batch_output": (Fate.REFUSED, "outputs are taken apart by rows only"),
    "optimization.graph.level": (Fate.HONOURED, "session.graph_optimization"),
    "optimization.priority": (Fate.REPORTED, "models share the processors fairly"),
    "optimization.cuda.graphs": (Fate.HONOURED, "graph_replay"),
    "optimization.cuda.busy_wait_events": (Fate.REPORTED, "who waits for a GPU sleeps"),
    "optimization.cuda.graph_spec": (Fate.REPORTED, "there is a graph for each size that batches are padded to"),
    "optimization.cuda.output_copy_stream": (Fate.REPORTED, "how outputs are copied is chosen here"),
    "optimization.execution_accelerators": (Fate.HONOURED, "execution_providers"),
    "optimization.input_pinned_memory": (Fate.REPORTED, "how inputs are staged is chosen here"),
    "optimization.output_pinned_memory": (Fate.REPORTED, "how outputs are staged is chosen here"),
    "optimization.gather_kernel_buffer_threshold": (Fate.REPORTED, "how inputs are staged is chosen here"),
    "optimization.eager_batching": (Fate.REPORTED, "how inputs are staged is chosen here"),
    "dynamic_batching.preferred_batch_size": (Fate.HONOURED, "preferred_rows"),
    "dynamic_batching.max_queue_delay_microseconds": (Fate.HONOURED, "queue_delay_s"),
    "dynamic_batching.preserve_ordering": (Fate.REPORTED, "each answer is sent when it is there"),
    "dynamic_batching.priority_levels": (Fate.HONOURED, "priority_levels"),
    "dynamic_batching.default_priority_level": (Fate.HONOURED, "default_priority_level"),
    "dynamic_batching.default_queue_policy": (Fate.HONOURED, "queue_policy"),
    "dynamic_batching.priority_queue_policy": (Fate.HONOURED, "priority_queue_policies"),
    "sequence_batching": (Fate.REFUSED, "sequences are not served"),
    "ensemble_scheduling": (Fate.REFUSED, "ensembles are not served"),
    "instance_group.name": (Fate.HONOURED, "shown to clients"),
    "instance_group.count": (Fate.HONOURED, "instances"),
    "instance_group.gpus": (Fate.HONOURED, "gpus"),
    "instance_group.kind": (Fate.HONOURED, "execution_providers; KIND_MODEL is refused"),
    "instance_group.profile": (Fate.REFUSED, "it is TensorRT's"),
    "instance_group.rate_limiter": (Fate.REPORTED, "it is off in Triton, too, unless switched on for the server"),
    "instance_group.passive": (Fate.REFUSED, "every instance takes requests"),
    "instance_group.secondary_devices": (Fate.REFUSED, "there are none"),
    "instance_group.host_policy": (Fate.REPORTED, "the server runs where its affinity mask says"),
    "default_model_filename": (Fate.HONOURED, "model_file"),
    "cc_model_filenames": (Fate.HONOURED, "on the CPU, which has none; with a GPU they are refused"),
    "metric_tags": (Fate.REPORTED, "metrics have the labels that are in the reference, and no others"),
    "parameters": (Fate.HONOURED, "those of the ONNX Runtime backend; others are reported"),
    "model_warmup": (Fate.HONOURED, "warmup_samples"),
    "model_operations.op_library_filename": (Fate.HONOURED, "session.operator_libraries"),
    "model_transaction_policy.decoupled": (Fate.REFUSED, "every request has one answer"),
    "model_repository_agents": (Fate.REFUSED, "there are none"),
    "response_cache.enable": (Fate.REPORTED, "every request is run"),
    "model_metrics": (Fate.REPORTED, "metrics have the buckets that are in the reference"),
}
"""By path; what is not here has the fate of the message that it is in. The text says where it goes, or why not."""


def fate_of(path: str) -> tuple[str, Fate, str] | None:
    """The entry for a field: its own path or the one above that the table has; None for one it does not know."""
    while path:
        if path in FIELDS:
            return path, *FIELDS[path]
        path = path.rpartition(".")[0]
    return None


def check_fields(config: ModelConfig) -> list[str]:
    """Refuse what is not served.

    Returns:
        For each field that has no effect, its path and why.

    Raises:
        ServeError: unsupported, naming every field that is refused.
    """
    told: dict[Fate, dict[str, str]] = {fate: {} for fate in Fate}
    for path in set_fields(config):
        if entry := fate_of(path):
            key, fate, why = entry
            told[fate][key] = why
    if refused := told[Fate.REFUSED]:
        raise ServeError(
            ErrorKind.UNSUPPORTED, "; ".join(f"{path} is not supported: {why}" for path, why in refused.items())
        )
    return [f"{path}: {why}" for path, why in told[Fate.REPORTED].items()]


class NamedNumbers(Protocol):
    """An enumeration of generated messages."""

    def Name(self, number: int) -> str: ...  # noqa: N802 - as protobuf has it
    def keys(self) -> list[str]: ...


def value_name(values: NamedNumbers, number: int, path: str) -> str:
    """The name of an enumerated value, of which a file or client may send any number.

    Raises:
        ServeError: invalid_input, with the path and the names there are, for a number that has none.
    """
    try:
        return values.Name(number)
    except ValueError:
        raise invalid_input(f"{path}: expected one of {', '.join(values.keys())}, got {number}") from None
