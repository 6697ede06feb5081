"""Can one client delay the others?

Level: server. Expected beside every neighbour: the 99th percentile of small requests is at most 3 ms and at most 3
times that of the same requests alone, on both protocols. The server's memory grows by at most its limit for requests
(``max_inflight_bytes``) and the size of a model that the neighbour makes it load.

    python loadtests/noisy_neighbour.py [--only NAME,...] [--seconds 4] [--rounds 2] [--base DIR] [--results DIR]

Each neighbour (``neighbours.py`` lists them) gets a new server, on which stretches alone and beside the neighbour take
turns. A separate process (``small_requests.py``) sends small requests, one row of a tiny MLP, at a fixed rate on each
protocol; their latency counts from their due time. The neighbour is another process with the lowest priority. With
``--base`` the server of another source tree is measured in the same turns. All answers to small requests are checked.
Writes ``loadtests/results/noisy_neighbour.md``, but not with ``--base`` or ``--only``. Exits with 1 if a goal is
missed.
"""

import argparse
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "support"), str(HERE)]
import numpy as np  # noqa: E402
import psutil  # noqa: E402

from harness import circumstances, cpu_s, process, receive, serving, table  # noqa: E402
from machine_stalls import watch  # noqa: E402
from neighbours import MIB, NEIGHBOURS, SLOWEST_S, Neighbour, Ports, neighbour, write_models  # noqa: E402
from small_requests import PATIENCE_S, PROTOCOLS, RATE, Row, Stretch, small_requests, small_row  # noqa: E402

PORT: Final = 18400
INFLIGHT_BYTES: Final = 1024 * MIB
"""The server's limit for requests; fixed, because the default depends on the machine's memory."""
MAX_MS: Final = 3.0
MAX_RATIO: Final = 3.0
STALL_MS: Final = 5.0
"""The report names longer stalls of the machine as a reason for a missed goal."""
SILENCE_S: Final = PATIENCE_S + SLOWEST_S
"""Silence after which a process counts as stuck."""


@dataclass
class Found:
    """Results of one neighbour and one server: stretches by protocol, alone and beside it, and the server's cost."""

    alone: dict[str, list[Stretch]] = field(default_factory=lambda: {protocol: [] for protocol in PROTOCOLS})
    beside: dict[str, list[Stretch]] = field(default_factory=lambda: {protocol: [] for protocol in PROTOCOLS})
    outcomes: Counter[str] = field(default_factory=Counter)
    processors: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    stalls_ms: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def misses(self, allowed_bytes: int) -> list[str]:
        """Describe the missed goals."""
        missed = list(self.faults)
        for protocol in PROTOCOLS:
            alone, beside = pooled(self.alone[protocol]), pooled(self.beside[protocol])
            p99, ratio = beside.quantile_ms(0.99), beside.quantile_ms(0.99) / alone.quantile_ms(0.99)
            if not p99 <= MAX_MS:
                busy = ", as alone: the machine is busy" if not alone.quantile_ms(0.99) <= MAX_MS else ""
                stalled = ", the machine stalled" if max(self.stalls_ms, default=0) > STALL_MS else ""
                missed.append(f"{protocol} p99 {p99:.1f} ms{busy or stalled}")
            if not ratio <= MAX_RATIO:
                missed.append(f"{protocol} {ratio:.1f} times alone")
            missed += [
                f"{protocol}: {each.lost} lost, {len(each.wrong)} wrong {each.wrong[:1]}"
                for each in (alone, beside)
                if each.lost or each.wrong
            ]
        if self.peak_bytes > allowed_bytes:
            missed.append(f"{self.peak_bytes / MIB:.0f} MiB of memory, {allowed_bytes / MIB:.0f} allowed")
        return missed


