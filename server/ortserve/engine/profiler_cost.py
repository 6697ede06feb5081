"""Measures the time that ONNX Runtime's profiler adds to the times that it records."""

import json
import time
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort

from ortserve.engine.provider_options import CPU
from ortserve.model_file.editing import GRAPH_INPUT, GRAPH_OUTPUT, write_model, write_node, write_tensor
from ortserve.model_file.graph import FLOAT

_NODES: Final = 200
"""So many that the time of a run outside its nodes, about 17 µs, adds only 0.1 µs to that of a node without the
profiler."""
_WIDTHS: Final = range(1, 301, 30)
"""Sizes of the tensors. The nodes take 0.3 to 1.8 µs, in steps that are shorter than the clock's 1 µs."""
_MAX_SAMPLES: Final = 100


class CallOverhead:
    """Measures the profiler's own part of the recorded time of a node's call.

    ONNX Runtime records the shapes, memory and threads of a call before it stops the call's clock. This takes 2 µs with
    one or two inputs, 0.1 µs more with each further one, and 1.2 µs more with several threads. The clock drops
    fractions of a microsecond. Nodes of one duration always lose the same fraction, up to 1 µs, so each sample runs
    nodes of different durations, with and without the profiler: on average, they lose as much as the nodes of other
    models. Take samples between the runs of the profiled model, so that both see the same load of the machine. One
    thread at a time.
    """

    def __init__(self, threads: int, prefix: Path) -> None:
        """Open the two sessions.

        Args:
            threads: Number of threads of a run, the calling thread included.
            prefix: Path prefix of the trace; the folder must exist.
        """
        nodes = b""
        for number in range(_NODES):
            name = f"x{_WIDTHS[number // 2 % len(_WIDTHS)]}"
            op, inputs = ("Pow", [name, name]) if number % 2 else ("Sinh", [name])
            nodes += write_node(op, "", inputs, f"y{number}")
        ends = b"".join(write_tensor(GRAPH_INPUT, f"x{width}", FLOAT, [width]) for width in _WIDTHS)
        ends += write_tensor(GRAPH_OUTPUT, f"y{_NODES - 1}", FLOAT, [_WIDTHS[-1]])
        model = write_model(nodes + ends, opset=14, ir_version=8)
        self._plain = _open(model, threads, None)
        self._profiled = _open(model, threads, prefix)
        self._plain_us: list[float] = []

    def sample(self) -> None:
        """Run both sessions twice, in about 3 ms. No-op after the hundredth sample.

        Only the second runs count: after a run of the model, the first ones wait for memory that it has displaced from
        the caches, mostly outside of the times that the profiler records.
        """
        if len(self._plain_us) == _MAX_SAMPLES:
            return
        feeds = {f"x{width}": np.full(width, 1.5, np.float32) for width in _WIDTHS}
        for session in (self._profiled, self._profiled, self._plain):
            session.run(None, feeds)
        began_ns = time.thread_time_ns()  # without interruptions
        self._plain.run(None, feeds)
        self._plain_us.append((time.thread_time_ns() - began_ns) / 1e3)

    def finish(self) -> float:
        """End the measurement. Returns the profiler's part of a call in microseconds.

        Each node counts with the mean of the middle half of its calls, as the nodes of profiled models do. This leaves
        out calls that other work interrupted.
        """
        events = json.loads(Path(self._profiled.end_profiling()).read_bytes())
        calls_us = np.array([event["dur"] for event in events if event["cat"] == "Node"], np.float64)
        second_runs = np.sort(calls_us.reshape(-1, 2, _NODES)[:, 1], axis=0)
        cut = len(second_runs) // 4
        recorded_us = float(second_runs[cut : len(second_runs) - cut].mean())
        return max(0.0, recorded_us - float(np.median(self._plain_us)) / _NODES)


def _open(model: bytes, threads: int, prefix: Path | None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if prefix is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(prefix)
    return ort.InferenceSession(model, options, providers=[CPU])
