"""Arrays of samples in ``.npz`` files: read within bounds, and checked against the tensors of a model.

Axis 0 of each array counts the samples, as ``registry/recording`` writes them: rows of a batched model, whole tensors
of another one. Golden samples and the tools read them.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Final
from zipfile import BadZipFile, ZipFile

import numpy as np

from ortserve.core.dtypes import DataType
from ortserve.core.signature import TensorSpec
from ortserve.errors import invalid_input

MOST_ARRAYS: Final = 1024
"""In one file."""


def read_arrays(file: Path, most_bytes: int) -> Mapping[str, np.ndarray]:
    """Read a file that ``numpy.savez`` wrote, without pickled objects. Blocks on it.

    Args:
        file: Named without its folder in errors.
        most_bytes: Of all arrays together, after decompression. Nothing larger is read.

    Raises:
        ServeError: invalid_input, with what is expected.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        with ZipFile(file) as archive:
            members = archive.infolist()
            nbytes = sum(member.file_size for member in members)
            if len(members) > MOST_ARRAYS or nbytes > most_bytes:
                raise invalid_input(
                    f"{file.name}: expected at most {MOST_ARRAYS} arrays and {most_bytes} bytes, "
                    f"got {len(members)} arrays and {nbytes} bytes"
                )
            for member in members:
                arrays[member.filename.removesuffix(".npy")] = _read_array(archive.read(member))
    except (OSError, ValueError, BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
        problem = getattr(error, "strerror", None) or error
        raise invalid_input(f"{file.name}: expected a file written by numpy.savez, got: {problem}") from None
    return arrays


def _read_array(content: bytes) -> np.ndarray:
    """One array. Raises ValueError, also for a shape that the content does not fill: numpy would allocate it first."""
    stream = BytesIO(content)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    elements = math.prod(shape)
    expected = elements * dtype.itemsize
    if elements and not dtype.itemsize:  # any number of them needs no data, and memory once they are objects
        raise ValueError(f"an array of {elements} elements of 0 bytes")
    if not dtype.hasobject and expected != len(content) - stream.tell():
        raise ValueError(f"an array of {expected} bytes with {len(content) - stream.tell()} bytes of data")
    array: np.ndarray = np.load(BytesIO(content), allow_pickle=False)
    return array


def as_samples(name: str, spec: TensorSpec, array: np.ndarray) -> np.ndarray:
    """The samples of one tensor in the model's datatype: numbers of the same kind are converted if none changes.

    Args:
        name: Of the array, for errors.
        spec: Of the tensor.
        array: As in a file.

    Raises:
        ServeError: invalid_input, with the expected and the actual shape or datatype.
    """
    expected = spec.row_shape if spec.batch_axis is not None else spec.shape
    if not array.ndim or not (spec.has_any_shape or fits(expected, array.shape[1:])):
        raise invalid_input(f"{name}: expected shape {['samples', *expected]}, got {list(array.shape)}")
    if spec.datatype is DataType.BYTES:
        if array.dtype.kind not in "US":
            raise invalid_input(f"{name}: expected texts, got {array.dtype}")
        if array.dtype.kind == "S":
            try:
                array = np.char.decode(array, "utf-8")
            except UnicodeDecodeError as error:
                raise invalid_input(f"{name}: expected texts in UTF-8, got {error.object!r:.100}") from None
        return array.astype(object)
    wanted = spec.datatype.numpy
    if array.dtype == wanted:
        return array
    if array.dtype.kind in "fiub" and (array.dtype.kind == "f") == (wanted.kind == "f"):
        converted = array.astype(wanted)
        if wanted.kind == "f" or np.array_equal(converted, array):
            return converted
    raise invalid_input(f"{name}: expected {wanted} ({spec.datatype.value}), got {array.dtype}")


def fits(expected: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a shape is one of those that a declared shape with free dimensions allows."""
    return len(sizes) == len(expected) and all(want in (-1, got) for want, got in zip(expected, sizes, strict=True))
