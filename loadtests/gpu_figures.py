"""How much do device buffers and graph replay gain on a GPU, against plain runs and a bare IO-bound loop?

Level: engine (sections ``replay`` and ``overlap``), batcher and engine (``served``), server (``server``); the section
``checks`` runs ``tests/gpu``.
Goals, each printed beside its figure:

- A plain bound run of a model with many kernels takes 1.5 times as long as a replay.
- The server reaches 0.90 (as ResNet-50) and 0.95 (as BERT base) of the rows per second of a bare loop that copies
  nothing, at the best batch size of that loop.
- On two buffer sets, the slower of copying alone and computing alone takes 0.9 of the time of a batch with both.

Expected: replay gains most at small batches and nothing at large ones.

    python loadtests/gpu_figures.py [--device cuda] [--scale full] [--out loadtests/results/gpu_figures.md]

The script is one command for a machine with a GPU and no network. It needs the server's dependencies, onnx, cupy and,
for ``checks``, pytest. It generates its models and first compares their answers with ONNX Runtime's on the CPU. Each
section runs in a separate process, because a failed capture may leave the GPU unusable, and writes its lines to the
file at once. A model that fails becomes a line of its section's table. The script ends within ``--budget-s`` (nine
minutes less the start-up time), even if a section hangs. ``--device host --scale tiny`` runs it on host memory, where
the figures mean nothing.
"""

import argparse
import asyncio
import itertools
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypedDict, TypeVar

HERE: Final = Path(__file__).parent
SOURCES: Final = [str(HERE), str(HERE.parent / "server"), str(HERE.parent / "tests" / "support")]
sys.path[:0] = SOURCES
# Child processes, such as trials of captures, find the package here, so it need not be installed.
os.environ["PYTHONPATH"] = os.pathsep.join([*SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])

import ortserve  # noqa: E402, I001 - silences ONNX Runtime before it is imported
import numpy as np  # noqa: E402
import onnxruntime as ort  # noqa: E402

import gpu_models  # noqa: E402
from gpu_server import whole_server  # noqa: E402
from ortserve.core.inflight import InflightRequest  # noqa: E402
from ortserve.batching.admission import QueueLimits  # noqa: E402
from ortserve.batching.timers import best_timer  # noqa: E402
from ortserve.batching.batch_runs import BatchRuns  # noqa: E402
from ortserve.batching.batcher import Batcher  # noqa: E402
from ortserve.batching.shared_threads import SharedThreads  # noqa: E402
from ortserve.batching.planner import BatchPolicy  # noqa: E402
from ortserve.batching.queue import RequestQueue  # noqa: E402
from ortserve.config.model import ModelOptions  # noqa: E402
from ortserve.core.batch import Arrays, Batch  # noqa: E402
from ortserve.core.timing import Timing  # noqa: E402
from ortserve.device.binding import DeviceBinding, EnqueuedBatch  # noqa: E402
from ortserve.device.buffers import BufferSet  # noqa: E402
from ortserve.device.devices import Devices  # noqa: E402
from fakes.host_device import HostDevice  # noqa: E402
from ortserve.device.instance import DeviceInstance  # noqa: E402
from ortserve.device.protocol import BoundRun  # noqa: E402
from ortserve.device.devices import DeviceProvider  # noqa: E402
from ortserve.engine.provider_options import CPU, CUDA  # noqa: E402
from ortserve.device.devices import DeviceRuntime  # noqa: E402
from ortserve.registry.load.capture_trial import CaptureTrials, TrialRequest  # noqa: E402
from ortserve.registry.load.progress import Progress  # noqa: E402
from ortserve.registry.load.inputs import InputGenerator  # noqa: E402
from ortserve.registry.load.loaded_model import LoadedModel  # noqa: E402
from ortserve.registry.load.pipeline import load_model  # noqa: E402

BUDGET_S: Final = 520.0
REPLAY_GOAL: Final = 1.5
SERVED_GOALS: Final = {"as ResNet-50": 0.90, "as BERT base": 0.95}
OVERLAP_GOAL: Final = 0.9
ROUNDS: Final = 3
"""Rounds of ``served``; its arms take turns in each."""
FAILURE_TOLD: Final = 3
"""Exit status of a section that has printed the reason of its failure."""
IN_A_ROW: Final = 16
"""Consecutive batches of each arm of ``overlap``, timed together."""
PRECISIONS: Final[dict[str, type[np.floating]]] = {"FP32": np.float32, "FP16": np.float16}
_TOLERANCE: Final = 0.2
"""Largest difference from the CPU's answer, relative to its root mean square.

Allows for TF32 and FP16 against FP32 through many layers.
"""


