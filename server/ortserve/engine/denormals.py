"""Sessions that take denormal numbers as 0: in all threads of their runs, and in no others.

By ``session.set_denormal_as_zero`` ONNX Runtime 1.31.1 has the processor do so in threads of a session's own pools, on
x86 alone (``core/common/denormal.cc``). A thread that calls a run, and does its share of the work, it leaves as it is;
but the one that makes the process's first session it changes for good, and with it every thread made there later
(``std::call_once`` in ``core/session/inference_session.cc``). So the thread is changed here, and put right again.
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
    """Where a thread's ``fenv_t`` says that denormals are 0.

    Attributes:
        words: Its length, in words of 32 bits.
        word: The one that says so.
        bits: All of them set in it.
    """

    words: int
    word: int
    bits: int


_LAYOUTS: Final = {
    "x86_64": FenvLayout(8, 7, 0x8040),  # MXCSR: FTZ, of what is computed, and DAZ, of what it is computed from
    "aarch64": FenvLayout(2, 0, 1 << 24),  # FPCR: FZ, of both
}
"""By machine, from its ``bits/fenv.h`` in glibc and from the processor's manual."""


def fenv_layout(machine: str, libc: str) -> FenvLayout | None:
    """That of a machine with a C library, both as ``platform`` calls them; None where it is not known."""
    return _LAYOUTS.get(machine) if libc == "glibc" else None


class ThreadDenormals:
    """How the calling thread takes denormals."""

    def __init__(self, layout: FenvLayout) -> None:
        """``layout`` is this machine's."""
        libm = ctypes.PyDLL("libm.so.6")  # it keeps the interpreter lock, else a busy thread would take it each time
        self._get, self._set = libm.fegetenv, libm.fesetenv
        self._new = ctypes.c_uint32 * layout.words
        self._word = layout.word
        self._bits = layout.bits

    @contextmanager
    def as_zero(self) -> Iterator[None]:
        """As 0 within the ``with``, afterwards as before."""
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
    """A session that takes denormals as 0, in runs and where it computes constants while it is made.

    Its options must ask for that, too, else the threads of its pools would not on x86; elsewhere they do because the
    thread that makes them does.
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
    """What sessions with these settings are made by, called as ``ort.InferenceSession`` is.

    Args:
        settings: An entry for it stands over ``denormal_as_zero``.
        has_global_threads: Whether runs use threads that the runs of other sessions use, too.

    Raises:
        ServeError: invalid_input, where denormals are to be taken as 0 and not all threads of the runs would.
    """
    if option_text(settings.entries.get(_ENTRY, settings.denormal_as_zero)) != "1":
        plain: Callable[..., ort.InferenceSession] = ort.InferenceSession
        return plain
    key = f"session.entries: {_ENTRY}" if _ENTRY in settings.entries else "session.denormal_as_zero"
    if has_global_threads:
        raise invalid_input(f"{key}: expected false, as the server has global_threads")
    machine, (libc, _) = platform.machine(), platform.libc_ver()
    layout = fenv_layout(machine, libc)
    if layout is None:
        raise invalid_input(
            f"{key}: expected false, as it needs {' or '.join(_LAYOUTS)} with glibc, "
            f"and this is {machine} with {libc or 'another C library'}"
        )
    return partial(FlushingSession, ThreadDenormals(layout))
