"""``ortserve bench`` against servers with known behaviour, real servers, and models in process.

The command runs in the test's process, which saves a second of imports per run; its generators are processes.
"""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from certificates import Secret
from models import builders, interfaces, sequences
from ortserve.cli.main import main
from ortserve.tools.bench import prepare
from ortserve.tools.bench.comparison import read_result
from pages import DOCS, Command, commands
from servers import LOOK_S, SHORT_WARMUP, ServerProcess, add_model, read_metrics, serving
from small_server import small_server

pytestmark = pytest.mark.usefixtures("preloaded_commands")

EXAMPLE: Final = Path(__file__).parents[2] / "server" / "ortserve" / "example" / "repository"
SEQUENCES: Final = """\
sequences:
  controls: {START: {kind: start}, READY: {kind: ready}, END: {kind: end}, CORRID: {kind: id, datatype: UINT64}}
  states: [{input: STATE, output: NEXT}]
"""
SHORT: Final = ("--seconds", "0.5", "--warmup", "0.1")
MODEST: Final = (*SHORT, "--rate", "50")
"""For measurements whose load does not matter: a closed loop would use two processors all the time."""
LONE: Final = 33
"""Requests before a measurement: generated inputs are tried once, then each is sent twice."""


@dataclass(frozen=True)
class Ran:
    """A run of the command: its exit status and its output."""

    status: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        assert self.out, self.err
        result: dict[str, Any] = json.loads(self.out)
        return result

    @property
    def point(self) -> dict[str, Any]:
        (point,) = self.result["points"]
        assert isinstance(point, dict)
        return point

    def percentile_ms(self, percent: float) -> float:
        (found,) = [one["ms"] for one in self.point["percentiles"] if one["percent"] == percent]
        return float(found)

    @property
    def failures(self) -> dict[str, int]:
        return {one["kind"]: one["count"] for one in self.point["failures"]}

    @property
    def problems(self) -> list[str]:
        """The problems, except those about a busy machine."""
        return [one for one in self.result["problems"] if "no verdict" not in one]


def bench(*arguments: str | Path) -> Ran:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = main(["bench", *map(str, arguments)])
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return Ran(status, out.getvalue(), err.getvalue())


def fails(*arguments: str | Path) -> tuple[int, str]:
    """Run the command, which must fail with one line on standard error. Returns the status and the line."""
    ran = bench(*arguments)
    assert not ran.out
    lines = ran.err.splitlines()
    assert len(lines) == 1, ran.err
    return ran.status, lines[0].removeprefix("ortserve bench: ")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving(
        "--example", "--allow-client-shm", "--model-control-mode=explicit", "--load-model=*", *SHORT_WARMUP
    ) as server:
        yield server


# Accuracy: servers with known delays.

SERVICE_S: Final = 0.001
STALL_S: Final = 0.4
EVERY_S: Final = 2.0
RATE: Final = 200


def latencies_ms(spans_s: Sequence[tuple[float, float]]) -> np.ndarray:
    """The true latencies at a constant rate, from the server's own clock: on a busy machine its timers are late, too.

    The requests are served in their order. The least late of them arrived when it was due.
    """
    arrived_s, done_s = np.sort(np.array(spans_s), axis=0).T
    schedule_s = np.arange(len(done_s)) / RATE
    return np.asarray((done_s - schedule_s - (arrived_s - schedule_s).min()) * 1e3)


def test_open_loop_finds_the_stalls_that_a_closed_loop_hides() -> None:
    count = int(RATE * 2 * EVERY_S)
    for _ in range(3):  # other work on the machine may disturb one measurement, but not all of them
        with small_server(service_s=SERVICE_S, stall_s=STALL_S, every_s=EVERY_S) as stalling:
            target = (stalling.url, "--model", "m", "--warmup", "0.2", "--json")
            opened = bench(*target, "--rate", str(RATE), "--seconds", str(2 * EVERY_S))
            true_ms = latencies_ms(stalling.spans_s[-count:])
            closed = bench(*target, "--concurrency", "1", "--seconds", str(2 * EVERY_S))
        found = {percent: opened.percentile_ms(percent) for percent in (50, 90, 95, 99)}
        true = {percent: pytest.approx(np.percentile(true_ms, percent), rel=0.2, abs=25) for percent in found}
        if found == true and not opened.point["is_overloaded"] and closed.percentile_ms(99) < found[99] / 3:
            break

    assert np.percentile(true_ms, 95) > 300
    assert found == true
    assert opened.point["requests"] == count
    assert not opened.point["is_overloaded"]
    # The only caller waited through each stall, so only two of its thousands of requests met one.
    assert closed.percentile_ms(99) < found[99] / 3
    assert closed.point["most_ms"] > 250
    assert (opened.point["concurrency"], closed.point["concurrency"]) == (None, 1)


