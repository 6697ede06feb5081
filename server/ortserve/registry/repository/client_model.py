"""A model that a client sends: its configuration as JSON, with or without files.

Clients must not gain access to the machine. Their configuration must not name libraries, files outside the model's
folder, or files that the server would write; only the operator's own repository may. Options of execution providers are
accepted only if they are known to be harmless.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.codecs.model_config import parse_config_json
from ortserve.config.model import LoadOptions, ModelOptions
from ortserve.config.session import FILE_ENTRIES, provider_parts
from ortserve.core.version_names import version_of
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.repository.configuration import Configuration, configure
from ortserve.registry.repository.model_files import ModelFiles, read_repositories
from ortserve.registry.repository.source import ModelSource, make_source

SOURCE: Final = "config"
"""Name of the parameter with the configuration. Error messages begin with it."""

_FILE_PREFIX: Final = "file:"
_MAX_NAME_BYTES: Final = 255

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
"""Options of execution providers that contain neither a file name nor a memory address."""

_MAX_THREADS: Final = 256
"""Maximum number of threads in all instances of a model that a client configures."""
_MAX_ELEMENTS: Final = 2**24
"""Maximum number of elements of a warm-up tensor or state of such a model: 128 MiB with 8 bytes per element."""


@dataclass(frozen=True, slots=True)
class ClientModel:
    """The model of a load request.

    Attributes:
        name: Name of the model.
        configuration: Configuration that is valid until the next load.
        files: Contents by path in the model's folder; empty for a model in a repository.
    """

    name: str
    configuration: Configuration
    files: Mapping[str, bytes | memoryview]

    def write(self, folder: Path) -> ModelFiles:
        """Write the files into an empty folder, and list them as a repository does. Blocks.

        Raises:
            ServeError: invalid_input, if a file cannot be written, for example because its path is also a folder, or if
                the files contain no version.
        """
        versions: dict[int, Path] = {}
        for path, content in self.files.items():
            target = folder / path
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            except OSError as error:
                raise invalid_input(f"{_FILE_PREFIX}{path}: cannot be written: {error.strerror}") from None
            name, inner, _ = path.partition("/")
            if inner and (version := version_of(name)):
                versions[version] = folder / name / "model.onnx"
        if not versions:
            raise invalid_input("no file of a version was sent: expected file:<version>/<file>")
        return ModelFiles(self.name, versions, folder=folder)


def read_client_model(
    name: str, config: str | bytes | None, files: Mapping[str, bytes | memoryview], defaults: LoadOptions
) -> ClientModel | None:
    """Read and check the parameters of a load request.

    Args:
        name: Name of the model.
        config: The parameter ``config``, a ModelConfig as JSON; None if it is missing.
        files: Contents by parameter name, ``file:<version>/<file>``.
        defaults: Values of options that the configuration does not set.

    Returns:
        The model. None if the request has neither parameter; then the files in the repository apply.

    Raises:
        ServeError: invalid_input or unsupported, naming the part that is wrong or not allowed.
    """
    paths = {_path(parameter): content for parameter, content in files.items()}
    if config is None:
        if paths:
            raise invalid_input("files were sent without a configuration: expected the parameter 'config', too")
        return None
    message = parse_config_json(config)
    _check_message(message)
    configuration = replace(configure(name, message, defaults, SOURCE), source="parameter config of the load")
    _check_options(configuration.options, defaults)
    return ClientModel(name, configuration, paths)


def _path(parameter: str) -> str:
    """The path in the model's folder that a parameter names.

    Raises:
        ServeError: invalid_input, for a path outside the folder, and for a path that file systems do not accept.
    """
    path = parameter.removeprefix(_FILE_PREFIX)
    parts = path.split("/")
    if path == parameter or "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise invalid_input(f"expected file:<path in the model's folder>, got {parameter[:_MAX_NAME_BYTES]!r}")
    if any(len(part.encode(errors="replace")) > _MAX_NAME_BYTES for part in parts) or not path.isprintable():
        raise invalid_input(f"expected names of at most 255 bytes that can be printed, got {path[:_MAX_NAME_BYTES]!r}")
    return path


def _check_message(config: ModelConfig) -> None:
    if config.HasField("model_operations") and config.model_operations.op_library_filename:
        raise _not_for_clients("model_operations.op_library_filename")
    if config.runtime:
        raise _not_for_clients("runtime")


def _check_options(options: ModelOptions, defaults: LoadOptions) -> None:
    """Reject options that clients must not set. Options of providers that equal the operator's defaults are allowed."""
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
    max_threads = max(_MAX_THREADS, defaults.intra_op_threads or 1)
    if threads > max_threads:
        raise invalid_input(f"{SOURCE}: expected at most {max_threads} threads in all instances, got {threads}")
    for output in options.outputs.values():
        if isinstance(output.labels, str):
            _check_inside(output.labels, "label_filename")
    _check_elements(options)
    for sample in options.warmup_samples:
        for tensor in sample.inputs.values():
            if tensor.file is not None:
                _check_inside(tensor.file, "input_data_file")


