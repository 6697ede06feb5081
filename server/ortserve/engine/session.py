"""Opening a model file as an ONNX Runtime session, and saying in our words what is wrong with it."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from ortserve.config.session import SessionSettings, option_text
from ortserve.engine.providers import CPU, ProviderChoice, check_providers, session_providers
from ortserve.errors import ErrorKind, ServeError, invalid_input

# ONNX Runtime's own classes derive straight from Exception, each on its own; bindings and strings raise built-in ones.
ORT_ERRORS: Final[tuple[type[Exception], ...]] = (
    *(kind for kind in vars(ort_errors).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    RuntimeError,
    ValueError,
)


_LEVELS: Final = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "layout": ort.GraphOptimizationLevel.ORT_ENABLE_LAYOUT,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a model is opened.

    Attributes:
        provider: The execution provider.
        intra_op_threads: How many threads one run may use, the calling one included.
        settings: As configured.
        operator_libraries: Files with operators that are not ONNX Runtime's.
    """

    provider: ProviderChoice
    intra_op_threads: int
    settings: SessionSettings = field(default_factory=SessionSettings)
    operator_libraries: tuple[Path, ...] = ()


def open_session(path: Path, name: str, options: SessionOptions) -> ort.InferenceSession:
    """Open a model file.

    Args:
        path: The ``.onnx`` file. A path, not bytes: ONNX Runtime would keep those beside its own copy of the weights.
        name: What log lines of ONNX Runtime call the model.
        options: See there.

    Raises:
        ServeError: invalid_input, saying what ONNX Runtime found wrong, without paths.
    """
    _check_arenas(options)
    try:
        session = ort.InferenceSession(
            str(path),
            sess_options=_native_options(name, options),
            providers=session_providers(options.provider),
            enable_fallback=0,  # else the wrapper retries on the CPU by itself, whatever failed
        )
    except ORT_ERRORS as error:
        # The model's own folder by its text: it may hold spaces, at which a pattern would stop.
        reason = without_paths(str(error).replace(f"{path.parent}/", ""))
        raise invalid_input(f"ONNX Runtime cannot load the model: {reason}") from error
    check_providers(options.provider, session.get_providers())
    return session


def run_options(settings: SessionSettings) -> ort.RunOptions | None:
    """What each run is told; None for nothing."""
    if not settings.shrink_arenas:
        return None
    told = ort.RunOptions()
    told.add_run_config_entry("memory.enable_memory_arena_shrinkage", ";".join(settings.shrink_arenas))
    return told


def run_error(error: Exception) -> ServeError:
    """What callers of a failed run are told."""
    return ServeError(ErrorKind.INTERNAL, f"ONNX Runtime failed to run the model: {without_paths(str(error))}")


def without_paths(message: str) -> str:
    """ONNX Runtime's text without file-system paths and source locations, on one line."""
    return " ".join(_LOCATION.sub("", _PATH.sub("…", message)).split())


def _check_arenas(options: SessionOptions) -> None:
    """ONNX Runtime would refuse every run for an arena that is not there."""
    settings = options.settings
    if options.provider.name != CPU:
        return
    there = {"cpu:0"} if settings.memory_arena else set()
    for arena in settings.shrink_arenas:
        if arena not in there:
            raise invalid_input(
                f"session.shrink_arenas: expected arenas out of {', '.join(there) or 'none'}, got {arena}"
            )


def _native_options(name: str, options: SessionOptions) -> ort.SessionOptions:
    settings = options.settings
    native = ort.SessionOptions()
    native.intra_op_num_threads = options.intra_op_threads
    native.inter_op_num_threads = settings.inter_op_threads  # 0 would size a pool by the host's cores
    is_parallel = settings.execution_mode == "parallel"
    native.execution_mode = ort.ExecutionMode.ORT_PARALLEL if is_parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    native.graph_optimization_level = _LEVELS[settings.graph_optimization]
    native.enable_cpu_mem_arena = settings.memory_arena
    native.enable_mem_pattern = settings.memory_pattern
    native.use_deterministic_compute = settings.deterministic
    # Idle threads that spin cost up to eight times the CPU of the work itself on a shared machine.
    for pool in ("intra_op", "inter_op"):
        native.add_session_config_entry(f"session.{pool}.allow_spinning", option_text(settings.spinning))
    for key, value in settings.entries.items():
        native.add_session_config_entry(key, option_text(value))
    native.logid = name
    native.log_severity_level = 4  # what fails is raised, too; a line for each would let callers flood the log
    for library in options.operator_libraries:
        native.register_custom_ops_library(str(library))
    return native


_PATH: Final = re.compile(r"(?<![\w.])/[^\s:'\",)]+")
_LOCATION: Final = re.compile(r"…:\d+ [^\n]*?(?=Status|\b[A-Z][a-z]+ )")
