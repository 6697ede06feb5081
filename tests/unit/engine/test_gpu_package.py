"""The options of CUDA's and TensorRT's providers, passed to ONNX Runtime's own package for GPUs."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from apart import UnavailableError
from gpu_package import environment_for_options
from models import builders
from ortserve.device.devices import DEVICE_PROVIDERS
from ortserve.engine.model_signature import read_signature
from ortserve.engine.provider_options import _RULES, CPU, CUDA, TENSORRT, make_provider_options, profile_shapes
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.model_file.reading import read_model
from servers import LONG_S

pytestmark = pytest.mark.timeout(600)  # the package may need to be installed

_TRY: Final = """
import json, sys
import onnxruntime as ort
from ortserve.engine.ort_errors import ORT_ERRORS

def problem(provider, options):
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    try:
        ort.InferenceSession(sys.argv[1], settings, providers=[(provider, options)], enable_fallback=0)
    except ORT_ERRORS as error:
        return str(error)
    return ""

ort.set_default_logger_severity(4)
json.dump([problem(*one) for one in json.load(sys.stdin)], sys.stdout)
"""
"""Opens a session for each pair of a provider and its options, and prints the outcome of each."""

_REFUSED: Final = re.compile(
    r"Unknown provider option|Failed to parse provider option(?!.*Invalid device ID: \d+, must be between 0)|"
    r"Invalid TensorRT EP option|The value for the key",
    re.DOTALL,
)
_VALUES: Final = ("1", "0", "7", "-1", "1048576", "kSameAsRequested", "EXHAUSTIVE", "DEFAULT", "/a/folder", "x:1x64")


@pytest.fixture(params=[CUDA, TENSORRT])
def provider(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def environment_of(provider: str) -> dict[str, str]:
    try:
        return environment_for_options("cuda" if provider == CUDA else "tensorrt")
    except UnavailableError as error:
        pytest.skip(f"ONNX Runtime's package for GPUs cannot be had here: {error}")


def refused(path: Path, provider: str, options: Sequence[Mapping[str, str]]) -> list[bool]:
    """Whether ONNX Runtime rejects the options; valid options pass until it finds no GPU."""
    completed = subprocess.run(
        [sys.executable, "-c", _TRY, path],
        input=json.dumps([[provider, one] for one in options]),
        env=environment_of(provider),
        stdout=subprocess.PIPE,
        text=True,
        timeout=LONG_S,
        check=True,
    )
    problems: list[str] = json.loads(completed.stdout)
    assert all(problems), "there is no GPU, so that no session can be opened"
    return [_REFUSED.search(problem) is not None for problem in problems]


def test_onnx_runtime_accepts_checked_options_unchanged(tmp_path: Path, provider: str) -> None:
    options: list[dict[str, str]] = []
    for name, rule in _RULES[provider].items():
        for value in _VALUES:
            try:
                options.append({name: rule(value)})
            except ValueError:
                continue
    assert len({name for option in options for name in option}) > 15
    taken = refused(builders.mlp(tmp_path / "m.onnx"), provider, options)
    assert [option for option, is_refused in zip(options, taken, strict=True) if is_refused] == []


def test_onnx_runtime_rejects_wrong_values_too(tmp_path: Path, provider: str) -> None:
    """Shows that acceptance of the other options is meaningful."""
    wrong = [{"no_such_option": "1"}, {"trt_fp16_enable" if provider == TENSORRT else "use_tf32": "maybe"}]
    assert refused(builders.mlp(tmp_path / "m.onnx"), provider, wrong) == [True, True]


def test_onnx_runtime_accepts_the_options_of_sessions_on_buffers(tmp_path: Path, provider: str) -> None:
    use = DEVICE_PROVIDERS[provider]
    options = [use.provider_options(2**63 - 1, captures=captures) for captures in (False, True)]
    assert refused(builders.mlp(tmp_path / "m.onnx"), provider, options) == [False, False]


def test_defaults_and_profiles_are_accepted(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "m.onnx")
    signature = read_signature(open_session(path, "m", SessionOptions(ProviderChoice(CPU), 1)), read_model(path))
    profile = profile_shapes(signature, (1, 8), {})
    assert profile
    assert refused(path, TENSORRT, [make_provider_options(TENSORRT, {}), profile]) == [False, False]
    assert refused(path, CUDA, [make_provider_options(CUDA, {})]) == [False]


_MISSING: Final = """
from ortserve.engine.provider_options import TENSORRT
from ortserve.engine.runtime import Runtime, missing_library

assert not Runtime().offer(TENSORRT).problem
print(missing_library(TENSORRT))
"""


def test_libraries_of_tensorrts_package_are_loaded(tmp_path: Path) -> None:
    """The provider finds them there although the dynamic loader does not search the package's folder."""
    environment = environment_of(TENSORRT)
    package, others = tmp_path / "packages" / "tensorrt_libs", tmp_path / "others"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    others.mkdir()
    for library in Path(environment["LD_LIBRARY_PATH"]).glob("lib*"):
        ((package if library.name.startswith("libnv") else others) / library.name).symlink_to(library)
    environment["LD_LIBRARY_PATH"] = str(others)

    def missing() -> str:
        command = [sys.executable, "-c", _MISSING]
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    assert missing() == "; the library libnvinfer.so.10 is missing here"
    environment["PYTHONPATH"] = os.pathsep.join([str(package.parent), environment["PYTHONPATH"]])
    assert missing() == ""