def pooled(stretches: Sequence[Stretch]) -> Stretch:
    """Merge the requests of several stretches into one."""
    latencies = np.concatenate([one.latencies_s for one in stretches]) if stretches else np.empty(0)
    wrong = tuple(text for one in stretches for text in one.wrong)
    return Stretch(latencies, wrong, sum(one.lost for one in stretches))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[one.name for one in NEIGHBOURS])
    parser.add_argument("--seconds", type=float, default=4, help="of each stretch")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--base", type=Path, help="source folder (PYTHONPATH) of another server to compare with")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a hanging server must not outlive this script
    chosen = [one for one in NEIGHBOURS if one.name in options.only]
    if unknown := set(options.only) - {one.name for one in chosen}:
        parser.error(f"no such neighbour: {', '.join(sorted(unknown))}")
    servers: dict[str, Mapping[str, str]] = {"this": {}}
    if options.base:
        servers["base"] = {"PYTHONPATH": str(options.base)}
    found: dict[tuple[str, str], Found] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = write_models(folder)
        row = small_row(folder)
        for one in chosen:
            for server, environment in servers.items():
                found[one.name, server] = measure(one, row, (*models, row.model), folder, options, environment)
                print(progress(one, server, found[one.name, server]), flush=True)
    misses = {key: each.misses(allowed(key[0])) for key, each in found.items()}
    text = report(found, misses, options)
    print(text)
    if not options.base and len(chosen) == len(NEIGHBOURS):
        options.results.mkdir(exist_ok=True)
        (options.results / "noisy_neighbour.md").write_text(text + "\n")
    return 1 if any(missed for (_, server), missed in misses.items() if server == "this") else 0


def measure(
    one: Neighbour,
    row: Row,
    models: Sequence[str],
    folder: Path,
    options: argparse.Namespace,
    environment: Mapping[str, str],
) -> Found:
    """Start a server and both client processes, and alternate stretches alone and beside the neighbour."""
    found = Found()
    ports = Ports(PORT, PORT + 1)
    flags = ["--example", "--model-control-mode=explicit", f"--max-inflight-bytes={INFLIGHT_BYTES}"]
    flags += [f"--load-model={','.join(models)}", "--warmup-s=0.2"]
    with ExitStack() as stack:
        other = stack.enter_context(process(neighbour, one.name, ports))  # builds its bodies meanwhile
        pid = stack.enter_context(serving(folder, PORT, *flags, environment=environment))
        machine = stack.enter_context(process(watch))
        assert receive(other, SILENCE_S) == "prepared"
        stretch = stack.enter_context(small_requests(PORT, row))
        base = memory_bytes(pid, "VmRSS")
        for _ in range(options.rounds):
            add(found.alone, stretch(options.seconds))
            began, before_s = begin_peak(pid), cpu_s(pid)
            longest_stall_s(machine)  # forgets those before
            other.send("begin")
            stretches = stretch(options.seconds)
            found.stalls_ms.append(longest_stall_s(machine) * 1e3)
            other.send("end")
            if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                found.faults.append("the server died")
                add(found.beside, stretches)
                break
            found.processors.append((cpu_s(pid) - before_s) / (time.monotonic() - began))
            found.outcomes.update(receive(other, SILENCE_S))
            add(found.beside, stretches)
            found.peak_bytes = max(found.peak_bytes, memory_bytes(pid, "VmHWM") - base)
            if any(one.lost for one in stretches.values()):
                break  # the server no longer answers, so there is nothing to compare
    return found


def add(stretches: dict[str, list[Stretch]], new: Mapping[str, Stretch]) -> None:
    for protocol, stretch in new.items():
        stretches[protocol].append(stretch)


def longest_stall_s(machine: Pipe) -> float:
    """Longest stall of the machine since the last call."""
    machine.send("ask")
    return float(receive(machine, SILENCE_S))


def begin_peak(pid: int) -> float:
    """Reset the kernel's record of peak memory of a process and its children. Returns the time."""
    for each in tree(pid):
        Path(f"/proc/{each}/clear_refs").write_text("5")  # proc(5)
    return time.monotonic()


