"""Runs work that may crash or hang, or whose memory is measured, in a process of its own.

``python -m ortserve.engine.child_process FD PARENT`` is that process. It reads pickled work from the connection ``FD``,
and ends with the process ``PARENT``.
"""

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

from ortserve.engine.ort_errors import ORT_ERRORS, without_paths
from ortserve.errors import ErrorKind, ServeError, invalid_input

_PR_SET_PDEATHSIG: Final = 1
"""A constant of Linux: the signal that a process receives when the thread that started it has ended."""

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
_Arguments = ParamSpec("_Arguments")
_Kept = TypeVar("_Kept")


@dataclass(frozen=True, slots=True)
class Failure:
    """The process ended without a result, or was too slow (``is_late``). ``reason`` begins with a verb."""

    reason: str
    is_late: bool = False


def run_in_child(
    work: Callable[[Any], Any],
    items: Sequence[Any],
    limit_s: float,
    children: list[subprocess.Popen[bytes]] | None = None,
) -> Generator[Any, None, None]:
    """Do work on each item in one process, which is replaced after a crash or a timeout.

    Args:
        work: A function of a module. The function, its items and its results are pickled.
        items: The arguments of the calls.
        limit_s: Time limit of each item. The start of the process counts for the first item.
        children: Holds the process while it runs, for callers that may kill it.

    Yields:
        The result for each item, or a ``Failure``. Closing the iterator ends the process.
    """
    waiting = list(items)
    while waiting:
        # Closed explicitly: in Python 3.12, a closed generator keeps the iterator of its loop until it is freed itself.
        with closing(_run_child(work, tuple(waiting), limit_s, [] if children is None else children)) as results:
            for result in results:
                waiting.pop(0)
                yield result


def run_in_children(
    work: Callable[[Any], Any], items: Sequence[_Item], limit_s: float, processes: int
) -> Generator[tuple[_Item, Any], None, None]:
    """As ``run_in_child``, in several processes at the same time.

    Yields:
        Each item with its result or ``Failure``, in the order of completion. Closing the iterator ends the processes.

    Raises:
        Exception: An item cannot be sent, or a process cannot be started.
    """
    outcomes: queue.SimpleQueue[tuple[_Item, Any] | BaseException] = queue.SimpleQueue()
    is_over = threading.Event()
    children: list[subprocess.Popen[bytes]] = []

    def run(part: Sequence[_Item]) -> None:
        try:
            with closing(run_in_child(work, part, limit_s, children)) as results:
                for item, result in zip(part, results, strict=True):
                    outcomes.put((item, result))
                    if is_over.is_set():
                        return
        except BaseException as error:  # noqa: BLE001 - for example OSError: no process can be started
            outcomes.put(error)

    processes = min(processes, len(items))
    threads = [threading.Thread(target=run, args=(items[first::processes],)) for first in range(processes)]
    for thread in threads:
        thread.start()
    try:
        for _ in items:
            outcome = outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome
    finally:
        is_over.set()
        while any(thread.is_alive() for thread in threads):
            for child in children:  # each thread waits for its child
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            for thread in threads:
                thread.join(0.05)


def call_in_child(limit_s: float, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function of a module in another process, and end that process.

    Raises:
        ServeError: The function raised it; invalid_input: it raised an error of ONNX Runtime; internal: the process
            ended, or gave no result in time.
        OSError: The function raised it, for example because the disk is full.
    """
    (outcome,) = run_in_child(_call, [(function, arguments)], limit_s)
    result: _Result = _result_of(outcome)
    return result


class ObjectInChild(Generic[_Kept]):
    """An object in a process of its own. Its methods are called one at a time.

    Use it as a context manager, which ends the process. Calls raise the errors of ``call_in_child``. Afterwards the
    process has ended, or the object is in the state in which the call left it.
    """

    def __init__(
        self,
        limit_s: float,
        make: Callable[..., _Kept],
        *arguments: Any,
        children: list[subprocess.Popen[bytes]] | None = None,
    ) -> None:
        """Make the object in a new process. ``limit_s`` limits that, with the start of the process, and each call.

        ``make`` is a function or class of a module. Its arguments are pickled; its result is not. ``children`` is as in
        ``run_in_child``.
        """
        self._next: tuple[Callable[..., Any], tuple[Any, ...]] = (make, arguments)
        self._outcomes: Final = _run_child(None, self._calls(), limit_s, [] if children is None else children)
        try:
            _result_of(next(self._outcomes))
        except BaseException:
            self._outcomes.close()
            raise

    def call(
        self,
        method: Callable[Concatenate[_Kept, _Arguments], _Result],
        *arguments: _Arguments.args,
        **named: _Arguments.kwargs,
    ) -> _Result:
        """Call a method of the object, given as an attribute of its class: ``call(Runner.run, 3)``."""
        self._next = (partial(method, **named) if named else method, arguments)
        result: _Result = _result_of(next(self._outcomes, Failure("has ended")))
        return result

    def _calls(self) -> Iterator[Any]:
        while True:
            yield self._next

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._outcomes.close()


def _result_of(outcome: Any) -> Any:
    """The result of ``_call``. Raises its error, or ServeError for a ``Failure``."""
    if isinstance(outcome, Failure):
        reason = outcome.reason if outcome.is_late else f"the other process {outcome.reason}"
        raise ServeError(ErrorKind.INTERNAL, reason)
    result, problem = outcome
    if problem is not None:
        raise problem
    return result


def _call(item: tuple[Callable[..., _Result], tuple[Any, ...]]) -> tuple[_Result | None, ServeError | OSError | None]:
    """The result of a function and None, or None and the error."""
    function, arguments = item
    try:
        return function(*arguments), None
    except (ServeError, OSError) as error:
        return None, error
    except ORT_ERRORS as error:
        return None, invalid_input(without_paths(str(error)))


def _run_child(
    work: Callable[[Any], Any] | None,
    items: Iterable[Any],
    limit_s: float,
    children: list[subprocess.Popen[bytes]],
) -> Generator[Any, None, None]:
    """The results of a new process, up to the first ``Failure``.

    Without ``work``, items are functions with arguments. The first one makes an object, which is the first argument of
    the others.
    """
    errors = os.memfd_create("errors")  # receives the output of libraries, which a Failure quotes
    ours, theirs = Pipe()
    child = subprocess.Popen(  # noqa: S603 - this interpreter and module
        [sys.executable, "-m", "ortserve.engine.child_process", str(theirs.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,  # a process group, so its own children end with it
    )
    theirs.close()
    children.append(child)
    try:
        for item in items:
            with suppress(BrokenPipeError):
                ours.send((work, item))
            if not ours.poll(limit_s):
                yield Failure(f"returned no result within {limit_s:g} s", is_late=True)
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
        children.remove(child)
        child.wait()


def _end_with(parent: int) -> None:
    """End this process as soon as its parent has ended, also in the middle of its work. On Linux."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it had ended before the call
            os.kill(os.getpid(), signal.SIGKILL)


def main(connection: Connection, parent: int) -> None:
    """Do the received work, until the parent kills this process or ends."""
    _end_with(parent)
    kept: list[Any] = []
    while True:
        work, item = connection.recv()
        if work is not None:
            connection.send(work(item))
            continue
        function, arguments = item
        result, problem = _call((function, (*kept, *arguments)))
        if not kept and problem is None:
            kept.append(result)
            result = None
        connection.send((result, problem))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))
