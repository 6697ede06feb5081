"""Whether the model refuses what is made up for it, or its execution provider fails at what the CPU takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ortserve.clock import Clock
from ortserve.config.model import ModelOptions
from ortserve.config.session import SessionSettings
from ortserve.core.batch import Arrays, Runner
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.engine.cpu_budget import cpu_budget, intra_op_threads
from ortserve.engine.instance import Instance
from ortserve.engine.provider_options import CPU, GPU_PROVIDERS
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, affinities_key, open_session
from ortserve.errors import DeviceLostError, OutOfMemoryError, RunTimeoutError, ServeError
from ortserve.registry.load.batch_sizes import USUAL_BOUNDS, RunBounds, SizeLatency, WorkerRuns, as_batch
from ortserve.registry.load.coordination import Progress
from ortserve.registry.load.inputs import MakeUp
from ortserve.registry.opening import model_nbytes

ONE_THREAD_BELOW_NS: Final = 1_000_000
"""A run of one row shorter than this gains less from a second thread than waking it costs."""
_FEW_WEIGHTS_NBYTES: Final = 4 * 1024**2


class RunThreads:
    """Chooses the number of threads for the sessions of one load."""

    def __init__(self, path: Path, options: ModelOptions, *, has_global_threads: bool) -> None:
        """``has_global_threads`` says whether all sessions of the process share their threads."""
        self._path = path
        self._options = options
        self._has_global_threads = has_global_threads
        session = options.session
        self.branches: Final = session.inter_op_threads if session.execution_mode == "parallel" else 1
        """Operators that may run beside each other."""

    def usual(self, choice: ProviderChoice) -> int:
        """Before it is known how short runs are."""
        if self._has_global_threads:
            return cpu_budget()
        if self._options.intra_op_threads is not None:
            return self._options.intra_op_threads
        return intra_op_threads(cpu_budget(), on_gpu=choice.name in GPU_PROVIDERS, inter_op_threads=self.branches)

    def first(self, choice: ProviderChoice) -> int:
        """In the session that shows how short runs are.

        Runs of a model with few weights are mostly short, and then it need not be opened again.
        """
        usual = self.usual(choice)
        if usual == 1 or choice.name != CPU or not self._options.warmup_s or not self._may_be_one():
            return usual
        return 1 if model_nbytes(self._path) < _FEW_WEIGHTS_NBYTES else usual

    def wanted(self, choice: ProviderChoice, latencies: Sequence[SizeLatency]) -> int:
        """Once it is known how short runs are, as far as ``latencies`` say."""
        is_short = bool(latencies) and latencies[0].run_ns < ONE_THREAD_BELOW_NS
        return 1 if is_short and self._may_be_one() else self.usual(choice)

    def _may_be_one(self) -> bool:
        """Whether the options leave open how many threads a run uses, and on which processors."""
        options = self._options
        return options.intra_op_threads is None and not affinities_key(options.session) and not self._has_global_threads


def refused_rows(
    runner: Runner,
    signature: ModelSignature,
    padding: Padding | None,
    progress: Progress,
    bounds: RunBounds = USUAL_BOUNDS,
) -> tuple[Arrays, ...]:
    """Rows that an instance refuses, one made up in each way; none at all where it takes any of them.

    One for which there is too little memory is not refused.

    Raises:
        DeviceLostError: As ``warm_up``.
        RunTimeoutError: Likewise.
    """
    progress.begin("warming up: looking for a row that the model takes")
    worker = WorkerRuns(runner, bounds)
    refused: list[Arrays] = []
    for way in MakeUp(signature, padding).ways():
        row = way(1, 0)
        try:
            worker.run(as_batch(row, 1))
        except (DeviceLostError, RunTimeoutError):
            raise
        except OutOfMemoryError:
            continue
        except ServeError:
            refused.append(row)
        else:
            return ()
    return tuple(refused)


def takes_any(runner: Runner, rows: Sequence[Arrays], bounds: RunBounds = USUAL_BOUNDS) -> bool:
    """Whether an instance runs one of the rows that another one has refused.

    Raises:
        DeviceLostError: As ``warm_up``.
        RunTimeoutError: Likewise.
    """
    worker = WorkerRuns(runner, bounds)
    for row in rows:
        try:
            worker.run(as_batch(row, 1))
        except (DeviceLostError, RunTimeoutError):
            raise
        except ServeError:
            continue
        return True
    return False


@dataclass(frozen=True, slots=True)
class CpuTrial:
    """Trying on the CPU what an execution provider refused.

    Attributes:
        path: The model file.
        name: Of the model.
        configured: Settings of its sessions.
        libraries: With operators of its own.
        has_global_threads: Whether runs use the threads of the process.
        threads: Inside an operator.
        clock: Monotonic nanoseconds.
        bounds: Of its runs.
    """

    path: Path
    name: str
    configured: SessionSettings
    libraries: tuple[Path, ...]
    has_global_threads: bool
    threads: int
    clock: Clock
    bounds: RunBounds

    def takes_any(self, rows: Sequence[Arrays], signature: ModelSignature, padding: Padding | None) -> bool:
        """Whether the model runs one of these rows on the CPU alone: then it is not the model that refuses them.

        It has a session of its own for that, in the host's memory, beside the one that refused them.
        """
        # Without settings that are meant for the execution provider, or would write the files that they name.
        settings = SessionSettings(
            graph_optimization=self.configured.graph_optimization,
            free_dimensions=self.configured.free_dimensions,
            free_dimensions_by_denotation=self.configured.free_dimensions_by_denotation,
        )
        choice = ProviderChoice(CPU)
        options = SessionOptions(choice, self.threads, settings, self.libraries, self.has_global_threads)
        try:
            session = open_session(self.path, self.name, options)
        except ServeError:  # it has operators that the CPU has not: nothing is known
            return False
        name = f"{self.name} on the CPU"
        instance = Instance(
            session, signature, name=name, intra_op_threads=self.threads, clock=self.clock, padding=padding
        )
        del session
        try:
            return takes_any(instance, rows, self.bounds)
        finally:
            instance.close()