_Model = TypeVar("_Model")
_Begun = TypeVar("_Begun")


class ImageShape(TypedDict, total=False):
    """Parameters of ``gpu_models.residual``; the defaults are those of ResNet-50."""

    blocks: tuple[int, ...]
    width: int
    size: int
    classes: int


@dataclass(frozen=True)
class Scale:
    """Sizes of the models, and durations of their measurements."""

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
        200, 2.0, (64, 256), (2, 64),
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
    """Approves every capture: on host memory a capture cannot do harm."""

    def why_not(self, request: TrialRequest, progress: Progress) -> str:
        return ""


@dataclass(frozen=True)
class Bench:
    """The device of the benchmark, and the scale of its models."""

    device: str
    scale: Scale
    folder: Path

    @contextmanager
    def loaded(
        self, path: Path, sizes: Sequence[int], *, captures: bool
    ) -> Iterator[tuple[LoadedModel, DeviceInstance]]:
        """Load a model on the device and compare its answers with the CPU's.

        Raises:
            RuntimeError: The model has no buffers or no replay, or an answer differs.
        """
        is_host = self.device == "host"
        devices = Devices({CPU: DeviceProvider(HostDevice)}) if is_host else Devices()
        options = ModelOptions(
            execution_providers=("cpu" if is_host else "cuda",),
            buckets=tuple(sizes), warmup_s=self.scale.seconds / 2, intra_op_threads=1, graph_replay=captures,
        )  # fmt: skip
        trials = NoTrial() if is_host else CaptureTrials()
        loaded = load_model(path, path.stem, options, None, DeviceRuntime(devices=devices), trials)
        (instance,) = loaded.instances
        try:
            if not isinstance(instance, DeviceInstance) or not loaded.on_device.sizes:
                raise RuntimeError(f"no buffers: {loaded.on_device}")
            if captures and not loaded.on_device.replayed:
                raise RuntimeError(f"no replay: {loaded.on_device.no_replay_because}")
            for rows in sorted(sizes)[:2]:  # loading compared the larger sizes with plain runs on the device
                self._check(path, loaded, instance, rows)
            yield loaded, instance
        finally:
            instance.close()

    def _check(self, path: Path, loaded: LoadedModel, instance: DeviceInstance, rows: int) -> None:
        inputs = InputGenerator(loaded.signature).generate(rows, 7)
        (answer,) = instance.run(as_batch(inputs)).outputs
        session = ort.InferenceSession(str(path), providers=[CPU])
        (right,) = session.run(None, {"x": inputs[0]})
        if not is_near(answer, right):
            raise RuntimeError(f"{path.stem}: the answer for {rows} rows differs from the CPU's")


def is_near(answer: np.ndarray, right: np.ndarray) -> bool:
    worst = float(np.abs(answer.astype(np.float32) - right.astype(np.float32)).max())
    return worst < _TOLERANCE * float(np.sqrt(np.mean(np.square(right, dtype=np.float64))))


def as_batch(inputs: Arrays) -> Batch:
    rows = len(inputs[0])
    return Batch(tuple((array,) for array in inputs), rows, rows)


