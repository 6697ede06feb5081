"""Checks golden samples: runs each alone and among others, and compares the outputs with the expected ones.

``check_loaded`` runs them on the instances of a loaded model, ``check_ensemble`` as requests to an ensemble.
"""

import asyncio
import math
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from ortserve.batching.queue import Alone
from ortserve.clock import Clock
from ortserve.core.agreement import AgreementMeter
from ortserve.core.batch import Arrays, Batch
from ortserve.core.inflight import InflightRequest
from ortserve.core.padding import padding_of_requests
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import as_numbers, is_absent
from ortserve.core.timing import Timing
from ortserve.engine.provider_options import GPU_PROVIDERS
from ortserve.errors import ErrorKind, RunTimeoutError, ServeError, invalid_input
from ortserve.paths import is_folder
from ortserve.registry.ensemble.served_ensemble import ServedEnsemble
from ortserve.registry.load.analysed_model import AnalysedModel
from ortserve.registry.load.batch_sizes import ENDS_LOAD, RunBounds, WorkerRuns
from ortserve.registry.load.golden_samples import (
    GOLDEN_MISSING,
    GoldenSample,
    GoldenSamples,
    golden_folder,
    read_golden,
)
from ortserve.registry.load.loaded_model import LoadedModel
from ortserve.registry.request_shapes import ShapeClasses, check_empty_axes, check_not_empty, crashing_operators

RunTogether: TypeAlias = Callable[[Sequence[GoldenSample]], list[Arrays]]
"""Runs samples together, and returns the outputs of each. Raises ServeError."""

_MAX_TOGETHER: Final = 64
"""Maximum number of samples in a run. Larger batches compute rows in the same way."""
_MAX_REQUESTS: Final = 16
"""Maximum number of concurrent requests to an ensemble."""
_BUSY: Final = (ErrorKind.OVERLOADED, ErrorKind.DEADLINE)
"""Kinds of errors with which a busy member rejects a request."""
_BUSY_NS: Final = 10_000_000_000
"""Maximum time in which a sample is sent again, because members reject it."""
_BUSY_RETRY_S: Final = 0.005


class MembersBusyError(ServeError):
    """Members of an ensemble rejected a golden sample for as long as it was sent again."""


def check_loaded(model: AnalysedModel, loaded: LoadedModel, bounds: RunBounds) -> str:
    """Check the golden samples of a version on its instances. Blocks; for the thread of the load.

    Returns:
        The result of ``check_samples``; empty without samples.

    Raises:
        ServeError: invalid_input, from ``check_samples``, or if required samples are missing.
    """
    options = model.options
    folder = golden_folder(model.path, model.folder, options)
    if (folder is None or not is_folder(folder)) and not options.golden_required:
        return ""
    bounds.progress.begin("checking golden samples")
    runs = InstanceRuns(loaded, options.buckets or loaded.on_device.sizes, bounds)
    golden = read_golden(folder, runs.signature)
    if golden is None:
        raise invalid_input(GOLDEN_MISSING)
    return runs.check(golden)


async def check_ensemble(
    served: ServedEnsemble, path: Path, folder: Path | None, threads: Executor, clock: Clock
) -> str:
    """Check the golden samples of an ensemble by running them as its requests.

    Returns:
        The result of ``check_samples``; empty without samples.

    Raises:
        ServeError: invalid_input, from ``check_samples``, or if required samples are missing; MembersBusyError.
    """
    options, signature = served.options, served.signature
    loop = asyncio.get_running_loop()
    golden = await loop.run_in_executor(threads, read_golden, golden_folder(path, folder, options), signature)
    if golden is None:
        if options.golden_required:
            raise invalid_input(GOLDEN_MISSING)
        return ""
    if served.takes_sequences:
        raise invalid_input("golden samples: expected none of an ensemble with sequences: its members may have some")

    async def answer(sample: GoldenSample) -> Arrays:
        inputs = as_sent(signature, sample.inputs)
        stop_ns = clock() + _BUSY_NS
        while True:
            request = InflightRequest(Timing(clock()), inputs, 1)
            try:
                served.submit(request, served.terms(clock()))
                return as_batched(signature, served.cut_back(await request, inputs))
            except ServeError as error:  # The members serve: their queues may be full of requests of callers.
                if error.kind not in _BUSY or isinstance(error, RunTimeoutError):
                    raise
                if clock() >= stop_ns:
                    raise MembersBusyError(error.kind, error.message) from None
            await asyncio.sleep(_BUSY_RETRY_S)

    async def answer_all(samples: Sequence[GoldenSample]) -> list[Arrays]:
        return await asyncio.gather(*map(answer, samples))

    def run(samples: Sequence[GoldenSample]) -> list[Arrays]:
        return asyncio.run_coroutine_threadsafe(answer_all(samples), loop).result()

    samples = golden.samples if len(golden.samples) > 1 else ()
    groups = [samples[begin : begin + _MAX_REQUESTS] for begin in range(0, len(samples), _MAX_REQUESTS)]
    return await asyncio.to_thread(check_samples, golden, signature, groups, run)


