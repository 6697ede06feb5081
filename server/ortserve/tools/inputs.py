"""Inputs of runs: made from the signature of a model, or read from files of users or recording servers."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol
from zipfile import ZipFile, is_zipfile

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import absent, fits_shape, is_absent
from ortserve.engine.ort_errors import ORT_ERRORS, without_paths
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.load.inputs import InputGenerator
from ortserve.registry.sample_files import MALFORMED_FILE_ERRORS, as_samples, read_array
from ortserve.tools.ensemble import Opened
from ortserve.tools.opening import naming_failures

MAX_FOLDER_BYTES: Final = 2**31
"""Limit of the total size of the files of a folder, which are read into memory."""


class Inputs(Protocol):
    """Inputs of runs."""

    @property
    def origin(self) -> str:
        """A description of the inputs, for reports."""
        ...

    def take(self, rows: int, number: int) -> Arrays:
        """Inputs with this many rows on axis 0. Different numbers give different inputs."""
        ...


@dataclass(frozen=True, slots=True)
class SyntheticInputs:
    """Random numbers and short strings in shapes that the model accepts."""

    generator: InputGenerator

    @property
    def origin(self) -> str:
        inputs = self.generator.signature.inputs
        texts = ", short texts" if any(spec.datatype is DataType.BYTES for spec in inputs) else ""
        free = f", free dimensions {self.generator.free_dim}" if any(-1 in spec.row_shape for spec in inputs) else ""
        return f"synthetic (floats from N(0, 1), integers 0 or 1{texts}{free})"

    def take(self, rows: int, number: int) -> Arrays:
        return self.generator.generate(rows, number)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Samples with equal row shapes, which can run together.

    Attributes:
        arrays: One array per input of the model, with the samples on axis 0; an absent array for an omitted input.
        positions: The position of each sample among the samples of all files, ordered by the names of the files.
    """

    arrays: Arrays
    positions: np.ndarray

    def take(self, chosen: np.ndarray, *, is_batched: bool) -> Arrays:
        """The ``chosen`` samples as one batch; for a model that is not batched, the first of them."""
        return tuple(array[chosen if is_batched else chosen[0], ...] for array in self.arrays)


