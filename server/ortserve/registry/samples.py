"""The requests that a model's configuration asks to be run before it is ready."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from ortserve.codecs.binary_tensor import decode_binary_tensor
from ortserve.config.model import ModelOptions
from ortserve.config.tensors import WarmupInput, WarmupSample
from ortserve.core.batch import Arrays
from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import absent
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.interface import Interface
from ortserve.registry.model_folder import read_model_file
from ortserve.registry.synthetic import FREE_DIM, draw, row_sizes

FOLDER: Final = "warmup"
"""Of the files with tensors, in the model's folder."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Inputs in the model's own form and order, and how often they run."""

    name: str
    inputs: Arrays
    rows: int
    count: int


def make_samples(
    options: ModelOptions, interface: Interface, folder: Path | None, *, max_rows: int | None
) -> list[Sample]:
    """Make the tensors of the configured samples. Blocks on their files.

    Args:
        options: Of the model.
        interface: Of the model, by which they are checked as a client's request is.
        folder: Of the model.
        max_rows: Most rows of a batch; None where any number runs.

    Raises:
        ServeError: invalid_input, naming the sample and what is wrong with it.
    """
    samples = []
    for number, sample in enumerate(options.warmup_samples):
        name = sample.name or str(number)
        try:
            samples.append(_make(name, sample, interface, folder, max_rows))
        except ServeError as error:
            raise ServeError(error.kind, f"warm-up sample '{name}': {error.message}") from None
    return samples


def _make(name: str, sample: WarmupSample, interface: Interface, folder: Path | None, max_rows: int | None) -> Sample:
    signature = interface.client
    is_batched = signature.is_batched
    rows = sample.rows if is_batched else 1
    if max_rows is not None and rows > max_rows:
        raise invalid_input(f"expected at most {max_rows} rows, got {rows}")
    for unknown in sample.inputs.keys() - signature.inputs_by_name.keys():
        raise invalid_input(f"unexpected input '{unknown}', allowed are: {', '.join(signature.inputs_by_name)}")
    generator = np.random.default_rng(0)
    arrays: list[np.ndarray] = []
    for spec in signature.inputs:
        if spec.is_optional and spec.name not in sample.inputs:
            arrays.append(absent(rows))
            continue
        if spec.is_optional and is_batched and spec.batch_axis is None:
            raise invalid_input(f"input '{spec.name}' is the same for all rows: expected it to be left out")
        declared = sample.inputs.get(spec.name, WarmupInput())
        if declared.datatype not in (None, spec.datatype):
            raise invalid_input(f"input '{spec.name}': expected {spec.datatype.value}, got {declared.datatype}")
        shape = _shape(spec, declared, rows)
        arrays.append(_fill(generator, spec, declared, shape, folder))
    inputs = tuple(arrays)
    if interface.conversions is not None:
        inputs = interface.conversions.to_model(inputs, rows)
    return Sample(name, inputs, rows, sample.count)


def _shape(spec: TensorSpec, declared: WarmupInput, rows: int) -> tuple[int, ...]:
    """The whole shape of the tensor that clients would send; ``dims`` leave the batch axis out."""
    dims, axis = _dims(spec, declared), spec.batch_axis
    return dims if axis is None else (*dims[:axis], rows, *dims[axis:])


def _dims(spec: TensorSpec, declared: WarmupInput) -> tuple[int, ...]:
    own = spec.row_shape
    if declared.dims is None:
        return row_sizes(spec, FREE_DIM)
    if len(declared.dims) != len(own) or any(
        dim not in (-1, size) for dim, size in zip(own, declared.dims, strict=True)
    ):
        raise invalid_input(f"input '{spec.name}': expected dims like {list(own)}, got {list(declared.dims)}")
    return declared.dims


def _fill(
    generator: np.random.Generator,
    spec: TensorSpec,
    declared: WarmupInput,
    shape: tuple[int, ...],
    folder: Path | None,
) -> np.ndarray:
    if declared.file is not None:
        raw = read_model_file(folder, f"{FOLDER}/{declared.file}", f"input '{spec.name}'")
        return decode_binary_tensor(memoryview(raw), spec.datatype, shape, spec.name, "warm-up")
    if declared.data == "random":
        return draw(generator, spec.datatype, shape)
    zeros = np.zeros(shape, spec.datatype.numpy)
    if zeros.dtype.hasobject:
        zeros.fill("")
    return zeros
