"""Compares two models: their outputs for the same inputs in one process, then their speed in separate processes."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from ortserve.core.agreement import Agreement, AgreementMeter
from ortserve.core.batch import Arrays
from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import as_numbers
from ortserve.engine.child_process import call_in_child
from ortserve.errors import invalid_input
from ortserve.registry.sample_files import MALFORMED_FILE_ERRORS, check_header
from ortserve.tools.compare.arguments import BATCH
from ortserve.tools.compare.result import ComparedModel, CompareResult
from ortserve.tools.console import progress
from ortserve.tools.ensemble import Opened
from ortserve.tools.inputs import FileInputs, Inputs, choose_inputs, take_inputs
from ortserve.tools.opening import naming_failures
from ortserve.tools.provenance import describe_model, read_provenance
from ortserve.tools.signatures import signature_differences
from ortserve.tools.speed import Feeds, Timed, compare_speed

SYNTHETIC_SAMPLES: Final = 32
"""The number of synthetic samples, if there is no file of inputs."""
_MAX_FEEDS: Final = 4
"""Different inputs for the measurement of speed."""
_MAX_BYTES: Final = 1 << 28
"""Maximum size of these inputs together."""
_LIMIT_S: Final = 3600.0
SYNTHETIC_NOTE: Final = "synthetic inputs judge a model less reliably than real ones; pass real samples with --inputs"


def compare_models(
    reference: Timed,
    candidate: Timed,
    inputs: Path | None,
    labels: Path | None = None,
    *,
    seconds: float,
    batch: int = BATCH,
) -> CompareResult:
    """Compare a model with another one.

    Args:
        reference: The model that it is compared with.
        candidate: The model.
        inputs: Samples; None for synthetic ones.
        labels: An ``.npy`` with the labels of the samples; needs ``inputs``.
        seconds: Time for the measurement of speed; 0 measures none.
        batch: Rows of a run, if both models are batched.

    Raises:
        ServeError: invalid_input: a model cannot be opened or run, their interfaces differ, or the inputs do not fit.
    """
    if labels is not None and inputs is None:
        raise invalid_input("--labels: expected --inputs to be given, too, with the samples that the labels describe")
    with progress("comparing outputs in another process"):
        result, feeds = call_in_child(_LIMIT_S, _compare_outputs, reference, candidate, inputs, labels, batch)
    if seconds:
        first, second = compare_speed([reference, candidate], feeds, seconds=seconds)
        result = replace(result, reference_speed=first, speed=second)
    notes: tuple[str, ...] = () if inputs is not None else (SYNTHETIC_NOTE,)
    if seconds and os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        notes += (f"other work kept the machine busy (load {os.getloadavg()[0]:.0f}), which widens the intervals",)
    return replace(result, notes=notes)


def _compare_outputs(
    reference: Timed, candidate: Timed, file: Path | None, labels_file: Path | None, batch: int
) -> tuple[CompareResult, Sequence[Feeds]]:
    """The result without speed, and inputs for the measurement of speed."""
    first, second = reference.open_with_members(), candidate.open_with_members()
    if differences := signature_differences(first.signature, second.signature, may_narrow=True):
        raise invalid_input(f"{second.subject.path}: its interface is not that of the first model: {differences[0]}")
    rows = common_rows(first, second, batch)
    inputs = choose_inputs(first, file)
    labels = None if labels_file is None else read_labels(labels_file, inputs)
    agreement = measure_agreement(first, second, inputs, labels=labels, rows=rows)
    names = [spec.name for spec in first.signature.inputs]
    feeds = [dict(zip(names, arrays, strict=True)) for arrays in take_inputs(inputs, rows, _MAX_FEEDS, _MAX_BYTES)]
    result = CompareResult(
        reference=_describe(first),
        candidate=_describe(second),
        inputs=inputs.origin,
        rows=rows,
        agreement=agreement,
        reference_speed=None,
        speed=None,
    )
    return result, feeds


def common_rows(reference: Opened, candidate: Opened, batch: int) -> int:
    """Rows of a run: ``batch``, or the most that a configuration allows; 1 if one of the models is not batched."""
    models = (reference, candidate)
    if not all(model.signature.is_batched for model in models):
        return 1
    return min(batch, *(model.subject.options.max_rows or batch for model in models))


def measure_agreement(
    reference: Opened,
    candidate: Opened,
    inputs: Inputs,
    samples: int = SYNTHETIC_SAMPLES,
    labels: np.ndarray | None = None,
    *,
    rows: int | None = None,
) -> Agreement:
    """Run both models on all samples of a file, or on synthetic ones, and compare the outputs that the candidate has.

    Args:
        reference: The model to compare with, which has all inputs and outputs of the candidate.
        candidate: The model.
        inputs: Inputs of the reference.
        samples: Number of synthetic samples.
        labels: Labels of the samples of a file, in their order.
        rows: Rows of a run; None for ``common_rows``.

    Raises:
        ServeError: As ``naming_failures``; invalid_input: the labels fit no output.
    """
    rows = common_rows(reference, candidate, BATCH) if rows is None else rows
    candidate = candidate.with_rows_of(reference.signature)
    first, second = reference.runner(), candidate.runner()
    chosen = [reference.signature.output_index[spec.name] for spec in candidate.signature.outputs]
    order = [[spec.name for spec in reference.signature.inputs].index(spec.name) for spec in candidate.signature.inputs]
    meter = AgreementMeter([spec.name for spec in candidate.signature.outputs])
    for positions, arrays in _batches(inputs, rows, samples):
        with naming_failures(reference.subject.path):
            expected = first.run(reference.for_model(arrays))
        with naming_failures(candidate.subject.path):
            got = second.run(candidate.for_model([arrays[index] for index in order]))
        wanted = [_comparable(expected[index], reference.signature.outputs[index]) for index in chosen]
        found = [_comparable(array, spec) for array, spec in zip(got, candidate.signature.outputs, strict=True)]
        meter.add(wanted, found, len(positions), None if labels is None else labels[positions])
    return meter.result()


def read_labels(file: Path, inputs: Inputs) -> np.ndarray:
    """Read the labels of samples: an ``.npy`` with an integer or text for each.

    Raises:
        ServeError: invalid_input, with what is expected.
    """
    assert isinstance(inputs, FileInputs)
    try:
        with file.open("rb") as opened:
            if opened.peek().startswith(np.lib.format.MAGIC_PREFIX):
                check_header(opened, file.stat().st_size)
                opened.seek(0)
            labels = np.load(opened, allow_pickle=False)
    except MALFORMED_FILE_ERRORS as error:
        raise invalid_input(f"--labels {file}: expected a file written by numpy.save, got: {error}") from None
    if not isinstance(labels, np.ndarray) or labels.shape != (inputs.samples,) or labels.dtype.kind not in "iuUS":
        got = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, np.ndarray) else "several arrays"
        raise invalid_input(f"--labels {file}: expected {inputs.samples} integers or texts, one per sample, got {got}")
    return np.char.decode(labels, "utf-8") if labels.dtype.kind == "S" else labels


def _batches(inputs: Inputs, rows: int, samples: int) -> Iterator[tuple[np.ndarray, Arrays]]:
    """Batches of samples, with their positions: each sample of a file once, or ``samples`` synthetic ones."""
    if isinstance(inputs, FileInputs):
        yield from inputs.each(rows)
    else:
        for begin in range(0, samples, rows):
            positions = np.arange(begin, min(begin + rows, samples))
            yield positions, inputs.take(len(positions), begin // rows)


def _comparable(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """The numbers of an output, with rows on axis 0."""
    numbers = as_numbers(array, spec.datatype)
    return numbers if spec.batch_axis in (None, 0) else np.moveaxis(numbers, spec.batch_axis, 0)


def _describe(opened: Opened) -> ComparedModel:
    subject, models = opened.subject, opened.models
    found = [describe_model(model.subject.path, model.subject.name, model.subject.version) for model in models]
    digests = [one.digest for one in found]
    is_ensemble = subject.options.ensemble is not None
    provenance = None if is_ensemble else read_provenance(subject.path)
    return ComparedModel(
        name=subject.name,
        version=subject.version,
        path=str(subject.path),
        digest=hashlib.sha256("".join(digests).encode()).hexdigest() if is_ensemble else digests[0],
        nbytes=sum(one.nbytes for one in found),
        nodes=sum(len(model.graph.graph.nodes) for model in models),
        execution_provider=", ".join(dict.fromkeys(model.choice.name for model in models)),
        threads=max(model.threads for model in models),
        provenance=None if provenance is None else provenance.summary,
    )
