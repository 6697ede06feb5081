"""Memory of a model by batch size: predicted from its constants and two small sizes, and measured in another process.

The measurement opens the model with a profile, whose events tell how much of ONNX Runtime's arena is in use, and reads
the process's own memory from the operating system. Run as a program, this module is that other process.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil

from ortserve.engine.ort_errors import ORT_ERRORS, without_paths
from ortserve.errors import ServeError, invalid_input
from ortserve.tools.inputs import choose_inputs
from ortserve.tools.inspect.result import BatchMemory, Memory
from ortserve.tools.opening import open_model
from ortserve.tools.subject import find_model

FIRST_SIZES: Final = (2, 4)
"""The sizes from which others are predicted, by a straight line. One row is no part of it: operators may treat a single
row in another way."""
_RUNS: Final = 2
"""Of each size. The second one has the memory pattern that ONNX Runtime planned in the first."""
_NEARLY: Final = 0.99
"""A use that is larger by less than the error of its prediction needs no larger arena."""
_MOST_KEPT: Final = 2
"""How much of a process further activations can take: blocks of single tensors, and a block for all of them at once.
More is growth of the process itself, which does not go on."""
_TIMEOUT_S: Final = 600.0
_ANSWER: Final = "measured: "


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured after runs of one batch size, in bytes.

    Attributes:
        rows: The size.
        in_use: Peak use of the arena; None without an arena.
        held: Size of the arena; None without one.
        process: Growth of the process since the model was opened.
    """

    rows: int
    in_use: int | None
    held: int | None
    process: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """What the other process measured, in bytes.

    Attributes:
        weights: Growth of the process by the open model.
        opening_peak: The largest growth while it was opened.
        in_arena: Use of the arena before the first run: weights that ONNX Runtime keeps there.
        samples: Ascending sizes.
        inputs: Where the inputs came from.
        threads: Threads of a run.
        skipped_because: Why larger sizes were not run; empty if all were.
    """

    weights: int
    opening_peak: int
    in_arena: int
    samples: tuple[Sample, ...]
    inputs: str
    threads: int
    skipped_because: str = ""


