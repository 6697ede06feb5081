"""Does ``ortserve tune`` match or beat the defaults on different kinds of models?

    python loadtests/tune_gains.py [--minutes 10] [--models digits,gru]

Level: a model behind the server's batcher, in one process with its load. Expected: no model is slower than with the
defaults. Models with small operators gain from fewer threads or instances; models with large operators hardly gain.

Each model starts without a ``model.yaml``. After the search and its own confirmation, new processes with the defaults
and with the written file take turns once more. Outputs are compared under every load. Run nothing else meanwhile.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from gpu_models import encoder, residual
from harness import table, write_report
from ortserve.engine.child_process import call_in_child
from ortserve.tools.statistics import estimate_ratio
from ortserve.tools.subject import find_model
from ortserve.tools.tune.lab import ProcessLab, prepare_requests
from ortserve.tools.tune.search import describe
from ortserve.tools.tune.sides import Goal, Side, take_pair

ROOT: Final = Path(__file__).parents[1]
CORPUS: Final = ROOT / "tests" / "rows" / "corpus"
RESULTS: Final = Path(__file__).parent / "results" / "tune_gains.md"
PAIRS: Final = 10
SLO_MS: Final = {"digits": 20, "encoder": 100, "residual": 200, "gru": 20, "trees": 20, "words": 20}
"""Bound of the 99th percentile, by model."""


def make_model(name: str, repository: Path) -> Path:
    """Write a model into a repository. Returns its folder."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    file = folder / "1" / "model.onnx"
    match name:
        case "digits":
            shutil.copy(ROOT / "server" / "ortserve" / "example" / "repository" / "digits" / "1" / "model.onnx", file)
        case "encoder":
            encoder(file, layers=6, hidden=384, heads=12, length=32)
        case "residual":
            residual(file, blocks=(2, 2, 2, 2), width=32)
        case _:
            source = {"gru": "torch_gru_with_lengths", "trees": "xgboost_classifier", "words": "sklearn_words"}[name]
            shutil.copy(CORPUS / f"{source}.onnx", file)
    return folder


def tune(folder: Path, slo_ms: float, minutes: float) -> dict[str, Any]:
    """Run ``ortserve tune`` as a user would. Returns its result."""
    command = [sys.executable, "-m", "ortserve", "tune", str(folder), "--slo", f"{slo_ms}ms", "--json"]
    limit_s = 90 * minutes + 120
    done = subprocess.run(
        [*command, "--max-minutes", str(minutes)], check=True, timeout=limit_s, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def check(default: Path, tuned: Path, slo_ms: float) -> str:
    """Run new processes with the defaults and with the result, in turns. Returns the ratio of their sustained rates."""
    goal = Goal("throughput", slo_ms / 1e3, 99.0)
    requests = call_in_child(600, prepare_requests, find_model(str(default)), None, 1)
    one, other = (ProcessLab(find_model(str(folder)), requests, goal, None).open({}) for folder in (default, tuned))
    try:
        before = Side(one, one.probed_per_s)
        after = before.beside(other)
        logs = [take_pair(before, after, goal, is_swapped=number % 2 == 1) for number in range(PAIRS)]
        return str(estimate_ratio(logs))
    finally:
        one.close()
        other.close()


def spell(ratio: Mapping[str, float | None] | None) -> str:
    """A ratio with its interval, of which a short search has none."""
    if not ratio or ratio["value"] is None:
        return "-"
    return f"{ratio['value']:.2f}" + ("" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})")


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each search")
    parser.add_argument("--models", default=",".join(SLO_MS), help="of the names in this file")
    given = parser.parse_args()
    rows: list[list[str]] = []
    for name in given.models.split(","):
        with TemporaryDirectory() as scratch:
            tuned = make_model(name, Path(scratch) / "tuned")
            default = Path(shutil.copytree(tuned, Path(scratch) / "default" / name))
            result = tune(tuned, SLO_MS[name], given.minutes)
            kept = [gain for gain in result["gains"] if gain["is_kept"]]
            keys = "; ".join(describe(gain["changes"]) for gain in kept) if result["written"] else "nothing"
            confirmed = spell(result["confirmation"] and result["confirmation"]["ratio"])
            again = check(default, tuned, SLO_MS[name]) if result["written"] else "the same configuration"
            noise = spell(result["noise"])
            rows.append([name, str(SLO_MS[name]), str(len(result["trials"])), noise, keys, confirmed, again])
            print(" | ".join(rows[-1]), flush=True)
    columns = ["model", "p99 within ms", "trials", "defaults against themselves", "written", "confirmed", "once more"]
    setting = (
        f"{given.minutes:g} minutes for each model. Ratios of the rates that are sustained within the bound, with 95 % "
        "intervals: of the search's own confirmation, and of a run of new processes in turn afterwards."
    )
    write_report(RESULTS, "What tune gains over the defaults", setting, table(columns, rows))


if __name__ == "__main__":
    main()
