"""Helper processes for work that would hold the interpreter lock of the server, or could end its process.

A helper process receives and returns byte strings, called parts, over a socket. Large parts are transferred without the
interpreter lock.
"""

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from ortserve.core.large_memory import LargeMemory
from ortserve.errors import ErrorKind, ServeError, out_of_memory

Parts: TypeAlias = list[bytes | memoryview]

LARGE_BYTES: Final = 64 * 1024
"""Parts above this size are received into ``LargeMemory``."""
_CHECK_S: Final = 2
"""Timeout of each system call that sends to a process or receives from it. The process is then checked."""
_MAX_SILENT_CHECKS: Final = 30
"""Number of checks in a row without a byte after which a process is given up. It decodes 64 MB of JSON in 2 s."""
_COUNT: Final = struct.Struct("<I")
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
"""Signals that may be sent to the whole process group, while the server still answers requests."""
_NICENESS: Final = 5
"""Small requests, which the server itself handles, take precedence over those of helper processes."""
_OOM_SCORE: Final = b"500"
"""If memory runs out, the kernel kills this process instead of the server."""


class HelperProcess:
    """A process that runs ``serve``: started by the first call, and again by the next one if it has ended.

    Used by one thread at a time.
    """

    def __init__(self, module: str, task: str, memory: LargeMemory) -> None:
        """Start nothing yet.

        Args:
            module: A module of this package whose ``main`` calls ``serve``.
            task: The task of the process, for errors, such as ``reads JSON``.
            memory: Memory for large results.
        """
        self._module = module
        self._task = task
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._stopped_ticks = -1
        """Processor time of the process if the last check found it stopped; otherwise -1."""

    def call(self, arguments: Any, content: bytes | memoryview) -> list[memoryview]:
        """Let the process work on bytes, and wait for the result.

        Args:
            arguments: Anything picklable.
            content: The bytes.

        Returns:
            The parts of the result; ``unpack`` reads the first one.

        Raises:
            ServeError: overloaded, if the process cannot be started, is stopped by a signal, does not answer, or ends
                before it answers, mostly for lack of memory.
        """
        connection = self._connection
        if connection is None or self._process is None or self._process.poll() is not None:
            self.close()
            try:
                connection = self._start()
            except OSError as error:
                text = f"the process that {self._task} cannot be started: {error.strerror}"
                raise ServeError(ErrorKind.OVERLOADED, text, retry_after_s=1) from error
        try:
            _send(connection, [pickle.dumps(arguments), content], self._check_progress)
            return _receive(connection, self._memory, self._check_progress)
        except (EOFError, OSError, MemoryError) as error:
            status = self.close()
            reason = str(error) if isinstance(error, TimeoutError) else f"ended with status {status}"
            text = f"the process that {self._task} {reason} while it read {len(content)} bytes"
            raise ServeError(ErrorKind.OVERLOADED, text, retry_after_s=1) from error

    def _check_progress(self, silent_checks: int) -> None:
        """Check the process after ``silent_checks`` timeouts of a system call in a row.

        A process that only waits for a processor is not given up early: two checks in a row must find it stopped, with
        the same processor time.

        Raises:
            TimeoutError: The process was stopped by a signal, or was silent for too long.
        """
        assert self._process is not None
        ticks = _stopped_ticks(self._process.pid)
        if silent_checks > 1 and ticks >= 0 and ticks == self._stopped_ticks:
            raise TimeoutError("was stopped by a signal")
        self._stopped_ticks = ticks
        if silent_checks >= _MAX_SILENT_CHECKS:
            raise TimeoutError(f"was silent for {silent_checks * _CHECK_S} s")

    def close(self) -> int | None:
        """Kill the process, which must not be in use. Returns its exit status; None without a process."""
        connection, process = self._connection, self._process
        self._connection = self._process = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        process.kill()
        return process.wait()

    def _start(self) -> socket.socket:
        """Start the process. Raises OSError."""
        ours, theirs = socket.socketpair()
        # Timeouts of the system calls, each of which moves a whole part without the interpreter lock. With a timeout of
        # Python's socket, each call would move only as much as a buffer of 200 KB holds.
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", _CHECK_S, 0))
        # ``-m`` would not run compiled modules.
        command = [sys.executable, "-c", f"from {self._module} import main; main()", str(theirs.fileno())]
        # The process does no linear algebra, and numpy's threads would reserve address space.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        # The process inherits the mask, for stop signals that arrive before ``serve`` ignores them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - of this package
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
            )
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self._connection = ours
        return ours


