"""Do callers notice swaps of a model's versions, and do the server's memory, threads and descriptors stay constant?

Level: server. Expected with 200 requests per second on each protocol: no request fails and every answer is correct. The
p99 is at most 1.5 times that of stretches without swaps in the same run. Descriptors, threads and resident memory stay
within 1 % after the first hundred swaps.

    python loadtests/swaps.py [--swaps 1000] [--seconds 10] [--pause-s 0.1]

A swap publishes the next version of the model in its folder, removes the previous version but one, and makes the server
load the model; the load returns when the new version answers. Stretches with and without swaps take turns.
``--pause-s`` is the time between two swaps. A separate process sends small requests and compares every answer.
Writes ``loadtests/results/swaps.md``.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Final

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "support"), str(HERE)]
import psutil  # noqa: E402

from harness import cpu_s, serving, spread, table, write_report  # noqa: E402
from small_requests import PROTOCOLS, Stretch, small_requests, small_row  # noqa: E402

PORT: Final = 18500
SETTLED: Final = 100
"""Number of swaps after which descriptors, threads and memory must stay constant."""
MAX_RATIO: Final = 1.5
MAX_GROWTH: Final = 1.01
FLAGS: Final = ("--model-control-mode=explicit", "--warmup-s=0.1")


class Swaps:
    """Publishes and loads one version of a model after another."""

    def __init__(self, folder: Path, pause_s: float) -> None:
        self.count = 0
        self.took_s: list[float] = []
        self._folder = folder
        self._pause_s = pause_s
        self._version = 1
        self._server = HTTPConnection("127.0.0.1", PORT, timeout=60)

    def swap(self) -> None:
        """Publish and load the next version. Raises AssertionError if it is not the serving version afterwards."""
        new = self._version + 1
        shutil.copytree(self._folder / str(self._version), self._folder / str(new))
        shutil.rmtree(self._folder / str(self._version - 1), ignore_errors=True)
        began = time.perf_counter()
        self._call("POST", f"/v2/repository/models/{self._folder.name}/load", b"{}")
        self.took_s.append(time.perf_counter() - began)
        assert self._call("GET", f"/v2/models/{self._folder.name}", None)["versions"] == [str(new)]
        self._version = new
        self.count += 1

    def keep_swapping(self, is_over: threading.Event) -> None:
        """Swap until the event is set."""
        while not is_over.wait(self._pause_s):
            self.swap()

    def _call(self, method: str, path: str, body: bytes | None) -> dict[str, list[str]]:
        self._server.request(method, path, body)
        answer = self._server.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        return json.loads(content) if content else {}


@dataclass
class Found:
    """Stretches by protocol, with and without swaps, and the server's resources at each stage."""

    beside: dict[str, list[Stretch]] = field(default_factory=lambda: {protocol: [] for protocol in PROTOCOLS})
    alone: dict[str, list[Stretch]] = field(default_factory=lambda: {protocol: [] for protocol in PROTOCOLS})
    stages: dict[str, Mapping[str, float]] = field(default_factory=dict)
    processors: list[float] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return sum(
            stretch.lost + len(stretch.wrong)
            for arm in (self.beside, self.alone)
            for stretches in arm.values()
            for stretch in stretches
        )

    def reasons(self) -> list[str]:
        """Describe the failed requests of the last stretches."""
        last = [arm[protocol][-1] for arm in (self.beside, self.alone) for protocol in PROTOCOLS]
        return [f"{one.lost} lost {one.wrong[:3]}" for one in last if one.lost or one.wrong]

    def ratios(self, protocol: str, share: float) -> list[float]:
        """Ratios of a latency quantile with swaps to that without, by pair of neighbouring stretches."""
        return [
            beside.quantile_ms(share) / alone.quantile_ms(share)
            for beside, alone in zip(self.beside[protocol], self.alone[protocol], strict=True)
        ]


def status(pid: int) -> dict[str, float]:
    server = psutil.Process(pid)
    return {
        "resident MB": server.memory_info().rss / 1e6,
        "threads": server.num_threads(),
        "descriptors": server.num_fds(),
    }


