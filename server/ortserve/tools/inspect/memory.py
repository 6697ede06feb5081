"""Memory of a model by batch size: predicted from its constants and two small sizes, and measured in another process.

The operating system shows the memory of the process. Then the model is opened again with profiling: its events contain
the use of ONNX Runtime's arena, and take memory themselves.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor, log2
from pathlib import Path
from typing import Any, Final

import psutil

from ortserve.engine.child_process import call_in_child
from ortserve.engine.process_memory import give_back_freed
from ortserve.engine.scratch import scratch_folder
from ortserve.tools.inputs import Inputs, choose_inputs
from ortserve.tools.inspect.result import BatchMemory, Memory
from ortserve.tools.opening import OpenModel, naming_failures, open_model
from ortserve.tools.subject import Subject

FIRST_SIZES: Final = (2, 4)
"""Sizes from which others are extrapolated linearly. Operators may treat a single row in another way."""
_RUNS: Final = 2
"""Runs of each size. The second run uses the memory pattern that ONNX Runtime planned in the first."""
_NEARLY: Final = 0.98
"""Share of an amount that counts as all of it. The rest is within the error of a prediction."""
_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """The use of ONNX Runtime's arena by runs of one batch size, in bytes.

    Attributes:
        activations: Peak of the memory that nodes requested. ONNX Runtime's own peak counts the blocks that they got,
            which may be twice as large.
        held: Size of the arena.
        before: Memory that was requested before the first run, for weights.
    """

    activations: int
    held: int
    before: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of one batch size.

    Attributes:
        rows: The batch size.
        arena: The use of the arena; None without an arena.
        process: Growth of the process by the open model and its runs, in bytes.
    """

    rows: int
    arena: ArenaUse | None
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
    return call_in_child(_TIMEOUT_S, _measure, subject, file, sizes, weights, budget_s)


def describe_batch(rows: int, samples: Sequence[Sample]) -> BatchMemory:
    """Predict the memory for one size, and add its measurement if there is one.

    Args:
        rows: The batch size.
        samples: The measurements, by ascending sizes.
    """
    small = [one for one in samples if one.rows <= max(FIRST_SIZES)]
    first = [one for one in small if one.rows in FIRST_SIZES] or small
    activations = _line([(one.rows, one.arena.activations) for one in first if one.arena is not None], rows)
    held = grown_arena([one.arena for one in small if one.arena is not None], activations)
    process = _line([(one.rows, one.process) for one in first], rows)
    last = first[-1] if first else None
    if process is not None and held is not None and last is not None and last.arena is not None and rows > last.rows:
        process = min(process, last.process + held - last.arena.held)  # other growth does not depend on the batch size
    measured = next((one for one in samples if one.rows == rows), None)
    use = measured.arena if measured else None
    return BatchMemory(
        rows=rows,
        activations_nbytes=activations,
        activations_measured_nbytes=use.activations if use else None,
        arena_nbytes=held,
        arena_measured_nbytes=use.held if use else None,
        process_nbytes=process,
        process_measured_nbytes=measured.process if measured else None,
    )


def _line(points: Sequence[tuple[int, int]], rows: int) -> int | None:
    """The value at ``rows`` of the straight line through the first and the last point; None without points.

    Below the first point it is at least in proportion to the rows, because amounts that grow faster than the rows lead
    to a line below 0.
    """
    if not points:
        return None
    (x0, y0), (x1, y1) = points[0], points[-1]
    if x0 == x1:
        return y0
    least = y0 * rows / x0 if rows < x0 else 0
    return round(max(least, y0 + (y1 - y0) * (rows - x0) / (x1 - x0)))


def grown_arena(seen: Sequence[ArenaUse], activations: int | None) -> int | None:
    """The size of an arena after runs with these activations, and with all smaller powers of two of rows before.

    ONNX Runtime doubles each extension of an arena, so each extension happens at twice the activations of the previous
    one. At which activations an extension happens is not known otherwise: blocks are up to twice as large as requested,
    and free memory between them may be unusable.

    Args:
        seen: Measurements of small sizes, ascending.
        activations: The predicted activations.
    """
    if activations is None or not seen:
        return None
    for one in seen:
        if one.activations >= activations * _NEARLY:
            return one.held
    held = seen[-1].held
    growth = [(after.activations, after.held - one.held) for one, after in pairwise(seen) if after.held > one.held]
    if growth:
        full_at, grown = 2 * growth[-1][0], growth[-1][1]
    else:
        full_at = grown = max(1, held - seen[0].before)
    extension = 2 ** floor(log2(grown / _NEARLY))  # the last one of several
    while full_at * _NEARLY <= activations:
        full_at, extension = 2 * full_at, 2 * extension
        held += extension
    return held