def check_samples(
    golden: GoldenSamples,
    signature: ModelSignature,
    groups: Sequence[Sequence[GoldenSample]],
    run: RunTogether,
    *,
    is_coarse: bool = False,
) -> str:
    """Run all samples, each alone and then the groups, and compare the outputs.

    The signature is that of the samples. If ``is_coarse``, they run on a GPU.

    Returns:
        The number of samples and their largest errors, for the model's metadata.

    Raises:
        ServeError: invalid_input, if an error exceeds its bound, with the output, the measure, both values and the
            sample; or if a sample cannot be run.
    """
    alone, together = (_Compared(golden, signature, is_coarse=is_coarse) for _ in range(2))
    for sample in golden.samples:
        _compare([sample], "alone", run, alone)
    alone.judge()
    count = len(golden.samples)
    text = f"{count} samples agree" if count > 1 else "1 sample agrees"
    text += f": alone {alone.describe()}"
    if not groups:
        return text
    for group in groups:
        _compare(group, f"in a batch of {len(group)}", run, together)
    together.judge()
    return f"{text}; in batches of up to {max(map(len, groups))} {together.describe()}"


def _compare(samples: Sequence[GoldenSample], how: str, run: RunTogether, compared: "_Compared") -> None:
    try:
        found = run(samples)
    except ENDS_LOAD:
        raise
    except ServeError as error:
        which = samples[0].place if len(samples) == 1 else f"{samples[0].place} to {samples[-1].place}"
        text = f"golden samples: {which} {how} fails: {error.message}"
        if isinstance(error, MembersBusyError):
            raise MembersBusyError(error.kind, text) from None
        raise invalid_input(text) from None
    for sample, outputs in zip(samples, found, strict=True):
        compared.add(sample, how, outputs)


class _Compared:
    """Collects the errors of all outputs, and the worst sample of each."""

    def __init__(self, golden: GoldenSamples, signature: ModelSignature, *, is_coarse: bool) -> None:
        self._specs = signature.outputs
        self._bounds = [golden.bounds(spec, is_coarse=is_coarse) for spec in self._specs]
        self._meters = [AgreementMeter([spec.name]) for spec in self._specs]
        self._worst: list[dict[str, tuple[float, str]]] = [{} for _ in self._specs]
        """For each output, by measure: the error of the worst sample, and the name of the sample."""

    def add(self, sample: GoldenSample, how: str, outputs: Arrays) -> None:
        for index, (spec, expected) in enumerate(zip(self._specs, sample.outputs, strict=True)):
            if expected is None:
                continue
            pair = [as_numbers(expected, spec.datatype)], [as_numbers(outputs[index], spec.datatype)]
            own = AgreementMeter([spec.name])
            for meter in (own, self._meters[index]):
                meter.add(*pair, 1)
            (error,) = own.result().outputs
            for measure in self._bounds[index]:
                # Samples rank by their largest difference. Relative errors would rank samples with small values first.
                value = error.max if measure == "relative" else float(getattr(error, measure))
                if value > self._worst[index].get(measure, (-1.0, ""))[0]:
                    self._worst[index][measure] = value, f"{sample.place} {how}"

    def judge(self) -> None:
        """Check all errors against their bounds. Raises ServeError: invalid_input, if any error exceeds its bound."""
        problems = []
        for index, spec in enumerate(self._specs):
            (error,) = self._meters[index].result().outputs
            for measure, most in self._bounds[index].items():
                found = float(getattr(error, measure))
                if found > most:
                    difference = "shape or elements that are not finite differ" if math.isinf(found) else f"{found:.3g}"
                    where = self._worst[index][measure][1]
                    problems.append(
                        f"output '{spec.name}': {measure} error at most {most:g} expected, got {difference} ({where})"
                    )
        if problems:
            raise invalid_input(f"golden samples: {'; '.join(problems)}")

    def describe(self) -> str:
        """The errors and their bounds."""
        texts = []
        for index, spec in enumerate(self._specs):
            if self._worst[index]:
                (error,) = self._meters[index].result().outputs
                bounds = self._bounds[index].items()
                errors = (f"{measure} {getattr(error, measure):.2g} of {most:g}" for measure, most in bounds)
                texts.append(f"'{spec.name}' {', '.join(errors)}")
        return "; ".join(texts)


