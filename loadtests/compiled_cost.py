"""How much does compiling the request path save?

Level: server. Expected: a REST JSON request takes at most 0.8 of the interpreted server's CPU at 32 connections, and
less than its median time at one connection. The same holds for a gRPC call.

    make test-compiled PYTEST_ARGS=tests/unit/core    # builds the compiled package in .venv/compiled
    python loadtests/compiled_cost.py [--package .venv/compiled] [--rounds 7] [--seconds 3]

Both servers run throughout; wrk and one grpcio client load them in turns, as in ``grpc_latency``. Answers are compared
with ONNX Runtime's. Writes ``loadtests/results/compiled_cost.md``.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
from builds import CALL_P50, REST_CPU, REST_P50, REST_RATE, comparison, load_by_grpcio, load_by_wrk, measure  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=HERE.parent / ".venv" / "compiled")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    environments = {"interpreted": {}, "compiled": {"PYTHONPATH": str(options.package.resolve())}}
    for name, environment in environments.items():
        check_build(name, environment)
    measured = measure(environments, (load_by_wrk(options.seconds), load_by_grpcio(calls=2000)), rounds=options.rounds)
    text = comparison(
        "The path of requests, compiled", measured, (REST_CPU, REST_RATE, REST_P50, CALL_P50), rounds=options.rounds
    )
    options.results.mkdir(exist_ok=True)
    (options.results / "compiled_cost.md").write_text(text + "\n")
    print(text)


def check_build(name: str, environment: Mapping[str, str]) -> None:
    """Raises RuntimeError if Python finds another build of the package in this environment."""
    command = [sys.executable, "-m", "ortserve", "version"]
    printed = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True).stdout
    if f"request path {name}\n" not in printed:
        raise RuntimeError(f"expected 'request path {name}' of ortserve version, got: {printed}")


if __name__ == "__main__":
    main()
