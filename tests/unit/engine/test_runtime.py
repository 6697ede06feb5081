"""Providers that the process's ONNX Runtime offers. Integration tests cover working plug-ins in other processes."""

import shutil
import subprocess
from pathlib import Path

import onnxruntime as ort
import pytest

from ortserve.engine.provider_options import CUDA
from ortserve.engine.runtime import Offer, Runtime, missing_library
from ortserve.errors import ErrorKind, ServeError

PACKAGE = """
def get_ep_names(): return ["BrokenExecutionProvider"]
def get_library_path(): return __file__
"""


def install(folder: Path, name: str, content: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(content)


def test_built_in_provider_with_devices_is_used_by_name() -> None:
    assert [device.ep_name for device in ort.get_ep_devices()] == ["CPUExecutionProvider"]
    assert Runtime().offer("CPUExecutionProvider") == Offer()


def test_unknown_provider_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "onnxruntime_ep_broken", PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("NoSuchExecutionProvider", "BrokenExecutionProviders", "Broken", "Broken.ExecutionProvider"):
        assert Runtime().offer(name) == Offer(problem="is not offered by this ONNX Runtime")


def test_package_is_loaded_for_providers_with_its_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "onnxruntime_ep_broken", PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    problem = Runtime().offer("BrokenExecutionProvider.AUTO").problem
    assert "the package onnxruntime_ep_broken cannot be used: " in problem


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("onnxruntime_ep_broken", PACKAGE, "Failed to load library"),
        ("onnxruntime_ep_unfinished", "import no_such_module", "No module named 'no_such_module'"),
        ("onnxruntime_ep_other", "", "has no attribute 'get_ep_name'"),
        ("onnxruntime_ep_empty", PACKAGE.replace("return __file__", "open('/no/library')"), "No such file"),
    ],
)
def test_unusable_package_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, reason: str
) -> None:
    install(tmp_path, name, content)
    monkeypatch.syspath_prepend(tmp_path)
    problem = Runtime().offer("BrokenExecutionProvider").problem
    assert problem.startswith(f"is not offered by this ONNX Runtime; the package {name} cannot be used: ")
    assert reason in problem
    assert str(tmp_path) not in problem


def test_library_that_is_not_a_plug_in_is_named_with_the_reason(tmp_path: Path) -> None:
    library = tmp_path / "plugin.so"
    library.write_bytes(b"no library")
    with pytest.raises(ServeError, match=f"execution_provider_libraries: '{library}' cannot be used: ") as caught:
        Runtime([library])
    assert caught.value.kind is ErrorKind.INVALID_INPUT


@pytest.mark.parametrize("name", ["CPUExecutionProvider", "OpenVINOExecutionProvider", "NoSuchExecutionProvider"])
def test_provider_without_a_library_misses_none(name: str) -> None:
    assert missing_library(name) == ""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="makes a library")
def test_missing_dependency_of_a_provider_library_is_named(tmp_path: Path) -> None:
    def build(file: str, *needed: str) -> None:
        command = ["gcc", "-shared", "-o", file, "nothing.c", *needed]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)

    (tmp_path / "nothing.c").touch()
    build("libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    build("libonnxruntime_providers_cuda.so", "-Wl,--no-as-needed", "./libcuda.so.1", "-Wl,-rpath,$ORIGIN")
    (tmp_path / "libcuda.so.1").unlink()
    assert missing_library(CUDA, tmp_path) == "; the library libcuda.so.1 is missing here"
    build("libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    assert missing_library(CUDA, tmp_path) == ""
    provider = tmp_path / "libonnxruntime_providers_cuda.so"
    provider.unlink()  # it is loaded: rewriting it would crash this process at its exit
    provider.write_text("no library")
    assert missing_library(CUDA, tmp_path) == ""
