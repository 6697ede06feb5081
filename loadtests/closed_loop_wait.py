"""Do closed-loop clients gain if a batch briefly waits for their next requests?

Level: server. Expected: at least 1.2 times the requests per second for 4 and 8 clients in a closed loop, and no loss
for 16. The duration of the model's runs hardly depends on the number of rows, as with small models on a GPU.

    python loadtests/closed_loop_wait.py [--rounds 5] [--seconds 4]

Two servers, with and without ``--no-closed-loop-wait``, are loaded in turns. Both have the same ``--max-rows``, because
warm-up may find different ones beside other work. Meanwhile a checker compares answers with the expected ones.
Writes ``loadtests/results/closed_loop_wait.md``.
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import numpy as np  # noqa: E402
import onnxruntime as ort  # noqa: E402

from harness import Load, checking, post, serving, spread, table, write_report, wrk  # noqa: E402
from infer_requests import json_request, numbers_of_json  # noqa: E402
from models.builders import slow  # noqa: E402

PORTS = {"waiting": 18000, "not waiting": 18010}
CLIENTS = (4, 8, 16)
STEPS = 450
"""Steps of the model's loop: about 2 ms per run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=4)
    options = parser.parse_args()
    array = np.arange(4, dtype=np.float32).reshape(1, 4)
    body = json_request(array)
    results: dict[tuple[int, str], list[Load]] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
        folder = Path(temporary)
        (folder / "slow" / "1").mkdir(parents=True)
        file = slow(folder / "slow" / "1" / "model.onnx", steps=STEPS)
        expected = (
            ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"x": array})[0].ravel()
        )
        pids = {}
        for arm, port in PORTS.items():
            flags = [] if arm == "waiting" else ["--no-closed-loop-wait"]
            pids[arm] = servers.enter_context(serving(folder, port, f"--max-rows={max(CLIENTS)}", *flags))

        def check(url: str) -> None:
            np.testing.assert_allclose(numbers_of_json(post(url, body)), expected, rtol=1e-5)

        for number in range(options.rounds):
            for clients in CLIENTS:
                for arm in PORTS if number % 2 == 0 else reversed(PORTS):
                    url = f"http://127.0.0.1:{PORTS[arm]}/v2/models/slow/infer"
                    with checking(lambda url=url: check(url)):  # type: ignore[misc]  # the default binds the loop's value
                        load = wrk(url, body, folder, pid=pids[arm], connections=clients, seconds=options.seconds)
                    results.setdefault((clients, arm), []).append(load)
                    print(f"round {number + 1} {clients:3} clients, {arm:11} {load}", flush=True)
    rows = []
    for clients in CLIENTS:
        waiting, not_waiting = results[clients, "waiting"], results[clients, "not waiting"]
        ratios = [one.requests_per_s / other.requests_per_s for one, other in zip(waiting, not_waiting, strict=True)]
        rows.append(
            [
                str(clients),
                spread([load.requests_per_s for load in not_waiting]),
                spread([load.requests_per_s for load in waiting]),
                spread(ratios),
                spread([load.p99_ms for load in not_waiting]),
                spread([load.p99_ms for load in waiting]),
            ]
        )
    header = ["clients", "requests/s", "waiting: requests/s", "times as many", "p99 ms", "waiting: p99 ms"]
    write_report(HERE / "results" / "closed_loop_wait.md", "Waiting for closed-loop callers", table(header, rows))


if __name__ == "__main__":
    main()
