"""OpenVINO's plug-in for ONNX Runtime: an execution provider that needs no GPU. It is installed separately."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from apart import UnavailableError, installed_apart

OPENVINO: Final = "OpenVINOExecutionProvider"
_VERSION: Final = "1.8.1"
_CLAIMS_INTEL: Final = Path(__file__).parent / "claims_intel"

_DEVICES: Final = """
import onnxruntime, onnxruntime_ep_openvino as package
onnxruntime.register_execution_provider_library("openvino", package.get_library_path())
print(*[device.ep_name for device in onnxruntime.get_ep_devices()])
"""


def openvino_folder() -> Path:
    """The folder of the package; skips the test if the package is unavailable."""
    try:
        return installed_apart(f"openvino-plugin-{_VERSION}", "--no-deps", f"onnxruntime-ep-openvino=={_VERSION}")
    except UnavailableError as error:
        pytest.skip(f"OpenVINO's plug-in cannot be installed: {error}")


def openvino_environment(*, with_package: bool = True) -> dict[str, str]:
    """Environment of a process in which the plug-in has a device; skips the test if there is none.

    Without the package, the plug-in must be named by its library.
    """
    folder = openvino_folder()
    own = {"ORT_DISABLE_TELEMETRY": "1"}
    whole = own | {"PYTHONPATH": _python_path(_CLAIMS_INTEL, folder)}
    if problem := _why_no_device(tuple(whole.items())):
        pytest.skip(f"OpenVINO's plug-in has no device here: {problem}")
    return whole if with_package else own | {"PYTHONPATH": _python_path(_CLAIMS_INTEL)}


@cache
def _why_no_device(added: tuple[tuple[str, str], ...]) -> str:
    """The output of a process with these variables in which the plug-in has no device; empty if it has one."""
    listed = subprocess.run(
        [sys.executable, "-c", _DEVICES], env=os.environ | dict(added), capture_output=True, text=True, check=False
    )
    return "" if OPENVINO in listed.stdout.split() else f"{listed.stdout} {listed.stderr[-300:]}"


def _python_path(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
