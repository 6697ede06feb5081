"""ONNX Runtime: versions, its execution providers, each tried in a process of its own, and GPUs."""

import platform
import time
from collections.abc import Callable
from importlib import metadata
from typing import Final

import onnxruntime as ort

from ortserve import __version__
from ortserve.core.compiled import IS_COMPILED
from ortserve.engine.distributions import installed_runtimes
from ortserve.engine.provider_options import CUDA, TENSORRT
from ortserve.engine.runtime import plugin_names
from ortserve.tools.doctor.result import GpuFacts, ProviderTrial, RuntimeFacts
from ortserve.tools.doctor.trial import in_child

_TRIAL_S: Final = 60.0
_GPUS_S: Final = 15.0
_REMOTE: Final = "AzureExecutionProvider"
"""Calls services of a cloud; it computes nothing here."""
_PACKAGES: Final = ("numpy", "onnx", "protobuf", "grpcio", "cupy-cuda13x", "nvidia-ml-py", "tensorrt")


def read_runtime(step: Callable[[str], None]) -> RuntimeFacts:
    """Try all execution providers. ``step`` is called with what is being done."""
    offered = [name for name in dict.fromkeys((*ort.get_available_providers(), *plugin_names())) if name != _REMOTE]
    trials = []
    for name in offered:
        step(f"trying {name}")
        began = time.monotonic()
        verdict = in_child(("provider", name), _TRIAL_S)
        took = {"seconds": time.monotonic() - began}
        trials.append(ProviderTrial(**({"name": name, "is_offered": True, "is_usable": False} | verdict | took)))
    because = "not part of the installed ONNX Runtime"
    trials += [ProviderTrial(name, False, False, because) for name in (CUDA, TENSORRT) if name not in offered]
    step("asking NVML about GPUs")
    found = in_child(("gpus",), _GPUS_S)
    gpus = [GpuFacts(**(gpu | {"throttled_because": tuple(gpu["throttled_because"])})) for gpu in found.get("gpus", ())]
    path = "compiled" if IS_COMPILED else "interpreted"
    versions = {"ortserve": f"{__version__}, {path}", "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    build = f"{ort.get_build_info()}".removeprefix("ORT Build Info: ")
    return RuntimeFacts(versions, installed_runtimes(), build, tuple(trials), tuple(gpus), found["problem"])
