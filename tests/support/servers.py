"""Real servers for tests: the command line in a separate process, on ports that the system chooses."""

import json
import os
import re
import resource
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import httpx
import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from preloaded import PreloadedProcess

LONG_S: Final = 60.0
"""Upper bound of waits; only failing tests reach it."""

LOOK_S: Final = 0.005
"""Pause between two checks of a state without events, so that polling leaves the processors to the server."""

SHORT_WARMUP: Final = ("--warmup-s", "0.2")
"""Warm-up that suffices to verify batching and to learn batch sizes of tiny models."""


class ServerProcess:
    """``ortserve serve`` with ``arguments``. A thread reads its output, so that tests can wait for lines.

    ``http``, ``grpc`` and ``metrics`` are ``host:port`` once the server listens. ``client`` is the context of a client
    of the HTTP port if that uses TLS. ``through`` is a command that changes its process and then executes its
    arguments. ``limits`` are soft and hard limits, by constants of the module ``resource``. A server starts preloaded,
    unless it has ``through``, or variables other than options, credentials, ``TMPDIR``, OpenTelemetry's and those of
    ``freezing``.
    """

    def __init__(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        client: ssl.SSLContext | None = None,
        through: Sequence[str] = (),
        limits: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        self.client = client
        words = ["serve", *map(str, arguments)]
        environment = _clean_environment() | dict(env or {})
        plain = (
            "ORTSERVE_",
            "AWS_",
            "AZURE_",
            "GCE_",
            "GOOGLE_",
            "OTEL_",
            "TMPDIR",
            *(("PYTHONPATH", "FREEZE_") if "FREEZE_WAY" in (env or ()) else ()),
        )
        is_plain = not through and all(name.startswith(plain) for name in env or ())
        forked = PreloadedProcess.start(words, environment, limits) if is_plain else None
        self._process: Final = forked or subprocess.Popen(
            [*through, sys.executable, "-m", "ortserve", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            preexec_fn=partial(_set_limits, limits) if limits else None,
        )
        self.lines: list[str] = []
        self._is_closed = False
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def http(self) -> str:
        return self._address("http")

    @property
    def url(self) -> str:
        """The URL of the HTTP port."""
        return f"http{'s' if self.client else ''}://{self.http}"

    @property
    def grpc(self) -> str:
        return self._address("grpc")

    @property
    def metrics(self) -> str:
        return self._address("metrics")

    def wait_for_line(self, *parts: str) -> str:
        """Wait for the first line with all ``parts`` and return it.

        Fails at the end of the output or after ``LONG_S``.
        """

        def found() -> str | None:
            return next((line for line in self.lines if all(part in line for part in parts)), None)

        with self._news:
            self._news.wait_for(lambda: found() is not None or self._is_closed, LONG_S)
            line = found()
        assert line is not None, f"no line with {parts} in the server's output:\n{self.output}"
        return line

    def wait_until_loaded(self) -> None:
        """Wait for the end of loading, whether it succeeds or fails."""
        self.wait_for_line("initial loading has ended")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_until_delivered(self, number: signal.Signals) -> None:
        """Wait until a sent signal is no longer pending for the server (proc_pid_status(5))."""
        for _ in range(100_000):
            status = Path(f"/proc/{self.pid}/status").read_text()
            pending = re.search(r"ShdPnd:\s+(\w+)", status)
            if pending is None or not int(pending[1], 16) >> (number - 1) & 1:
                return
        raise AssertionError(f"{number!r} was not delivered")

    def wait(self) -> int:
        """Return the exit status; ``lines`` then contains the whole output."""
        status = self._process.wait(LONG_S)
        self._reader.join(LONG_S)
        return status

    def stop(self) -> None:
        """Stop the server with SIGTERM. It must exit with 0 and without a traceback."""
        if self._process.poll() is None:
            self.send(signal.SIGTERM)
        status = self.wait()
        assert status == 0, f"exit status {status}:\n{self.output}"
        assert "Traceback" not in self.output, self.output

    def kill(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()
        self._process.wait()
        self._reader.join(LONG_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def _address(self, protocol: str) -> str:
        line = self.wait_for_line("listening", protocol)
        fields = json.loads(line) if line.startswith("{") else dict(re.findall(r"(\w+)=(\S+)", line))
        return f"{fields['host']}:{fields['port']}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._is_closed = True
            self._news.notify_all()


@contextmanager
def starting(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    client: ssl.SSLContext | None = None,
    through: Sequence[str] = (),
    limits: Mapping[int, tuple[int, int]] = MappingProxyType({}),
) -> Iterator[ServerProcess]:
    """Start a server on free ports without waiting for it. It may exit in any way and is killed after the block."""
    flags = ("--http-port", "--grpc-port", "--metrics-port")
    ports = () if set(flags) & set(arguments) else [part for flag in flags for part in (flag, "0")]
    server = ServerProcess(*arguments, *ports, env=env, client=client, through=through, limits=limits)
    try:
        yield server
    except BaseException as error:
        error.add_note(f"the server's output:\n{server.output}")
        raise
    finally:
        server.kill()


@contextmanager
def serving(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    client: ssl.SSLContext | None = None,
    through: Sequence[str] = (),
    limits: Mapping[int, tuple[int, int]] = MappingProxyType({}),
) -> Iterator[ServerProcess]:
    """Serve with all models loaded. After the block the server must drain, exit with 0 and show no traceback."""
    with starting(*arguments, env=env, client=client, through=through, limits=limits) as server:
        server.wait_until_loaded()
        ready = httpx.get(f"{server.url}/v2/health/ready", timeout=LONG_S, verify=client or True)
        assert ready.status_code == 200, ready.text
        yield server
        server.stop()


def with_support_folder(name: str) -> dict[str, str]:
    """Environment of a server that imports the ``sitecustomize`` of a folder of ``support/`` at its start."""
    folder = str(Path(__file__).parent / name)
    return {"PYTHONPATH": os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])}


def freezing(way: str, seconds: float | None = None) -> dict[str, str]:
    """Environment of a server whose event loop freezes at SIGUSR1 (``freezing/sitecustomize.py``)."""
    environment = with_support_folder("freezing") | {"FREEZE_WAY": way}
    return environment | ({} if seconds is None else {"FREEZE_S": str(seconds)})


def add_model(repository: Path, name: str, build: Callable[..., Path], *, version: int = 1, **traits: Any) -> Path:
    """Write a model of a builder in ``models.builders`` to a repository. Returns the model's folder."""
    folder = repository / name / str(version)
    folder.mkdir(parents=True)
    build(folder / "model.onnx", **traits)
    return folder.parent


@contextmanager
def triton_clients(
    server: ServerProcess,
) -> Iterator[tuple[triton_http.InferenceServerClient, triton_grpc.InferenceServerClient]]:
    """Unmodified Triton clients for HTTP and gRPC."""
    with (
        triton_http.InferenceServerClient(server.http) as http,
        triton_grpc.InferenceServerClient(server.grpc) as grpc,
    ):
        yield http, grpc


def wire_datatype(array: np.ndarray) -> str:
    """The protocol's name for an array's element type; text in object arrays is BYTES, ``ml_dtypes``' bfloat16 BF16."""
    if array.dtype.name == "bfloat16":
        return "BF16"
    kinds = {"b": "BOOL", "O": "BYTES", "f": "FP", "i": "INT", "u": "UINT"}
    name = kinds[array.dtype.kind]
    return name if array.dtype.kind in "bO" else f"{name}{array.dtype.itemsize * 8}"


def json_input(name: str, array: np.ndarray) -> dict[str, Any]:
    """An entry of ``inputs`` of a REST request, nested like the tensor; a number without axes is a list of one."""
    data = array.tolist() if array.ndim else [array.item()]
    return {"name": name, "shape": list(array.shape), "datatype": wire_datatype(array), "data": data}


def rest_url(server: ServerProcess, model: str, version: str = "") -> str:
    """The URL path of REST inference with a model."""
    return f"{server.url}/v2/models/{model}{f'/versions/{version}' if version else ''}/infer"


class Samples:
    """The content of the metrics port at one time."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _samples(self, name: str) -> list[Sample]:
        """All samples of a metric. Families with other names are not parsed, which would take most of a poll."""
        families = re.split(r"^(?=# HELP )", self.text, flags=re.MULTILINE)
        text = "".join(one for one in families if name.startswith(one[7:].partition(" ")[0].removesuffix("_total")))
        # The library adds a suffix to the names of Triton's counters.
        has_suffix = re.search(rf"^{name}_total\b", text, re.MULTILINE) is not None
        names = (name,) if has_suffix else (name, f"{name}_total")
        return [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name in names
        ]

    def value(self, name: str, **labels: str) -> float:
        """The sample with exactly these labels; fails if it does not exist."""
        values = [sample.value for sample in self._samples(name) if sample.labels == labels]
        assert len(values) == 1, f"{len(values)} samples of {name} with {labels} in:\n{self.text}"
        return float(values[0])

    def by_labels(self, name: str, *labels: str) -> dict[str, float]:
        """All nonzero samples of a metric, by the values of these labels: ``simple 1 http ok``."""
        return {
            " ".join(sample.labels[label] for label in labels): float(sample.value)
            for sample in self._samples(name)
            if sample.value
        }


def read_metrics(server: ServerProcess) -> Samples:
    """Read the metrics port."""
    answer = httpx.get(f"http://{server.metrics}/metrics", timeout=LONG_S)
    return Samples(answer.raise_for_status().text)


def wait_for_sample(server: ServerProcess, name: str, is_wanted: Callable[[float], bool], **labels: str) -> float:
    """Poll until a sample has a wanted value and return it; an absent sample counts as 0.

    Each poll is a separate request to the metrics port, which no load delays.
    """
    value = 0.0
    end_s = time.monotonic() + LONG_S
    while time.monotonic() < end_s:
        value = read_metrics(server).by_labels(name, *labels).get(" ".join(labels.values()), 0.0)
        if is_wanted(value):
            return value
        time.sleep(2 * LOOK_S)
    raise AssertionError(f"{name} with {labels} stayed at {value}")


def wait_for_queue(server: ServerProcess, model: str, rows: int) -> None:
    """Poll until at least ``rows`` rows wait for a model."""
    wait_for_sample(server, "ortserve_queue_rows", lambda waiting: waiting >= rows, model=model, version="1")


@contextmanager
def starting_batch(server: ServerProcess, model: str) -> Iterator[None]:
    """After the block, poll until a batch of the model runs that did not run before it."""
    before = decisions(server, model)["batches"]
    yield
    labels = {"model": model, "version": "1", "decision": "batches"}
    wait_for_sample(server, "ortserve_batching_decisions_total", lambda count: count > before, **labels)


def decisions(server: ServerProcess, model: str) -> dict[str, int]:
    """The batcher's count of each decision for a model."""
    answer = httpx.get(f"http://{server.http}/v2/models/{model}/batching", timeout=LONG_S).raise_for_status()
    taken: dict[str, int] = answer.json()["decisions"]
    return taken


def _set_limits(limits: Mapping[int, tuple[int, int]]) -> None:
    for limit, soft_and_hard in limits.items():
        resource.setrlimit(limit, soft_and_hard)


def _clean_environment() -> dict[str, str]:
    """The environment without variables that would change a server's options."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("ORTSERVE_", "ORT_", "OTEL_"))}
