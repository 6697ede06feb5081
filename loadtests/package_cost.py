"""Does a request cost more with one build of the package than with another?

Level: server. Expected after a change that moves code: no more CPU per request, over REST and gRPC.

    ORTSERVE_COMPILE=1 python -m pip install --no-deps --no-build-isolation --target OLD .    # on the old commit
    ORTSERVE_COMPILE=1 python -m pip install --no-deps --no-build-isolation --target NEW .    # on the new commit
    python loadtests/package_cost.py OLD NEW [--rounds 9] [--seconds 2]

Both servers run throughout and are loaded in turns: by wrk over REST with 32 connections and with one, and by h2load
over gRPC with 8 connections of 8 streams. Answers are compared with ONNX Runtime's. Writes
``loadtests/results/package_cost.md``.
"""

import argparse
from pathlib import Path

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
from builds import CALLS_CPU, REST_CPU, REST_P50, REST_RATE, comparison, load_by_h2load, load_by_wrk, measure  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="folder with the old package")
    parser.add_argument("new", type=Path, help="folder with the new package")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    packages = {"old": options.old, "new": options.new}
    environments = {name: {"PYTHONPATH": str(package.resolve())} for name, package in packages.items()}
    measured = measure(
        environments, (load_by_wrk(options.seconds), load_by_h2load(calls=30_000)), rounds=options.rounds
    )
    text = comparison(
        "A request with two builds of the package",
        measured,
        (REST_CPU, REST_RATE, REST_P50, CALLS_CPU),
        rounds=options.rounds,
    )
    text = text.replace(f"{options.old} {options.new}", "OLD NEW")
    options.results.mkdir(exist_ok=True)
    (options.results / "package_cost.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
