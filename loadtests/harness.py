"""Shared by the benchmarks: servers as processes, load generators, CPU time of a process tree, tables of results."""

import json
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from threading import Event, Thread
from types import MappingProxyType
from typing import Any, Final

import psutil

from infer_requests import INFER, framed
from ortserve.core.compiled import IS_COMPILED

START_TIMEOUT_S = 60
END_TIMEOUT_S = 15
NOTHING: Mapping[str, str] = MappingProxyType({})
_SPAWN: Final = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Load:
    """The result of one stretch of load: requests per second, latency in ms, CPU of the server per request in µs."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float


@contextmanager
def running(command: Sequence[str], ready_url: str, environment: Mapping[str, str] = NOTHING) -> Iterator[int]:
    """Start a server process, wait until it is ready, and end it after the block. Yields its process id.

    Raises:
        RuntimeError: The server does not start, or another server already answers at ``ready_url``.
    """
    if _answers(ready_url):
        raise RuntimeError(f"another server answers at {ready_url} already")
    process = subprocess.Popen(command, env=os.environ | {"ORT_DISABLE_TELEMETRY": "1"} | dict(environment))
    try:
        _wait_until_ready(process, ready_url)
        yield process.pid
    finally:
        _end(process)


@contextmanager
def serving(repository: Path, port: int, *flags: str, environment: Mapping[str, str] = NOTHING) -> Iterator[int]:
    """Start ortserve on ``port`` (HTTP) and the next two ports. Yields its process id once it is ready."""
    ports = [f"--http-port={port}", f"--grpc-port={port + 1}", f"--metrics-port={port + 2}"]
    command = [sys.executable, "-m", "ortserve", "serve", str(repository), "--log-level=warning", *ports, *flags]
    with running(command, f"http://127.0.0.1:{port}/v2/health/ready", environment) as pid:
        yield pid


def post(url: str, body: bytes) -> bytes:
    """Send a JSON document. Returns the body of the answer."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        content: bytes = answer.read()
    return content


