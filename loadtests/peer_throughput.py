"""How many REST requests does ortserve answer, compared with model servers that can be installed from PyPI?

Level: server. Expected: at 32 connections at least 3 times the requests per second of FastAPI as a user would write it,
MLServer and LitServe, and 1.5 times those of mosec, with the same ONNX model.

    python loadtests/peer_throughput.py [--rounds 5] [--seconds 5] [--connections 32] [--server NAME=URL]

Each peer is set up as its documentation advises (``loadtests/peers``): batches of up to 32, one worker, a session with
one thread, JSON in both directions. Each peer has a separate virtual environment in the folder that tests use for such
environments; the first run installs it, which takes a network. ``--server`` adds a running server with the Open
Inference Protocol, such as Triton, that serves the model ``mlp`` of this script. ``--keep FOLDER`` only writes that
model as a repository.

All servers run throughout and are loaded in turns, one at a time. A checker compares answers with ONNX Runtime's during
the load. CPU is that of the server's whole process tree. The load generator (wrk) shares the machine's processors.
Writes ``loadtests/results/peer_throughput.md`` and a plot.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import numpy as np  # noqa: E402
import onnxruntime as ort  # noqa: E402
from matplotlib import pyplot  # noqa: E402

from apart import CACHE, run_tool  # noqa: E402
from harness import Load, checking, post, running, serving, spread, table, write_report, wrk  # noqa: E402
from models.builders import mlp  # noqa: E402

PORT: Final = 18200
PEERS: Final = HERE / "peers"
MOSEC, LITSERVE, MLSERVER = "mosec==0.9.8", "litserve==0.2.19", "mlserver==1.7.1"
OLDER: Final = {MLSERVER: ("uvloop<0.22",)}
"""Version limits of dependencies, by peer: the peer does not start with newer versions."""
AIMS: Final = {"FastAPI": 3.0, MLSERVER: 3.0, LITSERVE: 3.0, MOSEC: 1.5}
"""Expected ratio of ortserve's requests per second to each peer's."""


@dataclass(frozen=True)
class Arm:
    """A server with the model, its port and request. ``pid`` is None for a server whose CPU time is not measured."""

    server: str
    pid: int | None
    url: str
    body: bytes
    values: Callable[[dict[str, Any]], Any]
    """Extracts the output values from a JSON answer."""
    expected: np.ndarray

    def check(self) -> None:
        answer = np.ravel(self.values(post(self.url, self.body)))
        np.testing.assert_allclose(answer, self.expected, rtol=1e-4, atol=1e-5)

    def load(self, folder: Path, connections: int, seconds: int) -> Load:
        pid = self.pid or os.getpid()
        return wrk(self.url, self.body, folder, pid=pid, connections=connections, seconds=seconds)


class Servers:
    """Starts servers with the same model and request, each on its own ports."""

    def __init__(self, repository: Path, stack: ExitStack) -> None:
        self._repository = repository
        self._stack = stack
        self._file = repository / "mlp" / "1" / "model.onnx"
        row = np.random.default_rng(0).uniform(-1, 1, (1, 64)).round(6).astype(np.float32)
        session = ort.InferenceSession(str(self._file), providers=["CPUExecutionProvider"])
        self._expected = session.run(None, {"x": row})[0].ravel()
        numbers = [float(f"{value:.6f}") for value in row.ravel()]
        tensor = {"name": "x", "shape": [1, 64], "datatype": "FP32", "data": numbers}
        self._protocol_body = json.dumps({"inputs": [tensor]}).encode()
        self._plain_body = json.dumps({"x": numbers}).encode()

    def ortserve(self) -> Arm:
        pid = self._stack.enter_context(serving(self._repository, PORT))
        return self.by_address("ortserve", f"http://127.0.0.1:{PORT}", pid)

    def naive(self) -> Arm:
        command = [sys.executable, HERE / "naive_server.py", PORT + 10, f"mlp={self._file}", "--one-thread"]
        url = f"http://127.0.0.1:{PORT + 10}"
        return self.by_address("FastAPI", url, self._start(command, f"{url}/health"))

    def mlserver(self) -> Arm:
        url = f"http://127.0.0.1:{PORT + 20}"
        environment = {"ONNX_FILE": str(self._file), "MLSERVER_HOST": "127.0.0.1", "MLSERVER_DEBUG": "false"}
        environment |= {
            f"MLSERVER_{kind}_PORT": str(PORT + 20 + i) for i, kind in enumerate(("HTTP", "GRPC", "METRICS"))
        }
        # MLServer imports its model's code from the working folder.
        command = ["env", "-C", PEERS / "mlserver", *(f"{name}={value}" for name, value in environment.items())]
        command += [python_with(MLSERVER).with_name("mlserver"), "start", "."]
        return self.by_address(MLSERVER, url, self._start(command, f"{url}/v2/models/mlp/ready"))

    def litserve(self) -> Arm:
        url = f"http://127.0.0.1:{PORT + 30}"
        command = [python_with(LITSERVE), PEERS / "litserve_server.py", self._file, PORT + 30]
        return self._plain(LITSERVE, f"{url}/predict", self._start(command, f"{url}/health"))

    def mosec(self) -> Arm:
        url = f"http://127.0.0.1:{PORT + 40}"
        command = ["env", f"ONNX_FILE={self._file}", python_with(MOSEC), PEERS / "mosec_server.py"]
        command += ["--address=127.0.0.1", "--port", PORT + 40]
        return self._plain(MOSEC, f"{url}/inference", self._start(command, f"{url}/metrics"))

    def by_address(self, name: str, url: str, pid: int | None = None) -> Arm:
        """The arm of a server with the Open Inference Protocol."""
        body, expected = self._protocol_body, self._expected
        return Arm(name, pid, f"{url}/v2/models/mlp/infer", body, lambda answer: answer["outputs"][0]["data"], expected)

    def _plain(self, name: str, url: str, pid: int) -> Arm:
        return Arm(name, pid, url, self._plain_body, lambda answer: answer["y"], self._expected)

    def _start(self, command: Sequence[object], ready_url: str) -> int:
        return self._stack.enter_context(running([str(part) for part in command], ready_url))


def python_with(requirement: str) -> Path:
    """The interpreter of a virtual environment with a peer and this environment's ONNX Runtime."""
    folder = CACHE / "peers" / requirement.replace("==", "-")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        wanted = (requirement, f"onnxruntime=={ort.__version__}", *OLDER.get(requirement, ()))
        try:
            run_tool([sys.executable, "-m", "venv", str(folder)])
            run_tool([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *wanted])
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # the next run would take half an environment for a whole one
            raise
    return folder / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if options.keep is not None:
        write_model(options.keep)
        return
    results: dict[str, list[Load]] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        write_model(folder / "models")
        servers = Servers(folder / "models", stack)
        arms = [servers.ortserve(), servers.naive(), servers.mlserver(), servers.litserve(), servers.mosec()]
        arms += [servers.by_address(*named.split("=", 1)) for named in options.server]
        for arm in arms:  # warm-up, not counted
            arm.check()
            arm.load(folder, options.connections, 1)
        for number in range(options.rounds):
            for arm in arms if number % 2 == 0 else reversed(arms):
                with checking(arm.check):
                    load = arm.load(folder, options.connections, options.seconds)
                results.setdefault(arm.server, []).append(load)
                print(f"round {number + 1} {arm.server:17} {load}", flush=True)
        foreign = {arm.server for arm in arms if arm.pid is None}
    report(results, foreign, options.connections, options.results)


