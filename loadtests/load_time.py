"""How long does a corpus of models take to load, and how much memory does it hold, against bare ONNX Runtime?

Level: engine and loader, on one processor, CPU time of the process. Expected: at most twice the time that ONNX Runtime
takes to open the same models and run one row, and at most 1.3 times the resident memory of its sessions after runs with
the same inputs.

    python loadtests/load_time.py [--models FOLDER ...] [--rounds 3]

Each arm loads all models in a separate process, in turns, and keeps them open:

- ortserve: ``load_model`` with its defaults, from the file to the warm instance;
- bare: a session with one thread runs one row, and then a batch that ortserve generated, with the number of rows that
  ortserve's warm-up chose.

Figures are the medians of the rounds. Writes ``loadtests/results/load_time.md``.
"""

import argparse
import gc
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

HERE = Path(__file__).parent
CORPUS = HERE.parent / "tests" / "rows" / "corpus"

Feeds = Mapping[str, Any]
_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(work: Callable[_P, _Result], *arguments: _P.args, **named: _P.kwargs) -> tuple[_Result, float]:
    """Call a function. Returns its result and CPU time in seconds."""
    began = time.process_time()
    return work(*arguments, **named), time.process_time() - began


def load_bare(models: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Open each model, run one row, and then the batch that ``folder`` holds."""
    import numpy  # noqa: F401 - its memory is no session's
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    sessions, open_s, run_s = [], 0.0, 0.0
    began_bytes = resident_bytes()
    for number, path in enumerate(models):
        session, took_s = timed(onnxruntime.InferenceSession, str(path), options)
        sessions.append(session)
        open_s += took_s
        batches = pickle.loads((folder / str(number)).read_bytes())
        for index, feeds in enumerate(batches):
            _, took_s = timed(session.run, None, feeds)
            run_s += took_s if index == 0 else 0
        del batches
    gc.collect()
    return {"open_s": open_s, "run_s": run_s, "bytes": resident_bytes() - began_bytes}


def load_served(models: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Load each model as ortserve does, and write the inputs for the bare session to ``folder``."""
    from ortserve.config.model import ModelOptions
    from ortserve.registry.load.pipeline import load_model

    load_s, loaded = 0.0, []
    began_bytes = resident_bytes()
    for number, path in enumerate(models):
        model, took_s = timed(load_model, path, path.stem, ModelOptions())
        load_s += took_s
        loaded.append(model)
        sizes = sorted({1, model.warm_up.max_rows}) if model.warm_up.inputs is not None else []
        (folder / str(number)).write_bytes(pickle.dumps([generated(model, rows) for rows in sizes]))
    gc.collect()
    result = {"load_s": load_s, "bytes": resident_bytes() - began_bytes}
    for model in loaded:
        for instance in model.instances:
            instance.close()
    return result


def generated(model: Any, rows: int) -> Feeds:
    """A batch of generated rows in the form that the model's file declares, by the names of inputs."""
    import numpy as np

    from ortserve.core.tensor import is_absent

    signature = model.warm_up.inputs.signature
    feeds = {}
    for spec, array in zip(signature.inputs, model.warm_up.inputs.generate(rows, 0), strict=True):
        if is_absent(array):
            continue
        if signature.is_batched:
            array = array[0] if spec.batch_axis is None else np.moveaxis(array, 0, spec.batch_axis)
        feeds[spec.name] = np.ascontiguousarray(array)
    return feeds


ARMS = {"bare": load_bare, "ortserve": load_served}


def run_arm(arm: str, models: Sequence[Path], folder: Path) -> dict[str, float]:
    child = subprocess.run(
        [sys.executable, __file__, "--arm", arm, "--folder", str(folder), "--files", *map(str, models)],
        stdout=subprocess.PIPE,
        timeout=600,
        check=True,
    )
    figures: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return figures


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def measure(corpus: str, models: Sequence[Path], rounds: int) -> list[str]:
    """Load a corpus in both arms. Returns its row of the results."""
    served: list[dict[str, float]] = []
    bare: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            served.append(run_arm("ortserve", models, Path(folder)))  # first: it writes the inputs of the other arm
            bare.append(run_arm("bare", models, Path(folder)))
    ours, theirs = medians(served), medians(bare)
    own_s = theirs["open_s"] + theirs["run_s"]
    ratios = [a["load_s"] / (b["open_s"] + b["run_s"]) for a, b in zip(served, bare, strict=True)]
    mib = 2**20
    return [
        f"{corpus}, {len(models)} models",
        f"{theirs['open_s']:.2f}",
        f"{own_s:.2f}",
        f"{ours['load_s']:.2f}",
        f"{ours['load_s'] / own_s:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{theirs['bytes'] / mib:,.0f}",
        f"{ours['bytes'] / mib:,.0f}",
        f"{ours['bytes'] / theirs['bytes']:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="*", default=[], help="folders with further models")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--files", type=Path, nargs="*", default=[], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.arm:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        print(json.dumps(ARMS[chosen.arm](chosen.files, chosen.folder)))
        return

    from harness import table, write_report

    corpora = {"by exporters, small": sorted(CORPUS.glob("*.onnx"))}
    for folder in chosen.models:
        corpora["from packages"] = sorted([*corpora.get("from packages", []), *folder.rglob("*.onnx")])
    if chosen.models:
        corpora["all"] = [path for models in corpora.values() for path in models]
    header = ["corpus", "open", "open, run one row", "load", "load / open, run one row"]
    rows = [measure(corpus, models, chosen.rounds) for corpus, models in corpora.items()]
    write_report(
        HERE / "results" / "load_time.md",
        "Time and memory of loading, against bare ONNX Runtime",
        "CPU seconds on one processor, and MiB of resident memory beyond what the process had before.",
        table([*header, "bare MiB", "loaded MiB", "ratio"], rows),
    )


if __name__ == "__main__":
    main()
