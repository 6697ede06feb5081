"""What does each piece of advice in ONNX Runtime's performance guides gain here?

Level: a session, opened as the server opens it; for trials with callers: the batcher, without a protocol. Expected:
each trial states its expectation, written from the guides and from earlier figures before the first run of this script.

    python loadtests/advice.py [--only TRIAL ...] [--pairs 3] [--blocks 2]
    python loadtests/advice.py --render

Each trial compares two arms that differ in one thing: an option of ``model.yaml``, an environment variable, or the form
of the model's file. Each arm runs in a separate process, because spinning threads, allocators and arenas belong to a
process. The two processes run blocks in turns. A trial repeats this with new processes (``--pairs``), because processes
of the same arm also differ. Outputs of both arms are compared. Takes up to 12 minutes. Writes
``loadtests/results/advice.json`` and ``.md``, and the figures of ``docs/performance.md``; ``--render`` only writes the
texts, from the JSON. With ``--only``, other trials keep their results.
"""

import argparse
import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from ctypes.util import find_library
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

import advice_report
import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported
from advice_arms import Arm, Block, Kept, Opened, arms_of
from advice_files import MODELS, VARIANTS
from advice_report import Figure, Report, Result
from advice_trials import TRIALS, CallersTrial, Trial, finding
from harness import circumstances
from ortserve.config.model import ModelOptions

_SMALLEST: Final = np.finfo(np.float32).tiny
"""Smallest normal number; the comparison counts denormal numbers as 0."""
LATER: Final = " Some trials later: "


@contextlib.contextmanager
def busy_process(is_wanted: bool) -> Iterator[None]:
    """Keep one processor busy with a process, if ``is_wanted``."""
    if not is_wanted:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


