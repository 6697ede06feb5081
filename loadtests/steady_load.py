"""Sends a steady load to a running server, for looking at its dashboard. It is not a benchmark.

    python loadtests/steady_load.py [--port 8000] [--rate 200] [--seconds 60]

Poisson arrivals of single rows for the bundled example model ``simple`` (``--example``), in stretches of five seconds;
each prints a line. Answers are checked: the model computes the sum and the difference of its inputs. Exits with 1 if
a response is neither an answer nor a rejection (429).
"""

import argparse
import json
import random
import sys

from open_loop import offer

STRETCH_S = 5.0
REQUESTS = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    numbers = random.Random(0)
    pairs = [[[numbers.randrange(1000) for _ in range(16)] for _ in range(2)] for _ in range(REQUESTS)]
    requests = [_request(*pair) for pair in pairs]

    def check(number: int, body: bytes) -> None:
        first, second = pairs[number % REQUESTS]
        outputs = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
        assert outputs["OUTPUT0"] == [a + b for a, b in zip(first, second, strict=True)], body
        assert outputs["OUTPUT1"] == [a - b for a, b in zip(first, second, strict=True)], body

    left_s, failed = options.seconds, 0
    while left_s > 0:
        seconds = min(STRETCH_S, left_s)
        outcome = offer(options.port, requests, check, rate=options.rate, seconds=seconds, seed=int(left_s))
        refused = outcome.statuses[429]
        others = outcome.offered - outcome.statuses[200] - refused
        print(
            f"{outcome.offered / seconds:.0f} requests a second, {outcome.statuses[200]} answered, {refused} refused, "
            f"{others} otherwise; p50 {outcome.quantile_ms(0.5):.2f} ms, p99 {outcome.quantile_ms(0.99):.2f} ms",
            flush=True,
        )
        failed += others
        left_s -= seconds
    return 1 if failed else 0


def _request(first: list[int], second: list[int]) -> bytes:
    inputs = [
        {"name": name, "datatype": "INT32", "shape": [1, 16], "data": data}
        for name, data in (("INPUT0", first), ("INPUT1", second))
    ]
    body = json.dumps({"inputs": inputs}).encode()
    head = f"POST /v2/models/simple/infer HTTP/1.1\r\nHost: ortserve\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


if __name__ == "__main__":
    sys.exit(main())