def _stopped_ticks(pid: int) -> int:
    """Processor time of a process, in ticks of the system, if a signal or debugger has stopped it; otherwise -1."""
    try:
        # The name of the process, in parentheses, may contain spaces (man 5 proc_pid_stat).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12]) if fields[0] in ("T", "t") else -1
    except (OSError, IndexError, ValueError):
        return -1


def serve(work: Callable[[Any, memoryview], Parts], task: str, niceness: int = _NICENESS) -> None:
    """Serve as a helper process until the server closes its end.

    Ignores ``_STOP_SIGNALS``.

    Args:
        work: Returns the parts of the result for the arguments and the content of a call; the first part is made by
            ``pack``. May raise ServeError or MemoryError, for which ``unpack`` raises a ServeError in the server.
        task: The task in the error that too little memory is left for it.
        niceness: Added to the nice level of the server.
    """
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.nice(niceness)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_OOM_SCORE)
    connection = socket.socket(fileno=int(sys.argv[1]))
    memory = LargeMemory()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:  # no variable refers to parts: their memory would be in use until the next ones arrive
            _send(connection, _do(work, task, *_receive(connection, memory)))


def _do(work: Callable[[Any, memoryview], Parts], task: str, arguments: memoryview, content: memoryview) -> Parts:
    try:
        return work(pickle.loads(arguments), content)  # noqa: S301 - from our own process, over a socket pair
    except ServeError as error:
        return [pack(error)]
    except MemoryError:
        return [pack(out_of_memory(task))]


def pack(result: Any) -> bytes:
    """Encode the first part of a result: anything picklable."""
    return pickle.dumps(result)


def unpack(part: memoryview) -> Any:
    """Decode the first part of a result. Raises the ServeError of the work, if it failed."""
    result = pickle.loads(part)  # noqa: S301 - from our own process, over a socket pair
    if isinstance(result, ServeError):
        raise result
    return result


def _never_silent(_: int) -> None:
    """A helper process waits for the server without a timeout."""
    raise AssertionError


def _send(
    connection: socket.socket, parts: Sequence[bytes | memoryview], on_silence: Callable[[int], None] = _never_silent
) -> None:
    """Send byte strings with their sizes. Blocks.

    ``on_silence`` is called after each timeout of the socket, with the number of timeouts in a row. It may raise.
    """
    sizes = [len(part) for part in parts]
    for part in (struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes), *parts):
        left, silent = memoryview(part), 0
        while len(left):
            try:
                sent = connection.send(left)
            except BlockingIOError:
                silent += 1
                on_silence(silent)
            else:
                left, silent = left[sent:], 0


def _receive(
    connection: socket.socket, memory: LargeMemory, on_silence: Callable[[int], None] = _never_silent
) -> list[memoryview]:
    """Receive the parts of ``_send``; large ones into ``memory``. Blocks. ``on_silence`` is that of ``_send``.

    Raises:
        EOFError: The other end closed the socket.
    """
    (count,) = _COUNT.unpack(_receive_part(connection, _COUNT.size, None, on_silence))
    sizes = struct.unpack(f"<{count}Q", _receive_part(connection, 8 * count, None, on_silence))
    return [_receive_part(connection, size, memory if size > LARGE_BYTES else None, on_silence) for size in sizes]


def _receive_part(
    connection: socket.socket, size: int, memory: LargeMemory | None, on_silence: Callable[[int], None]
) -> memoryview:
    room = np.empty(size, np.uint8).data if memory is None else memory.take(size)
    received = silent = 0
    while received < size:
        try:
            count = connection.recv_into(room[received:], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            silent += 1
            on_silence(silent)
            continue
        if not count:
            raise EOFError
        received, silent = received + count, 0
    return room