def test_capacity_of_one_worker_is_found() -> None:
    """100 requests per second, a rate that even a busy machine sustains."""
    with small_server(service_s=0.01) as worker:
        ran = bench(
            worker.url, "--model", "m", "--find-capacity", "--seconds", "1", "--warmup", "0", "--timeout", "2", "--json"
        )

    (capacity,) = ran.result["capacities"]
    assert 20 < capacity["sustained_per_s"] <= 105
    if capacity["exceeded_per_s"] is not None:
        assert capacity["sustained_per_s"] < capacity["exceeded_per_s"]
    rates = [point["rate"] for point in ran.result["points"]]
    assert rates == sorted(rates)


def test_overload_is_named_and_percentiles_include_the_wait() -> None:
    with small_server(service_s=0.01) as worker:
        ran = bench(worker.url, "--model", "m", "--rate", "200", "--seconds", "1.5", "--slo", "50", "--json")

    assert ran.status == 1
    assert ran.point["is_overloaded"]
    assert ran.percentile_ms(99) > 500
    assert ran.point["goodput_per_s"] < 40
    assert any("more than the 50 ms of --slo" in problem for problem in ran.problems)


def test_narrow_interval_ends_the_measurement() -> None:
    with small_server() as quick:
        target = (quick.url, "--model", "m", "--percentile", "50", "--warmup", "0", "--json")
        early = bench(*target, "--concurrency", "2", "--seconds", "30", "--precision", "0.5")
        late = bench(*target, "--concurrency", "1", "--seconds", "0.5", "--precision", "0.000001")

    assert (early.point["stopped_because"], late.point["stopped_because"]) == ("precision", "time")
    assert 1 <= early.point["seconds"] < 20
    (median,) = [one for one in early.point["percentiles"] if one["percent"] == 50]
    assert median["low_ms"] <= median["ms"] <= median["high_ms"]


# Failures by kind.


def test_failures_are_counted_by_kind() -> None:
    def behave(number: int) -> str:
        ways = {3: "503", 5: "close", 7: "garbage", 11: "429"}
        return next((way for each, way in ways.items() if number >= LONE and number % each == 0), "ok")

    with small_server(behave=behave) as rejecting:
        ran = bench(rejecting.url, "--model", "m", "--rate", "200", *SHORT, "--warmup", "0", "--json")

    assert ran.status == 1
    assert set(ran.failures) == {"http_503", "http_429", "connection_lost", "malformed_answer"}
    assert ran.failures["http_503"] > ran.failures["connection_lost"] > ran.failures["http_429"]
    assert ran.point["answers"] + sum(ran.failures.values()) == ran.point["requests"] == 100
    (example,) = [one["example"] for one in ran.point["failures"] if one["kind"] == "http_503"]
    assert "the server says 503" in example
    assert any("requests failed" in problem for problem in ran.problems)


@pytest.mark.parametrize(("allowed", "is_good"), [("0", False), ("0.3", True)])
def test_failures_may_be_allowed(allowed: str, is_good: bool) -> None:
    with small_server(behave=lambda number: "503" if number % 10 == 9 and number >= LONE else "ok") as rejecting:
        ran = bench(rejecting.url, "--model", "m", "--rate", "100", *SHORT, "--allow-errors", allowed, "--json")

    assert ran.failures["http_503"] > 0
    assert (ran.problems == []) is is_good


def test_allowed_failures_before_the_measurement_do_not_end_it() -> None:
    with small_server(behave=lambda number: ("close", "ok", "503")[number % 3]) as rejecting:
        target = (rejecting.url, "--model", "m", "--rate", "100", *SHORT)
        ran = bench(*target, "--allow-errors", "0.9", "--json")
        assert fails(*target)[0] == 1

    assert ran.failures["http_503"] > 0
    assert ran.problems == []


