"""Opening a model file as an ONNX Runtime session, and saying in our words what is wrong with it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import onnxruntime as ort

from ortserve.config.session import Scalar, SessionSettings, option_text
from ortserve.engine.declared_shapes import Dimension, input_dimensions
from ortserve.engine.denormals import session_maker
from ortserve.engine.ort_errors import ORT_ERRORS as ORT_ERRORS
from ortserve.engine.ort_errors import without_paths as without_paths
from ortserve.engine.placement import RECORD_ENTRY, check_placement, read_placement
from ortserve.engine.provider_options import GPU_PROVIDERS
from ortserve.engine.providers import CPU, ProviderChoice, attach_providers, check_providers
from ortserve.engine.runtime import missing_library
from ortserve.engine.zip_maps import with_score_tensors
from ortserve.errors import ServeError, invalid_input

_NO_CPU: Final = "session.disable_cpu_ep_fallback"
"""The entry that makes it an error where a node would be left to the CPU; the CPU itself must not be asked for then."""

_WEIGHTS_FOLDER: Final = "session.model_external_initializers_file_folder_path"
"""The entry that says where the files of a model lie that is given as bytes."""
_LOCALE: Final = re.compile(r"Failed to construct locale with name:\s?([A-Za-z_]+(?:\.[A-Za-z0-9-]+)?):")

_AFFINITIES: Final = "session.intra_op_thread_affinities"

_LEVELS: Final = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "layout": ort.GraphOptimizationLevel.ORT_ENABLE_LAYOUT,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


Session: TypeAlias = ort.InferenceSession
"""An open model, for rooms that hand it on."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a model is opened.

    Attributes:
        provider: The execution provider.
        intra_op_threads: How many threads one run may use, the calling one included.
        settings: As configured.
        operator_libraries: Files with operators that are not ONNX Runtime's.
        has_global_threads: Whether runs use the threads of the process, instead of the session's own.
    """

    provider: ProviderChoice
    intra_op_threads: int
    settings: SessionSettings = field(default_factory=SessionSettings)
    operator_libraries: tuple[Path, ...] = ()
    has_global_threads: bool = False


def open_session(path: Path, name: str, options: SessionOptions) -> ort.InferenceSession:
    """Open a model file.

    Args:
        path: The ``.onnx`` file. ONNX Runtime is given the path, not the bytes, which its Python API would keep beside
            its own copy of the weights; where ``zip_maps`` changes the model, the bytes are released after loading.
        name: What log lines of ONNX Runtime call the model.
        options: See there.

    Raises:
        ServeError: invalid_input, saying what ONNX Runtime found wrong, without paths, and on which execution provider
            if not the CPU; also where that does not start, or runs none of the model's nodes.
    """
    _check_settings(options)
    make_session = session_maker(options.settings, has_global_threads=options.has_global_threads)
    dimensions = input_dimensions(path)
    _check_dimensions(dimensions, options.settings)
    provider = options.provider
    try:
        native = _native_options(name, options, varies=_has_varying_shapes(dimensions, options.settings))
        has_cpu = option_text(options.settings.entries.get(_NO_CPU, False)) != "1"
        edited = with_score_tensors(path)
        if edited is not None and _WEIGHTS_FOLDER not in options.settings.entries:
            native.add_session_config_entry(_WEIGHTS_FOLDER, str(path.parent.absolute()))
        session = make_session(
            edited or str(path),
            sess_options=native,
            providers=attach_providers(native, provider, threads=options.intra_op_threads, has_cpu=has_cpu),
            enable_fallback=0,  # else the wrapper retries on the CPU by itself, whatever failed
        )
        if edited is not None:
            session._model_bytes = None  # read again only by the wrapper's own fallback, which is off
    except ORT_ERRORS as error:
        # The model's own folder by its text: it may hold spaces, at which a pattern would stop.
        reason = without_paths(str(error).replace(f"{path.parent}/", ""))
        where = "" if provider.name == CPU else f" on {provider.name}"
        missing = missing_library(provider.name) or _missing_locale(reason)
        error.__traceback__ = None  # its frames have what there is of the session, as below
        raise invalid_input(f"ONNX Runtime cannot load the model{where}: {reason}{missing}") from error
    try:
        check_providers(provider, session.get_providers())
        check_placement(provider.name, read_placement(session))
    except ServeError:
        del session  # else the traceback would have it, for longer than there are the streams that it was told of
        raise
    return session


def _missing_locale(reason: str) -> str:
    """How to install the locale that a StringNormalizer did not find, in words; empty for other reasons."""
    found = _LOCALE.search(reason)
    if found is None:
        return ""
    language, _, encoding = found[1].partition(".")
    return (
        f"; install the locale '{found[1]}' that the model's StringNormalizer needs: on Debian and Ubuntu, "
        f"apt-get install locales && localedef -i {language} -f {encoding or 'UTF-8'} {found[1]}"
    )


def affinities_key(settings: SessionSettings) -> str:
    """By which key the processors of threads are configured; empty where they are not."""
    if settings.thread_affinities is not None:
        return "session.thread_affinities"
    return f"session.entries: {_AFFINITIES}" if _AFFINITIES in settings.entries else ""


def _check_settings(options: SessionOptions) -> None:
    """ONNX Runtime would say nothing of settings that exclude each other, refuse every run for a missing arena, and say
    no more than a number of a folder that is missing.
    """
    settings = options.settings
    if settings.shared_arena and not settings.memory_arena:
        raise invalid_input("session.shared_arena: expected memory_arena beside it, got memory_arena: false")
    if options.has_global_threads and (key := affinities_key(settings)):
        raise invalid_input(f"{key}: expected unset, as the server has global_threads")
    if settings.optimized_model_file is not None:
        _check_optimized_model_file(Path(settings.optimized_model_file))
    # Behind the CPU nothing is attached; of the providers of GPUs ONNX Runtime is left to say which arenas they have.
    attached = options.provider.behind if options.provider.name != CPU else ()
    if GPU_PROVIDERS & {options.provider.name, *(provider.name for provider in attached)}:
        return
    there = {"cpu:0"} if settings.memory_arena else set()
    for arena in settings.shrink_arenas:
        if arena not in there:
            raise invalid_input(
                f"session.shrink_arenas: expected arenas out of {', '.join(there) or 'none'}, got {arena}"
            )


def _check_optimized_model_file(file: Path) -> None:
    if not file.parent.is_dir() or file.is_dir():
        came = "which is a folder" if file.parent.is_dir() else "whose folder is not there"
        raise invalid_input(
            f"session.optimized_model_file: expected a file in a folder that is there, got …/{file.name}, {came}"
        )


def _check_dimensions(dimensions: Sequence[Dimension], settings: SessionSettings) -> None:
    """ONNX Runtime says nothing of a dimension that is not there."""
    names = {dimension.name for dimension in dimensions} - {""}
    for name in settings.free_dimensions:
        if name not in names:
            told = ", ".join(sorted(names)) or "none"
            raise invalid_input(f"session.free_dimensions: expected dimensions out of {told}, got {name}")
    denotations = {dimension.denotation for dimension in dimensions} - {""}
    for denotation in settings.free_dimensions_by_denotation:
        if denotation.lower() not in {there.lower() for there in denotations}:  # which is how they are compared there
            told = ", ".join(sorted(denotations)) or "none"
            raise invalid_input(
                f"session.free_dimensions_by_denotation: expected denotations out of {told}, got {denotation}"
            )


def _has_varying_shapes(dimensions: Sequence[Dimension], settings: SessionSettings) -> bool:
    """Whether requests may differ in more than their rows, as which the first axis of an input counts here."""
    denotations = {denotation.lower() for denotation in settings.free_dimensions_by_denotation}
    return any(
        dimension.axis > 0
        and dimension.is_free
        and dimension.name not in settings.free_dimensions
        and dimension.denotation.lower() not in denotations
        for dimension in dimensions
    )


def _native_options(name: str, options: SessionOptions, *, varies: bool) -> ort.SessionOptions:
    """``varies`` says whether requests differ in more than their rows."""
    settings = options.settings
    native = ort.SessionOptions()
    native.intra_op_num_threads = options.intra_op_threads
    native.inter_op_num_threads = settings.inter_op_threads  # 0 would size a pool by the host's cores
    is_parallel = settings.execution_mode == "parallel"
    native.execution_mode = ort.ExecutionMode.ORT_PARALLEL if is_parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    native.graph_optimization_level = _LEVELS[settings.graph_optimization]
    native.enable_cpu_mem_arena = settings.memory_arena
    native.enable_mem_pattern = not varies if settings.memory_pattern is None else settings.memory_pattern
    native.use_deterministic_compute = settings.deterministic
    # Idle threads that spin cost up to eight times the CPU of the work itself on a shared machine.
    for pool in ("intra_op", "inter_op"):
        native.add_session_config_entry(f"session.{pool}.allow_spinning", option_text(settings.spinning))
    native.use_per_session_threads = not options.has_global_threads
    entries: dict[str, Scalar | None] = {
        _AFFINITIES: settings.thread_affinities,
        "session.dynamic_block_base": settings.dynamic_block_base,
        "session.set_denormal_as_zero": settings.denormal_as_zero,
        "session.use_env_allocators": settings.shared_arena,
    }
    for key, value in (entries | dict(settings.entries)).items():
        if value is not None:
            native.add_session_config_entry(key, option_text(value))
    for dimension, length in settings.free_dimensions.items():
        native.add_free_dimension_override_by_name(dimension, length)
    for denotation, length in settings.free_dimensions_by_denotation.items():
        native.add_free_dimension_override_by_denotation(denotation, length)
    if settings.optimized_model_file is not None:
        native.optimized_model_filepath = settings.optimized_model_file
    native.add_session_config_entry(RECORD_ENTRY, "1")
    native.logid = name
    native.log_severity_level = 4  # what fails is raised, too; a line for each would let callers flood the log
    for library in options.operator_libraries:
        native.register_custom_ops_library(str(library))
    return native