@dataclass(frozen=True, slots=True)
class FileInputs:
    """Samples of files, in turn, from the beginning again when they are used up.

    Samples of different row shapes, such as texts of different lengths, form groups. A batch has samples of one group.
    """

    name: str
    groups: Sequence[SampleGroup]
    is_batched: bool

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(len(group.positions) for group in self.groups)

    @property
    def origin(self) -> str:
        shapes = f" of {len(self.groups)} shapes" if len(self.groups) > 1 else ""
        return f"{self.name}: {self.samples} samples{shapes}"

    def take(self, rows: int, number: int) -> Arrays:
        """As ``Inputs.take``. A model that is not batched gets one sample, whatever ``rows`` is.

        Consecutive numbers take groups in proportion to their samples. A group with fewer samples than ``rows`` repeats
        them.
        """
        rows = rows if self.is_batched else 1
        order = _batch_order(tuple(len(group.positions) for group in self.groups), rows)
        laps, place = divmod(number, len(order))
        index, batch = order[place]
        group = self.groups[index]
        batches = -(-len(group.positions) // rows)
        chosen = (np.arange(rows) + (batch + laps * batches) * rows) % len(group.positions)
        return group.take(chosen, is_batched=self.is_batched)

    def each(self, rows: int = 1) -> Iterator[tuple[np.ndarray, Arrays]]:
        """Every sample once, in batches of at most ``rows``, each with the positions of its samples."""
        step = rows if self.is_batched else 1
        for group in self.groups:
            for begin in range(0, len(group.positions), step):
                chosen = np.arange(begin, min(begin + step, len(group.positions)))
                yield group.positions[chosen], group.take(chosen, is_batched=self.is_batched)

    def some(self, most: int) -> dict[int, Arrays]:
        """At most ``most`` samples, spread over the files, by their positions."""
        wanted = set(spread(self.samples, most).tolist())
        return {int(at[0]): arrays for at, arrays in self.each() if int(at[0]) in wanted}


def spread(count: int, most: int) -> np.ndarray:
    """At most ``most`` numbers below ``count``, spread evenly, because neighbouring samples are often alike."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int))


@lru_cache(maxsize=64)
def _batch_order(counts: tuple[int, ...], rows: int) -> list[tuple[int, int]]:
    """The batches of all groups, as pairs of group and batch. The batches of a group are spread evenly."""
    batches = [-(-count // rows) for count in counts]
    spread = [((batch + 0.5) / of, index, batch) for index, of in enumerate(batches) for batch in range(of)]
    return [(index, batch) for _, index, batch in sorted(spread)]


def choose_inputs(model: Opened, file: Path | None = None) -> Inputs:
    """The samples of a file, or synthetic inputs of the first kind that the model accepts.

    Raises:
        ServeError: invalid_input: the file does not fit the model, or the model accepts no synthetic inputs;
            rejected_by_model: the model rejects the first sample of the file.
    """
    return make_inputs(model.signature, file, lambda arrays: model.runner().run(model.for_model(arrays)))


def make_inputs(
    signature: ModelSignature,
    file: Path | None,
    run: Callable[[Arrays], Any] | None,
    remedy: str = "pass real samples with --inputs",
) -> Inputs:
    """As ``choose_inputs``, for a signature.

    Args:
        signature: The signature of the model.
        file: Samples, or a folder of them; None for synthetic inputs.
        run: Runs inputs, and raises the error if the model rejects them; None to skip the trial.
        remedy: What the error advises if the model accepts no synthetic inputs.
    """
    if file is not None:
        samples = read_inputs(file, signature)
        if run is not None:
            with naming_failures(f"--inputs {file}"):
                run(samples.take(1, 0))
        return samples
    variants = InputGenerator(signature, None).variants()
    if run is None:
        return SyntheticInputs(variants[0])
    problem = ""
    for variant in variants:
        try:
            run(variant.generate(1, 0))
        except ServeError as error:
            if error.kind is not ErrorKind.REJECTED_BY_MODEL:
                raise  # an error of the server, which runs the model
            problem = problem or error.message
        except ORT_ERRORS as error:
            problem = problem or without_paths(str(error))
        else:
            return SyntheticInputs(variant)
    raise invalid_input(f"the model rejects synthetic inputs; {remedy}: {problem}")


def take_inputs(inputs: Inputs, rows: int, most: int = 16, max_nbytes: int = 64 * 2**20) -> tuple[Arrays, ...]:
    """Up to ``most`` different inputs of ``rows`` rows, fewer if they exceed ``max_nbytes``."""
    first = inputs.take(rows, 0)
    count = max(1, min(most, max_nbytes // max(1, sum(array.nbytes for array in first))))
    return first, *(inputs.take(rows, number) for number in range(1, count))


def read_inputs(path: Path, signature: ModelSignature, *, option: str = "--inputs") -> FileInputs:
    """Read samples: an ``.npz`` with an array per input, whose first axis counts them, or a folder of such files.

    Files of a folder may differ in free dimensions, and in the optional inputs that they omit.

    Args:
        path: The file or folder.
        signature: The signature of the model.
        option: The option that errors name.

    Raises:
        ServeError: invalid_input, with the file, the array, the expectation and the content of the file.
    """
    if not path.is_dir():
        return FileInputs(path.name, _group([_read_file(path, signature, option)]), signature.is_batched)
    files = sorted(path.glob("[!.]*.npz"))
    if not files:
        folders = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir())[:5])
        hint = f"; it has the folders {folders}" if folders else ""
        raise invalid_input(f"{option} {path}: expected a folder with .npz files, got none{hint}")
    nbytes = 0
    for file in files:
        nbytes += file.stat().st_size
        if nbytes > MAX_FOLDER_BYTES:
            raise invalid_input(
                f"{option} {path}: expected files of at most {MAX_FOLDER_BYTES} bytes in total, got more up to "
                f"{file.name}: move some elsewhere"
            )
    groups = _group([_read_file(file, signature, option) for file in files])
    return FileInputs(f"{path.name} ({len(files)} files)", groups, signature.is_batched)


def _group(files: Sequence[Arrays]) -> tuple[SampleGroup, ...]:
    """Join the samples of files with equal row shapes."""
    parts: defaultdict[object, list[tuple[Arrays, np.ndarray]]] = defaultdict(list)
    count = 0
    for arrays in files:
        shapes = tuple(None if is_absent(array) else array.shape[1:] for array in arrays)
        parts[shapes].append((arrays, np.arange(count, count + len(arrays[0]))))
        count += len(arrays[0])
    return tuple(
        SampleGroup(
            tuple(np.concatenate(column) for column in zip(*(arrays for arrays, _ in group), strict=True)),
            np.concatenate([positions for _, positions in group]),
        )
        for group in parts.values()
    )


def _read_file(file: Path, signature: ModelSignature, option: str) -> Arrays:
    """The samples of one file, one array per input; absent arrays for omitted optional inputs.

    Raises:
        ServeError: As ``read_inputs``.
    """
    expected = f"{option} {file}: expected a .npz file, which numpy.savez('{file.stem}.npz', NAME=ARRAY) writes"
    try:
        if file.is_file() and not is_zipfile(file):
            raise invalid_input(f"{expected}, got another format or a truncated file")
        with ZipFile(file) as archive:
            members = archive.infolist()
            found: Mapping[str, np.ndarray] = {
                member.filename.removesuffix(".npy"): read_array(archive, member) for member in members
            }
    except OSError as error:
        raise invalid_input(f"{expected}, got: {error.strerror or error}") from None
    except MALFORMED_FILE_ERRORS as error:
        hint = "; save texts as numpy.array(TEXTS, dtype=str)" if "Object arrays" in str(error) else ""
        raise invalid_input(f"{expected}, got: {error}{hint}") from None
    names = ", ".join(spec.name for spec in signature.inputs)
    for name in found.keys() - {spec.name for spec in signature.inputs}:
        raise invalid_input(f"{option} {file}: array '{name}' is not an input of the model, whose inputs are {names}")
    for spec in signature.inputs:
        if spec.name not in found and not spec.is_optional:
            raise invalid_input(f"{option} {file}: expected an array '{spec.name}', got {', '.join(found) or 'none'}")
    found = _divide_request(signature, found)
    given = {
        spec.name: as_samples(f"{option} {file}: array '{spec.name}'", spec, found[spec.name])
        for spec in signature.inputs
        if spec.name in found
    }
    counts = {name: len(array) for name, array in given.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        lengths = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise invalid_input(f"{option} {file}: expected arrays with one first length of at least 1, got {lengths}")
    samples = next(iter(counts.values()))
    # For a model that is not batched, each sample of an absent input must be an array itself.
    nothing = absent(samples) if signature.is_batched else absent(samples)[:, np.newaxis]
    return tuple(given.get(spec.name, nothing) for spec in signature.inputs)


def _divide_request(signature: ModelSignature, found: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Divide a request that a server recorded whole, because its rows were not known to be independent, into rows."""
    specs = [spec for spec in signature.inputs if spec.name in found and spec.batch_axis is not None]
    is_whole = specs and all(
        not spec.has_any_shape
        and found[spec.name].shape[:1] == (1,)
        and fits_shape(found[spec.name].shape[1:], spec.shape)
        for spec in specs
    )
    if not is_whole:
        return found
    divided = {spec.name: np.moveaxis(found[spec.name][0], spec.batch_axis or 0, 0) for spec in specs}
    rows = max(len(array) for array in divided.values())
    return {name: divided[name] if name in divided else np.repeat(array, rows, 0) for name, array in found.items()}
