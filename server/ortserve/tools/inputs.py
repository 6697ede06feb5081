"""Inputs of runs: made from the signature of a model, or read from a file of the user."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.engine.ort_errors import ORT_ERRORS, without_paths
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.load.inputs import InputGenerator
from ortserve.tools.opening import OpenModel


class Inputs(Protocol):
    """Where the inputs of runs come from.

    Attributes:
        origin: The same in words, for reports.
    """

    @property
    def origin(self) -> str:
        """Where the inputs come from."""
        ...

    def take(self, rows: int, number: int) -> Arrays:
        """Inputs with this many rows, as batches hold them. Different numbers give different inputs."""
        ...


@dataclass(frozen=True, slots=True)
class SyntheticInputs:
    """Random numbers and short texts, in shapes that the model accepts."""

    generator: InputGenerator

    @property
    def origin(self) -> str:
        """Where the inputs come from."""
        free = f", free dimensions {self.generator.free_dim}" if self._has_free_dimensions() else ""
        return f"synthetic (floats from N(0, 1), integers 0 or 1{free})"

    def take(self, rows: int, number: int) -> Arrays:
        """As ``Inputs.take``."""
        return self.generator.generate(rows, number)

    def _has_free_dimensions(self) -> bool:
        return any(-1 in spec.row_shape for spec in self.generator.signature.inputs)


@dataclass(frozen=True, slots=True)
class FileInputs:
    """Samples of a file, in turn, from the beginning again when they are used up."""

    name: str
    arrays: Sequence[np.ndarray]
    samples: int
    is_batched: bool

    @property
    def origin(self) -> str:
        """Where the inputs come from."""
        return f"{self.name}: {self.samples} samples"

    def take(self, rows: int, number: int) -> Arrays:
        """As ``Inputs.take``. A model that is not batched gets one sample; ``rows`` has no effect."""
        if not self.is_batched:
            return tuple(array[number % self.samples] for array in self.arrays)
        chosen = (np.arange(rows) + number * rows) % self.samples
        return tuple(array[chosen] for array in self.arrays)


def choose_inputs(model: OpenModel, file: Path | None = None) -> Inputs:
    """The samples of a file, or synthetic inputs of the first kind that the model accepts.

    Raises:
        ServeError: invalid_input: the file does not fit the model, or the model accepts no synthetic inputs.
    """
    return make_inputs(model.signature, file, lambda arrays: model.runner().run(model.for_model(arrays)))


def make_inputs(signature: ModelSignature, file: Path | None, run: Callable[[Arrays], Any] | None) -> Inputs:
    """As ``choose_inputs``, for a signature.

    Args:
        signature: Of the model.
        file: Samples; None for synthetic inputs.
        run: Runs inputs and raises what the model says against them; None to try nothing.
    """
    if file is not None:
        return read_inputs(file, signature)
    variants = InputGenerator(signature, None).variants()
    if run is None:
        return SyntheticInputs(variants[0])
    problem = ""
    for variant in variants:
        try:
            run(variant.generate(1, 0))
        except ServeError as error:
            if error.kind is not ErrorKind.REJECTED_BY_MODEL:
                raise  # it is the server that runs it
            problem = problem or error.message
        except ORT_ERRORS as error:
            problem = problem or str(error)
        else:
            return SyntheticInputs(variant)
    raise invalid_input(f"the model rejects synthetic inputs, so give real ones by --inputs: {without_paths(problem)}")


def read_inputs(file: Path, signature: ModelSignature) -> FileInputs:
    """Read samples: an ``.npz`` with an array per input, whose first axis counts the samples.

    Raises:
        ServeError: invalid_input, naming the array, what is expected and what the file has.
    """
    try:
        with np.load(file, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, BadZipFile, AttributeError, TypeError) as error:
        raise invalid_input(f"--inputs {file}: expected a file written by numpy.savez, got: {error}") from None
    wanted = [spec for spec in signature.inputs if not spec.is_optional or spec.name in found]
    names = ", ".join(spec.name for spec in signature.inputs)
    for name in found.keys() - {spec.name for spec in signature.inputs}:
        raise invalid_input(f"--inputs {file}: array '{name}' is no input of the model, which has {names}")
    for spec in wanted:
        if spec.name not in found:
            raise invalid_input(f"--inputs {file}: expected an array '{spec.name}', got {', '.join(found) or 'none'}")
    if len(wanted) < len(signature.inputs):
        missing = ", ".join(spec.name for spec in signature.inputs if spec not in wanted)
        raise invalid_input(f"--inputs {file}: expected also the optional inputs {missing}")
    arrays = [_as_input(file, spec, found[spec.name]) for spec in wanted]
    counts = {spec.name: len(array) for spec, array in zip(wanted, arrays, strict=True)}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        lengths = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise invalid_input(f"--inputs {file}: expected arrays with one first length of at least 1, got {lengths}")
    return FileInputs(file.name, arrays, next(iter(counts.values())), signature.is_batched)


def _as_input(file: Path, spec: TensorSpec, array: np.ndarray) -> np.ndarray:
    """The samples of one input in the model's datatype: numbers of the same kind are converted if none changes."""
    name = f"--inputs {file}: array '{spec.name}'"
    expected = spec.row_shape if spec.batch_axis is not None else spec.shape
    sizes = array.shape[1:]
    fits = len(sizes) == len(expected) and all(want in (-1, got) for want, got in zip(expected, sizes, strict=True))
    if not array.ndim or not (spec.has_any_shape or fits):
        raise invalid_input(f"{name}: expected shape {['samples', *expected]}, got {list(array.shape)}")
    if spec.datatype is DataType.BYTES:
        if array.dtype.kind not in "US":
            raise invalid_input(f"{name}: expected texts, got {array.dtype}")
        return array.astype(object) if array.dtype.kind == "U" else np.char.decode(array, "utf-8").astype(object)
    wanted = spec.datatype.numpy
    if array.dtype == wanted:
        return array
    if array.dtype.kind in "fiub" and (array.dtype.kind == "f") == (wanted.kind == "f"):
        converted = array.astype(wanted)
        if wanted.kind == "f" or np.array_equal(converted, array):
            return converted
    raise invalid_input(f"{name}: expected {wanted} ({spec.datatype.value}), got {array.dtype}")
