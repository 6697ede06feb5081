"""Reads and writes ``batch_input`` and ``batch_output`` of a ``config.pbtxt``. The texts of errors are Triton's."""

from typing import Any, Final

from ortserve._pb import model_config_pb2 as pb
from ortserve.config.model import ModelOptions
from ortserve.core.signature import ModelSignature
from ortserve.errors import invalid_input
from ortserve.registry.repository.triton_fields import type_name, value_name

_DATATYPES: Final = {pb.TYPE_INT32: "INT32", pb.TYPE_FP32: "FP32"}


def read_ragged(config: pb.ModelConfig) -> dict[str, Any]:
    """The options ``batch_inputs`` and ``batch_outputs``. ``allow_ragged_batch`` is read with the other input fields.

    Raises:
        ServeError: invalid_input, for a name, a kind or a number of names that Triton does not accept.
    """
    ragged = [tensor.name for tensor in config.input if tensor.allow_ragged_batch]
    if not (ragged or config.batch_input or config.batch_output):
        return {}
    if not config.max_batch_size:
        key = f"allow_ragged_batch of input '{ragged[0]}'" if ragged else "batch_input, batch_output"
        raise invalid_input(f"{key}: expected a max_batch_size of at least 1, as they describe batches, got 0")
    return {"batch_inputs": _batch_inputs(config), "batch_outputs": _batch_outputs(config)}


def _batch_inputs(config: pb.ModelConfig) -> dict[str, dict[str, str]]:
    sources = {tensor.name for tensor in config.input}
    given: dict[str, dict[str, str]] = {}
    for derived in config.batch_input:
        kind = value_name(pb.BatchInput.Kind, derived.kind, "batch_input.kind")
        if not derived.target_name:
            raise invalid_input("batch input must specify at least one 'target_name'")
        if len(derived.source_input) != 1:
            raise invalid_input(f"batch input kind '{kind}' expects 1 source input, got {len(derived.source_input)}")
        if derived.data_type not in _DATATYPES:
            raise invalid_input("batch input data type must be TYPE_INT32 or TYPE_FP32")
        source = derived.source_input[0]
        if config.input and source not in sources:
            raise invalid_input(f"unknown source input name '{source}'")
        for target in derived.target_name:
            if target in given:
                raise invalid_input(f"batch input: target input name '{target}' can only be specified once")
            kind_name = kind.removeprefix("BATCH_").lower()
            given[target] = {"kind": kind_name, "source": source, "datatype": _DATATYPES[derived.data_type]}
    return given


def _batch_outputs(config: pb.ModelConfig) -> dict[str, str]:
    sources = {tensor.name for tensor in config.input}
    targets = {tensor.name for tensor in config.output}
    given: dict[str, str] = {}
    for divided in config.batch_output:
        kind = value_name(pb.BatchOutput.Kind, divided.kind, "batch_output.kind")
        if len(divided.source_input) != 1:
            raise invalid_input(f"batch output kind '{kind}' expects 1 source input, got {len(divided.source_input)}")
        source = divided.source_input[0]
        if config.input and source not in sources:
            raise invalid_input(f"unknown source input name '{source}'")
        for target in divided.target_name:
            if config.output and target not in targets:
                raise invalid_input(f"unknown target output name '{target}'")
            if target in given:
                raise invalid_input(f"target output name '{target}' can only be specified once")
            given[target] = source
    return given


def describe_ragged(config: pb.ModelConfig, options: ModelOptions, signature: ModelSignature) -> None:
    """Write the options into the configuration that clients read, also for a model with a ``model.yaml``."""
    del config.batch_input[:], config.batch_output[:]
    ragged = signature.ragged
    if ragged is None:
        return
    for derived in ragged.batch_inputs:
        config.batch_input.add(
            kind=f"BATCH_{derived.kind.upper()}",
            target_name=[derived.name],
            data_type=type_name(derived.datatype),
            source_input=[signature.inputs[derived.source].name],
        )
    for output, source in options.batch_outputs.items():
        config.batch_output.add(target_name=[output], kind="BATCH_SCATTER_WITH_INPUT_SHAPE", source_input=[source])
