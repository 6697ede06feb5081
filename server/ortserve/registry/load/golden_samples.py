"""Reads the golden samples of a version: inputs, expected outputs and tolerances. Blocks on the disk.

``golden/*.npz`` in the version's folder contain arrays ``input.<name>`` and ``output.<name>`` with the samples on
axis 0, in the form of recorded requests. ``golden/golden.yaml`` contains the tolerances.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from ortserve.config.golden import load_golden_file
from ortserve.config.model import ModelOptions
from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import TOLERANCES, absent
from ortserve.errors import ServeError, invalid_input
from ortserve.paths import is_folder
from ortserve.registry.sample_files import as_samples, read_arrays

GOLDEN_FOLDER: Final = "golden"
"""Name of the folder in the folder of a version."""
GOLDEN_FILE: Final = "golden.yaml"
GOLDEN_MISSING: Final = "golden_required: expected a folder 'golden' with samples beside the model file, found none"
MAX_FILES: Final = 256
MAX_BYTES: Final = 2**28
"""Maximum size of all arrays in memory."""
MAX_SAMPLES: Final = 1024
"""Maximum number of samples of a version. Each runs up to twice before the version serves."""
INPUT, OUTPUT = "input.", "output."

_COARSE_RELATIVE: Final = 1e-2
"""Relative tolerance on GPUs, which may compute FP32 with ten bits of mantissa."""


@dataclass(frozen=True, slots=True)
class GoldenSample:
    """One sample: a row of a batched model, or a whole request of another model.

    Attributes:
        place: File and position, for messages.
        inputs: Inputs in the order of the signature, in the form of batches.
        outputs: Expected outputs in the order of the signature; None for outputs that the file lacks.
    """

    place: str
    inputs: Arrays
    outputs: tuple[np.ndarray | None, ...]


@dataclass(frozen=True, slots=True)
class GoldenSamples:
    """The samples of a version.

    Attributes:
        files: Number of files.
        samples: At least one.
        tolerances: Configured bounds by measure, by the name of the output. Other outputs have those of their datatype.
    """

    files: int
    samples: tuple[GoldenSample, ...]
    tolerances: Mapping[str, Mapping[str, float]]

    def bounds(self, spec: TensorSpec, *, is_coarse: bool) -> Mapping[str, float]:
        """The bounds of an output by measure.

        Without configured bounds, floats may differ by the relative tolerance of the server's own comparisons, as a
        share of the largest expected element. Elements of other datatypes must be equal.
        """
        if configured := self.tolerances.get(spec.name):  # not a mapping without measures, which would bound nothing
            return configured
        if spec.datatype not in TOLERANCES:
            return {"max": 0.0}
        relative = TOLERANCES[spec.datatype][0]
        is_rounded = is_coarse and spec.datatype is not DataType.FP64
        return {"relative": max(relative, _COARSE_RELATIVE) if is_rounded else relative}


def golden_folder(path: Path, folder: Path | None, options: ModelOptions) -> Path | None:
    """The folder of a version's golden samples; None for a model that is a single file.

    The model file ``path`` may be inside a folder named ``model_file`` in the version's folder.
    """
    if folder is None:
        return None
    version = path.parent.parent if path.parent.name == options.model_file else path.parent
    return version / GOLDEN_FOLDER


def read_golden(folder: Path | None, signature: ModelSignature) -> GoldenSamples | None:
    """Read the samples of a version. Returns None if it has no folder of samples.

    ``signature`` has the tensors of clients, in the form of the model.

    Raises:
        ServeError: invalid_input, naming the file and the array, the expectation and the content.
    """
    try:
        return None if folder is None or not is_folder(folder) else _read(folder, signature)
    except ServeError as error:
        raise ServeError(error.kind, f"{GOLDEN_FOLDER}: {error.message}") from None
    except OSError as error:
        raise invalid_input(f"{GOLDEN_FOLDER}: cannot be read: {error.strerror}") from None


def _read(folder: Path, signature: ModelSignature) -> GoldenSamples:
    settings = load_golden_file(folder / GOLDEN_FILE)
    outputs = ", ".join(signature.output_index)
    for name in settings.tolerances.keys() - signature.output_index.keys():
        raise invalid_input(f"{GOLDEN_FILE}: tolerances: expected one of the outputs {outputs}, got '{name}'")
    files = sorted(folder.glob("[!.]*.npz"))
    if not files or len(files) > MAX_FILES:
        raise invalid_input(f"expected 1 to {MAX_FILES} files *.npz, got {len(files)}")
    samples: list[GoldenSample] = []
    left = MAX_BYTES
    for file in files:
        arrays = read_arrays(file, left)
        left -= sum(array.nbytes for array in arrays.values())
        samples += _samples(file.name, arrays, signature)
        if len(samples) > MAX_SAMPLES:
            raise invalid_input(f"expected at most {MAX_SAMPLES} samples, got more up to {file.name}")
    tolerances = {name: tolerance.bounds() for name, tolerance in settings.tolerances.items()}
    return GoldenSamples(len(files), tuple(samples), tolerances)


def _samples(file: str, arrays: Mapping[str, np.ndarray], signature: ModelSignature) -> Iterator[GoldenSample]:
    """The samples of one file."""
    inputs = {INPUT + spec.name: spec for spec in signature.inputs}
    outputs = {OUTPUT + spec.name: spec for spec in signature.outputs}
    known = inputs | outputs
    for name in arrays.keys() - known.keys():
        raise invalid_input(f"{file}: expected arrays out of {', '.join(known)}, got '{name}'")
    for name, spec in inputs.items():
        if name not in arrays and not spec.is_optional:
            raise invalid_input(f"{file}: expected an array '{name}', got {', '.join(arrays) or 'none'}")
    if not arrays.keys() & outputs.keys():
        raise invalid_input(f"{file}: expected an array out of {', '.join(outputs)}, got none")
    columns = {
        name: as_samples(f"{file}: array '{name}'", known[name], _in_form(known[name], array, signature))
        for name, array in arrays.items()
    }
    counts = {len(column) for column in columns.values()}
    if len(counts) != 1 or 0 in counts:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
        raise invalid_input(f"{file}: expected arrays with one first length of at least 1, got {lengths}")
    for position in range(counts.pop()):
        at = slice(position, position + 1) if signature.is_batched else position
        yield GoldenSample(
            f"{file} sample {position}",
            tuple(columns[name][at, ...] if name in columns else absent(1) for name in inputs),
            tuple(columns[name][at, ...] if name in columns else None for name in outputs),
        )


def _in_form(spec: TensorSpec, array: np.ndarray, signature: ModelSignature) -> np.ndarray:
    """Add an axis to rows of a batched model if this version runs each request alone: each row becomes a request."""
    is_row = not signature.is_batched and not spec.has_any_shape and array.ndim == len(spec.shape)
    return array[:, np.newaxis] if is_row else array