def measure_memory(model: str, file: Path | None, sizes: Sequence[int], budget_s: float) -> Measurement:
    """Measure a model in another process.

    Args:
        model: As the user names it.
        file: Samples; None for synthetic inputs.
        sizes: Ascending.
        budget_s: A size is run only if it is predicted to end within this time.

    Raises:
        ServeError: The model does not run, or the process ended, for example because memory was short.
    """
    request = {"model": model, "file": file and str(file), "sizes": list(sizes), "budget_s": budget_s}
    try:
        child = subprocess.run(
            [sys.executable, "-m", "ortserve.tools.inspect.memory"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise invalid_input(f"measuring memory took more than {_TIMEOUT_S:g} s") from None
    line = next((line for line in child.stdout.splitlines() if line.startswith(_ANSWER)), "")
    if not line:
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        raise invalid_input(f"measuring memory in another process failed: {how}: {last}")
    answer: dict[str, Any] = json.loads(line.removeprefix(_ANSWER))
    if problem := answer.get("problem"):
        raise invalid_input(problem)
    return Measurement(**answer | {"samples": tuple(Sample(**one) for one in answer["samples"])})


def describe_memory(measured: Measurement, weights: int, sizes: Sequence[int]) -> Memory:
    """Predictions beside measurements.

    Args:
        measured: In another process.
        weights: Bytes of the constants of the optimized graph.
        sizes: The sizes that the user asked for.
    """
    known = {sample.rows: sample for sample in measured.samples}
    return Memory(
        weights,
        measured.weights,
        measured.opening_peak,
        [_batch(rows, known.get(rows), measured) for rows in sizes],
        measured.inputs,
        measured.threads,
        measured.skipped_because,
    )


def _batch(rows: int, sample: Sample | None, measured: Measurement) -> BatchMemory:
    samples = measured.samples
    first = [one for one in samples if one.rows in FIRST_SIZES] or samples[:1]
    in_use = _line([(one.rows, one.in_use) for one in first if one.in_use is not None], rows)
    process = _line([(one.rows, one.process) for one in first], rows)
    assert process is not None
    if in_use is not None and first[-1].in_use is not None and rows > first[-1].rows:
        process = min(process, first[-1].process + _MOST_KEPT * (in_use - first[-1].in_use))
    actual = None if sample is None or sample.in_use is None else sample.in_use - measured.in_arena
    small = [(one.in_use, one.held) for one in samples if one.rows <= max(FIRST_SIZES)]
    return BatchMemory(
        rows,
        None if in_use is None else max(0, in_use - measured.in_arena),
        actual,
        grown_arena(small, in_use),
        None if sample is None else sample.held,
        measured.weights + max(0, process),
        None if sample is None else measured.weights + sample.process,
    )


def _line(points: Sequence[tuple[int, int]], rows: int) -> int | None:
    """The value at ``rows`` of the straight line through the first and the last point; None without points."""
    if not points:
        return None
    (x0, y0), (x1, y1) = points[0], points[-1]
    return y0 if x0 == x1 else round(y0 + (y1 - y0) * (rows - x0) / (x1 - x0))


def grown_arena(seen: Sequence[tuple[int | None, int | None]], in_use: int | None) -> int | None:
    """The size of an arena whose peak use is ``in_use``.

    ONNX Runtime doubles each extension of an arena: the last one was the last difference between the sizes ``seen``.

    Args:
        seen: Peak use and size of the arena after runs of small sizes, ascending.
        in_use: The predicted peak use.
    """
    sizes = [held for _, held in seen if held is not None]
    if in_use is None or not sizes:
        return None
    enough = in_use * _NEARLY
    smallest = next((held for peak, held in seen if peak is not None and held is not None and peak >= enough), None)
    if smallest is not None:
        return smallest
    held, steps = sizes[-1], [b - a for a, b in pairwise(sizes) if b > a]
    extension = steps[-1] if steps else held
    while held < in_use:
        extension *= 2
        held += extension
    return held


def _measure(request: dict[str, Any]) -> Measurement:
    subject = find_model(request["model"])
    process = psutil.Process()
    peak_before = _begin_peak()
    before = process.memory_full_info().uss
    with tempfile.TemporaryDirectory(prefix="ortserve-inspect-") as folder:
        opened = open_model(subject, provider="cpu", profile_prefix=Path(folder) / "profile")
        opening_peak = max(0, _peak() - peak_before)
        _return_freed_memory()
        after = process.memory_full_info().uss
        file = request["file"]
        inputs = choose_inputs(opened, Path(file) if file else None)
        run = opened.runner()
        growth: dict[int, int] = {}
        run_s, skipped = [0.0], ""
        deadline = time.monotonic() + request["budget_s"]
        for rows in request["sizes"]:
            predicted_s = run_s[-1] * rows / max([1, *growth]) * _RUNS
            if growth and time.monotonic() + predicted_s > deadline:
                skipped = f"batches of {rows} rows and more would take longer than {request['budget_s']:g} s"
                break
            for number in range(_RUNS):
                arrays = opened.for_model(inputs.take(rows, number))
                began = time.monotonic()
                run.run(arrays)
                run_s.append(time.monotonic() - began)
            del arrays
            growth[rows] = process.memory_full_info().uss - after
        events = json.loads(Path(opened.session.end_profiling()).read_text())
    peaks = _arena_by_run(events)[-len(growth) * _RUNS :]  # without the runs that looked for accepted inputs
    samples = [
        Sample(rows, *peaks[(index + 1) * _RUNS - 1], max(0, grown))
        for index, (rows, grown) in enumerate(growth.items())
    ]
    return Measurement(
        max(0, after - before),
        opening_peak,
        _use_before_runs(events),
        tuple(samples),
        inputs.origin,
        opened.threads,
        skipped,
    )


def _arena_by_run(events: Sequence[dict[str, Any]]) -> list[tuple[int | None, int | None]]:
    """Peak use and size of the arena so far, by run."""
    nodes = [event for event in events if event["cat"] == "Node" and "mem_in_use_peak" in event["args"]]
    found: list[tuple[int | None, int | None]] = []
    peak = held = None
    for run in (event for event in events if event["name"] == "model_run"):
        end = run["ts"] + run["dur"]
        own = [event["args"] for event in nodes if run["ts"] <= event["ts"] <= end]
        peak = max((int(one["mem_in_use_peak"]) for one in own), default=peak)
        held = max((int(one["mem_arena_held"]) for one in own), default=held)
        found.append((peak, held))
    return found


def _use_before_runs(events: Sequence[dict[str, Any]]) -> int:
    """What the arena held before the first node of the first run allocated."""
    for event in events:
        args = event["args"]
        if event["cat"] == "Node" and "mem_bytes_in_use" in args:
            return max(0, int(args["mem_bytes_in_use"]) - int(args["mem_in_use_delta"]))
    return 0


def _begin_peak() -> int:
    """Forget the process's peak so far; the memory that it has now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    return int(psutil.Process().memory_info().rss)


def _peak() -> int:
    """The peak since then. ``getrusage`` would begin with the peak of the process that started this one."""
    found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _return_freed_memory() -> None:
    """Return memory that opening freed to the system. Otherwise it would hide the first runs' growth."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # another C library than glibc
        return


def main() -> None:
    """Read the request, measure, and write the answer."""
    try:
        answer = asdict(_measure(json.loads(sys.stdin.read())))
    except ServeError as error:
        answer = {"problem": error.message}
    except ORT_ERRORS as error:
        answer = {"problem": f"the model does not run: {without_paths(str(error))}"}
    sys.stdout.write(f"{_ANSWER}{json.dumps(answer)}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
