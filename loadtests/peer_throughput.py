"""How many REST requests does ortserve answer, compared with model servers that can be installed from PyPI?

Level: server. Expected: at 32 connections at least 3 times the requests per second of FastAPI as a user would write it,
MLServer, LitServe, BentoML, Ray Serve and PyTriton, and 1.5 times those of mosec, with the same ONNX model.

    python loadtests/peer_throughput.py [--peers mosec ray …] [--rounds 5] [--seconds 5] [--connections 32]
                                        [--server NAME=URL]

Each peer is set up as its documentation advises (``loadtests/peers``): batches of up to 32, one worker, a session with
one thread, JSON in both directions, no access log. Each peer has a separate virtual environment in the folder that
tests use for such environments; the first run installs it, which takes a network. ``--server`` adds a running server
with the Open Inference Protocol, such as Triton, that serves the model ``mlp`` of this script. ``--keep FOLDER`` only
writes that model as a repository.

The servers take turns. Each is started for its turn and ended after it, because some, such as Ray, use processor time
even without requests. A turn starts with two seconds of load that are not counted. A checker compares answers with ONNX
Runtime's during the load. CPU is that of the server's whole process tree. The load generator (wrk) shares the machine's
processors. Writes ``loadtests/results/peer_throughput.md`` and a plot.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import numpy as np  # noqa: E402
import onnxruntime as ort  # noqa: E402

from apart import CACHE, run_tool  # noqa: E402
from harness import NOTHING, Load, checking, post, running, serving, spread, table, write_report, wrk  # noqa: E402
from infer_requests import json_request  # noqa: E402
from tiny_mlp import write_tiny_mlp  # noqa: E402

PORT: Final = 18200
PEERS: Final = HERE / "peers"
WARM_UP_S: Final = 2


@dataclass(frozen=True)
class Peer:
    """A server from PyPI."""

    name: str
    """The name in the tables, with its version."""
    requirement: str
    goal: float
    """Expected ratio of ortserve's requests per second to its own."""
    limits: tuple[str, ...] = ()
    """Version limits of dependencies: the peer does not start with newer versions."""

    def python(self) -> Path:
        """The interpreter of a virtual environment with the peer and this environment's ONNX Runtime."""
        versions = f"onnxruntime-{ort.__version__}-python-{platform.python_version()}"
        folder = CACHE / "peers" / f"{self.requirement.replace('==', '-')}-{versions}"
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            wanted = (self.requirement, f"onnxruntime=={ort.__version__}", *self.limits)
            try:
                run_tool([sys.executable, "-m", "venv", str(folder)])
                run_tool([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *wanted])
            except BaseException:
                # The next run would use the incomplete environment.
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return folder / "bin" / "python"


FASTAPI: Final = "FastAPI"
MOSEC: Final = Peer("mosec 0.9.8", "mosec==0.9.8", 1.5)
MLSERVER: Final = Peer("MLServer 1.7.1", "mlserver==1.7.1", 3, ("uvloop<0.22",))
LITSERVE: Final = Peer("LitServe 0.2.19", "litserve==0.2.19", 3)
BENTOML: Final = Peer("BentoML 1.4.40", "bentoml==1.4.40", 3)
RAY: Final = Peer("Ray Serve 2.60.0", "ray[serve]==2.60.0", 3)
PYTRITON: Final = Peer("PyTriton 0.7.0 (Triton 2.51, model in Python)", "nvidia-pytriton==0.7.0", 3)
FROM_PYPI: Final = (MOSEC, MLSERVER, LITSERVE, BENTOML, RAY, PYTRITON)
GOALS: Final = {FASTAPI: 3.0, **{peer.name: peer.goal for peer in FROM_PYPI}}


Start: TypeAlias = Callable[[], AbstractContextManager[int | None]]
"""Runs a server for a block. Yields its process id, or None for a server whose CPU time is not measured."""


