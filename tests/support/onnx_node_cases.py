"""The backend node tests of the ONNX package: one model per trait of an operator, with stored inputs and outputs.

Wheels after 1.22 do not contain them, so pip fetches that wheel once per machine into a cache outside the tree.
"""

import hashlib
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import onnx
from onnx import OptionalProto, SequenceProto, TensorProto, numpy_helper

from apart import CACHE, keep, run_tool

ONNX_VERSION: Final = "1.22.0"
# The same wheel for every Python and machine: only its data is used, nothing imports it.
_WHEEL: Final = ("--python-version=3.11", "--implementation=cp", "--abi=cp311", "--platform=manylinux_2_28_x86_64")
_SHA256: Final = "1d0a2bdb15eb2b3cb65c438f3423d9620d14fdce32f92380e6bb1b2e09568ef5"
_DATA: Final = "onnx/backend/test/data/node/"

RTOL: Final = 1e-3
ATOL: Final = 1e-7
"""The tolerances of ONNX's own runner (``onnx/backend/test/loader``); no case sets others."""


class _NoTensor:
    """The value of a stored optional sequence."""


NO_TENSOR: Final = _NoTensor()
Value: TypeAlias = np.ndarray | list[np.ndarray] | _NoTensor | None
"""A stored input or output: a list is a sequence of tensors, None an empty optional value."""


@dataclass(frozen=True, slots=True)
class NodeCase:
    """A case: its model, and its inputs and outputs by name. BF16 and similar types are arrays of ``ml_dtypes``."""

    name: str
    model: Path
    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]


def fetch_node_cases() -> Path:
    """The folder with a folder for each case.

    Raises:
        UnavailableError: The cases are not cached, and pip cannot fetch them.
    """
    folder = CACHE / f"onnx-{ONNX_VERSION}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            extracted = Path(scratch) / "extracted"
            with zipfile.ZipFile(_fetch_wheel(Path(scratch))) as wheel:
                wheel.extractall(extracted, [name for name in wheel.namelist() if name.startswith(_DATA)])
            keep(extracted, folder)
    return folder / _DATA


def read_node_cases(folder: Path) -> list[NodeCase]:
    """Read all cases in the order of their names; each has one set of data."""
    return [_read_case(entry) for entry in sorted(folder.iterdir()) if (entry / "model.onnx").exists()]


def make_repository(cases: list[NodeCase], repository: Path) -> None:
    """Write a model repository with one model per case."""
    for case in cases:
        version = repository / case.name / "1"
        version.mkdir(parents=True)
        shutil.copyfile(case.model, version / "model.onnx")


def is_similar(expected: np.ndarray, got: np.ndarray) -> bool:
    """Whether ``assert_similar`` passes. Writes no message, which takes longer than the comparison."""
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return False
    if expected.dtype == object:
        return np.array_equal(got, expected)
    return np.allclose(got, expected, rtol=RTOL, atol=ATOL, equal_nan=True)


def assert_similar(expected: np.ndarray, got: np.ndarray) -> None:
    """Make the assertion of the node tests' runner about an output."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    if expected.dtype == object:
        np.testing.assert_array_equal(got, expected)
    else:
        np.testing.assert_allclose(got, expected, rtol=RTOL, atol=ATOL)


def _fetch_wheel(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run_tool([*pip, "--only-binary=:all:", *_WHEEL, f"--dest={folder}", f"onnx=={ONNX_VERSION}"])
    (wheel,) = folder.glob("*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == _SHA256, wheel.name
    return wheel


def _read_case(folder: Path) -> NodeCase:
    model = onnx.load(folder / "model.onnx")
    data = folder / "test_data_set_0"

    def read(role: str, infos: list[onnx.ValueInfoProto]) -> dict[str, Value]:
        files = [data / f"{role}_{index}.pb" for index in range(len(infos))]
        return {info.name: _read_value(info, file) for info, file in zip(infos, files, strict=True) if file.exists()}

    return NodeCase(
        folder.name,
        folder / "model.onnx",
        read("input", list(model.graph.input)),
        read("output", list(model.graph.output)),
    )


def _read_value(info: onnx.ValueInfoProto, file: Path) -> Value:
    kind = info.type.WhichOneof("value")
    content = file.read_bytes()
    if kind == "tensor_type":
        return _as_array(TensorProto.FromString(content))
    if kind == "sequence_type":
        sequence = SequenceProto.FromString(content)
        if sequence.elem_type == SequenceProto.TENSOR:
            return [_as_array(tensor) for tensor in sequence.tensor_values]
    if kind == "optional_type":
        optional = OptionalProto.FromString(content)
        if optional.elem_type == OptionalProto.UNDEFINED:
            return None
        if optional.elem_type == OptionalProto.TENSOR:
            return _as_array(optional.tensor_value)
    return NO_TENSOR


def _as_array(tensor: TensorProto) -> np.ndarray:
    array = numpy_helper.to_array(tensor)
    if tensor.data_type != TensorProto.STRING:
        return array
    texts = np.empty(array.size, object)  # the array contains bytes or str, depending on the version
    texts[:] = [element.decode() if isinstance(element, bytes) else str(element) for element in array.ravel()]
    return texts.reshape(array.shape)