def _check_elements(options: ModelOptions) -> None:
    """Check the sizes of tensors that the load creates for states and warm-up samples."""
    for state in () if options.sequences is None else options.sequences.states:
        dims = state.dims if state.initial_dims is None else state.initial_dims
        if math.prod(max(dim, 1) for dim in dims or ()) > _MAX_ELEMENTS:
            raise invalid_input(
                f"{SOURCE}: expected at most {_MAX_ELEMENTS} elements of state '{state.input}', got {list(dims or ())}"
            )
    for sample in options.warmup_samples:
        for name, tensor in sample.inputs.items():
            if sample.rows * math.prod(tensor.dims or ()) > _MAX_ELEMENTS:
                raise invalid_input(
                    f"{SOURCE}: model_warmup: expected at most {_MAX_ELEMENTS} elements, got {sample.rows} rows of "
                    f"{list(tensor.dims or ())} for input '{name}'"
                )


def _check_inside(path: str, field: str) -> None:
    if any(part in ("", ".", "..") for part in path.split("/")) or "\\" in path or "\0" in path:
        raise invalid_input(f"{SOURCE}: {field}: expected a file in the model's folder, got '{path}'")


def _not_for_clients(option: str) -> ServeError:
    return invalid_input(f"{SOURCE}: {option} can be set only in the server's own repository, not by a client")


@contextmanager
def client_source(client: ClientModel, roots: Sequence[Path], named: Collection[int] = ()) -> Iterator[ModelSource]:
    """Create the source of a client's model, valid until the context exits. Blocks on the disk on entry and on exit.

    Args:
        client: The model. Its files are written to a temporary folder; without files, those of the repository are used.
        roots: The repositories.
        named: Versions that should serve though the configuration does not choose them, if they exist.

    Raises:
        ServeError: invalid_input, if the files cannot be written, or the model is in no repository.
    """
    if not client.files:
        yield make_source(_find(client.name, roots), client.configuration, named)
        return
    try:
        # The files must be on the disk, because ONNX Runtime finds external weights by names beside the model file.
        folder = TemporaryDirectory(prefix="ortserve-load-", ignore_cleanup_errors=True)
    except OSError as error:
        raise invalid_input(f"its files cannot be written: {error.strerror}") from None
    with folder as path:
        source = make_source(client.write(Path(path)), client.configuration, named)
        yield replace(source, versions={number: replace(one, is_sent=True) for number, one in source.versions.items()})


def _find(name: str, roots: Sequence[Path]) -> ModelFiles:
    try:
        files = next(iter(read_repositories(roots, name)), None)
    except ServeError:  # Its message names the folder, which clients must not learn.
        raise invalid_input("a repository cannot be read") from None
    if files is None:
        raise invalid_input("it is in no repository and no files were sent")
    if files.problem:
        raise invalid_input(files.problem)
    return files
