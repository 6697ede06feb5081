"""How much CPU time does the batcher itself take per request, with batches of 32?

Level: function; the same run measures the whole CPU of a REST JSON request at the server level. Expected: about 5 µs
per request, and at most a tenth of the whole.

    python loadtests/batcher_cost.py [--rounds 5]

A runner that answers at once replaces the model. The figure covers queueing, planning, gathering, splitting and waking
32 callers, including their futures and the iterations of the event loop. Answers are checked once. The server serves a
tiny MLP to 32 connections (wrk). Writes ``loadtests/results/batcher_cost.md``.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import numpy as np  # noqa: E402
import uvloop  # noqa: E402

from fakes.runner import NeverOverdue  # noqa: E402
from harness import serving, spread, write_report, wrk  # noqa: E402
from infer_requests import json_request  # noqa: E402
from ortserve.batching.admission import QueueLimits  # noqa: E402
from ortserve.batching.batch_runs import BatchRuns  # noqa: E402
from ortserve.batching.batcher import Batcher  # noqa: E402
from ortserve.batching.inline_runs import InlineBudget, InlineRuns  # noqa: E402
from ortserve.batching.planner import BatchPolicy  # noqa: E402
from ortserve.batching.queue import RequestQueue  # noqa: E402
from ortserve.batching.shared_threads import SharedThreads  # noqa: E402
from ortserve.clock import monotonic_ns  # noqa: E402
from ortserve.core.batch import Batch, BatchDone, BatchResult  # noqa: E402
from ortserve.core.inflight import InflightRequest  # noqa: E402
from ortserve.core.timing import Timing  # noqa: E402
from tiny_mlp import write_tiny_mlp  # noqa: E402

CALLERS = 32
TURNS = 3000
PORT = 18000


class InstantRunner(NeverOverdue):
    """Returns rows that were computed in advance."""

    def __init__(self, outputs: np.ndarray) -> None:
        self._outputs = outputs
        self.batches = 0

    def run(self, batch: Batch) -> BatchResult:
        self.batches += 1
        now_ns = monotonic_ns()
        return BatchResult((self._outputs[: batch.rows],), now_ns, now_ns, 1_000)

    def start(self, batch: Batch, done: BatchDone) -> None:
        done(self.run(batch))


async def batcher_us() -> float:
    """CPU µs of the batcher per request."""
    loop = asyncio.get_running_loop()
    outputs = np.arange(CALLERS * 10, dtype=np.float32).reshape(CALLERS, 10)
    runner = InstantRunner(outputs)
    known = [(1, 1_000.0), (CALLERS, 1_000.0)]
    runs = BatchRuns(
        [runner],
        BatchPolicy(CALLERS, closed_loop_wait=True),
        RequestQueue(known, known),
        shared=SharedThreads(1, loop),
        threads=1,
        inline=InlineRuns(InlineBudget(loop)),
        loop=loop,
        clock=monotonic_ns,
        observe_batch=lambda *_: None,
    )
    batcher = Batcher(runs, QueueLimits(4096, 2**30), monotonic_ns)
    rows = np.zeros((1, 64), np.float32)

    async def turn() -> list[tuple[np.ndarray, ...]]:
        requests = [InflightRequest(Timing(monotonic_ns()), (rows,)) for _ in range(CALLERS)]
        for request in requests:
            batcher.submit(request, None)
        return [await request for request in requests]

    for index, (answer,) in enumerate(await turn()):
        np.testing.assert_array_equal(answer, outputs[index : index + 1])
    for _ in range(200):
        await turn()
    runner.batches = 0
    began_s = time.process_time()
    for _ in range(TURNS):
        await turn()
    used_s = time.process_time() - began_s
    assert runner.batches == TURNS
    return used_s / (TURNS * CALLERS) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    own: list[float] = []
    whole: list[float] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        body = json_request(write_tiny_mlp(folder, decimals=6).row, decimals=6)
        with serving(folder, PORT) as pid:
            url = f"http://127.0.0.1:{PORT}/v2/models/mlp/infer"
            wrk(url, body, folder, pid=pid, connections=CALLERS, seconds=1)
            for _ in range(options.rounds):
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    own.append(runner.run(batcher_us()))
                whole.append(wrk(url, body, folder, pid=pid, connections=CALLERS, seconds=3).cpu_us)
                print(f"batcher {own[-1]:.2f} µs, request {whole[-1]:.1f} µs", flush=True)
    shares = [part / request for part, request in zip(own, whole, strict=True)]
    write_report(
        HERE / "results" / "batcher_cost.md",
        "CPU of the batcher",
        f"Batcher, at batches of {CALLERS}: {spread(own)} µs a request.",
        f"A REST JSON request, all in: {spread(whole)} µs. Share: {spread(shares)}.",
    )


if __name__ == "__main__":
    main()
