"""How do rollouts affect callers: a shadow that receives copies of a share of requests, and a canary?

Level: server. Expected: the p99 of callers is at most 1.1 times that without a rollout, both with a shadow of a tenth
of the requests and with a canary that answers half of them. With all requests copied it is higher, because a copy
occupies a processor as long as a request does. No request fails, and no copy's answer differs.

    python loadtests/rollouts.py [--seconds 5] [--rounds 5]

The candidate is the same model. A separate process sends 200 requests per second on each protocol and compares every
answer. Stretches without a rollout and with each kind of rollout take turns on one server. Writes
``loadtests/results/rollouts.md``.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "support"), str(HERE)]
import numpy as np  # noqa: E402
import onnxruntime as ort  # noqa: E402

from harness import cpu_s, serving, spread, table, write_report  # noqa: E402
from models.builders import mlp  # noqa: E402
from small_requests import PROTOCOLS, Row, Stretch, small_requests  # noqa: E402

PORT: Final = 18600
ROLLOUTS: Final[Mapping[str, dict[str, Any]]] = {
    "shadow of a tenth": {"mode": "shadow", "share": 0.1},
    "shadow of all": {"mode": "shadow", "share": 1},
    "canary of half": {"mode": "canary", "share": 0.5},
}
MODELS: Final = {"tiny": 256, "larger": 65_536}
"""Hidden sizes of multilayer perceptrons by name; their weights have 74 KB and 19 MB."""


def make_row(folder: Path, name: str, hidden: int) -> Row:
    """Write both versions of a model. Returns one request and its answer."""
    version = folder / name / "1"
    version.mkdir(parents=True)
    file = mlp(version / "model.onnx", hidden=hidden)
    shutil.copytree(version, folder / name / "2")
    (folder / name / "model.yaml").write_text("labels: {stable: 1}\nversion_policy: {all: true}\n")
    values = np.random.default_rng(0).uniform(-1, 1, 64).round(4).astype(np.float32)
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return Row(name, values, session.run(None, {"x": values[None]})[0].ravel())


def call(method: str, path: str, body: object = None) -> dict[str, Any]:
    server = HTTPConnection("127.0.0.1", PORT, timeout=60)
    server.request(method, path, None if body is None else json.dumps(body))
    answer = server.getresponse()
    content = answer.read()
    assert answer.status == 200, content
    document: dict[str, Any] = json.loads(content or "{}")
    return document


def measure(row: Row, folder: Path, rounds: int, seconds: float) -> list[list[str]]:
    """Measure one model. Returns its rows of the report."""
    rollout = f"/v2/models/{row.model}/rollout"
    found: dict[str, list[Mapping[str, Stretch]]] = {"none": [], **{name: [] for name in ROLLOUTS}}
    cpu_us: dict[str, list[float]] = {name: [] for name in found}
    counts: dict[str, str] = {}
    with serving(folder, PORT) as pid, small_requests(PORT, row) as stretch:
        for _ in range(rounds):
            for name in found:
                if name != "none":
                    call("PUT", rollout, {"candidate": 2, **ROLLOUTS[name]})
                before_s = cpu_s(pid)
                new = stretch(seconds)
                assert not any(one.lost or one.wrong for one in new.values()), new
                found[name].append(new)
                answers = sum(len(one.latencies_s) for one in new.values())
                cpu_us[name].append((cpu_s(pid) - before_s) * 1e6 / answers)
                if name != "none":
                    figures = call("GET", rollout)["figures"]
                    assert not figures["failed"] + figures["disagreed"], figures
                    kinds = ("requests", "compared", "shed", "rejected")
                    counts[name] = ", ".join(f"{figures[kind]} {kind}" for kind in kinds if figures.get(kind))
                    call("POST", f"/v2/models/{row.model}/rollback", {})
    rows = []
    for name, stretches in found.items():
        for protocol in PROTOCOLS:
            cells = []
            for share in (0.5, 0.99):
                values = [one[protocol].quantile_ms(share) for one in stretches]
                plain = [one[protocol].quantile_ms(share) for one in found["none"]]
                ratios = [value / other for value, other in zip(values, plain, strict=True)]
                cells += [f"{np.median(values):.2f}", "" if name == "none" else spread(ratios)]
            cpu = f"{np.median(cpu_us[name]):.0f}" if protocol == PROTOCOLS[0] else ""
            rows.append([row.model, name, protocol, *cells, cpu, counts.get(name, "") if cpu else ""])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5, help="of a stretch")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows = []
    for name, hidden in MODELS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            rows += measure(make_row(folder, name, hidden), folder, options.rounds, options.seconds)
            print(table([""] * len(rows[0]), rows[-2 * (len(ROLLOUTS) + 1) :]), flush=True)
    columns = [
        "model",
        "rollout",
        "protocol",
        "p50, ms",
        "ratio",
        "p99, ms",
        "ratio",
        "CPU, µs a request",
        "last stretch",
    ]
    write_report(
        HERE / "results" / "rollouts.md",
        "Callers beside a rollout",
        "Ratios of neighbouring stretches, with and without the rollout. All answers were right and no copy disagreed.",
        table(columns, rows),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
