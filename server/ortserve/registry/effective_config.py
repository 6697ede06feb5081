"""Describes the effective configuration of a served version as Triton's ModelConfig, for clients that read it."""

from collections import Counter
from typing import Final

from ortserve._pb import model_config_pb2 as pb
from ortserve.config.model import ModelOptions, QueuePolicy
from ortserve.config.versions import AllVersions, LatestVersions
from ortserve.core.signature import TensorSpec
from ortserve.engine.provider_options import CPU, OPENVINO
from ortserve.registry.ensemble.served_ensemble import ServedEnsemble
from ortserve.registry.repository.configuration import BACKEND, GRAPH_LEVELS
from ortserve.registry.repository.triton_fields import type_name
from ortserve.registry.repository.triton_ragged import describe_ragged
from ortserve.registry.repository.triton_sequences import describe_sequences
from ortserve.registry.served_model import ServedModel
from ortserve.registry.served_version import ServedVersion

_GRAPH_LEVELS: Final = {name: level for level, name in GRAPH_LEVELS.items()} | {"layout": 0}  # the nearest level


def describe_config(served: ServedVersion) -> pb.ModelConfig:
    """Describe a version: its ``config.pbtxt``, completed and corrected according to how the version is served."""
    config = pb.ModelConfig()
    config.CopyFrom(served.declared)
    config.name, config.platform = served.name, served.platform
    _describe_versions(config.version_policy, served.options)
    _describe_tensors(config, served)
    config.ClearField("metric_tags")
    config.metric_tags.update(served.options.metric_tags)
    config.ClearField("response_cache")
    if served.is_cached:
        config.response_cache.enable = True
    if isinstance(served, ServedEnsemble):
        _describe_ensemble(config, served)
    else:
        assert isinstance(served, ServedModel)
        _describe_model(config, served)
    return config


def _describe_ensemble(config: pb.ModelConfig, served: ServedEnsemble) -> None:
    config.max_batch_size = served.max_rows if served.signature.is_batched else 0
    config.model_transaction_policy.decoupled = False
    if not config.HasField("ensemble_scheduling"):
        ensemble = served.options.ensemble
        assert ensemble is not None
        config.ensemble_scheduling.max_inflight_requests = ensemble.max_inflight_requests
        for step in ensemble.steps:
            described = config.ensemble_scheduling.step.add(model_name=step.model, model_version=step.version)
            described.input_map.update(step.inputs)
            described.output_map.update(step.outputs)


def _describe_model(config: pb.ModelConfig, served: ServedModel) -> None:
    """Describe a version of a model file.

    ``max_batch_size`` is the maximum number of rows that run together, if rows are on axis 0 of all tensors, where
    clients expect them. Otherwise, and for a model whose requests run alone, it is 0, and dims include all axes.
    """
    options = served.options
    config.backend = BACKEND
    config.max_batch_size = served.max_rows if served.signature.rows_lead else 0
    # The model's hidden tensors come last.
    for tensor, spec, own in zip(config.input, served.signature.inputs, served.model_signature.inputs, strict=False):
        tensor.allow_ragged_batch = spec.name in options.inputs and options.inputs[spec.name].ragged
        _describe_reshape(tensor.reshape, spec, own, _first(served, spec))
    for made, spec, own in zip(config.output, served.signature.outputs, served.model_signature.outputs, strict=False):
        _describe_reshape(made.reshape, spec, own, _first(served, spec))
    describe_ragged(config, options, served.model_signature)
    if not config.HasField("optimization"):
        config.optimization.graph.level = _GRAPH_LEVELS[options.session.graph_optimization]
    config.ClearField("dynamic_batching")
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


def _describe_versions(policy: pb.ModelVersionPolicy, options: ModelOptions) -> None:
    policy.Clear()
    if isinstance(options.version_policy, LatestVersions):
        policy.latest.num_versions = options.version_policy.latest
    elif isinstance(options.version_policy, AllVersions):
        policy.all.SetInParent()
    else:
        policy.specific.versions.extend(options.version_policy.specific)


def _describe_tensors(config: pb.ModelConfig, served: ServedVersion) -> None:
    formats = {tensor.name: tensor.format for tensor in served.declared.input}
    del config.input[:], config.output[:]
    for spec in served.signature.inputs:
        dims = spec.shape[_first(served, spec) :]
        tensor = config.input.add(name=spec.name, data_type=type_name(spec.datatype), dims=dims)
        tensor.format = formats.get(spec.name, tensor.format)
        tensor.optional = spec.is_optional
    for spec in served.signature.outputs:
        configured = served.options.outputs.get(spec.name)
        labels = configured.labels if configured is not None and isinstance(configured.labels, str) else ""
        dims = spec.shape[_first(served, spec) :]
        config.output.add(name=spec.name, data_type=type_name(spec.datatype), dims=dims, label_filename=labels)


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
    for number, count in Counter(served.loaded.device_ids).items():
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


def _first(served: ServedVersion, spec: TensorSpec) -> int:
    """The first axis that dims include."""
    return spec.leading if isinstance(served, ServedEnsemble) or served.signature.rows_lead else 0