def measure(options: argparse.Namespace) -> tuple[Found, Swaps]:
    found = Found()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        row = small_row(folder)
        with (
            serving(folder, PORT, f"--load-model={row.model}", *FLAGS) as pid,
            small_requests(PORT, row) as stretch,
        ):
            swaps = Swaps(folder / row.model, options.pause_s)

            def measure_arm(arm: dict[str, list[Stretch]]) -> None:
                for protocol, new in stretch(options.seconds).items():
                    arm[protocol].append(new)

            while swaps.count < options.swaps:
                measure_arm(found.alone)
                is_over = threading.Event()
                failures: list[BaseException] = []
                swapping = threading.Thread(target=_guard, args=(failures, swaps, is_over))
                began, before_s = time.monotonic(), cpu_s(pid)
                swapping.start()
                measure_arm(found.beside)
                found.processors.append((cpu_s(pid) - before_s) / (time.monotonic() - began))
                is_over.set()
                swapping.join()
                if failures:
                    raise failures[0]
                if swaps.count >= SETTLED:
                    found.stages.setdefault(f"after {swaps.count} swaps", status(pid))
                print(f"{swaps.count} swaps, {found.failed} failed", *found.reasons(), flush=True)
    return found, swaps


def _guard(failures: list[BaseException], swaps: Swaps, is_over: threading.Event) -> None:
    try:
        swaps.keep_swapping(is_over)
    except BaseException as error:  # raised when the results are read
        failures.append(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=1000, help=f"at least {SETTLED}")
    parser.add_argument("--seconds", type=float, default=10, help="of a stretch")
    parser.add_argument("--pause-s", type=float, default=0.1)
    options = parser.parse_args()
    if options.swaps < SETTLED:
        parser.error(f"--swaps: expected at least {SETTLED}, after which memory is compared, got {options.swaps}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    found, swaps = measure(options)
    parts = report(found, swaps)
    if options.swaps >= 1000:
        write_report(HERE / "results" / "swaps.md", "Swaps of versions under load", *parts)
    else:
        print("\n\n".join(parts))
    return 1 if found.failed else 0


def report(found: Found, swaps: Swaps) -> list[str]:
    """The parts of the report, in Markdown."""
    rows = []
    for protocol in PROTOCOLS:
        for share in (0.5, 0.99, 0.999):
            figures = [_pooled(arm[protocol], share) for arm in (found.beside, found.alone)]
            rows.append([protocol, f"p{share * 100:g}", *figures, spread(found.ratios(protocol, share))])
    stages = list(found.stages.items())
    kept = [stages[0], stages[len(stages) // 2], stages[-1]]
    took = sorted(swaps.took_s)
    answered = sum(
        len(stretch.latencies_s)
        for arm in (found.beside, found.alone)
        for stretches in arm.values()
        for stretch in stretches
    )
    growth = {name: kept[-1][1][name] / kept[0][1][name] for name in kept[0][1]}
    missed = [f"p99 of {one} {ratio}" for one, ratio in _slow(found)]
    missed += [f"{name} grew to {ratio:.3f}" for name, ratio in growth.items() if ratio > MAX_GROWTH]
    return [
        (
            f"{swaps.count} swaps, each {took[len(took) // 2] * 1e3:.0f} ms (slowest {took[-1] * 1e3:.0f} ms), "
            f"{answered} right answers, {found.failed} failed or wrong. Beside swaps the server used "
            f"{sum(found.processors) / len(found.processors):.2f} processors."
        ),
        table(["protocol", "", "beside swaps", "without", "ratio of neighbouring stretches"], rows),
        table(["", *kept[0][1]], [[name, *(f"{value:.1f}" for value in one.values())] for name, one in kept]),
        f"Missed: {'; '.join(missed)}." if missed else "All expected figures are reached.",
    ]


def _slow(found: Found) -> list[tuple[str, str]]:
    """The protocols whose median ratio of p99 exceeds the bound."""
    ratios = {protocol: sorted(found.ratios(protocol, 0.99)) for protocol in PROTOCOLS}
    return [(one, spread(each)) for one, each in ratios.items() if each[len(each) // 2] > MAX_RATIO]


def _pooled(stretches: list[Stretch], share: float) -> str:
    values = sorted(value for stretch in stretches for value in stretch.latencies_s)
    return f"{values[min(len(values) - 1, int(share * len(values)))] * 1e3:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
