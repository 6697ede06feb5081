"""What device buffers and graph replay are worth on a GPU: against plain runs, and against a bare IO-bound loop?

Level: engine (sections ``replay`` and ``overlap``), batcher and engine (``served``); ``checks`` runs ``tests/gpu``.
Expected: replay takes half the time of a plain bound run or less for small models at small batches, and gains nothing
for large ones; served rows a second at least 0.9 of a bare loop that copies nothing, at its best batch; copies all but
hidden behind computing.

    python loadtests/gpu_figures.py [--device cuda] [--scale full] [--out loadtests/results/gpu_figures.md]

One command, for a machine with a GPU and without a network: it needs onnx, cupy, onnxruntime-gpu, numpy, pydantic and
pyyaml, makes its models itself, compares every model's answers with ONNX Runtime's on the CPU first, and writes the
file after each section, of which each is a process of its own: a capture that fails may take its GPU with it.
``--device host --scale tiny`` runs all of it on host memory, where the figures mean nothing.
"""

import argparse
import asyncio
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

HERE: Final = Path(__file__).parent
SOURCES: Final = [str(HERE), str(HERE.parent / "server"), str(HERE.parent / "tests")]
sys.path[:0] = SOURCES
# For processes that are started from here, trials of captures among them: the package need not be installed.
os.environ["PYTHONPATH"] = os.pathsep.join([*SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])

import ortserve  # noqa: E402, I001 - silences ONNX Runtime before it is imported
import numpy as np  # noqa: E402
import onnxruntime as ort  # noqa: E402

import gpu_models  # noqa: E402
from ortserve.batching.admission import QueueLimits  # noqa: E402
from ortserve.batching.alarm import best_alarm  # noqa: E402
from ortserve.batching.batcher import Batcher  # noqa: E402
from ortserve.batching.device import Device as SharedThreads  # noqa: E402
from ortserve.batching.planner import BatchPolicy  # noqa: E402
from ortserve.batching.queue import RiderQueue  # noqa: E402
from ortserve.config.model import ModelOptions  # noqa: E402
from ortserve.core.batch import Arrays, Batch  # noqa: E402
from ortserve.core.timing import Timing  # noqa: E402
from ortserve.engine.device.binding import DeviceBinding  # noqa: E402
from ortserve.engine.device.devices import Devices  # noqa: E402
from ortserve.engine.device.host import HostDevice  # noqa: E402
from ortserve.engine.device.instance import DeviceInstance  # noqa: E402
from ortserve.engine.provider_options import CPU, CUDA  # noqa: E402
from ortserve.engine.runtime import Runtime  # noqa: E402
from ortserve.registry.capture_trial import CaptureTrials, TrialOrder  # noqa: E402
from ortserve.registry.loader import LoadedModel, load_model  # noqa: E402
from ortserve.registry.synthetic import synthetic_inputs  # noqa: E402

SECTION_TIMEOUT_S: Final = 420
PRECISIONS: Final[dict[str, type[np.floating]]] = {"FP32": np.float32, "FP16": np.float16}
_TOLERANCE: Final = 5e-2
"""Largest difference to the CPU's answer, of values about 1: TF32 and FP16 against FP32, through many layers."""


class ImageShape(TypedDict, total=False):
    """Of ``gpu_models.residual``; what is not said is ResNet-50's."""

    blocks: tuple[int, ...]
    width: int
    size: int
    classes: int


@dataclass(frozen=True)
class Scale:
    """How large models are, and how long they are measured."""

    runs: int
    seconds: float
    mlp: tuple[int, int]
    tiny: tuple[int, int]
    encoder: dict[str, int]
    bert: dict[str, int]
    image: ImageShape
    sizes: tuple[int, ...]


SCALES: Final = {
    "full": Scale(
        200, 4.0, (64, 256), (2, 64),
        {"layers": 6, "hidden": 384, "heads": 12, "length": 128},
        {"layers": 12, "hidden": 768, "heads": 12, "length": 128, "vocabulary": 30000},
        {}, (1, 8, 16, 32, 64),
    ),
    "tiny": Scale(
        3, 0.05, (4, 16), (2, 8),
        {"layers": 1, "hidden": 16, "heads": 2, "length": 4},
        {"layers": 1, "hidden": 16, "heads": 2, "length": 4},
        {"blocks": (1, 1), "width": 4, "size": 32, "classes": 8}, (1, 2, 4),
    ),
}  # fmt: skip


class NoTrial(CaptureTrials):
    """For host memory, on which no capture harms anybody."""

    def why_not(self, order: TrialOrder) -> str:
        return ""