@dataclass(frozen=True)
class Arm:
    """A server with the model, and its request."""

    server: str
    start: Start
    url: str
    body: bytes
    values: Callable[[Any], Any]
    """Extracts the output values from a JSON answer."""
    expected: np.ndarray

    def check(self) -> None:
        answer = np.ravel(self.values(json.loads(post(self.url, self.body))))
        np.testing.assert_allclose(answer, self.expected, rtol=1e-4, atol=1e-5)

    def turn(self, folder: Path, connections: int, seconds: int) -> Load:
        """Start the server, warm it up, load it while its answers are checked, and end it."""
        with self.start() as pid:
            load = partial(wrk, self.url, self.body, folder, pid=pid or os.getpid(), connections=connections)
            self.check()
            load(seconds=WARM_UP_S)
            with checking(self.check):
                return load(seconds=seconds)


class Servers:
    """The arms: servers with the same model and row of inputs, each on ``port`` and the next two ports in its turn."""

    def __init__(self, folder: Path, port: int = PORT) -> None:
        """Write the model into ``folder``, where servers keep files of their own, too."""
        self._folder = folder
        self._port = port
        self._url = f"http://127.0.0.1:{port}"
        model = write_tiny_mlp(folder / "models", decimals=6)
        self._file, self._row, self._expected = model.file, model.row, model.expected
        self._numbers = [round(value, 6) for value in model.row.ravel().tolist()]

    def ortserve(self) -> Arm:
        return self.by_address("ortserve", self._url, partial(serving, self._folder / "models", self._port))

    def fastapi(self) -> Arm:
        command = [sys.executable, HERE / "naive_server.py", self._port, f"mlp={self._file}", "--one-thread"]
        return self.by_address(FASTAPI, self._url, self._start(command, "/health"))

    def mlserver(self) -> Arm:
        environment = {"MLSERVER_HOST": "127.0.0.1", "MLSERVER_DEBUG": "false"}
        environment |= {
            f"MLSERVER_{kind}_PORT": str(self._port + i) for i, kind in enumerate(("HTTP", "GRPC", "METRICS"))
        }
        # MLServer imports its model's code from the working folder.
        command = ["env", "-C", PEERS / "mlserver", MLSERVER.python().with_name("mlserver"), "start", "."]
        start = self._start(command, "/v2/models/mlp/ready", environment)
        return self.by_address(MLSERVER.name, self._url, start)

    def litserve(self) -> Arm:
        command = [LITSERVE.python(), PEERS / "litserve_server.py", self._file, self._port]
        return self._plain(LITSERVE, "/predict", self._start(command, "/health"))

    def mosec(self) -> Arm:
        command = [MOSEC.python(), PEERS / "mosec_server.py", "--address=127.0.0.1", "--port", self._port]
        return self._plain(MOSEC, "/inference", self._start(command, "/metrics"))

    def bentoml(self) -> Arm:
        command = [BENTOML.python().with_name("bentoml"), "serve", "bentoml_service:Mlp", "--quiet"]
        command += ["--working-dir", PEERS, "--host=127.0.0.1", "--port", self._port]
        environment = {"BENTOML_HOME": str(self._folder / "bentoml"), "BENTOML_DO_NOT_TRACK": "True"}
        # BentoML's documents are batches, here of one row.
        body = json.dumps({"x": [self._numbers]}).encode()
        start = self._start(command, "/readyz", environment)
        return Arm(BENTOML.name, start, f"{self._url}/predict", body, lambda answer: answer, self._expected)

    def ray(self) -> Arm:
        command = [RAY.python(), PEERS / "ray_server.py", self._file, self._port]
        return self._plain(RAY, "/", self._start(command, "/-/healthz", {"RAY_TMPDIR": str(self._folder / "ray")}))

    def pytriton(self) -> Arm:
        command = [PYTRITON.python(), PEERS / "pytriton_server.py", self._file, self._port]
        # Triton's Python backend loads the interpreter's shared library.
        environment = {"LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR"), "PYTRITON_HOME": str(self._folder)}
        start = self._start(command, "/v2/models/mlp/ready", environment)
        return self.by_address(PYTRITON.name, self._url, start)

    def by_address(self, name: str, url: str, start: Start = nullcontext) -> Arm:
        """The arm of a server with the Open Inference Protocol."""
        body = json_request(self._row, decimals=6)
        infer = f"{url}/v2/models/mlp/infer"
        return Arm(name, start, infer, body, lambda answer: answer["outputs"][0]["data"], self._expected)

    def _plain(self, peer: Peer, path: str, start: Start) -> Arm:
        body = json.dumps({"x": self._numbers}).encode()
        return Arm(peer.name, start, f"{self._url}{path}", body, lambda answer: answer["y"], self._expected)

    def _start(self, command: Sequence[object], ready_path: str, environment: Mapping[str, str] = NOTHING) -> Start:
        whole = {"ONNX_FILE": str(self._file), **environment}
        return partial(running, [str(part) for part in command], f"{self._url}{ready_path}", whole)