@pytest.mark.parametrize(("way", "kind"), [("503", "http_503"), ("hang", "timeout")])
def test_failures_of_every_request_are_counted(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer, the tries before the load end with the time limit of one call, and nothing is compared."""
    monkeypatch.setattr(prepare, "_PREPARE_S", 0.5)
    with small_server(behave=lambda number: way) as failing:
        target = (failing.url, "--model", "m", "--timeout", "0.3", *SHORT, "--allow-errors", "1")
        began_s = time.monotonic()
        ran = bench(*target, "--rate", "20", "--json")
        took_s = time.monotonic() - began_s
        assert fails(*target, "--protocol", "shm")[0] == 1

    assert (ran.status, ran.point["answers"], ran.failures) == (1, 0, {kind: 10})
    assert ran.point["outputs"]["expected"].startswith("nothing, because a request before the load failed: ")
    assert took_s < 30


def test_slow_targets_are_prepared_with_fewer_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_REPEATED_S", 0.0)
    with small_server() as server:
        ran = bench(server.url, "--model", "m", "--rate", "100", *SHORT, "--warmup", "0", "--json")
        assert server.requests == 3 + ran.point["requests"]  # one trial of the inputs, and the first input twice
    assert ran.failures == {}
    assert ran.point["outputs"]["checked"] > 0


def test_a_measurement_that_is_shorter_than_a_request_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_REPEATED_S", 0.0)
    with small_server(service_s=0.9) as slow:  # a request that begins in the warm-up lasts longer than the measurement
        ran = bench(slow.url, "--model", "m", "--seconds", "0.2", "--warmup", "0.4", "--json")
    (problem,) = ran.problems
    assert "no request could be sent within 0.2 s, because earlier ones took longer: allow more --seconds" in problem


def test_requests_without_an_answer_time_out() -> None:
    with small_server(behave=lambda number: "hang" if number >= LONE else "ok") as hanging:
        ran = bench(hanging.url, "--model", "m", "--rate", "20", *SHORT, "--timeout", "0.4", "--json")

    assert ran.failures == {"timeout": 10}
    assert (ran.status, ran.point["answers"], ran.point["percentiles"]) == (1, 0, [])


def test_late_answers_time_out_whenever_they_come() -> None:
    """Connections look for timeouts a few times a second. Answers that come between two looks are too late, too."""
    with small_server() as slow:

        def behave(number: int) -> str:
            slow.service_s = 0.1 if number >= LONE else 0.0
            return "ok"

        slow.behave = behave
        ran = bench(slow.url, "--model", "m", *SHORT, "--warmup", "0", "--timeout", "0.05", "--json")

    assert ran.failures == {"timeout": ran.point["requests"]}
    assert (ran.status, ran.point["answers"]) == (1, 0)


def test_an_answer_of_a_slow_target_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 37 requests take longer than the measurement, and the very first one belongs to the warm-up."""
    monkeypatch.setattr(prepare, "_REPEATED_S", 0.0)
    short = ("--seconds", "0.5", "--warmup", "0.2", "--json")
    with small_server(service_s=0.05) as slow:
        points = [bench(slow.url, "--model", "m", *short).point]
    points.append(bench(builders.heavy(tmp_path / "model.onnx"), "--threads", "1", "--batch", "32", *short).point)

    for point in points:
        assert 0 < point["answers"] < 37
        assert (point["outputs"]["checked"], point["outputs"]["different"]) == (1, 0)


@pytest.mark.parametrize("way", ["wrong", "nonsense"])
def test_wrong_outputs_are_seen(way: str) -> None:
    with small_server(behave=lambda number: way if number >= LONE else "ok") as lying:
        ran = bench(
            lying.url, "--model", "m", "--rate", "100", "--seconds", "2", "--warmup", "0", "--slo", "9999", "--json"
        )

    checked = ran.point["outputs"]
    assert checked["checked"] == checked["different"] == ran.failures["wrong_output"] >= 4
    assert ran.status == 1
    assert any("wrong outputs" in problem for problem in ran.problems)
    assert (ran.point["throughput"]["value"], ran.point["goodput_per_s"]) == (0, 0)


def test_slow_generator_is_refused() -> None:
    """A Python generator cannot sustain this rate: it is late or uses its whole processor."""
    with small_server() as quick:
        ran = bench(quick.url, "--model", "m", "--rate", "500000", "--seconds", "0.2", "--timeout", "1", "--json")

    assert ran.status == 1
    assert ran.point["generator"]["too_slow_because"]
    assert any("no verdict" in problem for problem in ran.result["problems"])
    assert "no verdict" in ran.err


# Bad input: one line.


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def test_absent_server_is_reported() -> None:
    for scheme in ("http", "grpc"):
        status, line = fails(f"{scheme}://127.0.0.1:{free_port()}", "--model", "m", "--timeout", "2")
        assert status == 1
        assert line.endswith("cannot reach the server: Connection refused")


def test_server_of_another_kind_is_reported(server: ServerProcess) -> None:
    with small_server(is_protocol=False) as other:
        status, line = fails(other.url, "--model", "m")
    assert (status, "expected a server of the Open Inference Protocol v2" in line) == (1, True)
    status, line = fails(f"http://{server.grpc}", "--model", "digits")
    assert (status, line.endswith("got an answer that is not HTTP; is this a gRPC port?")) == (1, True)
    for url, says in (
        (f"grpc://{server.http}", "got no HTTP/2; is this an HTTP port, or one for grpcs://?"),
        (f"https://{server.http}", "got an answer without TLS; is this a port for http://?"),
        (f"grpcs://{server.grpc}", "got an answer without TLS; is this a port for grpc://?"),
    ):
        status, line = fails(url, "--model", "digits")
        assert (status, says in line) == (1, True), line


def test_wrong_model_names_those_that_there_are(server: ServerProcess) -> None:
    status, line = fails(server.url, "--model", "digit")
    assert status == 1
    assert "'digit'" in line
    assert "the server has" in line
    assert "digits" in line
    status, line = fails(f"grpc://{server.grpc}", "--model", "digit")
    assert (status, "digit" in line) == (1, True)


def test_wrong_version_names_the_ready_ones_of_its_model(server: ServerProcess) -> None:
    for url in (server.url, f"grpc://{server.grpc}"):
        status, line = fails(url, "--model", "digits/9")
        assert (status, line.endswith("'digits' version 9 is not found; its ready versions: 1")) == (1, True)


def test_server_without_a_scheme_is_told_how_to_write_one(server: ServerProcess) -> None:
    status, line = fails(server.http)
    assert (status, line.endswith("found neither; the URL of a server begins with http:// or grpc://")) == (2, True)


def test_model_that_cannot_have_lone_synthetic_requests_says_what_it_needs(tmp_path: Path) -> None:
    add_model(tmp_path, "picky", builders.refuses_synthetic)
    (add_model(tmp_path, "sums", sequences.accumulate) / "model.yaml").write_text(SEQUENCES)
    with serving(tmp_path, *SHORT_WARMUP) as server:
        for url in (server.url, f"grpc://{server.grpc}"):
            status, line = fails(url, "--model", "picky")
            assert (status, f"pass real samples with --inputs: {url}: " in line) == (2, True), line
            status, line = fails(url, "--model", "sums")
            assert (status, line) == (
                2,
                "--sequences: expected the requests of each sequence, as 'sums' has sequences, got none",
            )
        with redirect_stderr(StringIO()) as written:
            assert main(["doctor", server.url, "--model", "sums"]) == 2
        expected = "--model: expected a model without sequences, got 'sums': ortserve bench measures it"
        assert written.getvalue() == f"ortserve doctor: {expected}\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["URL"], "expected --model"),
        (["URL", "--model", "digits", "--protocol", "grpc"], "--protocol: expected rest, rest-binary, shm"),
        (["URL", "--model", "digits", "--rate", "5", "--concurrency", "2"], "expected one of"),
        (
            ["URL", "--model", "digits", "--arrivals", "sometimes"],
            "expected constant, poisson, bursts:N or a file of times",
        ),
        (["URL", "--model", "digits", "--arrivals", "poisson"], "--arrivals: expected --rate or --find-capacity to be"),
        (
            ["URL", "--model", "digits", "--rate", "5", "--arrivals", __file__],
            "--arrivals: expected constant, poisson or bursts:N with --rate, or a file without --rate",
        ),
        (["http://user:s3cret@127.0.0.1:1"], "expected a URL without user and password"),
        (["URL", "--model", "digits", "--header", "x"], "--header: expected NAME: VALUE"),
        (["URL", "--model", "digits", "--key-file", "/nowhere"], "--key-file: expected a file with a key"),
        (["grpc://127.0.0.1:1/path", "--model", "digits"], "expected a URL such as"),
        (["URL", "--model", "digits", "--processes", "4", "--concurrency", "2"], "--processes"),
        (["URL", "--model", "digits", "--inputs", "/nowhere.npz"], "--inputs /nowhere.npz"),
        (["/nowhere/model.onnx"], "expected a model file"),
        ([str(EXAMPLE / "digits"), "--way", "walk"], "--way: expected run, bound, batcher"),
        ([str(EXAMPLE / "text_stats"), "--way", "bound"], "cannot be bound"),
        (["--compare", "/nowhere.json", "/nowhere.json"], "--compare /nowhere.json"),
        (["--compare", __file__, __file__], "expected a result of bench --json: Invalid JSON"),
    ],
)
def test_wrong_arguments_are_rejected(server: ServerProcess, arguments: Sequence[str], problem: str) -> None:
    status, line = fails(*(argument.replace("URL", server.url) for argument in arguments))
    assert problem in line
    assert status == 2


