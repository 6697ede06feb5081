"""Whether the model refuses what is made up for it, or its execution provider fails at what the CPU takes."""

from collections.abc import Sequence

from ortserve.core.batch import Arrays, Runner
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.errors import DeviceLostError, OutOfMemoryError, ServeError
from ortserve.registry.make_up import MakeUp, WorkerRuns, as_batch
from ortserve.registry.progress import Progress


def refused_rows(
    runner: Runner, signature: ModelSignature, padding: Padding | None, progress: Progress
) -> tuple[Arrays, ...]:
    """Rows that an instance refuses, one made up in each way; none at all where it takes any of them.

    One for which there is too little memory is not refused.

    Raises:
        DeviceLostError: As ``warm_up``.
    """
    progress.begin("warming up: looking for a row that the model takes")
    worker = WorkerRuns(runner)
    refused: list[Arrays] = []
    for way in MakeUp(signature, padding).ways():
        row = way(1, 0)
        try:
            worker.run(as_batch(row, 1))
        except DeviceLostError:
            raise
        except OutOfMemoryError:
            continue
        except ServeError:
            refused.append(row)
        else:
            return ()
    return tuple(refused)


def takes_any(runner: Runner, rows: Sequence[Arrays]) -> bool:
    """Whether an instance runs one of the rows that another one has refused.

    Raises:
        DeviceLostError: As ``warm_up``.
    """
    worker = WorkerRuns(runner)
    for row in rows:
        try:
            worker.run(as_batch(row, 1))
        except DeviceLostError:
            raise
        except ServeError:
            continue
        return True
    return False
