"""Decisions of a load that depend on the execution provider: devices, threads, and whether the provider works."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ortserve.config.session import SessionSettings
from ortserve.core.batch import Arrays, Batch
from ortserve.device.devices import DeviceRuntime
from ortserve.device.instance import DeviceInstance
from ortserve.engine.instance import Instance
from ortserve.engine.process_limits import core_budget, intra_op_threads
from ortserve.engine.provider_options import CPU, GPU_PROVIDERS, TENSORRT, most_rows
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, affinities_key, open_session
from ortserve.errors import OutOfMemoryError, ServeError
from ortserve.registry.load.analysed_model import AnalysedModel
from ortserve.registry.load.batch_sizes import ENDS_LOAD, RunBounds, SizeLatency, WorkerRuns, as_batch
from ortserve.registry.load.inputs import InputGenerator

ONE_THREAD_BELOW_NS: Final = 1_000_000
"""If a run of one row is shorter, waking a second thread costs more than the thread gains."""
_SMALL_MODEL_NBYTES: Final = 4 * 1024**2
"""Size of a model's files below which runs are mostly short."""


class ProviderSettings:
    """Decides how sessions of one model are opened and run on each provider.

    It reads the quota of processors once for each load: that takes 0.1 ms, and its files may change.
    """

    def __init__(self, model: AnalysedModel, runtime: DeviceRuntime) -> None:
        self._model = model
        self._options = options = model.options
        self._runtime = runtime
        self._cores: Final = core_budget()
        session = options.session
        self.branches: Final = session.inter_op_threads if session.execution_mode == "parallel" else 1
        """Maximum number of operators that run at the same time."""
        self._may_use_one_thread = (
            options.intra_op_threads is None and not affinities_key(session) and not runtime.has_global_threads
        )

    def is_on_gpu(self, choice: ProviderChoice) -> bool:
        """Whether the provider computes on a GPU, or on another device with buffers."""
        return choice.name in GPU_PROVIDERS or self._runtime.devices.has(choice.name)

    def place(self, choice: ProviderChoice, number: int) -> ProviderChoice:
        """The choice, with the device on which instance ``number`` runs."""
        gpus = self._options.gpus
        return choice.on_device(gpus[number % len(gpus)]) if gpus and self.is_on_gpu(choice) else choice

    def max_rows(self, choice: ProviderChoice | None = None) -> int | None:
        """Maximum number of rows of a batch, on this provider or on any; None for no limit."""
        options = self._options
        limits = [
            options.max_rows,
            max(options.buckets, default=None),  # A batch larger than the largest bucket could not be padded.
            most_rows(choice.options) if choice is not None and choice.name == TENSORRT else None,
        ]
        return min((limit for limit in limits if limit is not None), default=None)

    def memory_release(
        self, instance: Instance | DeviceInstance, choice: ProviderChoice
    ) -> Callable[[Batch], None] | None:
        """The function that frees memory that only warm-up needed; None for an instance without an arena of its own."""
        settings = self._options.session
        has_arena = settings.memory_arena and not settings.shared_arena and not settings.shrink_arenas
        is_on_cpu = choice.name == CPU and not choice.behind
        return instance.release_memory if isinstance(instance, Instance) and has_arena and is_on_cpu else None

    def usual_threads(self, choice: ProviderChoice) -> int:
        """The number of threads inside an operator for runs of unknown duration."""
        if self._runtime.has_global_threads:
            return self._cores
        if self._options.intra_op_threads is not None:
            return self._options.intra_op_threads
        return intra_op_threads(self._cores, on_gpu=choice.name in GPU_PROVIDERS, inter_op_threads=self.branches)

    def first_threads(self, choice: ProviderChoice) -> int:
        """The number of threads of the first session, which shows how short runs are.

        A small model begins with one thread, so that it seldom needs a second session.
        """
        usual = self.usual_threads(choice)
        if usual == 1 or choice.name != CPU or not self._options.warmup_s or not self._may_use_one_thread:
            return usual
        return 1 if self._model.nbytes < _SMALL_MODEL_NBYTES else usual

    def best_threads(self, choice: ProviderChoice, latencies: Sequence[SizeLatency]) -> int:
        """The number of threads for runs with these latencies, which begin with the smallest batch.

        The shortest run counts: longer ones show other work on the machine, which must not decide for the whole load.
        """
        is_short = bool(latencies) and latencies[0].least_run_ns < self.short_ns(choice)
        return 1 if is_short else self.usual_threads(choice)

    def short_ns(self, choice: ProviderChoice) -> int:
        """A model whose runs of one row are shorter gets one thread; 0 if the number does not depend on runs."""
        return ONE_THREAD_BELOW_NS if self._may_use_one_thread and self.usual_threads(choice) > 1 else 0

    def plain_cpu(self) -> SessionOptions:
        """Options of a session on the CPU, without settings for another provider and settings that write files."""
        configured = self._options.session
        settings = SessionSettings(
            graph_optimization=configured.graph_optimization,
            free_dimensions=configured.free_dimensions,
            free_dimensions_by_denotation=configured.free_dimensions_by_denotation,
        )
        cpu = ProviderChoice(CPU)
        has_global_threads = self._runtime.has_global_threads
        return SessionOptions(cpu, self.usual_threads(cpu), settings, self._model.libraries, has_global_threads)


def find_rejected_rows(worker: WorkerRuns, inputs: InputGenerator) -> tuple[Arrays, ...]:
    """Run one synthetic row of each variant of ``inputs`` on an instance.

    Returns:
        The rows that the instance rejects; empty if it accepts any row. A row for which memory is too small counts
        neither as accepted nor as rejected.

    Raises:
        DeviceLostError: The device is lost, so that nothing can run any more.
        RunTimeoutError: A run exceeded its time limit.
    """
    worker.progress.begin("warming up: looking for a row that the model accepts")
    accepted, rejected = run_until_accepted(worker, (variant.generate(1, 0) for variant in inputs.variants()))
    return () if accepted else tuple(rejected)


def run_until_accepted(worker: WorkerRuns, rows: Iterable[Arrays]) -> tuple[bool, list[Arrays]]:
    """Run rows one by one until the model accepts one. Returns whether it accepted one, and the rejected rows."""
    rejected: list[Arrays] = []
    for row in rows:
        try:
            worker.run(as_batch(row, 1))
        except ENDS_LOAD:
            raise
        except OutOfMemoryError:
            continue
        except ServeError:
            rejected.append(row)
        else:
            return True, rejected
    return False, rejected


def cpu_accepts_any(
    model: AnalysedModel,
    options: SessionOptions,
    rows: Sequence[Arrays],
    inputs: InputGenerator,
    bounds: RunBounds,
) -> bool:
    """Whether the model accepts any of the rows on the CPU. Also False if the CPU provider cannot open the model.

    Opens a session on the CPU with ``options`` for this, beside the session that rejected these rows of ``inputs``.
    """
    try:
        session = open_session(model.path, model.name, options, model.content)
    except ServeError:
        return False
    instance = Instance(
        session,
        inputs.signature,
        name=f"{model.name} on the CPU",
        intra_op_threads=options.intra_op_threads,
        clock=bounds.progress.clock,
        padding=inputs.padding,
    )
    del session
    try:
        return run_until_accepted(WorkerRuns(instance, bounds), rows)[0]
    finally:
        instance.close()
