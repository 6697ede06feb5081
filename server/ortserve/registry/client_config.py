"""A model that a client sends: its configuration as JSON, and perhaps its files.

Whoever may send requests is not thereby trusted with the machine. What names a library, a file elsewhere, or a file
that the server would write, is for configurations in the operator's own repository; and of ONNX Runtime's many options
only those are let through that are known to do nothing of the kind.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.codecs.model_config import parse_config_json
from ortserve.config.model import LoadOptions, ModelOptions
from ortserve.config.session import FILE_ENTRIES, provider_parts
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.configuration import Configuration, configure
from ortserve.registry.repository import VERSION, ModelFiles

SOURCE: Final = "config"
"""What errors of such a configuration begin with: the name of the parameter."""

_FILE_PREFIX: Final = "file:"
_LONGEST_NAME: Final = 255

_PROVIDER_OPTIONS: Final = frozenset(
    {
        "arena_extend_strategy",
        "cudnn_conv1d_pad_to_nc1d",
        "cudnn_conv_algo_search",
        "cudnn_conv_use_max_workspace",
        "device_id",
        "device_type",
        "do_copy_in_default_stream",
        "enable_skip_layer_norm_strict_mode",
        "gpu_mem_limit",
        "num_of_threads",
        "num_streams",
        "precision",
        "prefer_nhwc",
        "sdpa_kernel",
        "trt_auxiliary_streams",
        "trt_bf16_enable",
        "trt_build_heuristics_enable",
        "trt_builder_optimization_level",
        "trt_context_memory_sharing_enable",
        "trt_force_sequential_engine_build",
        "trt_fp16_enable",
        "trt_int8_enable",
        "trt_layer_norm_fp32_fallback",
        "trt_max_partition_iterations",
        "trt_max_workspace_size",
        "trt_min_subgraph_size",
        "trt_op_types_to_exclude",
        "trt_profile_max_shapes",
        "trt_profile_min_shapes",
        "trt_profile_opt_shapes",
        "trt_sparsity_enable",
        "use_ep_level_unified_stream",
        "use_tf32",
    }
)
"""Options of execution providers that name no file and hold no address in memory."""


_MOST_THREADS: Final = 256
"""Of all instances of a model that a client configures."""
_MOST_ELEMENTS: Final = 2**24
"""Of a tensor that warms such a model up: 128 MiB where they are of 8 bytes."""


@dataclass(frozen=True, slots=True)
class ClientModel:
    """What a load request brings.

    Attributes:
        name: Of the model.
        configuration: That holds until the next load.
        files: Their contents by their path in the model's folder; empty for a model that lies in the repository.
    """

    name: str
    configuration: Configuration
    files: Mapping[str, bytes]

    def write(self, folder: Path) -> ModelFiles:
        """Put the files into an empty folder, and list them as a repository would. Blocks.

        Raises:
            ServeError: invalid_input, when one cannot be written, such as one that is a folder of another.
        """
        versions: dict[int, Path] = {}
        for path, content in self.files.items():
            target = folder / path
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            except OSError as error:
                raise invalid_input(f"{_FILE_PREFIX}{path}: cannot be kept: {error.strerror}") from None
            version = path.partition("/")[0]
            if "/" in path and VERSION.fullmatch(version):
                versions[int(version)] = folder / version / "model.onnx"
        if not versions:
            raise invalid_input("no file of a version was sent: expected file:<version>/<file>")
        return ModelFiles(self.name, versions, folder=folder)


def read_client_model(
    name: str, config: str | bytes | None, files: Mapping[str, bytes], defaults: LoadOptions
) -> ClientModel | None:
    """Read what a load request brings beside the model's name.

    Args:
        name: Of the model.
        config: The parameter ``config``, JSON of a ModelConfig; None where there is none.
        files: Contents by parameter, ``file:<version>/<file>``.
        defaults: What holds for what the configuration does not say.

    Returns:
        None where it brings neither, so that the model's own files hold.

    Raises:
        ServeError: invalid_input or unsupported, naming what is wrong or not allowed.
    """
    paths = {_path(parameter): content for parameter, content in files.items()}
    if config is None:
        if paths:
            raise invalid_input("files were sent without their configuration: expected the parameter 'config', too")
        return None
    message = parse_config_json(config)
    _check_message(message)
    configuration = configure(name, message, defaults, SOURCE)
    _check_options(configuration.options, defaults)
    return ClientModel(name, configuration, paths)


def _path(parameter: str) -> str:
    """The path that a parameter names, in the model's folder.

    Raises:
        ServeError: invalid_input, for one outside of it, or that no file system takes.
    """
    path = parameter.removeprefix(_FILE_PREFIX)
    parts = path.split("/")
    if path == parameter or "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise invalid_input(f"expected file:<path in the model's folder>, got {parameter[:_LONGEST_NAME]!r}")
    if any(len(part.encode(errors="replace")) > _LONGEST_NAME for part in parts) or not path.isprintable():
        raise invalid_input(f"expected names of at most 255 bytes that can be printed, got {path[:_LONGEST_NAME]!r}")
    return path


def _check_message(config: ModelConfig) -> None:
    if config.HasField("model_operations") and config.model_operations.op_library_filename:
        raise _not_for_clients("model_operations.op_library_filename")
    if config.runtime:
        raise _not_for_clients("runtime")


def _check_options(options: ModelOptions, defaults: LoadOptions) -> None:
    """Refuse what clients may not say. What is as the operator's defaults have it was said by the operator."""
    for key in options.session.entries:
        if key in FILE_ENTRIES:
            raise _not_for_clients(f"parameters['{key}']")
    usual = dict(provider_parts(wish) for wish in defaults.execution_providers)
    for wish in options.execution_providers:
        name, given = provider_parts(wish)
        for key, value in given.items():
            if key not in _PROVIDER_OPTIONS and usual.get(name, {}).get(key) != value:
                raise _not_for_clients(f"option '{key}' of the execution provider {name}")
    threads = options.instances * ((options.intra_op_threads or 1) + options.session.inter_op_threads - 1)
    most_threads = max(_MOST_THREADS, defaults.intra_op_threads or 1)
    if threads > most_threads:
        raise invalid_input(f"{SOURCE}: expected at most {most_threads} threads in all instances, got {threads}")
    for output in options.outputs.values():
        if isinstance(output.labels, str):
            _check_inside(output.labels, "label_filename")
    for sample in options.warmup_samples:
        for name, tensor in sample.inputs.items():
            if sample.rows * math.prod(tensor.dims or ()) > _MOST_ELEMENTS:
                raise invalid_input(
                    f"{SOURCE}: model_warmup: expected at most {_MOST_ELEMENTS} elements, got {sample.rows} rows of "
                    f"{list(tensor.dims or ())} for input '{name}'"
                )
            if tensor.file is not None:
                _check_inside(tensor.file, "input_data_file")


def _check_inside(path: str, field: str) -> None:
    if any(part in ("", ".", "..") for part in path.split("/")) or "\\" in path or "\0" in path:
        raise invalid_input(f"{SOURCE}: {field}: expected a file in the model's folder, got '{path}'")


def _not_for_clients(what: str) -> ServeError:
    return invalid_input(f"{SOURCE}: {what} may be set in the server's own repository only, not by a client")
