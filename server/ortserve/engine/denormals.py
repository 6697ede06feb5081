"""Sessions that treat denormal numbers as 0, in all threads of their runs and in no other threads.

With ``session.set_denormal_as_zero``, ONNX Runtime 1.31.1 sets the mode in the threads of a session's own pools, on x86
only (``core/common/denormal.cc``). It does not set the mode in a thread that calls a run and does part of the work. But
it permanently sets the mode in the thread that opens the process's first session, and so in all threads that this
thread starts later (``std::call_once`` in ``core/session/inference_session.cc``). So this module sets and restores the
mode of the calling thread.
"""

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import onnxruntime as ort

from ortserve.config.session import SessionSettings, option_text
from ortserve.errors import invalid_input

_ENTRY: Final = "session.set_denormal_as_zero"


@dataclass(frozen=True, slots=True)
class FenvLayout:
    """The bits of a thread's ``fenv_t`` that set denormals to 0.

    Attributes:
        words: The length of ``fenv_t`` in words of 32 bits.
        word: The index of the word that holds the bits.
        bits: The mask of the bits, which are all set if denormals are 0.
    """

    words: int
    word: int
    bits: int


_LAYOUTS: Final = {
    "x86_64": FenvLayout(8, 7, 0x8040),  # MXCSR: FTZ for results, DAZ for operands
    "aarch64": FenvLayout(2, 0, 1 << 24),  # FPCR: FZ for both
}
"""The layout of each machine, from glibc's ``bits/fenv.h`` and the processor's manual."""


def fenv_layout(machine: str, libc: str) -> FenvLayout | None:
    """The layout for a machine and a C library, both named as in ``platform``; None if it is unknown."""
    return _LAYOUTS.get(machine) if libc == "glibc" else None


class ThreadDenormals:
    """The denormal mode of the calling thread."""

    def __init__(self, layout: FenvLayout) -> None:
        """``layout`` must be the layout of this machine."""
        # Calls keep the interpreter lock, which a busy thread could otherwise acquire at each call.
        libm = ctypes.PyDLL("libm.so.6")
        self._get, self._set = libm.fegetenv, libm.fesetenv
        self._new = ctypes.c_uint32 * layout.words
        self._word = layout.word
        self._bits = layout.bits

    @contextmanager
    def as_zero(self) -> Iterator[None]:
        """Treat denormals as 0 within the ``with``, then restore the mode."""
        environment = self._new()
        self._get(environment)
        before = environment[self._word]
        environment[self._word] = before | self._bits
        self._set(environment)
        try:
            yield
        finally:
            environment[self._word] = before
            self._set(environment)


class FlushingSession(ort.InferenceSession):  # type: ignore[misc]  # ONNX Runtime has no types
    """A session that treats denormals as 0, in runs and in constants that it folds while it is opened.

    On x86 its options must request this, too, for the threads of its pools. On other machines these threads inherit the
    mode of the thread that opens the session.
    """

    def __init__(self, denormals: ThreadDenormals, *args: Any, **kwargs: Any) -> None:
        self._denormals = denormals
        with denormals.as_zero():
            super().__init__(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with self._denormals.as_zero():
            return super().run(*args, **kwargs)

    def run_with_ort_values(self, *args: Any, **kwargs: Any) -> Any:
        with self._denormals.as_zero():
            return super().run_with_ort_values(*args, **kwargs)

    def run_with_iobinding(self, *args: Any, **kwargs: Any) -> None:
        with self._denormals.as_zero():
            super().run_with_iobinding(*args, **kwargs)


def session_maker(settings: SessionSettings, *, has_global_threads: bool) -> Callable[..., ort.InferenceSession]:
    """The constructor of sessions with these settings, called like ``ort.InferenceSession``.

    Args:
        settings: The settings of the session. An entry in ``entries`` overrides ``denormal_as_zero``.
        has_global_threads: Whether runs use threads that other sessions use, too.

    Raises:
        ServeError: invalid_input: denormals shall be 0, but not all threads of the runs can have this mode.
    """
    if option_text(settings.entries.get(_ENTRY, settings.denormal_as_zero)) != "1":
        plain: Callable[..., ort.InferenceSession] = ort.InferenceSession
        return plain
    key = f"session.entries: {_ENTRY}" if _ENTRY in settings.entries else "session.denormal_as_zero"
    if has_global_threads:
        raise invalid_input(f"{key}: expected false, because the server uses global_threads")
    machine, (libc, _) = platform.machine(), platform.libc_ver()
    layout = fenv_layout(machine, libc)
    if layout is None:
        raise invalid_input(
            f"{key}: expected false, because it needs {' or '.join(_LAYOUTS)} with glibc, and this is {machine} with "
            f"{libc or 'another C library'}"
        )
    return partial(FlushingSession, ThreadDenormals(layout))
