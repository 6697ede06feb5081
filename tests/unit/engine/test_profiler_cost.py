"""The profiler's own part of the times that it records, measured with a real profiler."""

import json
from pathlib import Path

import pytest

from ortserve.engine.profiler_cost import CallOverhead


def test_interrupted_calls_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four calls of 5 ms in each chain: the mean of all calls would be more than 100 µs."""
    overhead = CallOverhead(1, tmp_path / "trace")
    for _ in range(5):
        overhead.sample()
    trace = Path(overhead._profiled.end_profiling())
    events = json.loads(trace.read_bytes())
    for event in [event for event in events if event["cat"] == "Node"][::50]:
        event["dur"] += 5000
    trace.write_text(json.dumps(events))
    monkeypatch.setattr(overhead._profiled, "end_profiling", lambda: str(trace))

    assert 0 < overhead.finish() < 50
