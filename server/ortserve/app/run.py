"""The process: its settings, its stop signals, and the life of a server."""

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Final, NoReturn

import uvloop

from ortserve.app.server import Server
from ortserve.config.options import ServerOptions, unknown_variables
from ortserve.core.thread_pool import ThreadPool
from ortserve.engine.process_limits import SPARE_FILES, limit_malloc_arenas, raise_open_files
from ortserve.engine.thread_priority import LONGEST_SLICE_NS, put_loop_first, set_slice
from ortserve.errors import ErrorKind, ServeError
from ortserve.telemetry.logs import LogSwitches, configure_logging, log_event, log_fault, never_wait_for_standard_error
from ortserve.telemetry.standard_error import StandardError

logger: Final = logging.getLogger(__name__)

_SWITCH_INTERVAL_S: Final = 0.00005
"""Time for which the event loop may hold the interpreter lock while a worker waits for it. With Python's 5 ms a worker
waited 0.8 ms for the answers of its last batch before it could start the next one, and fewer rows per second were
served (``loadtests/batched_compute.py``)."""

_MIN_OPEN_FILES: Final = 16
"""Fewer cannot be enough for the ports, and libuv aborts the process if it gets none for the event loop."""

_LAST_LINES_S: Final = 1.0
"""Time for standard error to take the last log lines."""


def run(options: ServerOptions, origins: Mapping[str, str] | None = None) -> NoReturn:
    """Serve until SIGTERM or SIGINT, then drain and end the process with status 0. A second signal kills it at once.

    The status is 1 if the server cannot start, or if the drain failed or timed out: requests were cut off or runs
    abandoned.
    ``origins`` says where each option that is set was set, for the console.
    """
    limit_malloc_arenas()
    never_wait_for_standard_error(options.log_format)
    switches = configure_logging(options.log_level, options.log_format)
    logging.captureWarnings(True)  # of Python, such as of a library about a certificate; otherwise they are plain text
    for problem in unknown_variables(os.environ):
        log_event(logger, logging.WARNING, "environment variable has no effect", reason=problem)
    connections = options.http_max_connections + options.grpc_max_connections
    if (files := raise_open_files()) is not None and files < _MIN_OPEN_FILES:
        reason = f"Too many open files: expected a limit (ulimit -n) of at least {_MIN_OPEN_FILES}, got {files}"
        log_event(logger, logging.ERROR, "the server cannot start", reason=reason)
        _exit(1)
    if files is not None and files < connections + SPARE_FILES:
        message = "fewer open files than connections are allowed: callers can block every port"
        log_event(logger, logging.WARNING, message, open_files=files, connections=connections)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    put_loop_first()
    # Named, so that they outlive an error of theirs: the end of an open loop or an idle coroutine is logged, too.
    runner, serving = asyncio.Runner(loop_factory=uvloop.new_event_loop), _serve(options, switches, origins)
    try:
        runner.run(serving)
    except ServeError as error:
        log_event(logger, logging.ERROR, "the server cannot start", reason=error.message)
    except Exception as fault:  # noqa: BLE001 - the process ends
        log_fault(logger, "the server has failed", fault)
    _exit(1)


async def _serve(options: ServerOptions, switches: LogSwitches, origins: Mapping[str, str] | None) -> NoReturn:
    threads = ThreadPool(name="loop", initializer=set_slice, initargs=(LONGEST_SLICE_NS,))
    asyncio.get_running_loop().set_default_executor(threads)
    server = Server(options, switches, origins)
    asked_to_stop = catch_stop_signals(asyncio.get_running_loop())
    try:
        try:
            await server.start()
        except (OSError, MemoryError) as error:  # the system's limits: descriptors and memory
            raise ServeError(ErrorKind.OVERLOADED, str(error) or type(error).__name__) from error
        loading = asyncio.create_task(server.load(), name="load")
        watching = asyncio.create_task(server.watch(), name="watch")
        stopping = asyncio.create_task(asked_to_stop.wait(), name="signals")
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()  # raises if a repository cannot be read
        await stopping
        loading.cancel()
        watching.cancel()
        is_whole = await _drain(server)
    finally:
        await server.stop()
    _exit(0 if is_whole else 1)


async def _drain(server: Server) -> bool:
    """Drain the server. Returns False if requests were cut off, runs are still active or a part failed."""
    try:
        return await server.drain()
    except Exception as fault:  # noqa: BLE001 - the server stops all the same
        log_fault(logger, "the drain failed", fault)
        return False


def _exit(status: int) -> NoReturn:
    """End the process without waiting for threads, which may be in a load or a run without a time limit."""
    logging.shutdown()
    if isinstance(sys.stderr, StandardError):
        sys.stderr.wait_until_written(_LAST_LINES_S)
    sys.stdout.flush()
    os._exit(status)


STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def catch_stop_signals(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Handle the first of ``STOP_SIGNALS`` on ``loop``. Main thread only.

    The second signal ends the process in any state of the loop. The loop notices a signal only while it turns, and
    Python's own handlers run only between two bytecodes of the main thread. Neither happens while a call holds the
    thread or the interpreter lock forever. So the kernel handles the second signal: the handler of the first is
    installed for one delivery, which restores the default action before any code of the process runs.

    The kernel does not apply default actions to the first process of a container (pid_namespaces(7)); there the server
    needs an init process as its parent. The images have one.

    Returns:
        An event that the first signal sets. The same signal again, or either signal after that, ends the process.
    """
    caught = asyncio.Event()

    def on_signal() -> None:
        caught.set()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # the loop would restore Python's KeyboardInterrupt for SIGINT

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
        _catch_once(number)
    return caught


def _catch_once(number: signal.Signals) -> None:
    """Let the kernel reset a signal to its default action at the first delivery (SA_RESETHAND).

    Installs the existing handler, Python's, a second time. Without glibc's function the default action is restored only
    when the loop has run ``on_signal``.
    """
    install = getattr(ctypes.CDLL(None), "sysv_signal", None)
    if install is None:
        return
    install.restype = ctypes.c_void_p
    install.argtypes = (ctypes.c_int, ctypes.c_void_p)
    installed = ctypes.pythonapi.PyOS_getsig
    installed.restype = ctypes.c_void_p
    installed.argtypes = (ctypes.c_int,)
    install(number, installed(number))
    signal.siginterrupt(number, False)  # as the loop sets it: do not interrupt system calls of ONNX Runtime
