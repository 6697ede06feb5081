"""Memory of a model by batch size: predicted from its constants and two small sizes, and measured in another process.

The measurement opens the model with profiling, whose events contain the use of ONNX Runtime's arena. The memory of the
process comes from the operating system.
"""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil

from ortserve.engine.child_process import call_apart
from ortserve.engine.process_memory import give_back_freed
from ortserve.tools.inputs import choose_inputs
from ortserve.tools.inspect.result import BatchMemory, Memory
from ortserve.tools.opening import open_model
from ortserve.tools.subject import Subject

FIRST_SIZES: Final = (2, 4)
"""Sizes from which others are extrapolated linearly. Operators may treat a single row in another way."""
_RUNS: Final = 2
"""Runs of each size. The second run uses the memory pattern that ONNX Runtime planned in the first."""
_NEARLY: Final = 0.99
"""Share of the predicted use that an arena must hold. The rest is within the error of the prediction."""
_MAX_KEPT: Final = 2
"""Limit of the growth of the process per growth of activations: blocks of single tensors, and one block for all of
them. Any further growth does not depend on the batch size."""
_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured after runs of one batch size, in bytes.

    Attributes:
        rows: The batch size.
        in_use: Peak use of the arena; None without an arena.
        held: Size of the arena; None without an arena.
        process: Growth of the process by the open model and its runs.
    """

    rows: int
    in_use: int | None
    held: int | None
    process: int


def measure_memory(subject: Subject, file: Path | None, sizes: Sequence[int], weights: int, budget_s: float) -> Memory:
    """Measure the memory of a model in another process, and predict the same figures.

    Args:
        subject: The model on disk.
        file: Samples; None for synthetic inputs.
        sizes: The sizes that the user asked for, ascending.
        weights: Bytes of the constants of the optimized graph.
        budget_s: Time limit. A size is run only if its runs are predicted to end within this time.

    Raises:
        ServeError: The model does not run, or the process ended, for example because memory was short.
    """
    return call_apart(_TIMEOUT_S, _measure, subject, file, sizes, weights, budget_s)


def describe_batch(rows: int, samples: Sequence[Sample], in_arena: int) -> BatchMemory:
    """Predict the memory for one size, and add its measurement if there is one.

    Args:
        rows: The batch size.
        samples: The measurements, by ascending sizes.
        in_arena: Use of the arena before the first run, by weights that ONNX Runtime keeps there.
    """
    small = [one for one in samples if one.rows <= max(FIRST_SIZES)]
    first = [one for one in small if one.rows in FIRST_SIZES] or small
    in_use = _line([(one.rows, one.in_use) for one in first if one.in_use is not None], rows)
    process = _line([(one.rows, one.process) for one in first], rows)
    if process is not None and in_use is not None and first[-1].in_use is not None and rows > first[-1].rows:
        process = min(process, first[-1].process + _MAX_KEPT * (in_use - first[-1].in_use))
    measured = next((one for one in samples if one.rows == rows), None)
    used, held, grown = (measured.in_use, measured.held, measured.process) if measured else (None, None, None)
    predicted, activations = (None if use is None else max(0, use - in_arena) for use in (in_use, used))
    return BatchMemory(rows, predicted, activations, grown_arena(small, in_use), held, process, grown)


def _line(points: Sequence[tuple[int, int]], rows: int) -> int | None:
    """The value at ``rows`` of the straight line through the first and the last point; None without points."""
    if not points:
        return None
    (x0, y0), (x1, y1) = points[0], points[-1]
    return y0 if x0 == x1 else round(y0 + (y1 - y0) * (rows - x0) / (x1 - x0))


def grown_arena(seen: Sequence[Sample], in_use: int | None) -> int | None:
    """The size of an arena whose peak use is ``in_use``.

    ONNX Runtime doubles each extension of an arena: the last one was the last difference between the sizes ``seen``.

    Args:
        seen: Measurements of small sizes, ascending.
        in_use: The predicted peak use.
    """
    known = [(one.in_use, one.held) for one in seen if one.in_use is not None and one.held is not None]
    if in_use is None or not known:
        return None
    for peak, held in known:
        if peak >= in_use * _NEARLY:
            return held
    sizes = [held for _, held in known]
    held, extension = sizes[-1], next((b - a for a, b in reversed(list(pairwise(sizes))) if b > a), sizes[-1])
    while held < in_use:
        extension *= 2
        held += extension
    return held


def _measure(subject: Subject, file: Path | None, sizes: Sequence[int], weights: int, budget_s: float) -> Memory:
    process = psutil.Process()
    before = process.memory_full_info().uss
    with tempfile.TemporaryDirectory(prefix="ortserve-inspect-") as folder:
        opened = open_model(subject, provider="cpu", profile_prefix=Path(folder) / "profile")
        give_back_freed()  # otherwise the first runs reuse memory that opening freed, and do not show in the growth
        opening = process.memory_full_info().uss - before
        inputs, runner = choose_inputs(opened, file), opened.runner()
        growth: dict[int, int] = {}
        run_s, skipped = 0.0, ""
        deadline = time.monotonic() + budget_s
        shown = sizes if opened.signature.is_batched else (1,)
        for rows in sorted({*shown, *FIRST_SIZES}) if opened.signature.is_batched else shown:
            if growth and time.monotonic() + run_s * _RUNS * rows / max(growth) > deadline:
                skipped = f"batches of {rows} rows and more would take longer than {budget_s:g} s"
                break
            for number in range(_RUNS):
                arrays = opened.for_model(inputs.take(rows, number))
                began = time.monotonic()
                runner.run(arrays)  # frees the outputs
                run_s = time.monotonic() - began
            del arrays
            growth[rows] = max(process.memory_full_info().uss - before, opening)
        events: list[dict[str, Any]] = json.loads(Path(opened.session.end_profiling()).read_text())
    arena = _arena_by_run(events)[-len(growth) * _RUNS :]  # without the runs that looked for accepted inputs
    samples = [Sample(rows, *arena[_RUNS * n + _RUNS - 1], grown) for n, (rows, grown) in enumerate(growth.items())]
    batches = [describe_batch(rows, samples, _use_before_runs(events)) for rows in shown]
    return Memory(weights, max(0, opening), batches, inputs.origin, opened.threads, skipped)


def _arena_by_run(events: Sequence[Mapping[str, Any]]) -> list[tuple[int | None, int | None]]:
    """Peak use and size of the arena up to the end of each run. The event of a run follows those of its nodes."""
    found: list[tuple[int | None, int | None]] = []
    peak = held = None
    for event in events:
        if "mem_in_use_peak" in event["args"]:
            peak = max(peak or 0, int(event["args"]["mem_in_use_peak"]))
            held = max(held or 0, int(event["args"]["mem_arena_held"]))
        if event["name"] == "model_run":
            found.append((peak, held))
    return found


def _use_before_runs(events: Sequence[Mapping[str, Any]]) -> int:
    """The use of the arena before the first node of the first run, in bytes."""
    known = (event["args"] for event in events if "mem_bytes_in_use" in event["args"])
    return next((max(0, int(args["mem_bytes_in_use"]) - int(args["mem_in_use_delta"])) for args in known), 0)
