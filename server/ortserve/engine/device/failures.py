"""What a failed run or call of a device means: a bad batch, too little memory, or a device that is lost."""

import ctypes
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ortserve.engine.ort_errors import ORT_ERRORS, OUT_OF_MEMORY, run_error, without_paths
from ortserve.errors import DeviceLostError, OutOfMemoryError, ServeError

DEVICE_ERRORS: Final = ORT_ERRORS
"""What ONNX Runtime raises and what cupy does, whose ``CUDARuntimeError`` is a ``RuntimeError``."""

# Errors after which every call of the process on the device fails (CUDA runtime, cudaError: "the process must be
# terminated and relaunched"), by number and by name; 900 and more are of captures that were broken off, 46 of a device
# that others have taken.
_LOST_NUMBERS: Final = (214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999)
_LOST: Final = re.compile(
    r"CUDA (?:failure|error)[ :]+(?:" + "|".join(map(str, _LOST_NUMBERS)) + r")\b|"
    r"cudaError(?:IllegalAddress|LaunchTimeout|ContextIsDestroyed|Assert|HardwareStackError|IllegalInstruction|"
    r"MisalignedAddress|InvalidAddressSpace|InvalidPc|LaunchFailure|ECCUncorrectable|NvlinkUncorrectable|"
    r"Contained|TensorMemoryLeak|MpsClientTerminated|ExternalDevice|Unknown\b)|"
    r"an illegal memory access|unspecified launch failure|device-side assert|uncorrectable ECC error|"
    r"CUBLAS_STATUS_EXECUTION_FAILED.*700"
)


def give_back(*steps: Callable[[], object]) -> None:
    """Take each step, whatever becomes of the others: of a lost device nothing can be had back, but what the host has.

    Not by an ``ExitStack``, whose errors are part of a cycle that keeps all their callers' frames, and the session.
    """
    for step in steps:
        with suppress(*DEVICE_ERRORS):
            step()


def keep_for_good(owned: object) -> None:
    """Never free something, not at the end of the process either.

    That is for sessions with captured graphs on a lost device: ONNX Runtime's destructor of graphs throws where CUDA
    cannot destroy them (``CudaGraphSet::Clear``), which would end the process in the middle of its drain.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))


def says_lost(error: Exception) -> bool:
    """Whether one of ``DEVICE_ERRORS`` says that its device is lost."""
    return _LOST.search(without_paths(str(error))) is not None


def run_failure(error: Exception, device: str) -> ServeError:
    """What became of a run on a device that raised one of ``DEVICE_ERRORS``."""
    text = without_paths(str(error))
    if says_lost(error):
        return DeviceLostError(f"{device} is lost: {text}")
    if OUT_OF_MEMORY.search(text):
        return OutOfMemoryError(f"{device} has too little memory for the batch: {text}")
    return run_error(error)