def test_wrong_models_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("not a model")
    whole = (EXAMPLE / "digits" / "1" / "model.onnx").read_bytes()
    (tmp_path / "half.onnx").write_bytes(whole[: len(whole) // 2])
    np.savez(tmp_path / "inputs.npz", picture=np.zeros((2, 1, 8, 8), np.float32))

    (tmp_path / "empty.onnx").touch()
    builders.external_weights(tmp_path / "external.onnx", "gone.bin")

    problems = {"text": "expected an ONNX model", "half": "truncated", "empty": "the file is empty"}
    problems["external"] = "tensor 'w', in gone.bin: there is no such file"
    for name, problem in problems.items():
        status, line = fails(tmp_path / f"{name}.onnx")
        assert (status, f"{name}.onnx" in line, problem in line) == (2, True, True), line
    status, line = fails(tmp_path)
    assert (status, "no version folder" in line) == (2, True)
    status, line = fails(EXAMPLE / "digits", "--inputs", tmp_path / "inputs.npz")
    assert (status, "'picture' is not an input" in line) == (2, True)


def test_problems_beside_json_have_no_control_characters_of_names(tmp_path: Path) -> None:
    ran = bench(builders.mlp(tmp_path / "a\x1b]0;title\x07.onnx"), "--slo", "0.000001", *SHORT, "--json")
    assert (ran.status, "]0;title" in ran.err, "\x1b" in ran.err) == (1, True, False)


def test_command_without_a_target_is_rejected() -> None:
    ran = bench()
    assert (ran.status, "expected a target" in ran.err) == (2, True)


def test_interrupted_measurement_keeps_what_it_has(server: ServerProcess, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = [sys.executable, "-m", "ortserve", "bench", server.url, "--model", "digits", "--concurrency", "1,2"]
    options = ["--seconds", "60", "--warmup", "0", "--json", "-o", str(page)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    before = requests_of(server)
    while requests_of(server) < before + 200:
        assert process.poll() is None
        time.sleep(LOOK_S)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    result = json.loads(out)
    assert process.returncode == 130
    assert result["is_interrupted"]
    (point,) = result["points"]
    assert point["stopped_because"] == "interrupted"
    assert point["answers"] > 50
    assert point["percentiles"]
    assert "partial" in page.read_text()
    assert "Traceback" not in err


def test_interrupted_warm_up_gives_no_result(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "ortserve", "bench", server.url, "--model", "digits", "--warmup", "60", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    before = requests_of(server)
    while requests_of(server) < before + 200:
        assert process.poll() is None
        time.sleep(LOOK_S)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "ortserve bench: interrupted\n")
    assert process.returncode == 130


def requests_of(server: ServerProcess, model: str = "digits") -> int:
    stats = httpx.get(f"{server.url}/v2/models/{model}/stats", timeout=30).json()["model_stats"]
    return sum(one["inference_count"] for one in stats)


# Real servers and models.


@pytest.mark.parametrize("way", ["rest", "rest-binary", "shm", "grpc", "grpc-stream", "grpc shm"])
def test_every_protocol_of_a_real_server_is_measured(server: ServerProcess, way: str) -> None:
    protocol = way.split()[-1]
    url = f"grpc://{server.grpc}" if "grpc" in way else server.url
    model = EXAMPLE / "digits"

    ran = bench(
        url, "--model", "digits", "--protocol", protocol, "--rate", "150", "--batch", "3", "--compare-outputs", model,
        *SHORT, "--arrivals", "poisson", "--json",
    )  # fmt: skip

    point = ran.point
    assert ran.problems == []
    assert ran.failures == {}
    assert point["answers"] == point["requests"] > 30
    assert (point["outputs"]["different"], point["outputs"]["expected"]) == (0, str(model))
    assert point["outputs"]["checked"] >= 1
    assert point["server"].startswith("ortserve")
    # Counted by the server, roughly from the start of the measured time.
    assert sum(one["rows"] * one["batches"] for one in point["batches"]) > 2 * point["answers"]
    assert point["usage"]["cpu_us_per_request"] > 10
    assert point["usage"]["resident_bytes"] > 2**24
    phases = [one["name"] for one in point["phases"]]
    assert phases == ([] if protocol == "grpc-stream" else ["decode", "queue", "stage", "compute", "encode"])
    assert not list(Path("/dev/shm").glob("ortserve_bench_*"))


def test_each_target_and_batch_size_has_its_own_shared_memory(server: ServerProcess) -> None:
    targets = (server.url, f"grpc://{server.grpc}", "--model", "digits", "--protocol", "shm,shm", "--batch", "1,3")
    ran = bench(*targets, *MODEST, "--json")

    points = ran.result["points"]
    assert [(point["batch"], point["failures"]) for point in points] == [(1, []), (3, [])] * 4
    assert sum(point["answers"] for point in points) > 8
    assert not list(Path("/dev/shm").glob("ortserve_bench_*"))


def test_too_little_shared_memory_on_this_machine_is_an_error(server: ServerProcess) -> None:
    """A write to memory that the machine lacks would end the command by SIGBUS."""
    target = (server.url, "--model", "digits", "--protocol", "shm", "--batch", "64", *SHORT)
    small = 'mount -t tmpfs -o size=8k none /dev/shm || exit 77; "$@"; status=$?; ls /dev/shm; exit $status'
    apart = ["unshare", "--map-root-user", "--mount", "sh", "-c", small, "sh"]
    command = [*apart, sys.executable, "-m", "ortserve", "bench", *target]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    if ran.returncode == 77 or ran.stderr.startswith("unshare:"):
        pytest.skip("this process may not mount a file system")
    assert (ran.returncode, ran.stdout) == (1, ""), "a file is left"
    problem = r"/dev/shm/ortserve_bench_\w+: cannot create shared memory of \d+ bytes: No space left on device"
    assert re.fullmatch(f"ortserve bench: {problem}", ran.stderr.splitlines()[-1])


def test_models_without_inputs_or_dimensions_are_measured(tmp_path: Path) -> None:
    """In messages of gRPC, fields without entries are absent."""
    add_model(tmp_path, "constant", interfaces.constant)
    add_model(tmp_path, "scalar", builders.scalar_sum)
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    with serving(tmp_path, *SHORT_WARMUP) as server:
        urls = (server.url, f"grpc://{server.grpc}")
        for model in ("constant", "scalar"):
            ran = bench(*urls, "--model", model, *MODEST, "--json")
            assert ran.problems == []
            assert all(one["answers"] and one["outputs"]["checked"] for one in ran.result["points"])
        for url in urls:
            status, line = fails(url, "--model", "broken", *SHORT)
            assert (status, "no available versions" in line, "cannot reach" in line) == (1, True, False), line
            assert line.endswith("; its ready versions: none")


@pytest.mark.parametrize("way", ["rest", "rest-binary", "grpc", "grpc-stream"])
def test_callers_send_whole_sequences(tmp_path: Path, way: str) -> None:
    """A request to a sequence that has not started, or has another request in flight, would be an error."""
    folder = add_model(tmp_path, "sums", sequences.accumulate)
    (folder / "model.yaml").write_text(SEQUENCES)
    with serving(tmp_path, *SHORT_WARMUP) as server:
        url = f"grpc://{server.grpc}" if way.startswith("grpc") else server.url
        load = ("--concurrency", "6", "--sequences", "5", *SHORT)
        ran = bench(url, "--model", "sums", "--protocol", way, *load, "--json")
        assert (ran.failures, ran.problems) == ({}, [])
        assert "in sequences of 5 requests" in ran.result["inputs"]
        assert ran.point["outputs"]["expected"].startswith("nothing, because answers depend on earlier requests")
        samples = read_metrics(server)
        ended = samples.value("ortserve_ended_sequences_total", model="sums", version="1", reason="ended") - LONE
        (stats,) = httpx.get(f"{server.url}/v2/models/sums/stats").json()["model_stats"]
        answered = stats["inference_stats"]["success"]["count"] - LONE
        assert ended > 20
        assert 5 * ended <= answered <= 5 * (ended + 6)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--rate", "10"), "--rate: expected a closed loop of one process, whose answers are not compared"),
        (("--find-capacity",), "--find-capacity: expected a closed loop"),
        (("--processes", "2", "--concurrency", "2"), "--processes: expected a closed loop of one process"),
        (("--compare-outputs", str(EXAMPLE / "digits")), "--compare-outputs: expected a closed loop"),
        (("--protocol", "rest,shm"), "--protocol: expected one without shared memory, got shm and --sequences"),
        ((str(EXAMPLE / "digits"),), "--sequences: expected the URL of a server"),
    ],
)
def test_sequences_need_a_closed_loop_on_a_server(arguments: Sequence[str], problem: str) -> None:
    ran = bench("http://127.0.0.1:1", *arguments, "--model", "digits", "--sequences", "3")

    assert (ran.status, ran.out) == (2, "")
    assert f"ortserve bench: error: {problem}" in ran.err


def test_server_with_a_private_authority_is_measured_over_tls(tmp_path: Path) -> None:
    secret = Secret(tmp_path / "secret")
    with serving("--example", *secret.flags, *SHORT_WARMUP, client=secret.client_context()) as server:
        urls = [f"https://{server.http}", f"grpcs://{server.grpc}"]
        ran = bench(*urls, "--model", "digits", "--ca", secret.ca, "--header", "x-tenant: a", *MODEST, "--json")
        for url in urls:
            status, line = fails(url, "--model", "digits", *SHORT)
            assert (status, line.endswith("(--ca names a file with certificates to trust)")) == (1, True), line
            status, line = fails(url.replace("127.0.0.1", "localhost"), "--model", "digits", "--ca", secret.ca, *SHORT)
            assert (status, line.endswith("certificate is not valid for 'localhost'.")) == (1, True), line

    assert ran.problems == []
    assert [one["way"] for one in ran.result["points"]] == ["rest", "grpc"]
    assert all(one["answers"] > 5 and one["outputs"]["different"] == 0 for one in ran.result["points"])


@pytest.mark.parametrize("transport", ["native", "grpcio"])
def test_server_that_requires_client_certificates_gets_one(tmp_path: Path, transport: str) -> None:
    secret, stranger = Secret(tmp_path / "secret"), Secret(tmp_path / "stranger")
    own, other = tmp_path / "own.pem", tmp_path / "other.pem"
    for pem, issuer in ((own, secret), (other, stranger)):
        pem.write_bytes(b"".join(file.read_bytes() for file in issuer.client_files()))
    client = secret.client_context(has_certificate=True)
    flags = ("--example", f"--grpc-transport={transport}", *secret.mutual_flags, *SHORT_WARMUP)
    with serving(*flags, client=client) as server:
        urls = [f"https://{server.http}", f"grpcs://{server.grpc}"]
        access = ("--model", "digits", "--ca", secret.ca)
        ran = bench(*urls, *access, "--cert", own, *MODEST, "--json")
        for url in urls:
            for wrong in ((), ("--cert", other)):
                status, line = fails(url, *access, *wrong, *SHORT)
                assert (status, "client certificate" in line, "--cert" in line) == (1, True, True), line

    assert ran.problems == []
    assert all(one["answers"] > 5 and one["outputs"]["different"] == 0 for one in ran.result["points"])


@pytest.mark.parametrize("flag", ["--ca", "--cert"])
def test_unreadable_certificates_are_reported(flag: str) -> None:
    status, line = fails("https://127.0.0.1:1", "--model", "digits", flag, __file__)
    assert (status, line.startswith(f"{flag} {__file__}: expected ")) == (2, True), line


@pytest.mark.parametrize("protocol", ["grpc", "grpc-stream"])
def test_large_messages_over_grpc_keep_to_the_windows(tmp_path: Path, protocol: str) -> None:
    """Requests and answers of 1 MB; HTTP/2 permits 64 KiB before the receiver has read them."""
    add_model(tmp_path, "large", builders.identity, shape=("batch", 256 * 1024))
    with serving(tmp_path, *SHORT_WARMUP) as server:
        url = f"grpc://{server.grpc}"
        ran = bench(
            url, "--model", "large", "--protocol", protocol, "--concurrency", "2", *SHORT, "--warmup", "0", "--json"
        )

    assert ran.failures == {}
    assert ran.point["answers"] > 5
    assert ran.point["outputs"]["checked"] >= 1
    assert ran.point["outputs"]["different"] == 0


def test_failures_over_grpc_have_their_status(server: ServerProcess) -> None:
    """The model is unloaded during the load."""
    command = [sys.executable, "-m", "ortserve", "bench", f"grpc://{server.grpc}", "--model", "simple", "--json"]
    before = requests_of(server, "simple")
    process = subprocess.Popen([*command, "--rate", "100", "--seconds", "2"], stdout=subprocess.PIPE, text=True)
    while requests_of(server, "simple") < before + 150:
        assert process.poll() is None
        time.sleep(LOOK_S)
    httpx.post(f"{server.url}/v2/repository/models/simple/unload", timeout=30).raise_for_status()
    try:
        out, _ = process.communicate(timeout=60)
    finally:
        httpx.post(f"{server.url}/v2/repository/models/simple/load", timeout=30).raise_for_status()

    ran = Ran(process.returncode, out, "")
    assert ran.status == 1
    assert set(ran.failures) <= {"grpc_not_found", "grpc_unavailable"}
    assert ran.point["answers"] > 0
    assert "simple" in ran.point["failures"][0]["example"]


def test_outputs_of_another_model_are_refused(server: ServerProcess, tmp_path: Path) -> None:
    other = tmp_path / "other.onnx"
    builders.identity(other, shape=("batch", 1, 8, 8))
    status, line = fails(server.url, "--model", "digits", "--compare-outputs", other, *SHORT)
    assert status in (1, 2)
    assert "outputs" in line


def test_inputs_of_the_reference_may_have_another_order_but_no_other_names(tmp_path: Path) -> None:
    folder = add_model(tmp_path / "models", "products", builders.diagonal_products)
    swapped = onnx.load(folder / "1" / "model.onnx")
    inputs = [*swapped.graph.input]
    swapped.graph.ClearField("input")
    swapped.graph.input.extend(reversed(inputs))
    onnx.save(swapped, tmp_path / "swapped.onnx")
    other = builders.mlp(tmp_path / "other.onnx")
    with serving(tmp_path / "models", *SHORT_WARMUP) as server:
        target = (server.url, "--model", "products", *MODEST, "--compare-outputs")
        ran = bench(*target, tmp_path / "swapped.onnx", "--json")
        status, line = fails(*target, other)
    assert (ran.failures, ran.point["outputs"]["different"]) == ({}, 0)
    assert ran.point["outputs"]["checked"] > 0
    assert (status, line) == (2, f"--compare-outputs {other}: expected a model with the inputs x, z, got x")


def test_models_in_process_are_compared_with_the_reference(tmp_path: Path) -> None:
    first, same = builders.mlp(tmp_path / "first.onnx"), builders.mlp(tmp_path / "same.onnx")
    model = onnx.load(same)
    weight = model.graph.initializer[0]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) + 1, weight.name))
    onnx.save(model, tmp_path / "other.onnx")
    ran = bench(first, "--way", "run,bound,batcher", "--compare-outputs", same, *SHORT, "--json")
    assert [one["outputs"]["expected"] for one in ran.result["points"]] == [str(same)] * 3
    assert all(one["outputs"]["checked"] and not one["outputs"]["different"] for one in ran.result["points"])
    status, line = fails(first, "--compare-outputs", tmp_path / "other.onnx", *SHORT)
    assert (status, line.startswith(f"{first}: not the outputs of {tmp_path / 'other.onnx'}: output 'y'")) == (1, True)


