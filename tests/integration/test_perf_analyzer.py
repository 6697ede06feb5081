"""The unmodified perf_analyzer completes against a server in all of its request modes."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from apart import UnavailableError
from ortserve.frontends.metrics_server import MetricsServer
from ortserve.telemetry.families import TextFormat
from ortserve.telemetry.machine import GpuReading
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.statistics import TritonMetrics
from perf_analyzer import VERSION, PerfAnalyzer, find_perf_analyzer
from servers import LONG_S, SHORT_WARMUP, ServerProcess, serving

SHORT: Final = ("--measurement-mode", "count_windows", "--measurement-request-count", "20", "-s", "1000000", "-r", "3")
"""Three windows of 20 requests, accepted as stable whatever their difference: the shortest run that cannot hang.

Windows of time may contain no request on a busy machine. With ``--request-count`` perf_analyzer sometimes loses the
first answers, sends no more requests, and waits forever: all requests are answered, its threads have ended, its main
thread sleeps.
"""
CONCURRENCY: Final = ("--concurrency-range", "4")
"""As many requests as the server answers, which takes more processor time than a rate."""
RATE: Final = ("--request-rate-range", "100")

pytestmark = pytest.mark.timeout(400)  # the first test may need to install it


@pytest.fixture(scope="module")
def perf_analyzer() -> PerfAnalyzer:
    try:
        return find_perf_analyzer()
    except UnavailableError as error:
        pytest.skip(f"perf_analyzer {VERSION} cannot be had here: {error}")


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "trace"


@pytest.fixture(scope="module")
def server(trace_file: Path) -> Iterator[ServerProcess]:
    """The example models, for clients that can use shared memory and switch traces."""
    with serving("--example", "--allow-client-shm", "--trace-file", trace_file, *SHORT_WARMUP) as server:
        yield server


@pytest.fixture(params=["none", "system"])
def shared_memory(request: pytest.FixtureRequest) -> tuple[str, str]:
    return ("--shared-memory", request.param)


def run(perf_analyzer: PerfAnalyzer, server: ServerProcess, protocol: str, *arguments: str) -> float:
    """Run perf_analyzer with a model. Returns the measured requests per second."""
    address = server.http if protocol == "http" else server.grpc
    output = perf_analyzer.run("-i", protocol, "-u", address, *SHORT, *arguments)
    assert "Failed" not in output, output
    (found,) = re.findall(
        r"^(?:Concurrency|Request Rate): [\d.]+, throughput: ([\d.]+) infer/sec", output, re.MULTILINE
    )
    return float(found)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("way", ["--sync", "--async"])
def test_unary_requests_run_to_the_end(
    perf_analyzer: PerfAnalyzer, server: ServerProcess, protocol: str, way: str, shared_memory: tuple[str, str]
) -> None:
    model = ("-m", "simple", *RATE)
    assert run(perf_analyzer, server, protocol, *model, way, *shared_memory) > 0
    assert regions(server) == []


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_concurrent_requests_run_to_the_end(perf_analyzer: PerfAnalyzer, server: ServerProcess, protocol: str) -> None:
    assert run(perf_analyzer, server, protocol, "-m", "simple", "--async", *CONCURRENCY) > 0


def test_streamed_requests_run_to_the_end(
    perf_analyzer: PerfAnalyzer, server: ServerProcess, shared_memory: tuple[str, str]
) -> None:
    model = ("-m", "simple", *RATE)
    assert run(perf_analyzer, server, "grpc", *model, "--async", "--streaming", *shared_memory) > 0
    assert regions(server) == []


def test_trace_files_are_written_as_its_options_say(
    perf_analyzer: PerfAnalyzer, server: ServerProcess, trace_file: Path
) -> None:
    traced = ("--trace-level", "TIMESTAMPS", "--trace-rate", "2", "--trace-count", "20", "--log-frequency", "10")
    assert run(perf_analyzer, server, "http", "-m", "simple", *RATE, *traced) > 0
    counts = {path.name: len(json.loads(path.read_bytes())) for path in trace_file.parent.iterdir()}
    assert counts == {"trace.0": 10, "trace.1": 10}


def test_numbers_of_gpus_are_found_by_tritons_names(perf_analyzer: PerfAnalyzer, server: ServerProcess) -> None:
    gpus = {
        GpuReading("GPU-a", 0.25, 2**37, 2**35, 312.5): [25, 312.5, 2**35, 2**37],
        GpuReading("GPU-b", 0.75, 2**37, 2**36, 20.0): [75, 20, 2**36, 2**37],
    }
    registry = CollectorRegistry()
    TritonMetrics(registry, Metrics(registry), read_gpus=lambda: [*gpus])
    # In the test's process, because this machine may have no GPU.
    with closing(MetricsServer(TextFormat(registry).write, "127.0.0.1", 0)) as metrics:
        flags = ("--collect-metrics", "--metrics-url", f"127.0.0.1:{metrics.port}/metrics", "--metrics-interval", "200")
        output = perf_analyzer.run("-i", "http", "-u", server.http, *SHORT, *RATE, "-m", "simple", *flags)
    assert "Unable to parse" not in output, output
    for gpu, figures in gpus.items():
        found = re.findall(rf"^\s+{gpu.uuid} : ([\d.]+)(?:%| watts| bytes)$", output, re.MULTILINE)
        assert [float(figure) for figure in found] == figures, output


def regions(server: ServerProcess) -> object:
    """The regions that are still registered; perf_analyzer does not unregister its regions at its end."""
    return httpx.get(f"http://{server.http}/v2/systemsharedmemory/status", timeout=LONG_S).raise_for_status().json()
