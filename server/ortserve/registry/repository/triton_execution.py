"""Reads how to execute a model from a ``config.pbtxt``: backend parameters, instance groups and accelerators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ortserve._pb import model_config_pb2 as pb
from ortserve.config.model import MAX_INSTANCES, LoadOptions
from ortserve.config.session import provider_parts
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.repository.triton_fields import value_name

_ARENA_STRATEGIES: Final = {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"}
_ALGORITHM_SEARCHES: Final = {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"}
_MAX_DIGITS: Final = 20
"""Maximum number of digits of a 64-bit integer. The limit is checked because int() rejects texts of more than 4,300
digits with a message that does not name the parameter."""
_ENTRY_PREFIXES: Final = ("session.", "optimization.", "ep.")
_OTHER_NAMES: Final = {
    "intra_op_num_threads": "intra_op_thread_count",
    "inter_op_num_threads": "inter_op_thread_count",
    "enable_cpu_mem_arena": "enable_mem_arena",
}
"""Parameters by the names in ONNX Runtime's own interface, which Triton's backend ignores."""


@dataclass(slots=True)
class Parameters:
    """The translated parameters.

    Attributes:
        options: Options of the model.
        session: Settings of its sessions.
        cuda: Options of the CUDA execution provider, by the provider's names.
        without_effect: For each unknown parameter, its name and why it has no effect.
    """

    options: dict[str, Any] = field(default_factory=dict)
    session: dict[str, Any] = field(default_factory=lambda: {"entries": {}})
    cuda: dict[str, str] = field(default_factory=dict)
    without_effect: list[str] = field(default_factory=list)


def read_parameters(given: Mapping[str, str]) -> Parameters:
    """Translate ``parameters`` in the same way as Triton's ONNX Runtime backend.

    Raises:
        ServeError: invalid_input, with the parameter, the expected and the given value.
    """
    read = Parameters()
    for key, value in given.items():
        match key:
            case "intra_op_thread_count":
                read.options |= _threads("intra_op_threads", key, value)
            case "inter_op_thread_count":
                read.session |= _threads("inter_op_threads", key, value)
            case "execution_mode":
                read.session["execution_mode"] = _choice(key, value, {"0": "sequential", "1": "parallel"})
            case "enable_mem_arena":
                read.session["memory_arena"] = parse_bool(key, value)
            case "enable_mem_pattern":
                read.session["memory_pattern"] = parse_bool(key, value)
            case "memory.enable_memory_arena_shrinkage":
                read.session["shrink_arenas"] = [arena.strip() for arena in value.split(";") if arena.strip()]
            case "cudnn_conv_algo_search":
                read.cuda[key] = _choice(key, value, _ALGORITHM_SEARCHES)
            case "arena_extend_strategy":
                read.cuda[key] = _choice(key, value, _ARENA_STRATEGIES)
            case "gpu_mem_limit":
                read.cuda[key] = str(_integer(key, value))
            case "do_copy_in_default_stream":
                read.cuda[key] = str(int(parse_bool(key, value)))
            case _ if key.startswith(_ENTRY_PREFIXES):
                read.session["entries"][key] = value
            case _:
                hint = f"; did you mean '{_OTHER_NAMES[key]}'?" if key in _OTHER_NAMES else ""
                read.without_effect.append(f"parameters['{key}']: unknown parameter{hint}")
    return read


def parse_bool(key: str, text: str) -> bool:
    """Parse a boolean in the backend's spelling: 1, true, 0, false.

    Raises:
        ServeError: invalid_input.
    """
    is_on: bool = _choice(key, text.lower(), {"1": True, "true": True, "0": False, "false": False})
    return is_on


def _threads(name: str, key: str, text: str) -> dict[str, int]:
    count = _integer(key, text)
    return {name: count} if count else {}  # 0 stands for the server's default.


def _integer(key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise invalid_input(f"parameters['{key}']: expected an unsigned integer, got '{text}'")
    return int(text)


def _choice(key: str, text: str, choices: Mapping[str, Any]) -> Any:
    if text not in choices:
        raise invalid_input(f"parameters['{key}']: expected one of {', '.join(choices)}, got '{text}'")
    return choices[text]


_CPU_NAMES: Final = ("cpu", "CPUExecutionProvider")
_GPU_NAMES: Final = ("cuda", "tensorrt", "CUDAExecutionProvider", "TensorrtExecutionProvider")

_TENSORRT_OPTIONS: Final = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_PRECISIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "1"},
    "INT8": {"trt_int8_enable": "1"},
}


@dataclass(frozen=True, slots=True)
class ProviderWishes:
    """The execution providers that a configuration requests.

    Attributes:
        providers: Execution providers in the form of ``model.yaml``, preferred ones first.
        wants_gpu: Whether one of them uses a GPU.
        gpus: GPU of each instance, if the instances use several GPUs.
        without_effect: For each field that has no effect here, its path and the reason.
    """

    providers: list[Any]
    wants_gpu: bool
    gpus: tuple[int, ...] = ()
    without_effect: tuple[str, ...] = ()


def choose_providers(
    groups: Sequence[pb.ModelInstanceGroup],
    accelerators: pb.ModelOptimizationPolicy.ExecutionAccelerators,
    cuda: Mapping[str, str],
    defaults: LoadOptions,
) -> ProviderWishes:
    """List the execution providers that a configuration requests.

    Args:
        groups: Groups of instances; all must be of one kind.
        accelerators: Accelerators for the GPU and for the CPU.
        cuda: Options of the CUDA execution provider, from the parameters.
        defaults: Default options, whose execution providers apply to ``KIND_AUTO``.

    Raises:
        ServeError: unsupported or invalid_input, naming the field.
    """
    kind, gpus = _placement(groups)
    device = gpus[0] if gpus else None
    for_cpu = [_cpu_accelerator(one) for one in accelerators.cpu_execution_accelerator]
    usual: list[tuple[str, dict[str, str]]]
    if kind == "KIND_AUTO":
        usual = [provider_parts(wish) for wish in defaults.execution_providers]
    else:
        usual = [("cpu" if kind == "KIND_CPU" else "cuda", {})]
    without_effect, for_gpu = [], []
    if kind != "KIND_CPU":
        for_gpu = [_gpu_accelerator(one) for one in accelerators.gpu_execution_accelerator]
    elif accelerators.gpu_execution_accelerator:  # Not parsed, as in Triton, because they may be unknown here.
        without_effect.append("optimization.execution_accelerators.gpu_execution_accelerator: the model is on the CPU")
    if kind == "KIND_GPU" and for_cpu:
        without_effect.append("optimization.execution_accelerators.cpu_execution_accelerator: the model is on a GPU")
        for_cpu = []
    wished: dict[str, dict[str, str]] = {}
    ahead = [wish for wish in usual if wish[0] not in _CPU_NAMES]
    last = [wish for wish in usual if wish[0] in _CPU_NAMES]
    for name, options in (*for_gpu, *ahead, *for_cpu, *last):
        wished[name] = options | wished.get(name, {})
    if cuda and not any(name in _GPU_NAMES for name in wished):
        without_effect += [f"parameters['{key}']: the model is not on a GPU" for key in cuda]
    for name, options in wished.items():
        if name in ("cuda", "CUDAExecutionProvider"):
            options |= cuda
        if device is not None and name in _GPU_NAMES:
            options["device_id"] = str(device)
    return ProviderWishes(
        [{name: options} if options else name for name, options in wished.items()],
        any(name in _GPU_NAMES for name in wished),
        gpus if len(set(gpus)) > 1 else (),
        tuple(without_effect),
    )


def _placement(groups: Sequence[pb.ModelInstanceGroup]) -> tuple[str, tuple[int, ...]]:
    """The kind that all groups share, and the GPU of each instance if the groups name GPUs.

    As in Triton, the count of a group applies to each GPU that it names.
    """
    for group in groups:
        if group.count < 0:
            raise invalid_input(f"instance_group.count: expected 0 or more, got {group.count}")
    # Checked before devices are listed, because a client may send a count of 2**31 - 1.
    instances = sum((group.count or 1) * max(1, len(group.gpus)) for group in groups)
    if instances > MAX_INSTANCES:
        raise invalid_input(f"instance_group: expected at most {MAX_INSTANCES} instances in all, got {instances}")
    kinds = {
        "KIND_GPU"
        if group.gpus and not group.kind
        else value_name(pb.ModelInstanceGroup.Kind, group.kind, "instance_group.kind")
        for group in groups
    }
    devices = tuple(device for group in groups for _ in range(group.count or 1) for device in group.gpus)
    if any(device < 0 for device in devices):
        raise invalid_input(f"instance_group.gpus: expected 0 or more, got {min(devices)}")
    if "KIND_MODEL" in kinds:
        raise ServeError(ErrorKind.UNSUPPORTED, "instance_group.kind: KIND_MODEL is not supported")
    if len(kinds) > 1:
        raise ServeError(
            ErrorKind.UNSUPPORTED, f"instance_group: expected instances of one kind, got {', '.join(sorted(kinds))}"
        )
    if len(set(devices)) > 1 and not all(group.gpus for group in groups):
        raise invalid_input("instance_group.gpus: expected GPUs in every group, because some groups name several")
    if devices and kinds == {"KIND_CPU"}:
        raise invalid_input("instance_group.gpus: expected none for KIND_CPU")
    return next(iter(kinds), "KIND_AUTO"), devices


def _gpu_accelerator(
    accelerator: pb.ModelOptimizationPolicy.ExecutionAccelerators.Accelerator,
) -> tuple[str, dict[str, str]]:
    if accelerator.name == "cuda":
        return "cuda", dict(accelerator.parameters)
    if accelerator.name != "tensorrt":
        raise ServeError(
            ErrorKind.UNSUPPORTED, f"gpu_execution_accelerator: expected tensorrt or cuda, got '{accelerator.name}'"
        )
    options: dict[str, str] = {}
    for key, value in accelerator.parameters.items():
        if key == "precision_mode":
            if value not in _PRECISIONS:
                raise invalid_input(f"precision_mode: expected one of {', '.join(_PRECISIONS)}, got '{value}'")
            options |= _PRECISIONS[value]
        elif key in _TENSORRT_OPTIONS or key.startswith("trt_"):
            is_flag = value.lower() in ("true", "false")
            options[_TENSORRT_OPTIONS.get(key, key)] = str(int(parse_bool(key, value))) if is_flag else value
        else:
            raise invalid_input(f"gpu_execution_accelerator: tensorrt has no parameter '{key}'")
    return "tensorrt", options


def _cpu_accelerator(
    accelerator: pb.ModelOptimizationPolicy.ExecutionAccelerators.Accelerator,
) -> tuple[str, dict[str, str]]:
    if accelerator.name != "openvino":
        raise ServeError(
            ErrorKind.UNSUPPORTED, f"cpu_execution_accelerator: expected openvino, got '{accelerator.name}'"
        )
    return "openvino", dict(accelerator.parameters)
