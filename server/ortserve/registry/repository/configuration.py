"""The configuration of a model: reads ``model.yaml`` or translates a ``config.pbtxt`` into the same options."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ortserve._pb import model_config_pb2 as pb
from ortserve.codecs.model_config import parse_config_text
from ortserve.config.model import LoadOptions, ModelOptions, load_model_options, make_model_options
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.paths import read_file
from ortserve.registry.ensemble.plan import make_plan
from ortserve.registry.repository.model_files import OPTIONS_FILE, TRITON_OPTIONS_FILE
from ortserve.registry.repository.triton_execution import choose_providers, read_parameters
from ortserve.registry.repository.triton_fields import check_fields, datatype_name, value_name
from ortserve.registry.repository.triton_ragged import read_ragged
from ortserve.registry.repository.triton_sequences import read_sequences
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_MAX_REASONS: Final = 16
"""Maximum number of options without effect that are logged one by one for a model."""

PLATFORM: Final = "onnxruntime_onnx"
BACKEND: Final = "onnxruntime"
ENSEMBLE_PLATFORM: Final = "ensemble"

GRAPH_LEVELS: Final = {0: "all", -1: "basic", 1: "extended", 2: "none"}
"""``session.graph_optimization`` by Triton's ``optimization.graph.level``."""

_NICE_LEVELS: Final = {"PRIORITY_MAX": 0, "PRIORITY_MIN": 19}
"""``thread_nice`` by Triton's ``optimization.priority``, with the levels that Triton sets."""

_ENSEMBLE_OPTIONS: Final = frozenset(
    {
        "batched",
        "ensemble",
        "golden_required",
        "inputs",
        "labels",
        "load_policy",
        "max_rows",
        "metric_tags",
        "outputs",
        "required",
        "response_cache",
        "slo_s",
        "version_policy",
    }
)
"""Options that apply to ensembles."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The configuration of a model.

    Attributes:
        options: Options from a ``model.yaml`` or a ``config.pbtxt``, in the same form.
        declared: Fields of the ``config.pbtxt``, which clients may read; empty without such a file.
        without_effect: For each field that has no effect here, its path and the reason.
        source: Name of the file or of the request parameter that sets the options; empty for a model without either.
    """

    options: ModelOptions
    declared: pb.ModelConfig = field(default_factory=pb.ModelConfig)
    without_effect: tuple[str, ...] = ()
    source: str = field(default="", compare=False)


def read_configuration(name: str, path: Path | None, defaults: LoadOptions) -> Configuration:
    """Read the file that configures a model. Blocks on the disk.

    Args:
        name: Name of the model.
        path: A ``model.yaml`` or ``config.pbtxt``; None for a model that has neither.
        defaults: Values of options that the file does not set.

    Raises:
        ServeError: invalid_input or unsupported. The message begins with the name of the file, without its folder.
    """
    if path is None or path.name != TRITON_OPTIONS_FILE:
        options = load_model_options(path, defaults)
        configuration = Configuration(options, source="" if path is None else path.name)
        return _checked(name, configuration, OPTIONS_FILE)
    try:
        config = parse_config_text(read_file(path))
    except OSError as error:
        raise invalid_input(f"{path.name}: cannot be read: {error.strerror}") from None
    except ServeError as error:
        raise ServeError(error.kind, f"{path.name}: {error.message}") from None
    return configure(name, config, defaults, path.name)


def configure(name: str, config: pb.ModelConfig, defaults: LoadOptions, source: str) -> Configuration:
    """Translate Triton's configuration of a model.

    Args:
        name: Name of the model.
        config: The parsed configuration.
        defaults: Values of options that the configuration does not set.
        source: Prefix of error messages, such as ``config.pbtxt``.

    Raises:
        ServeError: unsupported for fields that this server does not support, invalid_input for wrong values.
    """
    try:
        is_ensemble = _is_ensemble(name, config)
        _check_identity(config, name, ENSEMBLE_PLATFORM if is_ensemble else PLATFORM)
        without_effect = check_fields(config)
        given, more = _ensemble(config) if is_ensemble else _options(config, name, defaults)
    except ServeError as error:
        raise ServeError(error.kind, f"{source}: {error.message}") from None
    options = make_model_options(given, defaults, source)
    return _checked(name, Configuration(options, config, (*without_effect, *more), source), source)


