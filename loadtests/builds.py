"""Measures two builds of the package in turns; shared by ``compiled_cost`` and ``package_cost``."""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, TypeAlias

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
from grpc_latency import Way, calls_us  # noqa: E402
from harness import checking, circumstances, cpu_s, h2load, serving, spread, table, wrk  # noqa: E402
from tiny_mlp import write_tiny_mlp  # noqa: E402

REST_CPU: Final = "REST, 32 connections, CPU µs"
REST_RATE: Final = "REST, 32 connections, requests/s"
REST_P50: Final = "REST, one connection, p50 µs"
CALL_P50: Final = "gRPC, one call at a time, p50 µs"
CALLS_CPU: Final = "gRPC, 64 calls at a time, CPU µs"

_FIRST_PORT: Final = 18400

Load: TypeAlias = Callable[[Way, Path], Mapping[str, float]]
"""Applies a load to one server and returns figures by name; the folder is for temporary files."""

Measured: TypeAlias = Mapping[str, Mapping[str, Sequence[float]]]
"""Figures of all rounds, by the name of the build and of the figure."""


def measure(environments: Mapping[str, Mapping[str, str]], loads: Sequence[Load], *, rounds: int) -> Measured:
    """Start a server in each environment and load the servers in turns, after a warm-up round.

    Args:
        environments: Environment variables of each of two servers, such as PYTHONPATH, by the name of the build.
        loads: Applied one after the other; answers are checked meanwhile.
        rounds: Number of counted rounds.
    """
    measured: dict[str, dict[str, list[float]]] = {name: {} for name in environments}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
        folder = Path(temporary)
        model = write_tiny_mlp(folder / "models")
        ways: list[tuple[str, Way]] = []
        for index, (name, environment) in enumerate(environments.items()):
            port = _FIRST_PORT + 10 * index
            server = servers.enter_context(serving(folder / "models", port, environment=environment))
            ways.append((name, Way(server, port, model)))
        for number in range(rounds + 1):
            for name, way in ways if number % 2 else reversed(ways):
                for load in loads:
                    with checking(way.check):
                        figures = load(way, folder)
                    print(f"round {number} {name:12} {dict(figures)}", flush=True)
                    for what, value in figures.items() if number else ():
                        measured[name].setdefault(what, []).append(value)
    return measured


def load_by_wrk(seconds: int) -> Load:
    """REST JSON with 32 connections and with one, for ``seconds`` each."""

    def load(way: Way, folder: Path) -> Mapping[str, float]:
        many = wrk(way.url, way.body, folder, pid=way.pid, connections=32, seconds=seconds)
        one = wrk(way.url, way.body, folder, pid=way.pid, connections=1, seconds=seconds)
        return {REST_CPU: many.cpu_us, REST_RATE: many.requests_per_s, REST_P50: one.p50_ms * 1e3}

    return load


def load_by_grpcio(calls: int) -> Load:
    """Sequential gRPC calls of one grpcio client."""
    return lambda way, _: {CALL_P50: calls_us(way.grpc, way.message, way.model.expected, calls)}


def load_by_h2load(calls: int) -> Load:
    """Concurrent gRPC calls on 8 connections with 8 streams each."""

    def load(way: Way, folder: Path) -> Mapping[str, float]:
        before_s = cpu_s(way.pid)
        h2load(way.grpc, way.message, folder, connections=8, streams=8, calls=calls)
        return {CALLS_CPU: (cpu_s(way.pid) - before_s) / calls * 1e6}

    return load


def comparison(title: str, measured: Measured, figures: Sequence[str], *, rounds: int) -> str:
    """A page with each figure of both builds and their ratio."""
    (first, old), (second, new) = measured.items()
    rows = []
    for what in figures:
        ratios = [one / other for one, other in zip(new[what], old[what], strict=True)]
        rows.append([what, spread(old[what]), spread(new[what]), spread(ratios)])
    explained = (
        f"Tiny MLP, medians (lowest to highest) of {rounds} rounds in which the servers took turns; CPU of the server "
        "per request. Samples and last answers were compared with ONNX Runtime's own."
    )
    header = ["figure", first, second, f"{second} / {first}"]
    head = circumstances(f"the builds {first} and {second}")
    return "\n\n".join([f"# {title}", head, explained, table(header, rows)])