def cpu_s(pid: int) -> float:
    """User and system time of a process and its children so far, in seconds, including children that ended."""
    total = 0.0
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def thread_cpu_ns(pid: int) -> int:
    """CPU time of the threads of a process that still run, as the scheduler counts it; ``cpu_s`` counts in 10 ms."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def wrk(
    url: str,
    body: bytes,
    folder: Path,
    *,
    pid: int,
    connections: int,
    seconds: int,
    headers: Mapping[str, str] = NOTHING,
) -> Load:
    """Run a closed loop of ``connections`` with wrk for ``seconds``. ``headers`` are sent besides the content type.

    Raises:
        RuntimeError: wrk is missing, or an answer was an error.
    """
    if shutil.which("wrk") is None:
        raise RuntimeError("this benchmark needs wrk (Debian package wrk)")
    script = folder / "post.lua"
    sent = {"Content-Type": "application/json", **headers}
    lines = ["method = 'POST'", *(f"headers['{name}'] = '{value}'" for name, value in sent.items())]
    lines.append(f"body = {json.dumps(body.decode())}")
    script.write_text("".join(f"wrk.{line}\n" for line in lines))
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(script), url]
    before_s = cpu_s(pid)
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 30).stdout
    used_s = cpu_s(pid) - before_s
    if "Non-2xx" in printed or "Socket errors" in printed:
        raise RuntimeError(printed)
    requests = int(_find(r"(\d+) requests in", printed))
    return Load(
        float(_find(r"Requests/sec:\s+([\d.]+)", printed)),
        _milliseconds(_find(r"\n\s+50%\s+(\S+)", printed)),
        _milliseconds(_find(r"\n\s+99%\s+(\S+)", printed)),
        used_s / requests * 1e6,
    )


def h2load(
    address: str,
    message: bytes,
    folder: Path,
    *,
    connections: int,
    streams: int,
    calls: int | None = None,
    seconds: int = 0,
) -> int:
    """Make gRPC calls in a closed loop with h2load: ``calls`` of them if it is given, else for ``seconds``.

    Args:
        address: Host and port of the server.
        message: The request of each call.
        folder: For a file with the request.
        connections: Number of connections.
        streams: Concurrent calls of each connection.
        calls: Number of calls.
        seconds: Duration.

    Returns:
        The number of calls.

    Raises:
        RuntimeError: h2load is missing, or a call failed.
    """
    if shutil.which("h2load") is None:
        raise RuntimeError("this benchmark needs h2load (Debian package nghttp2-client)")
    (folder / "request").write_bytes(framed(message))
    length = f"-D{seconds}" if calls is None else f"-n{calls}"
    command = ["h2load", f"-c{connections}", f"-m{streams}", length, "-d", str(folder / "request")]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers", f"http://{address}{INFER}"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 120).stdout
    found = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored", printed)
    if found is None or found[2] != "0" or found[3] != "0":
        raise RuntimeError(printed)
    return int(found[1])


@contextmanager
def checking(check: Callable[[], None]) -> Iterator[None]:
    """Call ``check`` repeatedly in a thread while the block runs.

    Raises:
        AssertionError: ``check`` failed or never ran.
    """
    stop = Event()
    failures: list[Exception] = []
    counted = [0]

    def loop() -> None:
        while not stop.wait(0.05):
            try:
                check()
            except Exception as error:
                failures.append(error)
                return
            counted[0] += 1

    thread = Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise AssertionError(f"an answer was wrong under load: {failures[0]}")
    assert counted[0], "no answer was checked"


def spread(values: Sequence[float]) -> str:
    """Median and range: ``7.9 (7.5 to 8.3)``."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_report(path: Path, title: str, *parts: str) -> None:
    """Write a page to ``path``, and print it: the title, the circumstances of this run, then ``parts``, in Markdown."""
    page = "\n\n".join((f"# {title}", circumstances(), *parts))
    path.parent.mkdir(exist_ok=True)
    path.write_text(page + "\n")
    print(page)


def circumstances(build: str = "compiled" if IS_COMPILED else "interpreted") -> str:
    """Describe machine, versions, build of the package, commit and command, for the head of a report."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    packages = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "uvicorn", "fastapi", "grpcio", "numpy"))
    processors = len(os.sched_getaffinity(0))
    return (
        f"{processors} processors ({platform.machine()}), Python {platform.python_version()}, {packages}; {build}, "
        f"commit {commit.strip() or 'unknown'}; `python {' '.join(sys.argv)}`; {time.strftime('%Y-%m-%d')}."
    )


def receive(pipe: Pipe, silence_s: float) -> Any:
    """Receive the next message of a process. Raises TimeoutError after ``silence_s`` without one."""
    if not pipe.poll(silence_s):
        raise TimeoutError("a process of this benchmark does not answer")
    return pipe.recv()


@contextmanager
def process(target: Any, *arguments: Any) -> Iterator[Pipe]:
    """Start a process and yield a pipe to it. The process ends when it receives None or when the block ends."""
    ours, theirs = _SPAWN.Pipe()
    started = _SPAWN.Process(target=target, args=(theirs, *arguments), daemon=True)
    started.start()
    theirs.close()
    try:
        yield ours
        ours.send(None)
        started.join(5)
    finally:
        started.kill()
        started.join()
        ours.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and its child processes; some do not end with their parent."""
    if process.poll() is not None:
        return
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    _, left = psutil.wait_procs(tree, END_TIMEOUT_S)
    for one in left:
        one.kill()
    process.wait(END_TIMEOUT_S)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        if _answers(url):
            return
        time.sleep(0.1)
    raise RuntimeError(f"the server is not ready after {START_TIMEOUT_S} s")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except OSError:
        return False


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"wrk printed no {pattern!r}: {text}")
    return found.group(1)


def _milliseconds(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]
