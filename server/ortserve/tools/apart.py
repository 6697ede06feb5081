"""Work that may crash or hang, or whose memory is to be measured, done in a process of its own.

``python -m ortserve.tools.apart FD`` is that process. It reads pickled work from the connection ``FD``.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from ortserve.engine.ort_errors import ORT_ERRORS, without_paths
from ortserve.errors import ServeError, invalid_input

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Failure:
    """What the process did instead: it ended, or ``is_late``. ``reason`` begins with a verb."""

    reason: str
    is_late: bool = False


def run_apart(work: Callable[[Any], Any], items: Sequence[Any], limit_s: float) -> Generator[Any, None, None]:
    """Do work on each item, all in one process, which is replaced after an item that it did not survive.

    Args:
        work: A function of a module. It and its items and results are pickled.
        items: What to work on.
        limit_s: For each item; the start of the process counts to the first one.

    Yields:
        The result for each item, or a ``Failure``. Closing the iterator ends the process.
    """
    waiting = list(items)
    while waiting:
        for result in _run_child(work, tuple(waiting), limit_s):
            waiting.pop(0)
            yield result


def call_apart(limit_s: float, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function of a module in another process, and end that process.

    Raises:
        ServeError: invalid_input: the function raised it or an error of ONNX Runtime, or the process gave no result in
            time.
    """
    (outcome,) = run_apart(_call, [(function, arguments)], limit_s)
    if isinstance(outcome, Failure):
        raise invalid_input(outcome.reason if outcome.is_late else f"the other process {outcome.reason}")
    result: _Result
    result, problem = outcome
    if problem:
        raise invalid_input(problem)
    return result


def _call(item: tuple[Callable[..., _Result], tuple[Any, ...]]) -> tuple[_Result | None, str]:
    """The result of a function and an empty text, or None and the problem."""
    function, arguments = item
    try:
        return function(*arguments), ""
    except ServeError as error:
        return None, error.message
    except ORT_ERRORS as error:
        return None, without_paths(str(error))


def _run_child(work: Callable[[Any], Any], items: Sequence[Any], limit_s: float) -> Iterator[Any]:
    """The results up to the first ``Failure``."""
    errors = os.memfd_create("errors")  # what libraries write is shown only if the process ends
    ours, theirs = Pipe()
    child = subprocess.Popen(  # noqa: S603 - this interpreter and module
        [sys.executable, "-m", "ortserve.tools.apart", str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,  # so that processes of its own end with it
    )
    theirs.close()
    try:
        for item in items:
            with suppress(BrokenPipeError):
                ours.send((work, item))
            if not ours.poll(limit_s):
                yield Failure(f"gave no result within {limit_s:g} s", is_late=True)
                return
            yield ours.recv()
    except (EOFError, ConnectionResetError):
        status = child.wait()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        text = os.pread(errors, 4096, max(0, os.fstat(errors).st_size - 4096)).decode(errors="replace")
        yield Failure(f"ended with {how}: {(text.strip().splitlines() or ['no output'])[-1][:500]}")
    finally:
        ours.close()
        os.close(errors)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # a broken driver may hang the release of its resources
        child.wait()


def main(connection: Connection) -> None:
    """Do what the other side sends, until it is killed."""
    while True:
        work, item = connection.recv()
        connection.send(work(item))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
