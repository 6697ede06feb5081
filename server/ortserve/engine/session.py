"""Opening a model file as an ONNX Runtime session, and saying in our words what is wrong with it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from ortserve.engine.providers import ProviderChoice, check_providers, session_providers
from ortserve.errors import ErrorKind, ServeError, invalid_input

# ONNX Runtime's own classes derive straight from Exception, each on its own; bindings and strings raise built-in ones.
ORT_ERRORS: Final[tuple[type[Exception], ...]] = (
    *(kind for kind in vars(ort_errors).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    RuntimeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """``intra_op_threads`` is how many threads one run may use, the calling one included."""

    provider: ProviderChoice
    intra_op_threads: int


def open_session(path: Path, name: str, options: SessionOptions) -> ort.InferenceSession:
    """Open a model file.

    Args:
        path: The ``.onnx`` file. A path, not bytes: ONNX Runtime would keep those beside its own copy of the weights.
        name: What log lines of ONNX Runtime call the model.
        options: Execution provider and threads.

    Raises:
        ServeError: invalid_input, saying what ONNX Runtime found wrong, without paths.
    """
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.intra_op_threads
    settings.inter_op_num_threads = 1  # of use to ORT_PARALLEL only; 0 would size a pool by the host's cores
    # Idle threads that spin cost up to eight times the CPU of the work itself on a shared machine.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.add_session_config_entry("session.inter_op.allow_spinning", "0")
    settings.logid = name
    settings.log_severity_level = 4  # what fails is raised, too; a line for each would let callers flood the log
    try:
        session = ort.InferenceSession(
            str(path),
            sess_options=settings,
            providers=session_providers(options.provider),
            enable_fallback=0,  # else the wrapper retries on the CPU by itself, whatever failed
        )
    except ORT_ERRORS as error:
        # The model's own folder by its text: it may hold spaces, at which a pattern would stop.
        reason = without_paths(str(error).replace(f"{path.parent}/", ""))
        raise invalid_input(f"ONNX Runtime cannot load the model: {reason}") from error
    check_providers(options.provider, session.get_providers())
    return session


def run_error(error: Exception) -> ServeError:
    """What callers of a failed run are told."""
    return ServeError(ErrorKind.INTERNAL, f"ONNX Runtime failed to run the model: {without_paths(str(error))}")


def without_paths(message: str) -> str:
    """ONNX Runtime's text without file-system paths and source locations, on one line."""
    return " ".join(_LOCATION.sub("", _PATH.sub("…", message)).split())


_PATH: Final = re.compile(r"(?<![\w.])/[^\s:'\",)]+")
_LOCATION: Final = re.compile(r"…:\d+ [^\n]*?(?=Status|\b[A-Z][a-z]+ )")
