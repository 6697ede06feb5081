"""Where a ``config.pbtxt`` wants a model to run: instance groups and accelerators, as a list of execution providers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ortserve._pb import model_config_pb2 as pb
from ortserve.config.model import MOST_INSTANCES, LoadOptions
from ortserve.config.session import provider_parts
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.config_fields import value_name
from ortserve.registry.config_parameters import parse_bool

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
class Wishes:
    """Execution providers best first, as ``model.yaml`` would list them, and what was said in vain.

    ``gpus`` are those of the instances, one each, where there are several.
    """

    providers: list[Any]
    wants_gpu: bool
    gpus: tuple[int, ...] = ()
    without_effect: tuple[str, ...] = ()


def choose_wishes(
    groups: Sequence[pb.ModelInstanceGroup],
    accelerators: pb.ModelOptimizationPolicy.ExecutionAccelerators,
    cuda: Mapping[str, str],
    defaults: LoadOptions,
) -> Wishes:
    """Say which execution providers a configuration asks for.

    Args:
        groups: Of instances; all must be of one kind.
        accelerators: For the GPU and for the CPU.
        cuda: Options of the CUDA execution provider that stand in the parameters.
        defaults: Whose execution providers hold for ``KIND_AUTO``.

    Raises:
        ServeError: unsupported or invalid_input, naming the field.
    """
    kind, gpus = _placement(groups)
    device = gpus[0] if gpus else None
    for_gpu = [_gpu_accelerator(one) for one in accelerators.gpu_execution_accelerator]
    for_cpu = [_cpu_accelerator(one) for one in accelerators.cpu_execution_accelerator]
    usual: list[tuple[str, dict[str, str]]]
    if kind == "KIND_AUTO":
        usual = [provider_parts(wish) for wish in defaults.execution_providers]
    else:
        usual = [("cpu" if kind == "KIND_CPU" else "cuda", {})]
    without_effect = []
    if kind == "KIND_CPU" and for_gpu:
        without_effect.append("optimization.execution_accelerators.gpu_execution_accelerator: the model is on the CPU")
        for_gpu = []
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
    return Wishes(
        [{name: options} if options else name for name, options in wished.items()],
        any(name in _GPU_NAMES for name in wished),
        gpus if len(set(gpus)) > 1 else (),
        tuple(without_effect),
    )


def _placement(groups: Sequence[pb.ModelInstanceGroup]) -> tuple[str, tuple[int, ...]]:
    """The one kind of all groups, and the device of each instance where they name some.

    The count of a group is of each GPU that it names, as it is in Triton.
    """
    for group in groups:
        if group.count < 0:
            raise invalid_input(f"instance_group.count: expected 0 or more, got {group.count}")
    # Before a device is listed for each: a client says these numbers, and may say 2**31 - 1.
    instances = sum((group.count or 1) * max(1, len(group.gpus)) for group in groups)
    if instances > MOST_INSTANCES:
        raise invalid_input(f"instance_group: expected at most {MOST_INSTANCES} instances in all, got {instances}")
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
            ErrorKind.UNSUPPORTED, f"instance_group: instances of one kind are served, got {', '.join(sorted(kinds))}"
        )
    if len(set(devices)) > 1 and not all(group.gpus for group in groups):
        raise invalid_input("instance_group.gpus: expected some in every group, as others name several")
    if devices and kinds == {"KIND_CPU"}:
        raise invalid_input("instance_group.gpus: KIND_CPU has none")
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