def median_us(work: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """Median time of each arm over ``runs`` rounds in which arms take turns, after as many warm-up rounds."""
    times: list[list[int]] = [[] for _ in work]
    for turn in range(2 * runs):
        for arm, taken in zip(work, times, strict=True):
            began_ns = time.perf_counter_ns()
            arm()
            if turn >= runs:
                taken.append(time.perf_counter_ns() - began_ns)
    return [statistics.median(taken) / 1e3 for taken in times]


def binding_of(instance: DeviceInstance) -> DeviceBinding:
    binding = instance.binding
    assert binding is not None
    return binding


def run_bound(instance: DeviceInstance, bound: BoundRun) -> None:
    """Run on the present contents of the first buffer set and wait for the end; copies nothing."""
    streams, computed = instance.streams, binding_of(instance).sets[0].computed
    streams.device.run(bound, streams.compute)
    streams.device.record(computed, streams.compute)
    streams.device.wait(computed)


def run_whole(instance: DeviceInstance, bound: BoundRun, batch: Batch) -> None:
    """Stage a batch into the first buffer set, copy it in, run, and copy the answers out."""
    binding = binding_of(instance)
    binding.finish(binding.enqueue(batch, binding.sets[0], bound))


def against(ratio: float, goal: float) -> str:
    """Three cells of a table: a ratio, its goal, and ``met`` or ``missed``."""
    return f"{ratio:.3f} | ≥ {goal:.2f} | {'met' if round(ratio, 3) >= goal else 'missed'}"


def each(models: Mapping[str, _Model], measure: Callable[[str, _Model], Iterator[str]]) -> Iterator[str]:
    """Yield the lines of all models; the line of a model that fails shows its error.

    Raises:
        RuntimeError: At the end, if a model failed.
    """
    failed: list[str] = []
    for name, model in models.items():
        try:
            yield from measure(name, model)
        except Exception as error:
            failed.append(name)
            yield f"| {name} | FAILED: {describe_error(error)} |"
    if failed:
        raise RuntimeError(f"of {len(models)} models these failed: {', '.join(failed)}")


def replay(bench: Bench) -> Iterator[str]:
    """Graph replay against plain bound runs, by model and batch size."""
    scale, folder = bench.scale, bench.folder
    sizes: dict[Path, tuple[int, ...]] = {}
    models: dict[str, Path] = {}
    for depth, width in (scale.tiny, scale.mlp):
        models[f"MLP of {depth} layers"] = path = folder / f"mlp{depth}.onnx"
        gpu_models.mlp(path, layers=depth, width=width)
        sizes[path] = (1, 8, 64)
    few_kernels = f"MLP of {scale.tiny[0]} layers"
    for suffix, dtype in PRECISIONS.items():
        models[f"encoder of {scale.encoder['layers']} layers, {suffix}"] = path = folder / f"encoder{suffix}.onnx"
        gpu_models.encoder(path, **scale.encoder, dtype=dtype)
        sizes[path] = (1, 2, 4, 8)

    def measure(name: str, path: Path) -> Iterator[str]:
        # The plain arm has its own session: a session with captures may run slower without its graph.
        with (
            bench.loaded(path, sizes[path], captures=True) as (loaded, instance),
            bench.loaded(path, sizes[path], captures=False) as (_, plain_instance),
        ):
            for rows in loaded.on_device.replayed:
                batch = as_batch(InputGenerator(loaded.signature).generate(rows, 1))

                def arms(rows: int = rows, batch: Batch = batch) -> list[float]:
                    ways = [
                        (one, binding_of(one).bind(rows, binding_of(one).sets[0], is_graph=is_graph))
                        for one, is_graph in ((plain_instance, False), (instance, True))
                    ]
                    return median_us(
                        [
                            *(partial(run_bound, *way) for way in ways),
                            *(partial(run_whole, *way, batch) for way in ways),
                        ],
                        scale.runs,
                    )

                # A graph must be replayed on the thread that captured it; a session without graphs runs on any thread.
                plain, replayed, whole, whole_replayed = instance.call(arms)
                ratio = plain / replayed
                figure = f"{ratio:.3f} | none | " if name == few_kernels else against(ratio, REPLAY_GOAL)
                yield (
                    f"| {name} | {rows} | {plain:.0f} | {replayed:.0f} | {figure} | {whole:.0f} | "
                    f"{whole_replayed:.0f} |"
                )
            if loaded.on_device.no_replay_because:
                raise RuntimeError(f"not all sizes are replayed: {loaded.on_device.no_replay_because}")

    yield "| model | rows | run µs | replay µs | run ÷ replay | goal | | whole way µs | replayed whole way µs |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    yield from each(models, measure)


def served(bench: Bench) -> Iterator[str]:
    """Rows per second through batcher and instance, against a bare bound loop at its best batch and ``session.run``."""
    scale, folder = bench.scale, bench.folder
    models: dict[str, tuple[Path, float]] = {}
    for suffix, dtype in PRECISIONS.items():
        path = gpu_models.residual(folder / f"image{suffix}.onnx", **scale.image, dtype=dtype)
        models[f"as ResNet-50, {suffix}"] = path, SERVED_GOALS["as ResNet-50"]
        path = gpu_models.encoder(folder / f"bert{suffix}.onnx", **scale.bert, dtype=dtype)
        models[f"as BERT base, {suffix}"] = path, SERVED_GOALS["as BERT base"]

    def measure(name: str, model: tuple[Path, float]) -> Iterator[str]:
        path, goal = model
        with bench.loaded(path, scale.sizes, captures=False) as (loaded, instance):

            def bare(rows: int, seconds: float) -> float:
                binding = binding_of(instance)
                bound = binding.bind(rows, binding.sets[0], is_graph=False)
                return per_second(partial(run_bound, instance, bound), rows, seconds)

            by_size = {rows: instance.call(partial(bare, rows, scale.seconds / 2)) for rows in loaded.on_device.sizes}
            best = max(by_size, key=by_size.__getitem__)
            run_plainly = plain_session(bench, path, InputGenerator(loaded.signature).generate(best, 1))
            rounds: list[tuple[float, float, float]] = []
            for _ in range(ROUNDS):
                bare_rows = instance.call(partial(bare, best, scale.seconds))
                reached = asyncio.run(serve(loaded, instance, best, scale.seconds))
                rounds.append((bare_rows, reached, per_second(run_plainly, best, scale.seconds)))
        bare_rows, reached, plain_rows = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = sorted(reached / bare_rows for bare_rows, reached, _ in rounds)
        yield (
            f"| {name} | {best} | {bare_rows:,.0f} | {reached:,.0f} | {against(statistics.median(ratios), goal)} | "
            f"{ratios[0]:.3f} to {ratios[-1]:.3f} | {plain_rows:,.0f} | {reached / plain_rows:.2f} |"
        )

    yield (
        f"| model | best batch | bare rows/s | served rows/s | served ÷ bare | goal | | of {ROUNDS} rounds | "
        "session.run rows/s | served ÷ it |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    yield from each(models, measure)


class NothingToRun:
    """Stands in for a session and computes nothing, so that a batch consists of its copies only."""

    def run_with_iobinding(self, binding: ort.IOBinding, options: ort.RunOptions) -> None: ...


def two_at_a_time(
    begin: Callable[[BufferSet], _Begun], finish: Callable[[_Begun], object], sets: Sequence[BufferSet]
) -> Callable[[], None]:
    """Returns a function that runs ``IN_A_ROW`` batches on two buffer sets in turns.

    Each batch begins before the function waits for the previous one.
    """

    def run() -> None:
        begun = [begin(sets[0])]
        for buffers in itertools.islice(itertools.cycle((sets[1], sets[0])), IN_A_ROW - 1):
            begun.append(begin(buffers))
            finish(begun.pop(0))
        finish(begun.pop())

    return run


def overlap(bench: Bench) -> Iterator[str]:
    """Copying and computing batches of an image model, each alone and both at once on two buffer sets."""
    path = gpu_models.residual(bench.folder / "image.onnx", **bench.scale.image, dtype=np.float16)
    yield "Each alone by the same way: a batch is begun before the one before it is waited for."
    yield ""
    yield (
        "| rows | copying alone µs | computing alone µs | one batch at a time µs | two at a time µs | "
        "slower alone ÷ two at a time | goal | |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    with bench.loaded(path, bench.scale.sizes, captures=False) as (loaded, instance):
        for rows in loaded.on_device.sizes:
            batch = as_batch(InputGenerator(loaded.signature).generate(rows, 1))

            def measure(rows: int = rows, batch: Batch = batch) -> list[float]:
                binding, streams = binding_of(instance), instance.streams
                runs = [binding.bind(rows, buffers, is_graph=False) for buffers in binding.sets]
                idle: Any = NothingToRun()
                copies = [BoundRun(idle, run.binding, run.options) for run in runs]

                def both(buffers: BufferSet) -> EnqueuedBatch:
                    return binding.enqueue(batch, buffers)

                def copy(buffers: BufferSet) -> EnqueuedBatch:
                    return binding.enqueue(batch, buffers, copies[buffers.index])

                def compute(buffers: BufferSet) -> int:
                    streams.device.run(runs[buffers.index], streams.compute)
                    streams.device.record(buffers.computed, streams.compute)
                    return buffers.computed

                def one_at_a_time() -> None:
                    for _ in range(IN_A_ROW):
                        binding.finish(both(binding.sets[0]))

                arms = [
                    two_at_a_time(copy, binding.finish, binding.sets),
                    two_at_a_time(compute, streams.device.wait, binding.sets),
                    one_at_a_time,
                    two_at_a_time(both, binding.finish, binding.sets),
                ]
                return [taken / IN_A_ROW for taken in median_us(arms, max(3, bench.scale.runs // 20))]

            copying, computing, one, two = instance.call(measure)
            figure = against(max(copying, computing) / two, OVERLAP_GOAL)
            yield f"| {rows} | {copying:.0f} | {computing:.0f} | {one:.0f} | {two:.0f} | {figure} |"


def per_second(work: Callable[[], object], rows: int, seconds: float) -> float:
    """Rows per second of consecutive runs of ``rows`` rows."""
    for _ in range(3):
        work()
    runs, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < seconds:
        work()
        runs += 1
    return runs * rows / taken


async def serve(loaded: LoadedModel, instance: DeviceInstance, max_rows: int, seconds: float) -> float:
    """Rows per second of closed-loop clients with one row each; there are four times as many as fit into a batch."""
    loop = asyncio.get_running_loop()
    known = [(size.rows, size.round_trip_ns) for size in loaded.warm_up.latencies]
    runs = BatchRuns(
        [instance], BatchPolicy(max_rows, buckets=loaded.on_device.sizes), RequestQueue(known, known),
        shared=SharedThreads(instance.depth, loop), threads=1, inline=None,
        loop=loop, clock=time.monotonic_ns, observe_batch=lambda *_: None,
        make_timer=lambda ring: best_timer(loop, ring), depth=instance.depth,
    )  # fmt: skip
    batcher = Batcher(runs, QueueLimits(2**20, 2**40), time.monotonic_ns)
    inputs = InputGenerator(loaded.signature).generate(1, 3)
    answered = 0
    ends = time.perf_counter() + 1.25 * seconds

    async def call() -> None:
        nonlocal answered
        while time.perf_counter() < ends:
            request = InflightRequest(Timing(time.monotonic_ns()), inputs)
            batcher.submit(request, None)
            await request
            answered += 1

    callers = [asyncio.create_task(call()) for _ in range(4 * max_rows)]
    await asyncio.sleep(0.25 * seconds)
    before, began = answered, time.perf_counter()
    await asyncio.gather(*callers)
    taken = time.perf_counter() - began
    await batcher.close()
    return (answered - before) / taken


def plain_session(bench: Bench, path: Path, inputs: Arrays) -> Callable[[], object]:
    """Returns a plain ``session.run`` on host arrays, as a user would write it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if bench.device == "host":
        session = ort.InferenceSession(str(path), options, providers=[CPU])
    else:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        provider = (CUDA, {"cudnn_conv_algo_search": "HEURISTIC"})
        session = ort.InferenceSession(str(path), options, providers=[provider], enable_fallback=0)
    feeds = {"x": inputs[0]}
    return lambda: session.run(None, feeds)


def checks(bench: Bench) -> Iterator[str]:
    """GPU tests: correct answers by type and size, guards of replay, memory, failures."""
    root = HERE.parent
    which = ["-m", "gpu"] if bench.device == "cuda" else ["-k", "host and not every_datatype"]
    # The repository's own settings require plugins that a GPU machine may lack; these tests need none of them.
    settings = ["-c", os.devnull, "--rootdir", str(root), "--import-mode=importlib", "-o", "markers=gpu"]
    settings += ["-o", "faulthandler_timeout=60"]  # dumps the stacks of all threads of a hanging test
    settings += ["--confcutdir", str(root / "tests" / "gpu")]  # tests/conftest.py imports packages that may be missing
    settings += ["-p", "no:cacheprovider", "-p", "no:asyncio"]
    arguments = ["-m", "pytest", "-v", "-rfEs", "--tb=short", *settings, *which, str(root / "tests" / "gpu")]
    yield "```text"
    # pytest writes directly to this process's output, so that finished tests are recorded even if a later one hangs.
    environment = os.environ | {"ORTSERVE_TEST_GPU": "1" if bench.device == "cuda" else ""}
    run = subprocess.run([sys.executable, "-u", *arguments], stderr=subprocess.STDOUT, check=False, env=environment)
    yield "```"
    if run.returncode:
        raise RuntimeError(f"pytest ended with {run.returncode}")


def server(bench: Bench) -> Iterator[str]:
    """The whole server: answers over both protocols, GPU memory of a client, and the ledger against the driver."""
    folder = bench.folder / "repository"
    folder.mkdir()
    large = gpu_models.encoder(bench.folder / "bert.onnx", **bench.scale.bert, dtype=np.float32)
    yield from whole_server(bench.device, folder, large, bench.scale.runs, is_near)


@dataclass(frozen=True)
class Section:
    """A part of the results: the function that yields its lines, and its share of the time budget.

    Time that earlier sections leave over is added to the share.
    """

    lines: Callable[[Bench], Iterator[str]]
    share: float

    @property
    def title(self) -> str:
        return (self.lines.__doc__ or "").splitlines()[0]


SECTIONS: Final[dict[str, Section]] = {
    "checks": Section(checks, 0.30),
    "server": Section(server, 0.16),
    "replay": Section(replay, 0.17),
    "served": Section(served, 0.29),
    "overlap": Section(overlap, 0.08),
}


def describe_error(error: Exception) -> str:
    """The error as text for a cell of a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".replace("|", "/")


def machine(device: str) -> str:
    """Describe the machine and the versions."""
    known = [f"{os.cpu_count()} processors ({platform.machine()})", f"Python {platform.python_version()}"]
    known.append(f"onnxruntime {ort.__version__}, numpy {np.__version__}, ortserve {ortserve.__version__}")
    if device == "cuda":
        try:
            import cupy

            runtime = cupy.cuda.runtime
            properties = runtime.getDeviceProperties(0)
            known.insert(0, f"{properties['name'].decode()}, {properties['totalGlobalMem'] >> 20:,} MiB")
            versions = f"CUDA {runtime.runtimeGetVersion()}, driver {runtime.driverGetVersion()}"
            known.append(f"cupy {cupy.__version__}, {versions}")
        except Exception as error:
            known.insert(0, f"a GPU without properties from cupy ({describe_error(error)})")
    else:
        known.insert(0, "host memory in the place of a GPU: the figures mean nothing")
    return "; ".join(known)


def run_section(name: str, device: str, scale: str) -> int:
    """Print a section's lines as they come."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            if device == "cuda":
                ort.preload_dlls()
            for line in SECTIONS[name].lines(Bench(device, SCALES[scale], Path(folder))):
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
        except Exception as error:
            sys.stdout.write(f"\nFAILED: {describe_error(error)}\n")
            sys.stdout.flush()
            os._exit(FAILURE_TOLD)  # a regular exit may hang after a failed capture
    return 0


def run_apart(arguments: Sequence[str], out: Path, timeout_s: float) -> str:
    """Run a section in a process that appends to ``out``. Returns the reason of its failure, or an empty string.

    The process leads a process group. A timeout kills the whole group, which includes tests and trials of captures.
    """
    with out.open("a") as lines, subprocess.Popen(arguments, stdout=lines, start_new_session=True) as process:
        try:
            status = process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"its time of {max(timeout_s, 0):.0f} s was over"
    return "" if status in (0, FAILURE_TOLD) else f"exit status {status}"


def main() -> int:
    """Run all sections, or only the named one, and write the results. Returns 1 if a section failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--scale", choices=tuple(SCALES), default="full")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu_figures.md")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="how long all sections may take together")
    parser.add_argument("--only", choices=tuple(SECTIONS), help="print one section, in this process")
    chosen = parser.parse_args()
    if chosen.only:
        return run_section(chosen.only, chosen.device, chosen.scale)
    began = time.monotonic()
    out: Path = chosen.out
    command = f"python loadtests/gpu_figures.py --device {chosen.device} --scale {chosen.scale}"
    date = time.strftime("%Y-%m-%d")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f"# Device buffers and graph replay\n\n{machine(chosen.device)}; `{command}`; {date}.\n")
    share = 0.0
    for name, section in SECTIONS.items():
        share += section.share
        with out.open("a") as lines:
            lines.write(f"\n## {section.title}\n\n")
        arguments = [sys.executable, __file__, "--only", name, "--device", chosen.device, "--scale", chosen.scale]
        problem = run_apart(arguments, out, began + share * chosen.budget_s - time.monotonic())
        if problem:
            with out.open("a") as lines:
                lines.write(f"\nFAILED: {problem}\n")
    written = out.read_text()
    sys.stdout.write(written)
    return int("FAILED" in written)


if __name__ == "__main__":
    sys.exit(main())
