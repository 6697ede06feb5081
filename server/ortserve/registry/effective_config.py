"""Describes the effective configuration of a served version as Triton's ModelConfig, for clients that read it."""

from collections import Counter
from typing import Final

from ortserve._pb import model_config_pb2 as pb
from ortserve.config.model import ModelOptions, QueuePolicy
from ortserve.config.versions import AllVersions, LatestVersions
from ortserve.core.signature import TensorSpec
from ortserve.engine.provider_options import CPU, OPENVINO
from ortserve.registry.ensemble.served import ServedEnsemble
from ortserve.registry.repository.configuration import BACKEND, GRAPH_LEVELS
from ortserve.registry.repository.triton_fields import type_name
from ortserve.registry.repository.triton_ragged import describe_ragged
from ortserve.registry.repository.triton_sequences import describe_sequences
from ortserve.registry.served import ServedModel
from ortserve.registry.serving import ServedVersion

_GRAPH_LEVELS: Final = {name: level for level, name in GRAPH_LEVELS.items()} | {"layout": 0}  # the nearest level


def describe_config(served: ServedVersion) -> pb.ModelConfig:
    """Describe a version: its ``config.pbtxt``, completed and corrected according to how the version is served."""
    if isinstance(served, ServedEnsemble):
        return _describe_ensemble(served)
    assert isinstance(served, ServedModel)
    return _describe_model(served)


def _describe_ensemble(served: ServedEnsemble) -> pb.ModelConfig:
    options, signature = served.options, served.signature
    config = pb.ModelConfig()
    config.CopyFrom(served.declared)
    config.name, config.platform = served.name, served.platform
    _describe_versions(config.version_policy, options)
    config.max_batch_size = served.max_rows if signature.is_batched else 0
    _describe_ensemble_inputs(config, served)
    del config.output[:]
    for spec in signature.outputs:
        tensor = config.output.add(name=spec.name, data_type=type_name(spec.datatype), dims=spec.shape[spec.leading :])
        configured = options.outputs[spec.name]
        if isinstance(configured.labels, str):
            tensor.label_filename = configured.labels
    config.ClearField("metric_tags")
    config.metric_tags.update(options.metric_tags)
    config.ClearField("response_cache")
    if served.is_cached:
        config.response_cache.enable = True
    config.model_transaction_policy.decoupled = False
    if not config.HasField("ensemble_scheduling"):
        assert options.ensemble is not None
        config.ensemble_scheduling.max_inflight_requests = options.ensemble.max_inflight_requests
        for step in options.ensemble.steps:
            described = config.ensemble_scheduling.step.add(model_name=step.model, model_version=step.version)
            described.input_map.update(step.inputs)
            described.output_map.update(step.outputs)
    return config


def _describe_ensemble_inputs(config: pb.ModelConfig, served: ServedEnsemble) -> None:
    formats = {tensor.name: tensor.format for tensor in served.declared.input}
    del config.input[:]
    for spec in served.signature.inputs:
        tensor = config.input.add(name=spec.name, data_type=type_name(spec.datatype), dims=spec.shape[spec.leading :])
        tensor.format = formats.get(spec.name, tensor.format)
        tensor.optional = spec.is_optional


def _describe_model(served: ServedModel) -> pb.ModelConfig:
    """Describe a version of a model file.

    ``max_batch_size`` is the maximum number of rows that run together, if rows are on axis 0 of all tensors, where
    clients expect them. Otherwise, and for a model whose requests run alone, it is 0, and dims include all axes.
    """
    options = served.options
    config = pb.ModelConfig()
    config.CopyFrom(served.declared)
    config.name, config.platform, config.backend = served.name, served.platform, BACKEND
    _describe_versions(config.version_policy, options)
    config.max_batch_size = served.max_rows if served.signature.rows_lead else 0
    _describe_inputs(config, served)
    _describe_outputs(config, served)
    describe_ragged(config, options, served.model_signature)
    if not config.HasField("optimization"):
        config.optimization.graph.level = _GRAPH_LEVELS[options.session.graph_optimization]
    config.ClearField("dynamic_batching")
    config.ClearField("metric_tags")
    config.metric_tags.update(options.metric_tags)
    config.ClearField("response_cache")
    if served.is_cached:
        config.response_cache.enable = True
    if options.sequences is not None:
        config.ClearField("sequence_batching")
        datatypes = {spec.name: spec.datatype for spec in served.model_signature.inputs}
        describe_sequences(config.sequence_batching, options, datatypes, served.max_rows)
    elif config.max_batch_size > 1:
        _describe_batching(config.dynamic_batching, options, served.max_rows)
    _describe_instances(config, served)
    config.default_model_filename = options.model_file
    config.parameters["intra_op_thread_count"].string_value = str(served.intra_op_threads)
    if options.session.execution_mode == "parallel":
        config.parameters["execution_mode"].string_value = "1"
        config.parameters["inter_op_thread_count"].string_value = str(options.session.inter_op_threads)
    if not served.declared.model_warmup:
        _describe_samples(config, served)
    return config


