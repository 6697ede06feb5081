"""The profiler's own part of the times that it records, measured with a real profiler."""

import json
from pathlib import Path

import pytest

from ortserve.engine.profiler_cost import CallOverhead


def test_interrupted_calls_and_first_runs_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of first runs take 1 ms, as their caches are cold; of each other run, four different calls take 5 ms."""
    overhead = CallOverhead(1, tmp_path / "trace")
    for _ in range(5):
        overhead.sample()
    trace = Path(overhead._profiled.end_profiling())
    events = json.loads(trace.read_bytes())
    calls = [event for event in events if event["cat"] == "Node"]
    for number, call in enumerate(calls):
        is_first_run = number // (len(calls) // 10) % 2 == 0
        call["dur"] = 1000 if is_first_run else 5000 if number % 49 == 0 else 3
    trace.write_text(json.dumps(events))
    monkeypatch.setattr(overhead._profiled, "end_profiling", lambda: str(trace))

    overhead._plain_us = [200 * 0.3] * 5

    assert overhead.finish() == pytest.approx(2.7)