def _measure(subject: Subject, file: Path | None, sizes: Sequence[int], weights: int, budget_s: float) -> Memory:
    process = psutil.Process()
    before = process.memory_full_info().uss
    opened = open_model(subject, provider="cpu")
    give_back_freed()  # otherwise the first runs reuse memory that opening freed, and do not show in the growth
    opening = process.memory_full_info().uss - before
    inputs, threads, is_batched = choose_inputs(opened, file), opened.threads, opened.signature.is_batched
    shown = sizes if is_batched else (1,)
    growth: dict[int, int] = {}
    run_s, skipped = 0.0, ""
    deadline = time.monotonic() + budget_s / 2  # the runs with profiling take the other half
    for rows in _sizes_to_run(shown) if is_batched else shown:
        if growth and time.monotonic() + run_s * _RUNS * rows / max(growth) > deadline:
            skipped = f"batches of {rows} rows and more would take longer than {budget_s:g} s"
            break
        run_s = _run(opened, inputs, rows)
        growth[rows] = max(process.memory_full_info().uss - before, opening)
    del opened
    uses = _profile(subject, inputs, list(growth))
    samples = [Sample(rows, use, grown) for (rows, grown), use in zip(growth.items(), uses, strict=True)]
    batches = [describe_batch(rows, samples) for rows in shown]
    return Memory(
        weights_nbytes=weights,
        weights_measured_nbytes=max(0, opening),
        batches=batches,
        inputs=inputs.origin,
        threads=threads,
        problem=skipped,
    )


def _sizes_to_run(shown: Sequence[int]) -> list[int]:
    """The sizes, and all smaller powers of two, as in a warm-up of the server: an arena depends on the sizes before."""
    return sorted({*shown, *FIRST_SIZES, *(2**n for n in range(max(shown).bit_length()))})


def _run(opened: OpenModel, inputs: Inputs, rows: int) -> float:
    """Run batches of one size. Returns the seconds of the last run."""
    runner, run_s = opened.runner(), 0.0
    for number in range(_RUNS):
        arrays = opened.for_model(inputs.take(rows, number))
        began = time.monotonic()
        with naming_failures(opened.subject.path):
            runner.run(arrays)  # frees the outputs
        run_s = time.monotonic() - began
    return run_s


def _profile(subject: Subject, inputs: Inputs, sizes: Sequence[int]) -> list[ArenaUse | None]:
    """The use of the arena after the runs of each size; None without an arena."""
    with scratch_folder() as folder:
        opened = open_model(subject, provider="cpu", profile_prefix=folder / "profile")
        for rows in sizes:
            _run(opened, inputs, rows)
        events = json.loads(Path(opened.session.end_profiling()).read_text())
    return arena_by_size(events, _RUNS)


def arena_by_size(events: Iterable[Mapping[str, Any]], runs: int) -> list[ArenaUse | None]:
    """Read the use of the arena from a profile of ``runs`` runs of each size; None without an arena.

    The event of a run follows those of its nodes. Nodes report their use before their inputs are freed. Memory that a
    node allocates and frees shows only in ONNX Runtime's peak, if it raises that.
    """
    found: list[ArenaUse | None] = []
    before: int | None = None
    ended = activations = held = peak = 0
    for event in events:
        use = {name: int(value) for name, value in event["args"].items() if name.startswith("mem_")}
        if use:
            requested, blocks, now = use["mem_bytes_requested_in_use"], use["mem_bytes_in_use"], use["mem_in_use_peak"]
            before = max(0, requested - use["mem_requested_in_use_delta"]) if before is None else before
            freed = now - max(blocks, blocks - use["mem_in_use_delta"]) if now > peak else 0
            activations, peak = max(activations, requested + freed - before), max(peak, now)
            held = use["mem_arena_held"]
        if event["name"] == "model_run":
            ended += 1
            if ended % runs == 0:
                found.append(None if before is None else ArenaUse(activations, held, before))
                activations = 0
    return found
