"""Records and checks golden samples with models in this process. Commands call it in another process."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ortserve.clock import monotonic_ns
from ortserve.config.golden import load_golden_file
from ortserve.core.batch import Arrays
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import is_absent
from ortserve.engine.providers import choose_provider
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.load.batch_sizes import RunBounds
from ortserve.registry.load.golden_check import InstanceRuns, as_batched, as_sent
from ortserve.registry.load.golden_samples import (
    GOLDEN_FILE,
    INPUT,
    MAX_BYTES,
    MAX_SAMPLES,
    OUTPUT,
    GoldenSample,
    GoldenSamples,
    golden_folder,
    read_golden,
)
from ortserve.registry.load.loaded_model import LoadedModel
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.load.progress import Progress
from ortserve.registry.load.trial_load import trial_options
from ortserve.registry.recording import UnrecordableError, encode_texts, write_arrays
from ortserve.tools.control import Control
from ortserve.tools.encoding import tensors_of
from ortserve.tools.inputs import FileInputs, Inputs, SyntheticInputs, make_inputs, read_inputs
from ortserve.tools.subject import Subject


@dataclass(frozen=True, slots=True)
class Recorded:
    """The number of recorded samples, a description of their inputs, and how the version agrees with them."""

    samples: int
    origin: str
    agreement: str


def record_samples(
    subject: Subject,
    source: Subject | Control | None,
    inputs: Path | None,
    count: int,
    tolerances: Mapping[str, Mapping[str, float]],
    target: Path,
) -> Recorded:
    """Take inputs, run them, check that the version agrees with the outputs, and write both.

    Args:
        subject: The version to record samples for.
        source: The model that computes the expected outputs, in this process or on a server; None for the version
            itself.
        inputs: Samples; None for synthetic ones.
        count: Maximum number of samples.
        tolerances: The largest errors by the name of an output and the measure.
        target: A new folder for the files.

    Raises:
        ServeError: invalid_input: a model cannot be loaded or run, the inputs do not fit, or the version disagrees.
        OSError: The files cannot be written.
    """
    if subject.options.ensemble is not None:
        return _record_ensemble(source, inputs, count, tolerances, target)
    with loaded_runs(subject) as (loaded, runs):
        signature = runs.signature
        generator = loaded.warm_up.inputs
        given: Inputs
        if inputs is not None:
            given = read_inputs(inputs, signature)
        elif generator is not None:
            given = SyntheticInputs(generator)
        else:
            raise invalid_input("the model rejects synthetic inputs; pass real samples with --inputs")
        samples = list(_take(given, signature, count))
        if source is None:
            outputs = len(signature.outputs)  # without the states of sequences
            samples = [replace(sample, outputs=runs.run([sample])[0][:outputs]) for sample in samples]
        elif isinstance(source, Subject):
            samples = _run_source(source, signature, samples)
        else:
            client = loaded.interface.client
            is_reshaped = (client.inputs, client.outputs) != (signature.inputs, signature.outputs)
            if loaded.interface.sequences is not None or is_reshaped:
                raise invalid_input("--from URL: expected a model without sequences and reshaped tensors")
            samples = _ask(source, signature, samples)
        golden = GoldenSamples(1, tuple(samples), tolerances)
        write_samples(target, golden, signature)
        checked = read_golden(target, signature)
        assert checked is not None
        return Recorded(len(samples), given.origin, runs.check(checked))


def check_version(subject: Subject) -> str:
    """Load a version with its golden samples. Returns how it agrees with them; empty if it has none.

    Raises:
        ServeError: invalid_input: the version cannot be loaded, or disagrees.
    """
    with loaded_runs(subject) as (_, runs):
        golden = read_golden(golden_folder(subject.path, subject.folder, subject.options), runs.signature)
        return "" if golden is None else runs.check(golden)


@contextmanager
def loaded_runs(subject: Subject) -> Iterator[tuple[LoadedModel, InstanceRuns]]:
    """A model loaded as the server loads it, on the CPU if none of its execution providers can be used here."""
    options = trial_options(subject.options)
    try:
        choose_provider(options.execution_providers)
    except ServeError:
        options = options.model_copy(update={"execution_providers": ("cpu",)})
    loaded = load_model(subject.path, subject.name, options, subject.folder, checks_golden=False)
    try:
        bounds = RunBounds(Progress(monotonic_ns))
        yield loaded, InstanceRuns(loaded, options.buckets or loaded.on_device.sizes, bounds)
    finally:
        loaded.close()


def write_samples(folder: Path, golden: GoldenSamples, signature: ModelSignature) -> None:
    """Write samples into a new folder: a file for each set of shapes, and the tolerances.

    Raises:
        ServeError: invalid_input, if the samples are too many or too large, or have texts that cannot be recorded.
        OSError: The disk is full or cannot be written.
    """
    folder.mkdir()
    groups: dict[object, list[dict[str, np.ndarray]]] = {}
    nbytes = 0
    for sample in golden.samples:
        arrays = _named(sample, signature)
        nbytes += sum(array.nbytes for array in arrays.values())
        shapes = tuple((name, array.shape) for name, array in arrays.items())
        groups.setdefault(shapes, []).append(arrays)
    if len(golden.samples) > MAX_SAMPLES or nbytes > MAX_BYTES:
        raise invalid_input(
            f"expected at most {MAX_SAMPLES} samples of {MAX_BYTES} bytes in total, got {len(golden.samples)} of "
            f"{nbytes} bytes; record fewer with --samples"
        )
    for number, group in enumerate(groups.values(), 1):
        columns = {name: np.concatenate([arrays[name] for arrays in group]) for name in group[0]}
        try:
            texts = {name: encode_texts(column) for name, column in columns.items() if column.dtype.hasobject}
        except (UnrecordableError, UnicodeEncodeError):
            raise invalid_input("expected texts in UTF-8 that do not end with a NUL, got other texts") from None
        with (folder / f"samples-{number}.npz").open("wb") as file:
            write_arrays(file, columns | texts)
    if golden.tolerances:
        content = {"tolerances": golden.tolerances}  # JSON is YAML
        (folder / GOLDEN_FILE).write_text(json.dumps(content, indent=1, default=dict) + "\n", encoding="utf-8")


def kept_tolerances(folder: Path) -> dict[str, dict[str, float]]:
    """The tolerances of existing samples. Raises ServeError: invalid_input, if they cannot be read."""
    return {name: one.bounds() for name, one in load_golden_file(folder / GOLDEN_FILE).tolerances.items()}


def _named(sample: GoldenSample, signature: ModelSignature) -> dict[str, np.ndarray]:
    """The arrays of one sample by name. Axis 0 has length 1 and is the axis of samples."""
    first = ... if signature.is_batched else np.newaxis
    given = zip((INPUT + spec.name for spec in signature.inputs), sample.inputs, strict=True)
    made = zip((OUTPUT + spec.name for spec in signature.outputs), sample.outputs, strict=True)
    return {name: array[first] for name, array in (*given, *made) if array is not None and not is_absent(array)}


def _take(inputs: Inputs, signature: ModelSignature, count: int) -> Iterator[GoldenSample]:
    """At most ``count`` samples without outputs, spread over a file."""
    nothing = (None,) * len(signature.outputs)
    tensors = len(signature.inputs)  # without inputs that the server fills
    if not isinstance(inputs, FileInputs):
        for number in range(count):
            yield GoldenSample(f"sample {number}", inputs.take(1, number)[:tensors], nothing)
        return
    for position, arrays in inputs.some(count).items():
        yield GoldenSample(f"sample {position}", arrays, nothing)


def _run_source(source: Subject, signature: ModelSignature, samples: Sequence[GoldenSample]) -> list[GoldenSample]:
    """The samples with the outputs of another model, which has the same inputs and at least one of the outputs."""
    with loaded_runs(source) as (_, runs):
        names = [spec.name for spec in signature.inputs]
        index = runs.signature.output_index
        if {spec.name for spec in runs.signature.inputs} != set(names) or not index.keys() & signature.output_index:
            raise invalid_input(f"{source.path}: expected the inputs {', '.join(names)} and outputs of the version")
        order = [names.index(spec.name) for spec in runs.signature.inputs]
        found = []
        for sample in samples:
            ordered = replace(sample, inputs=tuple(sample.inputs[position] for position in order))
            outputs = runs.run([ordered])[0]
            expected = tuple(outputs[index[spec.name]] if spec.name in index else None for spec in signature.outputs)
            found.append(replace(sample, outputs=expected))
        return found


def _ask(control: Control, signature: ModelSignature, samples: Sequence[GoldenSample]) -> list[GoldenSample]:
    """The samples with the answers of a server.

    Raises:
        ServeError: As ``Control``; invalid_input, if an answer lacks an output.
    """
    return [replace(sample, outputs=_answer(control, signature, sample.inputs)) for sample in samples]


def _answer(control: Control, signature: ModelSignature, inputs: Arrays) -> Arrays:
    answers = control.infer(control.encode(tensors_of(signature, as_sent(signature, inputs))))
    missing = [spec.name for spec in signature.outputs if spec.name not in answers]
    if missing:
        raise invalid_input(f"{control.address.url}: expected the output '{missing[0]}', got {', '.join(answers)}")
    return as_batched(signature, tuple(answers[spec.name].array for spec in signature.outputs))


def _record_ensemble(
    source: Subject | Control | None,
    file: Path | None,
    count: int,
    tolerances: Mapping[str, Mapping[str, float]],
    target: Path,
) -> Recorded:
    """Record the answers of a server. Only a server with all members can run an ensemble."""
    if not isinstance(source, Control):
        raise invalid_input("expected --from URL of a server with the ensemble, whose members run there")
    signature = source.describe()[1]
    inputs = make_inputs(signature, file, lambda arrays: _answer(source, signature, arrays))
    samples = _ask(source, signature, list(_take(inputs, signature, count)))
    write_samples(target, GoldenSamples(1, tuple(samples), tolerances), signature)
    return Recorded(len(samples), inputs.origin, "")
