"""A loop that stands still is reported, in the log and in the metrics."""

import signal
from pathlib import Path

import pytest

from servers import freezing, read_metrics, serving, starting, wait_for_sample


@pytest.mark.parametrize(("way", "step"), [("call", "stands still"), ("lock", "goes on after a stall")])
def test_stall_is_logged_and_counted(tmp_path: Path, way: str, step: str) -> None:
    """While a call keeps the interpreter lock nothing else can log: then it is seen afterwards."""
    with serving(tmp_path, env=freezing(way, seconds=1.5)) as server:
        server.send(signal.SIGUSR1)
        line = server.wait_for_line("the event loop", step)
        assert way == "lock" or "stack=" in line
        assert way == "lock" or "sitecustomize._freeze:" in line
        assert " seconds=" in server.wait_for_line("the event loop goes on after a stall")
        samples = read_metrics(server)
        assert samples.value("ortserve_event_loop_stalls_total") >= 1
        assert samples.value("ortserve_event_loop_stall_seconds_total") > 1


def test_stall_is_told_while_it_lasts(tmp_path: Path) -> None:
    with starting(tmp_path, env=freezing("call")) as server:
        server.wait_for_line("no models were found")  # the last line: a loop frozen in the middle of one keeps the log
        server.send(signal.SIGUSR1)
        server.wait_for_line("the event loop stands still")
        # The metrics port has its own thread.
        seconds = wait_for_sample(server, "ortserve_event_loop_stall_seconds_total", lambda value: value > 0)
        wait_for_sample(server, "ortserve_event_loop_stall_seconds_total", lambda value: value > seconds)
        server.send(signal.SIGTERM)
        server.wait_until_delivered(signal.SIGTERM)
        server.send(signal.SIGTERM)
        assert server.wait() == -signal.SIGTERM
