"""The generators of a measurement: processes that offer the load together."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from ortserve.clock import monotonic_ns
from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.bench.generator import GO_ON, STOP, Finished, Problem, Work
from ortserve.tools.bench.samples import Chunk

_PROGRAM: Final = "from ortserve.tools.bench.generator import main; main()"
_START_S: Final = 0.05
"""From the moment when all are ready to their common start."""
_GRACE_S: Final = 30
"""For a generator that should have ended."""


@dataclass(slots=True)
class Outcome:
    """What the generators saw.

    Attributes:
        chunks: Of each generator, in the order of time.
        finished: Of each generator; empty entries are missing only if one died.
        is_interrupted: By Ctrl-C.
        is_stopped: ``wants_more`` said so.
    """

    chunks: list[list[Chunk]]
    finished: list[Finished] = field(default_factory=list)
    is_interrupted: bool = False
    is_stopped: bool = False


class Generators:
    """Processes that stay for several works. Use as a context manager."""

    def __init__(self, count: int) -> None:
        """``count`` is at least 1."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        for _ in range(count):
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL)  # noqa: S603 - ours
                self._processes.append(process)
            self._pipes.append(Connection(ours.detach()))

    def __enter__(self) -> "Generators":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [process.pid for process in self._processes]

    def offer(
        self,
        works: Sequence[Work],
        wants_more: Callable[[Sequence[Sequence[Chunk]], float], bool],
        on_begin: Callable[[], object],
    ) -> Outcome:
        """Have all generators offer their work at the same time. Ctrl-C ends the load, not this call.

        Args:
            works: One for each process.
            wants_more: Called about four times a second with all chunks so far and the seconds since the measured time
                began (negative in warm-up); False ends the load.
            on_begin: Called once when the measured time has begun.

        Raises:
            ServeError: A target cannot be opened, or a generator has died.
        """
        outcome = Outcome([[] for _ in works])
        start_ns = self._open(works)
        begin_ns = start_ns + int(works[0].warmup_s * 1e9)
        end_ns = begin_ns + int((works[0].seconds + works[0].timeout_s + _GRACE_S) * 1e9)
        left = dict(zip(self._pipes, range(len(works)), strict=True))
        is_stopping = has_begun = False
        while left:
            try:
                to_begin_s = 0.1 if has_begun else max(0.0, (begin_ns - monotonic_ns()) / 1e9)
                for pipe in wait(list(left), timeout=min(0.1, to_begin_s)):
                    assert isinstance(pipe, Connection)
                    message = self._receive(pipe)
                    if isinstance(message, Finished):
                        outcome.finished.append(message)
                        del left[pipe]
                    else:
                        outcome.chunks[left[pipe]].append(message)
                now_ns = monotonic_ns()
                if not has_begun and now_ns >= begin_ns:
                    has_begun = True
                    on_begin()
                if now_ns > end_ns:
                    raise ServeError(ErrorKind.INTERNAL, "a generator has not ended in time")
                if not wants_more(outcome.chunks, (now_ns - begin_ns) / 1e9) and not is_stopping:
                    is_stopping = outcome.is_stopped = True
                    self._tell(STOP)
            except KeyboardInterrupt:
                if outcome.is_interrupted:  # twice: at once
                    raise
                outcome.is_interrupted = True
                self._tell(STOP)
        return outcome

    def _open(self, works: Sequence[Work]) -> int:
        """Open all targets; returns the time of the common start."""
        for pipe, work in zip(self._pipes, works, strict=True):
            self._send(pipe, work)
        problems = [answer for pipe in self._pipes if (answer := self._receive(pipe)) != GO_ON]
        for problem in problems:
            assert isinstance(problem, Problem)
            self._tell(STOP)  # those that could open theirs wait for the start
            raise ServeError(problem.kind, problem.message)
        start_ns = time.monotonic_ns() + int(_START_S * 1e9)
        self._tell(start_ns)
        return start_ns

    def _tell(self, message: object) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(message)

    def _send(self, pipe: Connection, message: object) -> None:
        try:
            pipe.send(message)
        except BrokenPipeError:
            raise _died() from None

    def _receive(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            raise _died() from None


def _died() -> ServeError:
    return ServeError(ErrorKind.INTERNAL, "a generator ended unexpectedly; its own message is above")