@dataclass(frozen=True)
class Bench:
    """Where it runs, and how large."""

    device: str
    scale: Scale
    folder: Path

    @contextmanager
    def loaded(
        self, path: Path, sizes: Sequence[int], *, captures: bool
    ) -> Iterator[tuple[LoadedModel, DeviceInstance]]:
        """A model on the device, its answers compared with the CPU's."""
        is_host = self.device == "host"
        devices = Devices({CPU: HostDevice}) if is_host else Devices()
        options = ModelOptions(
            execution_providers=("cpu" if is_host else "cuda",),
            buckets=tuple(sizes), warmup_s=self.scale.seconds / 2, intra_op_threads=1, graph_replay=captures,
        )  # fmt: skip
        trials = NoTrial() if is_host else CaptureTrials()
        loaded = load_model(path, path.stem, options, time.monotonic_ns, None, Runtime(devices=devices), trials)
        (instance,) = loaded.instances
        try:
            if not isinstance(instance, DeviceInstance) or not loaded.on_device.sizes:
                raise RuntimeError(f"no buffers: {loaded.on_device}")
            if captures and not loaded.on_device.replayed:
                raise RuntimeError(f"no replay: {loaded.on_device.no_replay_because}")
            self._check(path, loaded, instance, min(sizes))
            yield loaded, instance
        finally:
            instance.close()

    def _check(self, path: Path, loaded: LoadedModel, instance: DeviceInstance, rows: int) -> None:
        inputs = synthetic_inputs(loaded.signature, rows, 7)
        (answer,) = instance.run(as_batch(inputs)).outputs
        session = ort.InferenceSession(str(path), providers=[CPU])
        (right,) = session.run(None, {"x": inputs[0]})
        worst = float(np.abs(answer.astype(np.float32) - right.astype(np.float32)).max())
        if not worst < _TOLERANCE * max(1.0, float(np.abs(right).max())):
            raise RuntimeError(f"{path.stem}: answers differ from the CPU's by {worst}")


def as_batch(inputs: Arrays) -> Batch:
    rows = len(inputs[0])
    return Batch(tuple((array,) for array in inputs), rows, rows)


