"""Measures the time that ONNX Runtime's profiler adds to the times that it records."""

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Final

import numpy as np
import onnxruntime as ort

from ortserve.engine.provider_options import CPU
from ortserve.model_file.editing import GRAPH_INPUT, GRAPH_OUTPUT, write_model, write_node, write_tensor
from ortserve.model_file.graph import FLOAT

_NODES: Final = 200
"""So many that the time of a run outside its nodes, about 17 µs, adds only 0.1 µs to that of a node without the
profiler."""
_MAX_SAMPLES: Final = 100
_INTERRUPTED: Final = 10
"""A call that takes so many times as long as half of the others was interrupted."""
_QUIET: Final = 0.25
"""The quantile of runs that stands for an undisturbed one. Other work on the machine makes runs longer, and those
without the profiler more so."""


class CallOverhead:
    """Measures the profiler's own part of the recorded time of a node's call.

    ONNX Runtime records the shapes, memory and threads of a call before it stops the call's clock. This takes 1 to 3 µs
    with one input and up to 2 µs more with sixteen; the larger figures are with several threads. Each sample runs a
    chain of nodes that take 0.3 µs each, with and without the profiler. Take samples between the runs of the profiled
    model, so that both see the same load of the machine. One thread at a time.
    """

    def __init__(self, threads: int, prefix: Path) -> None:
        """Open the two sessions.

        Args:
            threads: Number of threads of a run, the calling thread included.
            prefix: Path prefix of the trace; the folder must exist.
        """
        names = [f"t{number}" for number in range(_NODES + 1)]
        nodes = b"".join(write_node("Relu", "", [source], target) for source, target in pairwise(names))
        ends = write_tensor(GRAPH_INPUT, names[0], FLOAT, [1]) + write_tensor(GRAPH_OUTPUT, names[-1], FLOAT, [1])
        model = write_model(nodes + ends, opset=14, ir_version=8)
        self._plain = _open(model, threads, None)
        self._profiled = _open(model, threads, prefix)
        self._plain_us: list[float] = []

    def sample(self) -> None:
        """Run both sessions twice, in about 2 ms. No-op after the hundredth sample.

        Only the second runs count: after a run of the model, the first ones wait for memory that it has displaced from
        the caches, mostly outside of the times that the profiler records.
        """
        if len(self._plain_us) == _MAX_SAMPLES:
            return
        feeds = {"t0": np.ones(1, np.float32)}
        for session in (self._profiled, self._profiled, self._plain):
            session.run(None, feeds)
        began_ns = time.thread_time_ns()  # without interruptions
        self._plain.run(None, feeds)
        self._plain_us.append((time.thread_time_ns() - began_ns) / 1e3)

    def finish(self) -> float:
        """End the measurement. Returns the profiler's part of a call in microseconds.

        Calls and runs that other work interrupted do not count: on a busy machine, each chain after a long run has one
        that takes longer than all other calls together.
        """
        events = json.loads(Path(self._profiled.end_profiling()).read_bytes())
        calls_us = [event["dur"] for event in events if event["cat"] == "Node"]
        second_runs = range(_NODES, len(calls_us), 2 * _NODES)
        runs_us = [_uninterrupted(calls_us[start : start + _NODES]) for start in second_runs]
        recorded_us, plain_us = (float(np.quantile(times, _QUIET)) for times in (runs_us, self._plain_us))
        return max(0.0, recorded_us - plain_us / _NODES)


def _uninterrupted(times_us: Sequence[float]) -> float:
    """The mean of the calls that other work did not interrupt."""
    limit_us = _INTERRUPTED * median(times_us)
    return fmean(one for one in times_us if one <= limit_us)


def _open(model: bytes, threads: int, prefix: Path | None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if prefix is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(prefix)
    return ort.InferenceSession(model, options, providers=[CPU])
