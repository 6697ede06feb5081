"""Inputs for warm-up: synthetic inputs with any number of rows, and the configured samples.

Synthetic floats are from N(0, 1), integers and booleans are 0 or 1, texts are short, and image files are black.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Final

import numpy as np

from ortserve.codecs.binary_tensor import decode_binary_tensor
from ortserve.config.model import ModelOptions
from ortserve.config.tensors import WarmupInput, WarmupSample
from ortserve.core.batch import Arrays
from ortserve.core.conversion import repeated
from ortserve.core.dtypes import DataType, narrow
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import absent, fits_shape, zeros
from ortserve.errors import OutOfMemoryError, ServeError, invalid_input
from ortserve.registry.load.interface import Interface
from ortserve.registry.repository.model_files import read_model_file
from ortserve.rows import sum_terms

FREE_DIM: Final = 8
"""Size of free dimensions other than the batch axis. All have the same size, because many must agree."""
LARGER_FREE_DIMS: Final = (32, 224)
"""Sizes to try in this order if the model rejects ``FREE_DIM``. Image models halve the dimensions of images about five
times, and many were trained on 224."""
MAX_ROW_ELEMENTS: Final = 2**20
"""Maximum number of elements in a row of an input with larger free dimensions. A row with three or four such dimensions
could otherwise fill the memory."""
_MAX_BATCH_ELEMENTS: Final = 2**24
"""Maximum number of elements of an input with larger free dimensions: enough for a batch of images."""

SAMPLE_FOLDER: Final = "warmup"
"""Folder in the model's folder, with the tensors of configured samples."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The range of synthetic numbers: integers from 0 up to, not including, ``below``; floats from N(0, ``scale``²)."""

    below: int = 2
    scale: float = 1.0


USUAL: Final = Spread()
ZEROS: Final = Spread(1, 0.0)
"""Zeros, and equal texts. Shapes that depend on data are smallest for them."""

# They alternate by row and differ in the number of words, so that outputs show if a tokenizer pads to the longest row.
_TEXTS: Final = np.array(["a", "b c d"], object)