class Repository:
    """Models in all forms and configurations, written on demand."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()

    def model(self, name: str, variant: str, options: Mapping[str, Any]) -> Path:
        """Write a model folder ``REPOSITORY/name`` with this form of the file and these options. Returns its path."""
        ModelOptions.model_validate(options)
        folder = self._folder / f"r{next(self._numbers)}" / name
        (folder / "1").mkdir(parents=True)
        for file in self._file(name, variant).parent.iterdir():
            (folder / "1" / file.name).hardlink_to(file)
        (folder / "model.yaml").write_text(yaml.safe_dump(dict(options)))
        return folder

    def _file(self, name: str, variant: str) -> Path:
        source = self._folder / name / "model.onnx"
        if not source.exists():
            source.parent.mkdir()
            MODELS[name](source)
        target = self._folder / f"{name}, {variant}" / "model.onnx"
        if not target.exists():
            target.parent.mkdir()
            VARIANTS[variant](source, target)
        return target


def figure(pairs: Sequence[tuple[float, float]]) -> Figure:
    """Summarize the pairs of values of two processes, without and with the advice."""
    without, advised = zip(*pairs, strict=True)
    ratios = [one / other for one, other in pairs]
    medians = statistics.median(without), statistics.median(advised)
    return Figure(*medians, statistics.median(ratios), min(ratios), max(ratios))


def values_of(opened: Opened, blocks: Sequence[Block], kept: Kept) -> dict[str, float]:
    runs = [one for block in blocks for one in block.wall_ms]
    values = {
        "speed": statistics.median(runs),
        "p95": float(np.percentile(runs, 95)),
        "cpu": statistics.median(block.cpu_ms for block in blocks),
        "memory": kept.mib,
        "threads": float(kept.threads),
    }
    return values | ({"open": opened.open_ms} if opened.open_ms else {})


def compare(outputs: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """The smallest cosine similarity of an output between two arms."""
    cosines = []
    for one, other in zip(outputs, others, strict=True):
        assert one.shape == other.shape
        a, b = (np.where(abs(array) < _SMALLEST, 0, array).astype(np.float64).ravel() for array in (one, other))
        norms = float(np.linalg.norm(a) * np.linalg.norm(b))
        cosines.append(float(a @ b) / norms if norms else float(np.array_equal(a, b)))
    return min(cosines)


def run_pair(
    arms: Sequence[Arm], models: Sequence[Path], blocks: int, block_s: float
) -> tuple[list[dict[str, float]], float]:
    """Measure both arms in new processes. Returns the values of each, and the smallest cosine of their outputs."""
    with arms_of(arms, models) as processes, busy_process(arms[0].beside_busy):
        opened = [one.open() for one in processes]
        ran: list[list[Block]] = [[], []]
        for _ in range(blocks):
            for index in (0, 1):
                ran[index].append(processes[index].run(block_s))
        values = [values_of(one, its, process.end()) for one, its, process in zip(opened, ran, processes, strict=True)]
        return values, compare(opened[0].outputs, opened[1].outputs)


def run_trial(trial: Trial, repository: Repository, pairs: int, blocks: int) -> dict[str, Result]:
    results = {}
    for name in trial.models:
        arms = trial.without, trial.advised
        models = [repository.model(name, arm.variant, {"intra_op_threads": 1, **arm.options}) for arm in arms]
        measured = [run_pair(arms, models, blocks, trial.block_s) for _ in range(pairs)]
        cosine = min(one for _, one in measured)
        assert cosine >= trial.least_cosine, f"outputs differ: cosine {cosine:.4f}"
        names = measured[0][0][0].keys()
        values = {one: figure([(pair[0][one], pair[1][one]) for pair, _ in measured]) for one in names}
        results[name] = Result({one: values[one] for one in trial.shows}, cosine)
    return results


def run_callers(trial: CallersTrial, repository: Repository, pairs: int) -> dict[str, Result]:
    """Measure answers per second with ``ortserve bench``, which compares answers with those of single runs."""
    results = {}
    for name in trial.models:
        models = [str(repository.model(name, "source", options)) for options in (trial.without, trial.advised)]
        load = ["--way=batcher", "--concurrency=16", "--seconds=1", "--warmup=0.3", "--json"]
        command = [sys.executable, "-m", "ortserve", "bench", *models, *load]
        rates = []
        for _ in range(pairs):
            # bench exits with 1 if its process was too busy for exact percentiles; these trials do not use percentiles.
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
            if not done.stdout:
                raise RuntimeError(done.stderr)
            points = json.loads(done.stdout)["points"]
            for point in points:
                assert not point["failures"], point["failures"]
                # bench compares one answer in 37.
                assert not (point["outputs"] or {}).get("different"), point["outputs"]
            rates.append((points[0]["throughput"]["value"], points[1]["throughput"]["value"]))
        turned = figure([(advised, without) for without, advised in rates])
        results[name] = Result({"rate": replace(turned, without=turned.advised, advised=turned.without)}, 1.0)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TRIALS, metavar="TRIAL", help=", ".join(TRIALS))
    parser.add_argument("--pairs", type=int, default=3, help="pairs of processes of each trial")
    parser.add_argument("--blocks", type=int, default=2, help="of runs of each process")
    parser.add_argument("--render", action="store_true", help="only write the texts again")
    chosen = parser.parse_args()
    if chosen.render:
        advice_report.render(advice_report.read())
        return
    if find_library("mimalloc") is None and any(name.startswith("mimalloc") for name in chosen.only or TRIALS):
        parser.error("mimalloc is missing: apt-get install libmimalloc2.0")
    logging.disable(logging.WARNING)  # silences the quantizer
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    earlier = advice_report.read() if chosen.only else Report("", {})
    where = f"{earlier.circumstances.partition(LATER)[0]}{LATER}{circumstances()}" if chosen.only else circumstances()
    found = dict(earlier.findings)
    with tempfile.TemporaryDirectory() as folder:
        repository = Repository(Path(folder))
        for key in chosen.only or TRIALS:
            trial = TRIALS[key]
            if isinstance(trial, CallersTrial):
                results = run_callers(trial, repository, chosen.pairs)
            else:
                results = run_trial(trial, repository, chosen.pairs, chosen.blocks)
            found[key] = finding(key, trial, results)
            print(key, {name: one.figures for name, one in results.items()}, flush=True)
            findings = {key: found[key] for key in TRIALS if key in found}
            advice_report.save(Report(where, findings))  # after each trial: an interruption loses no results
    advice_report.render(advice_report.read())


if __name__ == "__main__":
    main()
