"""Reads arrays of samples from ``.npz`` files of bounded size, and checks them against the tensors of a model.

Axis 0 of each array counts the samples, as ``registry/recording`` writes them. A sample is a row of a batched model, or
a whole tensor of another model. Golden samples and the tools use this module.
"""

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from tokenize import TokenError
from typing import IO, Final
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np

from ortserve.core.dtypes import DataType
from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import fits_shape
from ortserve.errors import invalid_input
from ortserve.paths import open_file

MAX_ARRAYS: Final = 1024
"""Maximum number of arrays in one file."""
MALFORMED_FILE_ERRORS: Final = (
    *(OSError, ValueError, BadZipFile, EOFError, zlib.error),
    *(NotImplementedError, RuntimeError),  # an archive of a newer kind, or with a password
    *(AttributeError, TypeError, SyntaxError, TokenError),  # the header of an array, which numpy reads as Python
)
"""What numpy and zipfile raise for files that ``numpy.save`` and ``numpy.savez`` did not write."""


def read_arrays(file: Path, max_bytes: int) -> Mapping[str, np.ndarray]:
    """Read a file written by ``numpy.savez``. Pickled objects are rejected. Blocks on the disk.

    Args:
        file: Path of the file. Errors name it without its folder.
        max_bytes: Maximum size of all arrays together, after decompression. A larger file is rejected unread.

    Raises:
        ServeError: invalid_input, with the expectation and the problem.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        with open_file(file) as opened, ZipFile(opened) as archive:
            members = archive.infolist()
            nbytes = sum(member.file_size for member in members)
            if len(members) > MAX_ARRAYS or nbytes > max_bytes:
                raise invalid_input(
                    f"{file.name}: expected at most {MAX_ARRAYS} arrays and {max_bytes} bytes, "
                    f"got {len(members)} arrays and {nbytes} bytes"
                )
            if any(member.compress_type not in (ZIP_STORED, ZIP_DEFLATED) for member in members):
                raise ValueError("an archive with a compression that numpy does not use")
            for member in members:
                arrays[member.filename.removesuffix(".npy")] = read_array(archive, member)
    except MALFORMED_FILE_ERRORS as error:
        problem = getattr(error, "strerror", None) or error
        raise invalid_input(f"{file.name}: expected a file written by numpy.savez, got: {problem}") from None
    return arrays


def read_array(archive: ZipFile, member: ZipInfo) -> np.ndarray:
    """Read one array of an archive. Raises one of ``MALFORMED_FILE_ERRORS``."""
    with archive.open(member) as stream:
        check_header(stream, member.file_size)
    with archive.open(member) as stream:
        array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
    return array


def check_header(stream: IO[bytes], nbytes: int) -> None:
    """Check that the shape of an array in a file of ``nbytes`` matches its data, as numpy would allocate it first.

    Raises:
        ValueError: It does not.
        Exception: One of ``MALFORMED_FILE_ERRORS``.
    """
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    elements, left = math.prod(shape), nbytes - stream.tell()
    expected = elements * dtype.itemsize
    if elements and not dtype.itemsize:  # needs no data in the file, but memory once the elements become objects
        raise ValueError(f"an array of {elements} elements of 0 bytes")
    if not dtype.hasobject and expected != left:
        raise ValueError(f"an array of {expected} bytes with {left} bytes of data")


def as_samples(name: str, spec: TensorSpec, array: np.ndarray) -> np.ndarray:
    """Convert the samples of one tensor to the model's datatype.

    Floats are converted to other float types, if no value becomes infinite. Integers are converted if no value changes.

    Raises:
        ServeError: invalid_input, with the expected and the actual shape, datatype or value.
    """
    expected = spec.row_shape if spec.batch_axis is not None else spec.shape
    if not array.ndim or not (spec.has_any_shape or fits_shape(array.shape[1:], expected)):
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
        with np.errstate(over="ignore"):
            converted = array.astype(wanted)
        if wanted.kind == "f" and (lost := array[np.isinf(converted) & np.isfinite(array)]).size:
            raise invalid_input(f"{name}: expected values of {wanted} ({spec.datatype.value}), got {lost[0]:g}")
        if wanted.kind == "f" or np.array_equal(converted, array):
            return converted
    raise invalid_input(f"{name}: expected {wanted} ({spec.datatype.value}), got {array.dtype}")
