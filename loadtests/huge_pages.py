"""How do huge pages affect a model with large weights: opening it, running it and freeing it?

Level: engine. Expected for huge pages against pages of 4 KiB: freeing the session takes at most a fifth of the time; it
holds the interpreter lock and so blocks a server's event loop. Opening takes no longer, runs take as long within the
noise, and memory grows by at most 5 %.

    python loadtests/huge_pages.py [--rounds 5]

Each arm opens a model with 200 MB of weights three times in a separate process; the arms take turns and differ only in
the tunable of glibc. Outputs of both arms are compared. The kernel must provide huge pages on request
(/sys/kernel/mm/transparent_hugepage/enabled: madvise). Writes ``loadtests/results/huge_pages.md``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "support"), str(HERE)]
import numpy as np  # noqa: E402

from harness import spread, table, write_report  # noqa: E402
from models.costly import weighty  # noqa: E402

ARMS = {"4 KiB": "0", "huge": "1"}
WIDTH = 5_000
RUNS = 5


def measure(path: Path) -> dict[str, float]:
    """Open, run and free the model three times. Returns medians."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    row = np.random.default_rng(1).standard_normal((1, WIDTH)).astype(np.float32)
    found: dict[str, list[float]] = {"open ms": [], "run of one row ms": [], "free ms": [], "memory MiB": []}
    for _ in range(3):
        began = time.perf_counter()
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        found["open ms"].append((time.perf_counter() - began) * 1e3)
        for _ in range(RUNS):
            began = time.perf_counter()
            (output,) = session.run(None, {"x": row})
            found["run of one row ms"].append((time.perf_counter() - began) * 1e3)
        (resident,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line]
        found["memory MiB"].append(int(resident.split()[1]) / 1024)
        began = time.perf_counter()
        del session
        found["free ms"].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(values) for name, values in found.items()} | {"output": float(output[0, 0])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return 0
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        model = weighty(Path(folder) / "model.onnx", WIDTH)
        for _ in range(options.rounds):
            for arm, value in ARMS.items():
                environment = os.environ | {"GLIBC_TUNABLES": f"glibc.malloc.hugetlb={value}"}
                command = [sys.executable, __file__, "--measure", str(model)]
                done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120)
                found[arm].append(json.loads(done.stdout))
    small, huge = found.values()
    assert len({one["output"] for one in (*small, *huge)}) == 1, "outputs differ"
    bounds = {"open ms": 1.0, "run of one row ms": 1.1, "free ms": 0.2, "memory MiB": 1.05}
    rows, is_missed = [], False
    for name, bound in bounds.items():
        ratios = [with_huge[name] / without[name] for without, with_huge in zip(small, huge, strict=True)]
        missed = statistics.median(ratios) > bound
        is_missed |= missed
        cells = [spread([one[name] for one in arm]) for arm in (small, huge)]
        rows.append([name, *cells, spread(ratios), f"{bound}{' MISSED' if missed else ''}"])
    write_report(
        HERE / "results" / "huge_pages.md",
        "Huge pages for weights",
        f"200 MB of weights, one thread. Medians (lowest to highest) of {options.rounds} rounds in turns.",
        table(["figure", "4 KiB", "huge pages", "huge / 4 KiB", "at most, as asked"], rows),
    )
    return 1 if is_missed else 0


if __name__ == "__main__":
    sys.exit(main())