def _checked(name: str, configuration: Configuration, source: str) -> Configuration:
    """Check the graph of an ensemble, and report options that do not apply to ensembles.

    Raises:
        ServeError: invalid_input, for a graph with a cycle, a gap or an unused tensor.
    """
    options = configuration.options
    if options.ensemble is None:
        return configuration
    try:
        make_plan(name, options)
    except ServeError as error:
        raise ServeError(error.kind, f"{source}: {error.message}") from None
    others = [key for key in options.model_fields_set - _ENSEMBLE_OPTIONS if getattr(options, key)]
    reasons = [f"{key}: expected no such option for an ensemble; set it for its members" for key in sorted(others)]
    return replace(configuration, without_effect=(*configuration.without_effect, *reasons))


def _is_ensemble(name: str, config: pb.ModelConfig) -> bool:
    """Whether a configuration describes an ensemble.

    Raises:
        ServeError: invalid_input, for an ensemble that lacks a field that it needs, or sets one of other models. The
            texts of the errors are Triton's.
    """
    has_steps = config.HasField("ensemble_scheduling")
    if config.platform != ENSEMBLE_PLATFORM:
        if has_steps:
            raise invalid_input(f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble")
        return False
    if not has_steps:
        raise invalid_input(f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble")
    if config.backend:
        raise invalid_input(f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type")
    if config.instance_group:
        raise invalid_input(f"instance group should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        raise invalid_input(f"optimization should not be specified for ensemble '{name}'")
    if config.model_warmup:
        raise invalid_input(f"model_warmup can not be specified for ensemble '{name}'")
    if config.batch_input or config.batch_output or any(tensor.allow_ragged_batch for tensor in config.input):
        raise invalid_input(
            f"batch_input, batch_output and allow_ragged_batch can not be specified for ensemble '{name}': its members "
            "form the batches"
        )
    steps = config.ensemble_scheduling.step
    if not steps:
        raise invalid_input(f"must specify 'step' for ensemble '{name}'")
    for number, step in enumerate(steps):
        for key in ("model_name", "input_map", "output_map"):
            if not getattr(step, key):
                raise invalid_input(f"must specify '{key}' in step {number} of ensemble '{name}'")
    return True


def _check_identity(config: pb.ModelConfig, name: str, platform: str) -> None:
    if config.name and config.name != name:
        raise invalid_input(f"name: expected '{name}', the name of the model's folder, got '{config.name}'")
    for key, got, expected in (("platform", config.platform, platform), ("backend", config.backend, BACKEND)):
        if got not in ("", expected):
            raise ServeError(ErrorKind.UNSUPPORTED, f"{key}: expected '{expected}', got '{got}'")


def _signature(config: pb.ModelConfig) -> dict[str, Any]:
    """The options of inputs, outputs and the batch dimension."""
    given: dict[str, Any] = {}
    if config.max_batch_size < 0:
        raise invalid_input(f"max_batch_size: expected 0 or more, got {config.max_batch_size}")
    if config.max_batch_size:
        given |= {"max_rows": config.max_batch_size, "batched": True}
    elif any(tensor.dims for tensor in config.input) or any(tensor.dims for tensor in config.output):
        given["batched"] = False  # In this case the dims include all axes.
    given["inputs"] = {
        tensor.name: _tensor(tensor) | {"optional": tensor.optional, "ragged": tensor.allow_ragged_batch}
        for tensor in config.input
    }
    given["outputs"] = {
        tensor.name: _tensor(tensor) | {"labels": tensor.label_filename or None} for tensor in config.output
    }
    given["served_outputs"] = list(given["outputs"])
    for role, tensors in (("input", config.input), ("output", config.output)):
        if len({tensor.name for tensor in tensors}) < len(tensors) or not all(tensor.name for tensor in tensors):
            raise invalid_input(f"{role}: expected a distinct name for each")
    return given


def _ensemble(config: pb.ModelConfig) -> tuple[dict[str, Any], list[str]]:
    given = _signature(config) | _version_policy(config.version_policy)
    steps = [
        {
            "model": step.model_name,
            "version": step.model_version,
            "inputs": dict(step.input_map),
            "outputs": dict(step.output_map),
        }
        for step in config.ensemble_scheduling.step
    ]
    most = config.ensemble_scheduling.max_inflight_requests
    given["ensemble"] = {"steps": steps, "max_inflight_requests": most}
    given["metric_tags"] = dict(config.metric_tags)
    given["batched"] = config.max_batch_size > 0
    if config.response_cache.enable:
        given["response_cache"] = True
    del given["served_outputs"]
    return given, [f"parameters['{key}']: an ensemble has no parameters" for key in config.parameters]


def _options(config: pb.ModelConfig, name: str, defaults: LoadOptions) -> tuple[dict[str, Any], list[str]]:
    given = _signature(config) | read_ragged(config)
    if config.default_model_filename:
        given["model_file"] = config.default_model_filename
    given |= _version_policy(config.version_policy)
    if config.HasField("dynamic_batching"):
        given |= _dynamic_batching(config.dynamic_batching)
        largest = max(config.dynamic_batching.preferred_batch_size, default=0)
        if largest > config.max_batch_size > 0:
            raise invalid_input(
                "dynamic_batching.preferred_batch_size: expected sizes up to max_batch_size, "
                f"{config.max_batch_size}, got {largest}"
            )
    if config.HasField("sequence_batching"):
        given |= read_sequences(config, name)
    given["metric_tags"] = dict(config.metric_tags)
    given["response_cache"] = config.response_cache.enable
    given["warmup_samples"] = [_sample(sample) for sample in config.model_warmup]

    groups = list(config.instance_group)
    if count := sum(group.count or 1 for group in groups):
        given["instances"] = count
    parameters = read_parameters({key: value.string_value for key, value in config.parameters.items()})
    wishes = choose_providers(groups, config.optimization.execution_accelerators, parameters.cuda, defaults)
    given["execution_providers"] = wishes.providers
    if wishes.gpus:
        given |= {"gpus": list(wishes.gpus), "instances": len(wishes.gpus)}
    if config.cc_model_filenames and wishes.wants_gpu:
        raise ServeError(
            ErrorKind.UNSUPPORTED,
            "cc_model_filenames is not supported on a GPU: set default_model_filename instead",
        )
    without_effect = [*parameters.without_effect, *wishes.without_effect]
    if config.optimization.cuda.graphs and wishes.wants_gpu:
        given["graph_replay"] = True
    elif config.optimization.cuda.graphs:
        without_effect.append("optimization.cuda.graphs: the model is not on a GPU")
    priority = value_name(
        pb.ModelOptimizationPolicy.ModelPriority, config.optimization.priority, "optimization.priority"
    )
    if priority in _NICE_LEVELS:
        given["thread_nice"] = _NICE_LEVELS[priority]
    level = config.optimization.graph.level
    if level not in GRAPH_LEVELS:
        raise invalid_input(f"optimization.graph.level: expected one of -1, 0, 1, 2, got {level}")
    given |= parameters.options
    given["session"] = parameters.session | {
        "graph_optimization": GRAPH_LEVELS[level],
        "operator_libraries": list(config.model_operations.op_library_filename),
    }
    return given, without_effect


def _tensor(tensor: pb.ModelInput | pb.ModelOutput) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if tensor.data_type:
        options["datatype"] = datatype_name(tensor.data_type, f"data_type of '{tensor.name}'")
    if any(dim < 1 and dim != -1 for dim in tensor.dims):
        raise invalid_input(f"dims of '{tensor.name}': expected sizes of at least 1, or -1, got {list(tensor.dims)}")
    if tensor.dims:
        options["dims"] = list(tensor.dims)
        if isinstance(tensor, pb.ModelInput) and tensor.format != pb.ModelInput.FORMAT_NONE and len(tensor.dims) != 3:
            raise invalid_input(f"model input NHWC/NCHW require 3 dims: '{tensor.name}' has {list(tensor.dims)}")
    if tensor.HasField("reshape"):
        options["reshape"] = list(tensor.reshape.shape)
    return options


def _version_policy(policy: pb.ModelVersionPolicy) -> dict[str, Any]:
    match policy.WhichOneof("policy_choice"):
        case "latest":
            return {"version_policy": {"latest": policy.latest.num_versions or 1}}
        case "all":
            return {"version_policy": {"all": True}}
        case "specific":
            return {"version_policy": {"specific": list(policy.specific.versions)}}
        case _:
            return {}


def _dynamic_batching(batching: pb.ModelDynamicBatching) -> dict[str, Any]:
    given: dict[str, Any] = {
        "preferred_rows": list(batching.preferred_batch_size),
        "queue_delay_s": batching.max_queue_delay_microseconds / 1e6,
        "priority_levels": batching.priority_levels,
    }
    level, levels = batching.default_priority_level, max(1, batching.priority_levels)
    if level > levels:
        raise invalid_input(f"dynamic_batching.default_priority_level: expected 1 to {levels}, got {level}")
    for named in batching.priority_queue_policy:
        if not 1 <= named <= levels:
            raise invalid_input(f"dynamic_batching.priority_queue_policy: expected keys 1 to {levels}, got {named}")
    if batching.priority_levels:
        given["default_priority_level"] = level or 1
    if batching.HasField("default_queue_policy"):
        given["queue_policy"] = _queue_policy(batching.default_queue_policy, "dynamic_batching.default_queue_policy")
    given["priority_queue_policies"] = {
        level: _queue_policy(policy, f"dynamic_batching.priority_queue_policy[{level}]")
        for level, policy in batching.priority_queue_policy.items()
    }
    return given


def _queue_policy(policy: pb.ModelQueuePolicy, path: str) -> dict[str, Any]:
    action = value_name(pb.ModelQueuePolicy.TimeoutAction, policy.timeout_action, f"{path}.timeout_action")
    return {
        "timeout_s": policy.default_timeout_microseconds / 1e6 or None,
        "timeout_override": policy.allow_timeout_override,
        "timeout_action": action.lower(),
        "max_requests": policy.max_queue_size or None,
    }


def _sample(sample: pb.ModelWarmup) -> dict[str, Any]:
    return {
        "name": sample.name,
        "rows": sample.batch_size or 1,
        "count": sample.count or 1,
        "inputs": dict(_sample_inputs(sample.name, sample.inputs)),
    }


def _sample_inputs(sample: str, inputs: Mapping[str, pb.ModelWarmup.Input]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, tensor in inputs.items():
        options: dict[str, Any] = {"dims": list(tensor.dims)}
        if tensor.data_type:
            options["datatype"] = datatype_name(tensor.data_type, f"model_warmup '{sample}': data_type of '{name}'")
        match tensor.WhichOneof("input_data_type"):
            case "zero_data":
                options["data"] = "zeros"
            case "random_data":
                options["data"] = "random"
            case "input_data_file":
                options["file"] = tensor.input_data_file
            case _:
                raise invalid_input(
                    f"model_warmup '{sample}': input '{name}' needs zero_data, random_data or input_data_file"
                )
        yield name, options


def log_without_effect(model: str, reasons: Sequence[str]) -> None:
    """Log the options without effect. The number of lines is bounded, because a client's configuration is not."""
    for reason in reasons[:_MAX_REASONS]:
        log_event(logger, logging.WARNING, "option has no effect", model=model, reason=reason)
    if (further := len(reasons) - _MAX_REASONS) > 0:
        log_event(logger, logging.WARNING, "further options have no effect", model=model, options=further)