def median_us(work: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """Medians of several arms, run in turns, after as many runs that do not count."""
    times: list[list[int]] = [[] for _ in work]
    for turn in range(2 * runs):
        for arm, taken in zip(work, times, strict=True):
            began_ns = time.perf_counter_ns()
            arm()
            if turn >= runs:
                taken.append(time.perf_counter_ns() - began_ns)
    return [statistics.median(taken) / 1e3 for taken in times]


def bound_run(instance: DeviceInstance, binding: DeviceBinding, rows: int, *, is_graph: bool) -> Callable[[], None]:
    """A run of what lies in the first buffers already, waited for; nothing is copied."""
    buffers, lane = binding.sets[0], instance.lane
    bound = binding.bind(rows, buffers, is_graph=is_graph)

    def run() -> None:
        lane.device.run(bound, lane.compute)
        lane.device.record(buffers.computed, lane.compute)
        lane.device.wait(buffers.computed)

    return run


def replay(bench: Bench) -> Iterator[str]:
    """Replay against the same bound run without, by model and batch size."""
    scale = bench.scale
    folder, layers = bench.folder, scale.encoder["layers"]
    models: list[tuple[str, Path, tuple[int, ...]]] = []
    for depth, width in (scale.tiny, scale.mlp):
        path = gpu_models.mlp(folder / f"mlp{depth}.onnx", layers=depth, width=width)
        models.append((f"MLP of {depth} layers", path, (1, 8, 64)))
    for suffix, dtype in PRECISIONS.items():
        path = gpu_models.encoder(folder / f"encoder{suffix}.onnx", **scale.encoder, dtype=dtype)
        models.append((f"encoder of {layers} layers, {suffix}", path, (1, 2, 4, 8)))
    yield "| model | rows | run µs | replay µs | run ÷ replay | whole way µs | replayed whole way µs |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, path, sizes in models:
        with bench.loaded(path, sizes, captures=True) as (loaded, instance):
            for rows in loaded.on_device.replayed:

                def measure(
                    rows: int = rows, loaded: LoadedModel = loaded, instance: DeviceInstance = instance
                ) -> list[float]:
                    binding = instance.binding
                    assert binding is not None
                    batch, buffers = as_batch(synthetic_inputs(loaded.signature, rows, 1)), binding.sets[0]
                    ways = [binding.bind(rows, buffers, is_graph=is_graph) for is_graph in (False, True)]
                    return median_us(
                        [
                            bound_run(instance, binding, rows, is_graph=False),
                            bound_run(instance, binding, rows, is_graph=True),
                            lambda: binding.finish(binding.begin(batch, buffers, ways[0])),
                            lambda: binding.finish(binding.begin(batch, buffers, ways[1])),
                        ],
                        bench.scale.runs,
                    )

                plain, replayed, whole, whole_replayed = instance.call(measure)
                yield (
                    f"| {name} | {rows} | {plain:.0f} | {replayed:.0f} | {plain / replayed:.2f} | {whole:.0f} | "
                    f"{whole_replayed:.0f} |"
                )


def served(bench: Bench) -> Iterator[str]:
    """Rows a second through batcher and instance, against a bare bound loop at its best batch, and ``session.run``."""
    scale, folder = bench.scale, bench.folder
    models: list[tuple[str, Path]] = []
    for suffix, dtype in PRECISIONS.items():
        path = gpu_models.residual(folder / f"image{suffix}.onnx", **scale.image, dtype=dtype)
        models.append((f"as ResNet-50, {suffix}", path))
        path = gpu_models.encoder(folder / f"bert{suffix}.onnx", **scale.bert, dtype=dtype)
        models.append((f"as BERT base, {suffix}", path))
    yield "| model | best batch | bare rows/s | served rows/s | served ÷ bare | session.run rows/s | served ÷ it |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, path in models:
        with bench.loaded(path, scale.sizes, captures=False) as (loaded, instance):

            def bare(loaded: LoadedModel = loaded, instance: DeviceInstance = instance) -> tuple[float, int]:
                binding = instance.binding
                assert binding is not None
                runs = {rows: bound_run(instance, binding, rows, is_graph=False) for rows in loaded.on_device.sizes}
                return max((per_second(run, rows, bench.scale.seconds), rows) for rows, run in runs.items())

            bare_rows, best = instance.call(bare)
            reached = asyncio.run(serve(loaded, instance, best, scale.seconds))
        plain_rows = plainly(bench, path, synthetic_inputs(loaded.signature, best, 1))
        yield (
            f"| {name} | {best} | {bare_rows:,.0f} | {reached:,.0f} | {reached / bare_rows:.2f} | {plain_rows:,.0f} | "
            f"{reached / plain_rows:.2f} |"
        )


def overlap(bench: Bench) -> Iterator[str]:
    """How much of copying an image model's batches is hidden behind computing the batch before."""
    path = gpu_models.residual(bench.folder / "image.onnx", **bench.scale.image, dtype=np.float16)
    yield "| rows | computing alone µs | one batch at a time µs | two at a time µs | hidden of what is not computing |"
    yield "| --- | --- | --- | --- | --- |"
    with bench.loaded(path, bench.scale.sizes, captures=False) as (loaded, instance):
        for rows in loaded.on_device.sizes:

            def measure(rows: int = rows) -> list[float]:
                binding = instance.binding
                assert binding is not None
                batch = as_batch(synthetic_inputs(loaded.signature, rows, 1))
                first, second = binding.sets

                def two_at_a_time() -> None:
                    flights = [binding.begin(batch, first)]
                    for buffers in itertools.islice(itertools.cycle((second, first)), 15):
                        flights.append(binding.begin(batch, buffers))
                        binding.finish(flights.pop(0))
                    binding.finish(flights.pop())

                def one_at_a_time() -> None:
                    for _ in range(16):
                        binding.finish(binding.begin(batch, first))

                alone = bound_run(instance, binding, rows, is_graph=False)
                arms = [lambda: [alone() for _ in range(16)], one_at_a_time, two_at_a_time]
                return [taken / 16 for taken in median_us(arms, max(3, bench.scale.runs // 20))]

            alone, one, two = instance.call(measure)
            hidden = (one - two) / (one - alone) if one > alone else float("nan")
            yield f"| {rows} | {alone:.0f} | {one:.0f} | {two:.0f} | {hidden:.2f} |"


def per_second(work: Callable[[], object], rows: int, seconds: float) -> float:
    """Rows a second of runs of so many rows, one after the other."""
    for _ in range(3):
        work()
    runs, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < seconds:
        work()
        runs += 1
    return runs * rows / taken


async def serve(loaded: LoadedModel, instance: DeviceInstance, max_rows: int, seconds: float) -> float:
    """Rows a second of callers in a closed loop, a row each, four times as many as fit into a batch."""
    loop = asyncio.get_running_loop()
    known = [(size.rows, size.round_trip_ns) for size in loaded.warm_up.latencies]
    batcher = Batcher(
        [instance], BatchPolicy(max_rows, buckets=loaded.on_device.sizes), RiderQueue(known, known),
        limits=QueueLimits(2**20, 2**40), device=SharedThreads(instance.depth, loop), threads=1, inline=None,
        loop=loop, clock=time.monotonic_ns, observe_batch=lambda *_: None,
        make_alarm=lambda ring: best_alarm(loop, ring), depth=instance.depth,
    )  # fmt: skip
    inputs = synthetic_inputs(loaded.signature, 1, 3)
    answered = 0
    ends = time.perf_counter() + 1.25 * seconds

    async def call() -> None:
        nonlocal answered
        while time.perf_counter() < ends:
            await batcher.submit(inputs, 1, None, Timing(time.monotonic_ns())).promise
            answered += 1

    callers = [asyncio.create_task(call()) for _ in range(4 * max_rows)]
    await asyncio.sleep(0.25 * seconds)
    before, began = answered, time.perf_counter()
    await asyncio.gather(*callers)
    taken = time.perf_counter() - began
    await batcher.close()
    return (answered - before) / taken


def plainly(bench: Bench, path: Path, inputs: Arrays) -> float:
    """Rows a second of ``session.run`` on host arrays, as anybody would make it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if bench.device == "host":
        session = ort.InferenceSession(str(path), options, providers=[CPU])
    else:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        provider = (CUDA, {"cudnn_conv_algo_search": "HEURISTIC"})
        session = ort.InferenceSession(str(path), options, providers=[provider], enable_fallback=0)
    feeds = {"x": inputs[0]}
    return per_second(lambda: session.run(None, feeds), len(inputs[0]), bench.scale.seconds)


def checks(bench: Bench) -> Iterator[str]:
    """The tests of a GPU: right answers by type and size, guards of replay, memory, failures."""
    root = HERE.parent
    which = ["-m", "gpu"] if bench.device == "cuda" else ["-k", "host and not every_type"]
    # The repository's own settings ask for plugins that a GPU machine may not have, and these tests need none.
    settings = ["-c", os.devnull, "--rootdir", str(root), "--import-mode=importlib", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rfEs", "--tb=short", *settings, *which, str(root / "tests" / "gpu")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    yield "```text"
    yield run.stdout.strip()
    yield "```"
    if run.returncode:
        raise RuntimeError(f"pytest ended with {run.returncode}")


SECTIONS: Final[dict[str, Callable[[Bench], Iterator[str]]]] = {
    "checks": checks,
    "replay": replay,
    "served": served,
    "overlap": overlap,
}


def machine(device: str) -> str:
    """What ran it."""
    told = [f"{os.cpu_count()} processors ({platform.machine()})", f"Python {platform.python_version()}"]
    told.append(f"onnxruntime {ort.__version__}, numpy {np.__version__}, ortserve {ortserve.__version__}")
    if device == "cuda":
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(0)
        told.insert(0, f"{properties['name'].decode()}, {properties['totalGlobalMem'] >> 20:,} MiB")
        runtime = cupy.cuda.runtime
        told.append(f"cupy {cupy.__version__}, CUDA {runtime.runtimeGetVersion()}, driver {runtime.driverGetVersion()}")
    else:
        told.insert(0, "host memory in the place of a GPU: the figures mean nothing")
    return "; ".join(told)


def run_section(name: str, device: str, scale: str) -> int:
    """Print a section's lines as they come."""
    if device == "cuda":
        ort.preload_dlls()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for line in SECTIONS[name](Bench(device, SCALES[scale], Path(folder))):
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
        except Exception as error:
            sys.stdout.write(f"\nFAILED: {type(error).__name__}: {error}\n")
            sys.stdout.flush()
            os._exit(1)  # what a failed capture left behind may hang an orderly exit
    return 0


def main() -> int:
    """Run the sections, or the one that is named, and write the results. Returns 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--scale", choices=tuple(SCALES), default="full")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu_figures.md")
    parser.add_argument("--only", choices=tuple(SECTIONS), help="print one section, in this process")
    chosen = parser.parse_args()
    if chosen.only:
        return run_section(chosen.only, chosen.device, chosen.scale)
    command = f"python loadtests/gpu_figures.py --device {chosen.device} --scale {chosen.scale}"
    lines = [
        "# Device buffers and graph replay",
        "",
        f"{machine(chosen.device)}; `{command}`; {time.strftime('%Y-%m-%d')}.",
        "",
    ]
    failed = False
    for name, section in SECTIONS.items():
        written = len(lines)
        lines += [f"## {(section.__doc__ or name).splitlines()[0]}", ""]
        arguments = [sys.executable, __file__, "--only", name, "--device", chosen.device, "--scale", chosen.scale]
        try:
            run = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, timeout=SECTION_TIMEOUT_S, check=False)
            lines += run.stdout.splitlines()
            failed |= run.returncode != 0
            if run.returncode not in (0, 1):
                lines.append(f"\nFAILED: exit status {run.returncode}")
        except subprocess.TimeoutExpired as late:
            failed = True
            kept = late.stdout.decode() if isinstance(late.stdout, bytes) else (late.stdout or "")
            lines += [*kept.splitlines(), "", f"FAILED: it took more than {SECTION_TIMEOUT_S} s"]
        lines.append("")
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text("\n".join(lines))
        sys.stdout.write("\n".join(lines[written:]) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