def write_model(repository: Path) -> None:
    (repository / "mlp" / "1").mkdir(parents=True)
    mlp(repository / "mlp" / "1" / "model.onnx")


_CAVEATS: Final = (
    "Tiny MLP, 64 numbers a request as JSON; {connections} connections, closed loop, medians of {rounds} interleaved "
    "rounds; CPU is that of a server's whole process tree; the load generator runs on the same processors. Every "
    "answer was a success, samples were compared with ONNX Runtime's own. FastAPI is `naive_server.py` with a session "
    "of one thread; the others are set up in `loadtests/peers`."
)


def report(results: dict[str, list[Load]], foreign: set[str], connections: int, folder: Path) -> None:
    """Write the tables and the plot into ``folder``. The CPU time of ``foreign`` servers is unknown."""

    def median(server: str, field: str) -> float:
        return float(statistics.median(getattr(load, field) for load in results[server]))

    rows = []
    ratios = []
    for server, loads in results.items():
        cpu = "-" if server in foreign else spread([load.cpu_us for load in loads])
        rows.append(
            [
                server,
                spread([load.requests_per_s for load in loads]),
                f"{median(server, 'p50_ms'):.2f}",
                f"{median(server, 'p99_ms'):.2f}",
                cpu,
            ]
        )
        if server != "ortserve":
            pairs = list(zip(results["ortserve"], loads, strict=True))
            more = spread([ours.requests_per_s / theirs.requests_per_s for ours, theirs in pairs])
            less = "-" if server in foreign else spread([theirs.cpu_us / ours.cpu_us for ours, theirs in pairs])
            ratios.append([server, more, f"{AIMS[server]:g}" if server in AIMS else "-", less])
    write_report(
        folder / "peer_throughput.md",
        "REST throughput: ortserve and its peers",
        _CAVEATS.format(connections=connections, rounds=len(results["ortserve"])),
        table(["server", "requests/s", "p50 ms", "p99 ms", "CPU µs a request"], rows),
        table(["against", "requests/s, times as many", "expected", "CPU a request, times less"], ratios),
        "![requests a second](peer_throughput.png)",
    )
    plot({server: median(server, "requests_per_s") for server in results}, connections, folder / "peer_throughput.png")


def plot(requests_per_s: dict[str, float], connections: int, file: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 0.5 * len(requests_per_s) + 1))
    bars = axes.barh(
        list(requests_per_s),
        list(requests_per_s.values()),
        color=["tab:blue", *["lightgray"] * (len(requests_per_s) - 1)],
    )
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(f"requests a second, REST JSON, {connections} connections")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
