"""Starts the generator processes of a measurement, which offer loads together."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Final

from ortserve.clock import monotonic_ns
from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.bench.generator import STOP, Finished, LoadPart
from ortserve.tools.bench.outcomes import Chunk
from ortserve.tools.staging import signals_handled_by

_PROGRAM: Final = "from ortserve.tools.bench.generator import main; main()"
_START_S: Final = 0.05
"""Delay from the moment when all generators are ready to their common start."""
_GRACE_S: Final = 30
"""Time limit of the last message, after the last request has timed out."""


@dataclass(slots=True)
class Seen:
    """The outcomes of one load from all generators.

    Attributes:
        chunks: The chunks in the order of their arrival.
        finished: The last message of each generator.
        is_interrupted: Whether Ctrl-C ended the load.
        is_precise: Whether ``wants_more`` ended the load.
    """

    chunks: list[Chunk] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    is_interrupted: bool = False
    is_precise: bool = False


class Generators:
    """Generator processes, which offer several loads one after the other. Use as a context manager."""

    def __init__(self, count: int, *, errors: int | None = None, open_limit_s: float | None = None) -> None:
        """Start the processes.

        Args:
            count: The number of processes, at least 1.
            errors: Descriptor of a file that replaces their standard error; None to keep it.
            open_limit_s: Time limit of opening a target; None for no limit.
        """
        self.count: Final = count
        self._open_limit_s = open_limit_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        # The processes inherit the mask, so Ctrl-C reaches this process only, which keeps the outcomes so far.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for _ in range(count):
                ours, theirs = Pipe()
                self._pipes.append(ours)
                with theirs:
                    command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
                    process = subprocess.Popen(  # noqa: S603 - ours
                        command, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL, stderr=errors
                    )
                    self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [process.pid for process in self._processes]

    def __enter__(self) -> "Generators":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. A load in progress is aborted."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def offer(self, parts: Sequence[LoadPart], wants_more: Callable[[Seen, float], bool]) -> Seen:
        """Offer the parts of a load at the same time. Ctrl-C ends the load, and this call returns normally.

        Args:
            parts: One for each process.
            wants_more: Called at the beginning of the measurement and ten times a second, with the outcomes so far and
                the seconds since this beginning (negative in the warm-up). False ends the load.

        Raises:
            ServeError: A target cannot be opened, or a generator has died.
        """
        seen, part = Seen(), parts[0]
        begin_ns, end_ns, _ = part.times(self._open(parts))
        left = list(self._pipes)

        def interrupt(number: int, frame: FrameType | None) -> None:
            if seen.is_interrupted:  # the second Ctrl-C ends the call at once
                raise KeyboardInterrupt
            seen.is_interrupted = True

        is_stopped = False
        with signals_handled_by(interrupt, signal.SIGINT):  # an exception would lose the message that is being received
            while left:
                for pipe in wait(left, timeout=0.1):
                    assert isinstance(pipe, Connection)
                    message = _receive(pipe)
                    if isinstance(message, Finished):
                        seen.finished.append(message)
                        left.remove(pipe)
                    else:
                        seen.chunks.append(message)
                now_ns = monotonic_ns()
                if now_ns > end_ns + (part.timeout_s + _GRACE_S) * 1e9:
                    raise ServeError(ErrorKind.INTERNAL, "a generator has not ended in time")
                seen.is_precise |= not wants_more(seen, (now_ns - begin_ns) / 1e9)
                if not is_stopped and (seen.is_interrupted or seen.is_precise):
                    is_stopped = True
                    self._tell(STOP)
        return seen

    def _open(self, parts: Sequence[LoadPart]) -> int:
        """Open all targets. Returns the time of the common start."""
        for pipe, part in zip(self._pipes, parts, strict=True):
            with _watching():
                pipe.send(part)
        for pipe in self._pipes if self._open_limit_s is not None else ():
            if not pipe.poll(self._open_limit_s):
                raise ServeError(ErrorKind.INTERNAL, f"it did not open within {self._open_limit_s:g} s")
        for answer in [_receive(pipe) for pipe in self._pipes]:
            if isinstance(answer, ServeError):
                self._tell(STOP)  # generators whose targets are open wait for the start
                raise answer
        start_ns = monotonic_ns() + int(_START_S * 1e9)
        self._tell(start_ns)
        return start_ns

    def _tell(self, message: object) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # ``_receive`` raises for a process that has ended
                pipe.send(message)


def _receive(pipe: Connection) -> Any:
    with _watching():
        return pipe.recv()


@contextlib.contextmanager
def _watching() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        message = "a generator ended unexpectedly; its own message is above"
        raise ServeError(ErrorKind.INTERNAL, message) from None
