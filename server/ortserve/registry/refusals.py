"""Whether the model refuses what is made up for it, or its execution provider fails at what the CPU takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ortserve.clock import Clock
from ortserve.config.session import SessionSettings
from ortserve.core.batch import Arrays, Runner
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.engine.instance import Instance
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import DeviceLostError, OutOfMemoryError, RunTimeoutError, ServeError
from ortserve.registry.make_up import USUAL_BOUNDS, MakeUp, RunBounds, WorkerRuns, as_batch
from ortserve.registry.progress import Progress


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