def memory_bytes(pid: int, name: str) -> int:
    """Sum of a memory figure over a process and its children. The sum of peaks is an upper bound of the peak sum."""
    texts = [Path(f"/proc/{each}/status").read_text() for each in tree(pid)]
    return sum(int(found[1]) * 1024 for text in texts if (found := re.search(rf"{name}:\s+(\d+) kB", text)))


def tree(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def allowed(name: str) -> int:
    return INFLIGHT_BYTES + next(one.extra_bytes for one in NEIGHBOURS if one.name == name)


def progress(one: Neighbour, server: str, found: Found) -> str:
    parts = []
    for protocol in PROTOCOLS:
        alone, beside = pooled(found.alone[protocol]), pooled(found.beside[protocol])
        worst = beside.quantile_ms(1.0)
        parts.append(
            f"{protocol} {alone.quantile_ms(0.99):.2f} → {beside.quantile_ms(0.99):.2f} ms (worst {worst:.0f})"
        )
    parts += [f"+{found.peak_bytes / MIB:.0f} MiB", f"machine stalled {max(found.stalls_ms, default=0):.0f} ms"]
    return f"{one.name:18} {server:5} {'; '.join(parts)}; {dict(found.outcomes)}"


_SETTING: Final = (
    "{rate:.0f} small requests a second on each protocol (one row of a tiny MLP; REST JSON, gRPC raw contents) at "
    "fixed times. Latencies in ms count from the time when a request was due: p99 and maximum of {rounds} stretches "
    "of {seconds:g} s. Stretches without and with the neighbour alternate on the same server. Memory is the peak "
    "growth of resident memory since before the first stretch, children included; {inflight} MiB are allowed "
    "(`max_inflight_bytes`), {load} MiB if a model is loaded. Processors is the number of processors that the server "
    "kept busy beside the neighbour. Stalls is the longest time for which a processor of the machine ran nothing "
    "(`machine_stalls.py`). Goals: p99 at most {most:g} ms, and at most {ratio:g} times that without the neighbour."
)


def report(found: Mapping[tuple[str, str], Found], misses: Mapping[tuple[str, str], list[str]], options: Any) -> str:
    rows = []
    for (name, server), each in found.items():
        one = next(one for one in NEIGHBOURS if one.name == name)
        cells = []
        for protocol in PROTOCOLS:
            alone, beside = pooled(each.alone[protocol]), pooled(each.beside[protocol])
            cells += [
                f"{alone.quantile_ms(0.99):.2f}",
                f"{beside.quantile_ms(0.99):.2f}",
                f"{beside.quantile_ms(1):.1f}",
            ]
        answered = ", ".join(f"{status}: {count}" for status, count in each.outcomes.most_common())
        busy = f"{np.mean(each.processors):.2f}" if each.processors else "—"
        label = f"{one.sends} (`{name}`)" + (f", {server}" if options.base else "")
        stalled = f"{max(each.stalls_ms):.0f}" if each.stalls_ms else "—"
        missed = "; ".join(misses[name, server]) or "none"
        rows.append([label, *cells, answered, busy, stalled, f"{each.peak_bytes / MIB:.0f}", missed])
    header = ["neighbour"]
    header += [f"{protocol} {what}" for protocol in PROTOCOLS for what in ("alone", "beside", "slowest")]
    header += ["its requests", "processors", "stalls, ms", "memory, MiB", "missed"]
    setting = _SETTING.format(
        rate=RATE,
        rounds=options.rounds,
        seconds=options.seconds,
        inflight=INFLIGHT_BYTES // MIB,
        load=allowed("load") // MIB,
        most=MAX_MS,
        ratio=MAX_RATIO,
    )
    return "\n\n".join(["# Small requests beside noisy neighbours", circumstances(), setting, table(header, rows)])


if __name__ == "__main__":
    sys.exit(main())