def as_sent(signature: ModelSignature, inputs: Arrays) -> Arrays:
    """Convert one row to the form of a request: rows move from axis 0 to the row axis of each tensor. Returns views."""
    if not signature.is_batched:
        return inputs
    return tuple(
        array if is_absent(array) else _without_front(array, spec.batch_axis)
        for spec, array in zip(signature.inputs, inputs, strict=True)
    )


def _without_front(array: np.ndarray, axis: int | None) -> np.ndarray:
    """Move the rows from axis 0 to ``axis``; None for a tensor without rows, which the first row holds."""
    return array[0, ...] if axis is None else np.moveaxis(array, 0, axis)


def as_batched(signature: ModelSignature, outputs: Arrays) -> Arrays:
    """Convert the answer to one row to the form of batches, with rows on axis 0. Returns views."""
    if not signature.is_batched:
        return outputs
    return tuple(
        array[np.newaxis] if spec.batch_axis is None else np.moveaxis(array, spec.batch_axis, 0)
        for spec, array in zip(signature.outputs, outputs, strict=True)
    )


class InstanceRuns:
    """Runs golden samples on the workers of a loaded model's instances, in turn. For the thread of the load."""

    def __init__(self, loaded: LoadedModel, buckets: Sequence[int], bounds: RunBounds) -> None:
        """``buckets`` are the sizes to which batches are padded."""
        self._loaded = loaded
        self._buckets = sorted(buckets)
        self._padding = padding_of_requests(loaded.padding)
        self._shapes = ShapeClasses(loaded.signature, self._padding)
        self._workers = cycle([WorkerRuns(instance, bounds) for instance in loaded.instances])
        self._crashing = crashing_operators(loaded.operators)
        self._empty_axes = loaded.empty_axes if loaded.signature.ragged is None else None
        interface = loaded.interface
        self.signature = loaded.signature
        """Signature of samples: that of the model without the tensors that the server fills."""
        if interface.sequences is not None:
            inputs = loaded.signature.inputs[: len(interface.client.inputs)]
            outputs = loaded.signature.outputs[: len(interface.client.outputs)]
            self.signature = replace(loaded.signature, inputs=inputs, outputs=outputs)

    def check(self, golden: GoldenSamples) -> str:
        """Check samples as ``check_samples`` does."""
        groups = self._groups(golden.samples)
        is_coarse = self._loaded.execution_provider in GPU_PROVIDERS
        return check_samples(golden, self.signature, groups, self.run, is_coarse=is_coarse)

    def run(self, samples: Sequence[GoldenSample]) -> list[Arrays]:
        """Run samples in one batch. If the model has sequences, each sample begins one."""
        sequences = self._loaded.interface.sequences
        inputs = [sample.inputs for sample in samples]
        for sample in samples if self._crashing else ():
            check_not_empty(sample.inputs, self.signature, "golden", self._crashing)
        for sample in samples if self._empty_axes is not None else ():
            check_empty_axes(sample.inputs, self.signature, "golden", self._empty_axes or {})
        if sequences is not None:
            inputs = [sequences.first(arrays, 1) for arrays in inputs]
        rows = len(samples)
        bucket = next((size for size in self._buckets if size >= rows), rows) if self.signature.is_batched else 1
        outputs = next(self._workers).run(Batch(tuple(zip(*inputs, strict=True)), rows, bucket)).outputs
        parts = [outputs]
        if rows > 1:
            parts = [tuple(output[row : row + 1] for output in outputs) for row in range(rows)]
        if self._padding is not None:
            parts = [self._padding.cut_back(part, arrays) for part, arrays in zip(parts, inputs, strict=True)]
        return parts

    def _groups(self, samples: Sequence[GoldenSample]) -> list[list[GoldenSample]]:
        """Group samples that may share a batch, up to the maximum size of a batch."""
        if not self.signature.is_batched:
            return []
        most = min(_MAX_TOGETHER, self._loaded.warm_up.max_rows)
        classes: dict[Hashable, list[GoldenSample]] = {}
        sequences = self._loaded.interface.sequences
        for sample in samples:
            inputs = sample.inputs if sequences is None else sequences.first(sample.inputs, 1)
            classes.setdefault(self._shapes.find(inputs), []).append(sample)
        return [
            alike[begin : begin + most]
            for key, alike in classes.items()
            if not isinstance(key, Alone) and len(alike) > 1
            for begin in range(0, len(alike), most)
        ]
