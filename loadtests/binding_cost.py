"""What does a run cost with inputs and outputs bound to buffers, against newly allocated arrays?

Level: engine, one thread, CPU time of the process. Expected: 1 to 2 µs less per run for a tiny model, and no
significant difference with large outputs, because ONNX Runtime also reuses their memory from an arena.

    python loadtests/binding_cost.py [--rounds 25]

Ways of running; each first stages the rows of single-row requests into one buffer:

- plain: ``session.run`` on a dict of arrays;
- bound: a binding for each number of rows, with inputs and outputs bound once;
- by address: one binding, with inputs and outputs bound for each run by address and shape;
- output bound anew: inputs bound once, the output bound for each run, as a stored OrtValue;
- inputs bound: inputs bound once, outputs allocated by ONNX Runtime.

The script then measures whole instances, as they serve, with and without binding. At last it measures a request that
fills its bucket alone: copied into the bound buffer, or bound at its own address (after which the buffer is bound
again). All arms take turns in each round. Figures are the lowest of the rounds, because other work on the machine
affects these least. Outputs of the arms are compared. Writes ``loadtests/results/binding_cost.md``.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402

from harness import table, write_report  # noqa: E402
from models.builders import identity, mlp  # noqa: E402
from ortserve.clock import monotonic_ns  # noqa: E402
from ortserve.core.batch import Batch  # noqa: E402
from ortserve.engine.instance import Instance  # noqa: E402
from ortserve.engine.model_signature import read_signature  # noqa: E402
from ortserve.engine.provider_options import CPU  # noqa: E402
from ortserve.engine.providers import ProviderChoice  # noqa: E402
from ortserve.engine.session import SessionOptions, open_session  # noqa: E402

Arm = Callable[[], np.ndarray]
IMAGE = (3, 224, 224)


def open_cpu(path: Path) -> onnxruntime.InferenceSession:
    return open_session(path, "m", SessionOptions(ProviderChoice(CPU), 1))


def cpu_us(arms: Mapping[str, Arm], runs: int, rounds: int) -> dict[str, float]:
    """Lowest CPU µs per run of each arm; all arms must give equal answers."""
    answers = [arm().copy() for arm in arms.values()]
    for answer in answers[1:]:
        np.testing.assert_array_equal(answer, answers[0])
    lowest = dict.fromkeys(arms, float("inf"))
    for _ in range(rounds):
        for name, arm in arms.items():
            began_ns = time.process_time_ns()
            for _ in range(runs):
                arm()
            lowest[name] = min(lowest[name], (time.process_time_ns() - began_ns) / runs / 1e3)
    return lowest


def ways_of_running(
    session: onnxruntime.InferenceSession, parts: Sequence[np.ndarray], item: tuple[int, ...]
) -> dict[str, Arm]:
    rows = len(parts)
    slab = np.empty((rows, *parts[0].shape[1:]), np.float32)
    out = np.empty((rows, *item), np.float32)
    out_value = onnxruntime.OrtValue.ortvalue_from_numpy(out)
    addresses = slab.ctypes.data, out.ctypes.data
    kept, by_address, out_anew, in_kept = (session.io_binding() for _ in range(4))
    for binding in (kept, out_anew, in_kept):
        binding.bind_cpu_input("x", slab)
    kept.bind_output("y", "cpu", 0, np.float32, out.shape, addresses[1])

    def stage() -> None:
        np.concatenate(parts, out=slab)

    def plain() -> np.ndarray:
        stage()
        output: np.ndarray = session.run(["y"], {"x": slab})[0]
        return output

    def bound() -> np.ndarray:
        stage()
        session.run_with_iobinding(kept)
        return out[:rows]

    def address() -> np.ndarray:
        stage()
        by_address.bind_input("x", "cpu", 0, np.float32, slab.shape, addresses[0])
        by_address.bind_output("y", "cpu", 0, np.float32, out.shape, addresses[1])
        session.run_with_iobinding(by_address)
        return out[:rows]

    def anew() -> np.ndarray:
        stage()
        out_anew.bind_ortvalue_output("y", out_value)
        session.run_with_iobinding(out_anew)
        return out[:rows]

    def inputs() -> np.ndarray:
        stage()
        in_kept.bind_output("y")
        session.run_with_iobinding(in_kept)
        output: np.ndarray = in_kept.get_outputs()[0].numpy()
        return output

    return {
        "plain": plain,
        "bound": bound,
        "by address": address,
        "output bound anew": anew,
        "inputs bound": inputs,
    }


def instances(path: Path, parts: Sequence[np.ndarray]) -> tuple[dict[str, Arm], list[Instance]]:
    opened = []
    for _ in range(2):
        session = open_cpu(path)
        signature = read_signature(session)
        opened.append(Instance(session, signature, name="m", intra_op_threads=1, clock=monotonic_ns))
    opened[0]._binding = None
    batch = Batch((tuple(parts),), len(parts), len(parts))
    opened[1].run(batch)  # creates the binding
    plain, bound = opened
    return {"plain": lambda: plain.run(batch).outputs[0], "bound": lambda: bound.run(batch).outputs[0]}, opened


def lone(session: onnxruntime.InferenceSession, width: int) -> dict[str, Arm]:
    # Bodies are used in turns, because bodies of real requests are not in the cache either.
    bodies = [np.random.default_rng(number).standard_normal((1, width), np.float32) for number in range(8)]
    slab, out = np.empty((1, width), np.float32), np.empty((1, 1), np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input("x", slab)
    binding.bind_output("y", "cpu", 0, np.float32, out.shape, out.ctypes.data)

    def copied() -> np.ndarray:
        for body in bodies:
            np.concatenate((body,), out=slab)
            session.run_with_iobinding(binding)
        return out

    def lent() -> np.ndarray:
        for body in bodies:
            binding.bind_cpu_input("x", body)
            session.run_with_iobinding(binding)
            binding.bind_cpu_input("x", slab)
        return out

    def plain() -> np.ndarray:
        for body in bodies:
            output: np.ndarray = session.run(["y"], {"x": body})[0]
        return output

    return {"copied, bound": copied, "not copied, bound": lent, "not copied, plain": plain}


def costs(head: str, lines: Mapping[str, Mapping[str, float]]) -> str:
    """A table with a line for each case and a column for each arm."""
    arms = next(iter(lines.values()))
    return table([head, *arms], [[label, *(f"{us:.2f}" for us in line.values())] for label, line in lines.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    gc.disable()
    ways: dict[str, dict[str, float]] = {}
    served: dict[str, dict[str, float]] = {}
    alone: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        dense = mlp(Path(temporary) / "mlp.onnx")
        images = identity(Path(temporary) / "images.onnx", shape=("batch", *IMAGE))
        for name, path, item, out_item, sizes in (
            ("MLP 64 → 256 → 10", dense, (64,), (10,), ((1, 400), (8, 400), (32, 400))),
            ("images copied", images, IMAGE, IMAGE, ((1, 100), (8, 20), (27, 5))),
        ):
            session = open_cpu(path)
            for rows, runs in sizes:
                draw = np.random.default_rng(rows)
                parts = [draw.standard_normal((1, *item), np.float32) for _ in range(rows)]
                nbytes = rows * int(np.prod(out_item)) * 4
                label = f"{name}, {rows} rows, {nbytes:,} bytes of output"
                ways[label] = cpu_us(ways_of_running(session, parts, out_item), runs, rounds)
                arms, opened = instances(path, parts)
                served[label] = cpu_us(arms, runs, rounds)
                for instance in opened:
                    instance.close()
                print(label, ways[label], served[label], flush=True)
        for kib in (4, 16, 32, 64, 128, 256, 1024):
            session = open_cpu(mlp(Path(temporary) / "wide.onnx", kib * 256, 1, 1))
            eight = cpu_us(lone(session, kib * 256), 20, rounds)
            alone[f"{kib} KiB"] = {arm: us / 8 for arm, us in eight.items()}
            print(kib, alone[f"{kib} KiB"], flush=True)
    write_report(
        HERE / "results" / "binding_cost.md",
        "CPU of a run, bound and plain",
        f"CPU µs a run, lowest of {rounds} rounds.",
        "## Ways of running, staging included",
        costs("session", ways),
        "## Instances, as they serve",
        "A set of outputs over 8 MiB, for the next power of two of the rows, is not bound: both arms are the same.",
        costs("instance", served),
        "## A request that fills its bucket alone",
        costs("input", alone),
    )


if __name__ == "__main__":
    main()
