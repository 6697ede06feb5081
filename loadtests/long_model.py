"""Do the requests of one model wait for the long runs of another?

Level: server. Expected: beside a model whose runs of some 50 ms take all processors, the median of a model whose runs
take 2 to 4 ms on a worker is below a third of that. When both are always busy, the short one loses no more to the other
than about half of the processors.

    python loadtests/long_model.py [--rounds 5] [--seconds 5] [--base DIR --base-name NAME]

A separate process keeps two requests to the long model under way. Meanwhile the short model gets 20 requests a second
(Poisson), then two callers in a closed loop. ``--base`` measures the server of another source tree in turns with this
one. Answers are compared with ONNX Runtime's. Writes ``loadtests/results/long_model.md``.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "support"), str(HERE)]
import numpy as np  # noqa: E402
import onnxruntime as ort  # noqa: E402

from crafted_messages import http_request  # noqa: E402
from harness import process, receive, serving, spread, table, write_report  # noqa: E402
from infer_requests import json_request, numbers_of_json  # noqa: E402
from models.builders import heavy  # noqa: E402
from open_loop import Outcome, closed_loop, offer  # noqa: E402

PORT: Final = 18700
LONG_ROWS: Final = 32
RATE: Final = 20
CALLERS: Final = 2
STEPS: Final = {"long": 120, "short": 30}
FIGURES: Final = ("p50 ms", "p99 ms", "short/s, both busy", "long/s, both busy", "long/s beside few")


class Caller:
    """Sends requests of ``rows`` rows to a model, and checks answers."""

    def __init__(self, repository: Path, name: str, rows: int) -> None:
        sent = np.random.default_rng(rows).standard_normal((rows, 64)).astype(np.float32).round(4)
        file = repository / name / "1" / "model.onnx"
        self._expected = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"x": sent})[0]
        self._requests = [http_request(name, json_request(sent))]

    def check(self, _: int, body: bytes) -> None:
        np.testing.assert_allclose(numbers_of_json(body), self._expected.ravel(), rtol=1e-3, atol=1e-4)

    def some(self, port: int, seconds: float, seed: int) -> Outcome:
        return offer(port, self._requests, self.check, rate=RATE, seconds=seconds, seed=seed, check_every=5)

    def many(self, port: int, seconds: float) -> Outcome:
        return closed_loop(port, self._requests, self.check, callers=CALLERS, seconds=seconds)


def keep_busy(pipe: Pipe, repository: Path) -> None:
    """Keep the long model busy for each (port, seconds) that ``pipe`` receives, and send back the answers a second."""
    caller = Caller(repository, "long", LONG_ROWS)
    pipe.send(None)
    while (order := pipe.recv()) is not None:
        pipe.send(caller.many(*order).answers_per_s)


def measure(pipe: Pipe, short: Caller, port: int, seconds: float, seed: int) -> Sequence[float]:
    """One round on the server at ``port``: the values of ``FIGURES``."""
    pipe.send((port, seconds))
    some = short.some(port, seconds, seed)
    beside_few = receive(pipe, 60)
    pipe.send((port, seconds))
    many = short.many(port, seconds)
    both_busy = receive(pipe, 60)
    return some.quantile_ms(0.5), some.quantile_ms(0.99), many.answers_per_s, both_busy, beside_few


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--base", type=Path, help="a source tree to compare with")
    parser.add_argument("--base-name", default="not measured", help="its name in the report")
    options = parser.parse_args()
    trees = {"this": HERE.parent} | ({"base": options.base} if options.base else {})
    measured: dict[str, list[Sequence[float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        repository = Path(temporary)
        for name, steps in STEPS.items():
            (repository / name / "1").mkdir(parents=True)
            heavy(repository / name / "1" / "model.onnx", steps=steps)
        (repository / "long" / "model.yaml").write_text(f"max_rows: {LONG_ROWS}\nintra_op_threads: 2\n")
        (repository / "short" / "model.yaml").write_text("max_rows: 4\nintra_op_threads: 1\n")
        short = Caller(repository, "short", 1)
        ports = {}
        for number, (name, tree) in enumerate(trees.items()):
            ports[name] = PORT + 10 * number
            environment = {"PYTHONPATH": str(tree / "server")}
            stack.enter_context(serving(repository, ports[name], environment=environment))
        pipe = stack.enter_context(process(keep_busy, repository))
        receive(pipe, 60)
        for number in range(options.rounds):
            for name in trees if number % 2 else reversed(list(trees)):
                measured[name].append(measure(pipe, short, ports[name], options.seconds, number))
                print(name, [round(value, 1) for value in measured[name][-1]], flush=True)
    rows = [[name, *(spread(values) for values in zip(*measured[name], strict=True))] for name in trees]
    what = f"Base is another version of the server, {options.base_name}. Medians (lowest to highest)."
    page = HERE / "results" / "long_model.md"
    write_report(page, "A short model beside a long one", what, table(("server", *FIGURES), rows))


if __name__ == "__main__":
    main()
