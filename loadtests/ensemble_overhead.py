"""How much time does a step of an ensemble add to the run of its model?

Level: engine, one process, no protocol. Expected: at most 60 µs per step with the compiled package.

    python loadtests/ensemble_overhead.py [--rounds 7] [--requests 2000]

The server's loader loads three models that add 1 to 16 numbers. Both arms run one request at a time and take turns in
each round: an ensemble that chains the three models, and the same three requests that the benchmark submits one after
the other. The difference divided by three is the cost of a step. Answers are checked once. Prints the spread of the
rounds and writes no file.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import numpy as np  # noqa: E402
import uvloop  # noqa: E402
from prometheus_client import CollectorRegistry  # noqa: E402

from harness import circumstances  # noqa: E402
from models import members  # noqa: E402
from ortserve.clock import monotonic_ns  # noqa: E402
from ortserve.config.model import LoadOptions  # noqa: E402
from ortserve.core.batch import Arrays  # noqa: E402
from ortserve.core.inflight import InflightRequest  # noqa: E402
from ortserve.core.timing import Timing  # noqa: E402
from ortserve.registry.registry import Registry  # noqa: E402
from ortserve.registry.served_version import ServedVersion  # noqa: E402
from ortserve.telemetry.metrics import Metrics  # noqa: E402

STEPS = ("one", "two", "three")


async def ask(served: ServedVersion, inputs: Arrays) -> Arrays:
    """Run one request."""
    now_ns = monotonic_ns()
    request = InflightRequest(Timing(now_ns), inputs, len(inputs[0]))
    served.submit(request, served.terms(now_ns))
    return served.cut_back(await request, request.inputs)


async def measure(folder: Path, rounds: int, requests: int) -> None:
    """Load the models and print the time of a request for both arms."""
    shape = ("batch", 16)
    for name in STEPS:
        (folder / name / "1").mkdir(parents=True)
        members.affine(folder / name / "1" / "model.onnx", offset=1, shape=shape)
    tensors = ("x", "t", "u", "y")
    chain = [(name, {"a": tensors[n]}, {"b": tensors[n + 1]}) for n, name in enumerate(STEPS)]
    members.add_ensemble(folder, "chain", ["x"], ["y"], chain)
    registry = Registry([folder], LoadOptions(warmup_s=0.5), Metrics(CollectorRegistry()), monotonic_ns)
    await registry.load_all()
    ensemble, alone = registry.find("chain", ""), [registry.find(name, "") for name in STEPS]
    inputs = (np.arange(16, dtype=np.float32).reshape(1, 16),)

    async def through_ensemble() -> Arrays:
        return await ask(ensemble, inputs)

    async def one_after_the_other() -> Arrays:
        tensors: Arrays = inputs
        for served in alone:
            tensors = await ask(served, tensors)
        return tensors

    for arm in (through_ensemble, one_after_the_other):
        assert np.array_equal((await arm())[0], inputs[0] + 3)
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        pair = []
        for arm in (through_ensemble, one_after_the_other):
            began = time.perf_counter()
            for _ in range(requests):
                await arm()
            pair.append((time.perf_counter() - began) / requests * 1e6)
        times.append((pair[0], pair[1]))
    await registry.close()
    costs = sorted((one - other) / len(STEPS) for one, other in times)
    whole, apart = median(one for one, _ in times), median(other for _, other in times)
    print(f"{circumstances()} {rounds} rounds of {requests} requests.")
    print(f"ensemble of {len(STEPS)} steps: {whole:.1f} µs; the same models one after the other: {apart:.1f} µs")
    print(
        f"a step costs {median(costs):.1f} µs more (from {costs[0]:.1f} to {costs[-1]:.1f}); whole {whole / 3:.1f} µs"
    )


def main() -> None:
    """Measure in a temporary repository."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=2000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(measure(Path(folder), arguments.rounds, arguments.requests))


if __name__ == "__main__":
    main()