def test_random_outputs_are_not_compared(tmp_path: Path) -> None:
    models = tmp_path / "models"
    model = add_model(models, "random", builders.random_outputs)
    with serving(models, *SHORT_WARMUP) as random:
        targets = (str(model), "--way", "run,batcher"), (random.url, "--model", "random", "--compare-outputs", model)
        for target in targets:
            ran = bench(*target, *MODEST, "--json")
            assert not ran.problems
            for point in ran.result["points"]:
                assert point["outputs"]["checked"] == 0
                assert "differ for equal inputs: output 'y'" in point["outputs"]["expected"]
        assert "Wrong answers are not detected" in bench(*targets[1], *MODEST).out


def test_generators_share_the_load(server: ServerProcess) -> None:
    ran = bench(server.url, "--model", "digits", "--rate", "200", "--processes", "2", *SHORT, "--json")

    assert ran.point["generator"]["processes"] == 2
    assert ran.point["requests"] == ran.point["answers"]
    assert 90 <= ran.point["requests"] <= 100, "a busy machine may send a few too late"


def test_targets_take_turns_and_are_compared(server: ServerProcess, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    page = tmp_path / "page.html"
    targets = (server.url, f"grpc://{server.grpc}", "--model", "digits", "--concurrency", "1,2")
    for file, more in zip(files, ((), ("-o", page)), strict=True):  # pictures take seconds
        ran = bench(*targets, "--seconds", "0.2", "--warmup", "0", "--rounds", "2", "--json", *more)
        file.write_text(ran.out)
    keys = [(one["way"], one["concurrency"]) for one in ran.result["points"]]
    assert keys == [("rest", 1), ("rest", 2), ("grpc", 1), ("grpc", 2)]
    assert {read_result(file).points[0].way for file in files} == {"rest"}
    assert "Latency against load" in page.read_text()

    compared = bench("--compare", *files, "--json")

    changes = compared.result["changes"]
    assert len(changes) == 4 * 6
    same = bench("--compare", files[0], files[0], "--json").result["changes"]
    assert all(one["ratio"] == 1 and not one["is_significant"] for one in same)
    assert "within the noise" in bench("--compare", files[0], files[0]).out


@pytest.mark.parametrize("name", ["digits", "text_stats"])
def test_models_in_this_process_are_measured(name: str) -> None:
    ways = "run,batcher" if name == "text_stats" else "run,bound,batcher"

    ran = bench(EXAMPLE / name, "--way", ways, "--batch", "1,4", "--seconds", "0.25", "--warmup", "0.05", "--json")

    points = ran.result["points"]
    assert [(one["way"], one["batch"]) for one in points] == [(w, rows) for w in ways.split(",") for rows in (1, 4)]
    assert (ran.status, ran.result["problems"]) == (0, [])
    for point in points:
        assert point["answers"] > 20
        assert point["outputs"]["different"] == 0
        assert bool(point["batches"]) == (point["way"] == "batcher")


def test_inputs_that_requests_may_omit_are_not_bound(tmp_path: Path) -> None:
    ran = bench(interfaces.optional_bias(tmp_path / "optional.onnx"), "--way", "bound", *SHORT, "--json")

    assert (ran.status, ran.result["problems"]) == (0, [])
    assert ran.point["outputs"]["checked"] > 0


def test_sequences_cannot_be_bound(tmp_path: Path) -> None:
    """A second run would append to the sequence of the first run."""
    status, line = fails(builders.sequence_output(tmp_path / "sequence.onnx"), "--way", "bound", *SHORT)
    assert (status, "cannot be bound" in line) == (2, True), line


def test_outputs_that_are_declared_twice_cannot_be_bound(tmp_path: Path) -> None:
    """A binding has each output once."""
    model = onnx.load(builders.scalar_sum(tmp_path / "once.onnx"))
    model.graph.output.append(model.graph.output[0])
    onnx.save(model, tmp_path / "twice.onnx")
    status, line = fails(tmp_path / "twice.onnx", "--way", "bound", *SHORT)
    assert (status, "cannot be bound" in line) == (2, True), line


def test_open_loop_on_a_model_in_this_process_is_measured() -> None:
    ran = bench(EXAMPLE / "digits", "--rate", "100", "--seconds", "1", "--warmup", "0.1", "--json")

    assert ran.point["answers"] == ran.point["requests"] == 100


def test_rate_beyond_a_model_in_this_process_is_overload(tmp_path: Path) -> None:
    """Requests that could not run in time are failures, also those of the warm-up, which delay the measurement."""
    model = builders.heavy(tmp_path / "model.onnx")
    load = ("--seconds", "1", "--warmup", "1", "--timeout", "0.5", "--json")
    ran = bench(model, "--rate", "20000", *load)

    assert ran.point["requests"] == 20_000
    assert ran.failures["timeout"] > 10_000
    assert ran.point["answers"] > 0
    assert any("requests failed" in problem for problem in ran.problems)


def test_recorded_arrivals_are_replayed(server: ServerProcess, tmp_path: Path) -> None:
    times = tmp_path / "times.txt"
    times.write_text("\n".join(str(100 + 0.01 * number) for number in range(40)))

    ran = bench(server.url, "--model", "digits", "--arrivals", times, "--seconds", "2", "--warmup", "0", "--json")

    assert ran.point["requests"] == 40
    assert ran.point["load"] == "times of times.txt"

    times.write_text("0\n100\n")
    ran = bench(server.url, "--model", "digits", "--arrivals", times, *SHORT, "--json")
    (problem,) = ran.problems
    assert "no request could be sent within 0.5 s, because none was due" in problem


@pytest.mark.parametrize("command", commands(DOCS / "tools" / "bench.md"), ids=str)
def test_commands_of_the_page_run(server: ServerProcess, command: Command) -> None:
    text = re.sub(r"--seconds \d+", "--seconds 0.3 --warmup 0", command.text).replace("models/", f"{EXAMPLE}/")
    text = text.replace("127.0.0.1:8000", server.http).replace("127.0.0.1:8001", server.grpc)
    name, *arguments = Command(command.page, text).words[1:]

    ran = bench(*arguments, "--json")

    assert name == "bench"
    assert ran.result["points"]
    assert [one for one in ran.result["points"] if one["failures"]] == []
    assert any(one["answers"] for one in ran.result["points"]), "a busy machine may leave some points without time"


def test_tables_show_what_was_measured(server: ServerProcess) -> None:
    ran = bench(server.url, "--model", "digits", "--concurrency", "2", *SHORT)

    assert "Latency in ms" in ran.out
    assert re.search(r"2 callers +[\d.]+ +[\d.]+", ran.out)
    assert "\x1b" not in ran.out