@dataclass(frozen=True, slots=True)
class InputGenerator:
    """Generates synthetic inputs of a model for a number of rows and a seed.

    Attributes:
        signature: Signature of the model.
        padding: Padding of its batches; None without. Padded axes have the padded lengths.
        includes_optional: Whether optional inputs are present.
        free_dim: Size of free dimensions.
        ones: Names of free dimensions with size 1 instead; ``""`` stands for first dimensions without a name.
    """

    signature: ModelSignature
    padding: Padding | None = None
    includes_optional: bool = False
    free_dim: int = FREE_DIM
    ones: frozenset[str] = frozenset()

    def generate(self, rows: int, seed: int, spread: Spread = USUAL) -> Arrays:
        """Generate one array per input, as batches hold them. The same seed gives the same arrays.

        ``rows`` has no effect if the model is not batched. Optional inputs without rows are always absent, because
        requests that set them are not batched.
        """
        signature = self.signature
        generator = np.random.default_rng(seed)
        arrays = []
        known = {**_needed_sizes(signature), **dict(signature.fixed_sizes)}
        padded_axes = self.padding.axes if self.padding is not None else (None,) * len(signature.inputs)
        for spec, padded in zip(signature.inputs, padded_axes, strict=True):
            is_whole = signature.is_batched and spec.batch_axis is None
            if spec.is_optional and (is_whole or not self.includes_optional):
                arrays.append(absent(rows if signature.is_batched else 1))
                continue
            if spec.is_image:
                arrays.append(_black_image())
                continue
            shape = _row_sizes(spec, self.free_dim, {**known, **dict.fromkeys(self.ones, 1)})
            if signature.is_batched and not is_whole:
                shape = (rows, *shape)
            if padded is not None:
                length = padded.padded_length(self.free_dim)
                shape = (*shape[: padded.axis], length, *shape[padded.axis + 1 :])
            try:
                array = _draw(generator, spec.datatype, shape, spread)
            except (MemoryError, ValueError):  # numpy raises either for shapes beyond all memory
                raise OutOfMemoryError(f"too little memory for input '{spec.name}' of shape {list(shape)}") from None
            arrays.append(repeated(array, rows) if is_whole else array)
        return tuple(arrays)

    def variants(self) -> list["InputGenerator"]:
        """All variants to try, preferred ones first.

        Preferred are variants without optional inputs, then small free dimensions, then free first dimensions of 1 in a
        model without batches: such a dimension may be the length of a list, for which 1 is the smallest.
        """
        ones = _first_dimensions(self.signature)
        has_free_dims = any(-1 in shape for shape in self._row_shapes())
        larger = [dim for dim in LARGER_FREE_DIMS if has_free_dims and self._row_elements(dim) <= MAX_ROW_ELEMENTS]
        return [
            replace(self, includes_optional=includes_optional, free_dim=free_dim, ones=names)
            for includes_optional in ([False, True] if self.signature.has_optional_inputs else [False])
            for free_dim in (FREE_DIM, *larger)
            for names in dict.fromkeys((ones, frozenset[str]()))
        ]

    @property
    def max_rows(self) -> int:
        """Maximum number of rows to generate at a time if free dimensions are larger than ``FREE_DIM``."""
        return max(1, _MAX_BATCH_ELEMENTS // max(1, self._row_elements(self.free_dim)))

    def _row_shapes(self) -> list[tuple[int, ...]]:
        return [replace(spec, shape=_known_shape(spec)).row_shape for spec in self.signature.inputs]

    def _row_elements(self, free_dim: int) -> int:
        """Number of elements in a row of the largest input."""
        return max(prod(free_dim if dim == -1 else dim for dim in shape) for shape in self._row_shapes())


def _known_shape(spec: TensorSpec) -> tuple[int, ...]:
    return spec.needed_shape or spec.shape


def _needed_sizes(signature: ModelSignature) -> dict[str, int]:
    """The sizes that the graph needs, by name, for inputs of which it needs none."""
    return {
        name: size
        for spec in signature.inputs
        for axis, (name, size) in enumerate(zip(spec.dim_names, spec.needed_shape, strict=False))
        if name and size != -1 and axis != spec.batch_axis
    }


def _row_sizes(spec: TensorSpec, free_dim: int, known: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a row. Free dimensions have the size in ``known`` or ``free_dim``, and sums that of their terms."""

    def size(name: str) -> int:
        terms = sum_terms(name)
        if terms:
            return sum(term if isinstance(term, int) else size(term) for term in terms)
        return known.get(name, free_dim)

    sizes = []
    for axis, dim in enumerate(_known_shape(spec)):
        name = spec.dim_names[axis] if axis < len(spec.dim_names) else ""
        if axis == spec.batch_axis:
            continue
        if dim != -1:
            sizes.append(dim)
        else:
            sizes.append(size(name) if name or axis == 0 else free_dim)
    return tuple(sizes)


def _first_dimensions(signature: ModelSignature) -> frozenset[str]:
    """Names of free first dimensions of the inputs, for a model that is not batched."""
    if signature.is_batched:
        return frozenset()
    return frozenset(spec.dim_names[0] for spec in signature.inputs if spec.dim_names and spec.shape[0] == -1)


def _draw(
    generator: np.random.Generator, datatype: DataType, shape: tuple[int, ...], spread: Spread = USUAL
) -> np.ndarray:
    """Draw one tensor. Integers stay within the range of a small type."""
    if datatype is DataType.BYTES:
        texts = _TEXTS if spread != ZEROS else _TEXTS[:1]
        rows = np.resize(texts, shape[0] if shape else 1)
        return np.broadcast_to(rows.reshape(shape[:1] + (1,) * (len(shape) - 1)), shape).copy()
    if datatype is DataType.BF16:
        return narrow(generator.standard_normal(shape, np.float32) * np.float32(spread.scale) + 0)
    if datatype.numpy.kind == "f":
        return np.asarray(generator.standard_normal(shape) * spread.scale + 0).astype(datatype.numpy)
    largest = 1 if datatype is DataType.BOOL else int(np.iinfo(datatype.numpy).max)
    return np.asarray(generator.integers(0, min(spread.below, largest + 1), size=shape)).astype(datatype.numpy)


def _black_image() -> np.ndarray:
    """The bytes of a BMP file with 224 by 224 black pixels."""
    side, head, channels = 224, 54, 3
    nbytes = side * side * channels
    file = struct.pack("<2sIIIIiiHHIIiiII", b"BM", head + nbytes, 0, head, 40, side, side, 1, 24, 0, nbytes, 0, 0, 0, 0)
    return np.frombuffer(file + bytes(nbytes), np.uint8)


@dataclass(frozen=True, slots=True)
class Sample:
    """A configured warm-up request: inputs in the form and order of the model, and the number of its runs."""

    name: str
    inputs: Arrays
    rows: int
    count: int


def make_samples(
    options: ModelOptions, interface: Interface, folder: Path | None, *, max_rows: int | None
) -> list[Sample]:
    """Create the tensors of the configured samples, checked like requests. Blocks on their files.

    Raises:
        ServeError: invalid_input, naming the sample and the problem.
    """
    samples = []
    for number, sample in enumerate(options.warmup_samples):
        name = sample.name or str(number)
        try:
            samples.append(_make_sample(name, sample, interface, folder, max_rows))
        except ServeError as error:
            raise ServeError(error.kind, f"warm-up sample '{name}': {error.message}") from None
    return samples


def _make_sample(
    name: str, sample: WarmupSample, interface: Interface, folder: Path | None, max_rows: int | None
) -> Sample:
    signature = interface.client
    is_batched = signature.is_batched
    rows = sample.rows if is_batched else 1
    if max_rows is not None and rows > max_rows:
        raise invalid_input(f"expected at most {max_rows} rows, got {rows}")
    hidden = () if interface.sequences is None else interface.model.inputs[len(signature.inputs) :]
    known = [spec.name for spec in (*signature.inputs, *hidden)]
    for unknown in sample.inputs.keys() - set(known):
        raise invalid_input(f"unexpected input '{unknown}', allowed are: {', '.join(known)}")
    generator = np.random.default_rng(0)
    arrays: list[np.ndarray] = []
    for spec in signature.inputs:
        if spec.is_optional and spec.name not in sample.inputs:
            arrays.append(absent(rows))
            continue
        if spec.is_optional and is_batched and spec.batch_axis is None:
            raise invalid_input(
                f"input '{spec.name}': expected the sample to omit it, because it is the same for all rows"
            )
        arrays.append(_sample_array(generator, spec, sample.inputs.get(spec.name, WarmupInput()), rows, folder))
    inputs = tuple(arrays)
    if interface.conversions is not None:
        inputs = interface.conversions.to_model(inputs, rows)
    if interface.sequences is not None:
        filled = list(interface.sequences.first(inputs, rows))
        for index, spec in enumerate(hidden, len(inputs)):
            if spec.name in sample.inputs:
                filled[index] = _sample_array(generator, spec, sample.inputs[spec.name], rows, folder)
        inputs = tuple(filled)
    return Sample(name, inputs, rows, sample.count)


def _sample_array(
    generator: np.random.Generator, spec: TensorSpec, declared: WarmupInput, rows: int, folder: Path | None
) -> np.ndarray:
    if declared.datatype is not None and declared.datatype is not spec.datatype:
        raise invalid_input(f"input '{spec.name}': expected {spec.datatype.value}, got {declared.datatype.value}")
    dims, axis = _sample_dims(spec, declared), spec.batch_axis
    shape = dims if axis is None else (*dims[:axis], rows, *dims[axis:])
    if declared.file is not None:
        raw = read_model_file(folder, f"{SAMPLE_FOLDER}/{declared.file}", f"input '{spec.name}'")
        return _decode_rows(memoryview(raw), spec, shape)
    if spec.is_image:
        return _black_image()
    if declared.data == "random":
        return _draw(generator, spec.datatype, shape)
    return zeros(shape, spec.datatype)


def _decode_rows(raw: memoryview, spec: TensorSpec, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor in a file. As in Triton, a file of one row stands for any number of equal rows."""
    try:
        return decode_binary_tensor(raw, spec.datatype, shape, spec.name, "warm-up")
    except ServeError as error:
        axis = spec.batch_axis
        if axis is None:
            raise
        one_row = (*shape[:axis], 1, *shape[axis + 1 :])
        try:
            row = decode_binary_tensor(raw, spec.datatype, one_row, spec.name, "warm-up")
        except ServeError:
            raise error from None
    return np.repeat(row, shape[axis], axis=axis)


def _sample_dims(spec: TensorSpec, declared: WarmupInput) -> tuple[int, ...]:
    """The shape of a row in a tensor of a sample."""
    own = spec.row_shape
    if declared.dims is None:
        return _row_sizes(spec, FREE_DIM, {})
    if not fits_shape(declared.dims, own):
        raise invalid_input(f"input '{spec.name}': expected dims like {list(own)}, got {list(declared.dims)}")
    return declared.dims