ARMS: Final = {
    "fastapi": Servers.fastapi,
    "mlserver": Servers.mlserver,
    "litserve": Servers.litserve,
    "mosec": Servers.mosec,
    "bentoml": Servers.bentoml,
    "ray": Servers.ray,
    "pytriton": Servers.pytriton,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="*", choices=ARMS, default=tuple(ARMS), metavar="PEER", help=", ".join(ARMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if options.keep is not None:
        write_tiny_mlp(options.keep)
        return
    results: dict[str, list[Load]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        servers = Servers(folder)
        foreign = [servers.by_address(*named.split("=", 1)) for named in options.server]
        arms = [servers.ortserve(), *(ARMS[name](servers) for name in options.peers), *foreign]
        for number in range(options.rounds):
            for arm in arms if number % 2 == 0 else reversed(arms):
                load = arm.turn(folder, options.connections, options.seconds)
                results.setdefault(arm.server, []).append(load)
                print(f"round {number + 1} {arm.server:17} {load}", flush=True)
    report(results, {arm.server for arm in foreign}, options.connections, options.results)


_CAVEATS: Final = (
    "Tiny MLP, 64 numbers a request as JSON; {connections} connections, closed loop, medians of {rounds} interleaved "
    "rounds, each server alone on the machine in its turn; CPU is that of a server's whole process tree; the load "
    "generator runs on the same processors. All requests succeeded, and samples of the answers were compared with ONNX "
    "Runtime's own. FastAPI is `naive_server.py` with a session of one thread; the others are set up in "
    "`loadtests/peers`."
)


def report(results: dict[str, list[Load]], foreign: set[str], connections: int, folder: Path) -> None:
    """Write the tables and the plot into ``folder``, fastest server first. The CPU of ``foreign`` ones is unknown."""

    def median(server: str, field: str) -> float:
        return float(statistics.median(getattr(load, field) for load in results[server]))

    rows = []
    ratios = []
    fastest_first = sorted(results, key=lambda server: -median(server, "requests_per_s"))
    for server in fastest_first:
        loads = results[server]
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
            ratios.append([server, more, f"{GOALS[server]:g}" if server in GOALS else "-", less])
    write_report(
        folder / "peer_throughput.md",
        "REST throughput: ortserve and its peers",
        _CAVEATS.format(connections=connections, rounds=len(results["ortserve"])),
        table(["server", "requests/s", "p50 ms", "p99 ms", "CPU µs a request"], rows),
        table(["against", "requests/s, times as many", "expected", "CPU a request, times less"], ratios),
        "![requests a second](peer_throughput.png)",
    )
    rates = {server: median(server, "requests_per_s") for server in fastest_first}
    plot(rates, connections, folder / "peer_throughput.png")


def plot(requests_per_s: dict[str, float], connections: int, file: Path) -> None:
    from matplotlib import pyplot  # imported here: it takes half a second, and tests import this module

    figure, axes = pyplot.subplots(figsize=(7, 0.5 * len(requests_per_s) + 1))
    bars = axes.barh(
        [server.replace(" (", "\n(") for server in requests_per_s],
        list(requests_per_s.values()),
        color=["tab:blue" if server == "ortserve" else "lightgray" for server in requests_per_s],
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