def _describe_versions(policy: pb.ModelVersionPolicy, options: ModelOptions) -> None:
    policy.Clear()
    if isinstance(options.version_policy, LatestVersions):
        policy.latest.num_versions = options.version_policy.latest
    elif isinstance(options.version_policy, AllVersions):
        policy.all.SetInParent()
    else:
        policy.specific.versions.extend(options.version_policy.specific)


def _describe_inputs(config: pb.ModelConfig, served: ServedModel) -> None:
    declared = {tensor.name: tensor for tensor in served.declared.input}
    del config.input[:]
    # The model's hidden tensors come last.
    for spec, own in zip(served.signature.inputs, served.model_signature.inputs, strict=False):
        first = _first(served, spec)
        tensor = config.input.add(name=spec.name, data_type=type_name(spec.datatype), dims=spec.shape[first:])
        if spec.name in declared:
            tensor.format = declared[spec.name].format
        tensor.optional = spec.is_optional
        tensor.allow_ragged_batch = spec.name in served.options.inputs and served.options.inputs[spec.name].ragged
        _describe_reshape(tensor.reshape, spec, own, first)


def _describe_outputs(config: pb.ModelConfig, served: ServedModel) -> None:
    del config.output[:]
    for spec, own in zip(served.signature.outputs, served.model_signature.outputs, strict=False):
        first = _first(served, spec)
        tensor = config.output.add(name=spec.name, data_type=type_name(spec.datatype), dims=spec.shape[first:])
        configured = served.options.outputs.get(spec.name)
        if configured is not None and isinstance(configured.labels, str):
            tensor.label_filename = configured.labels
        _describe_reshape(tensor.reshape, spec, own, first)


def _describe_reshape(message: pb.ModelTensorReshape, spec: TensorSpec, own: TensorSpec, first: int) -> None:
    if spec.shape != own.shape:
        message.SetInParent()  # An empty shape removes a dimension of 1.
        message.shape.extend(own.shape[first:])


def _describe_batching(batching: pb.ModelDynamicBatching, options: ModelOptions, max_rows: int) -> None:
    batching.preferred_batch_size.extend(options.preferred_rows or (max_rows,))
    batching.max_queue_delay_microseconds = round(options.queue_delay_s * 1e6)
    batching.priority_levels = options.priority_levels
    if options.priority_levels:
        batching.default_priority_level = options.default_priority_level
    if options.queue_policy != QueuePolicy():
        batching.default_queue_policy.CopyFrom(_policy(options.queue_policy))
    for level, policy in options.priority_queue_policies.items():
        batching.priority_queue_policy[level].CopyFrom(_policy(policy))


def _policy(policy: QueuePolicy) -> pb.ModelQueuePolicy:
    return pb.ModelQueuePolicy(
        timeout_action=policy.timeout_action.upper(),
        default_timeout_microseconds=round((policy.timeout_s or 0) * 1e6),
        allow_timeout_override=policy.timeout_override,
        max_queue_size=policy.max_requests or 0,
    )


def _describe_instances(config: pb.ModelConfig, served: ServedModel) -> None:
    declared = served.declared.instance_group
    del config.instance_group[:]
    name = (declared[0].name if declared else "") or served.name
    if served.execution_provider in (CPU, OPENVINO):
        config.instance_group.add(name=name, count=served.options.instances, kind="KIND_CPU")
        return
    # One group per device, because the count of a group applies to each of its devices.
    for number, count in Counter(served.device_ids).items():
        config.instance_group.add(name=name, count=count, kind="KIND_GPU", gpus=[number])


def _describe_samples(config: pb.ModelConfig, served: ServedModel) -> None:
    specs = served.signature.inputs_by_name
    for sample in served.options.warmup_samples:
        described = config.model_warmup.add(name=sample.name, batch_size=sample.rows, count=sample.count)
        for name, declared in sample.inputs.items():
            own_dims = specs[name].shape[_first(served, specs[name]) :]
            dims = own_dims if declared.dims is None else declared.dims
            tensor = pb.ModelWarmup.Input(data_type=type_name(specs[name].datatype), dims=dims)
            if declared.file is not None:
                tensor.input_data_file = declared.file
            elif declared.data == "zeros":
                tensor.zero_data = True
            else:
                tensor.random_data = True
            described.inputs[name].CopyFrom(tensor)


def _first(served: ServedModel, spec: TensorSpec) -> int:
    """The first axis that dims include."""
    return spec.leading if served.signature.rows_lead else 0
