"""Python processes forked from one that has already imported their packages.

``PreloadedProcess`` is a server, which saves 0.9 s of processor time per start. ``PreloadedPopen`` takes the place of
``subprocess.Popen`` for the commands of ``ortserve`` and for the processes that they start, which saves 0.6 to 1.2 s.

Both are ordinary processes: they read their own arguments and environment, and are children of the test run, which
waits for them. Starts that need ``sitecustomize``, except that of ``freezing/``, or another program that executes them,
use ``subprocess``; so do all starts for which the template cannot fork.

Three things differ from a start by the interpreter. All processes of one template share the seed of the hashes of
texts. Commands are called as ``main(arguments)``, so they neither run ``__main__.py`` nor restart with huge pages: at
least one test of each such command starts it by ``subprocess``. And a process that exits with a status waits for its
threads, calls the functions of ``atexit`` and writes its output. It neither destroys modules, which would take 0.16 s,
nor runs the exit handlers and destructors of native libraries.
"""

import atexit
import ctypes
import fcntl
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, Self, TextIO
from unittest.mock import Mock

_PR_SET_CHILD_SUBREAPER: Final = 36
_MAX_BYTES: Final = 2**20  # of the arguments and the environment of one process
_FREE_FILE: Final = 512
"""Files of the template and received files are above this descriptor, before each received one gets the number that it
had in the test run."""

_ANSWER_LIMIT_S: Final = 60.0  # the template imports for some seconds before its first answer

_READ_EARLY: Final = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_TUNABLES", "LC_", "LANG", "TZ", "HOME"),
    *("OMP_", "OPENBLAS_", "MKL_", "CUDA_", "HOST_CUDA", "GRPC_", "MPL"),
)
"""Beginnings of variables that the interpreter or a library reads at its start."""
_PLAIN: Final = (True, True, None, None, None, -1, -1)
"""Defaults of ``close_fds``, ``restore_signals``, ``group``, ``extra_groups``, ``user``, ``umask`` and
``process_group``, as the constructor of ``subprocess.Popen`` passes them on."""

_LIMITS: Final = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_TOOLS: Final = (
    *("check", "compare", "doctor", "golden", "inspect", "models", "optimize", "profile", "publish", "quantize"),
    *("bench", "tune"),
)
_ALSO_FOR_TOOLS: Final = (
    *("onnxscript.optimizer", "onnxscript.rewriter.ort_fusions", "onnxslim", "matplotlib.pyplot"),
    *("ortserve.tools.bench.generator", "ortserve.tools.bench.in_process", "ortserve.tools.bench.grpc_client"),
)
"""Modules that commands import on first use."""

Kind = Literal["servers", "tools"]
_TOOLS_TEMPLATE: Final = "preloaded"
"""Named as the module of the order to become the template of tools."""


class PreloadedProcess:
    """A forked server, with the methods of ``subprocess.Popen`` that tests use.

    Attributes:
        pid: Its process id.
        stdout: Its standard output and standard error; None for a template.
    """

    @classmethod
    def start(
        cls, arguments: Sequence[str], env: Mapping[str, str], limits: Mapping[int, tuple[int, int]]
    ) -> Self | None:
        """Fork a server with these soft and hard limits. Returns None if it has to be started by ``subprocess``."""
        customizes = "FREEZE_WAY" in env
        if _is_read_early(_with_own_path(env) if customizes else env):
            return None
        order: dict[str, Any] = {"module": "ortserve", "arguments": list(arguments), "env": dict(env)}
        order |= {"cwd": str(Path.cwd()), "customizes": customizes, "both_limits": list(limits.items())}
        reading, writing = os.pipe()
        output = os.fdopen(reading)
        try:
            pid = _fork("servers", order, {1: writing, 2: writing})
        finally:
            os.close(writing)
        if pid is None:
            output.close()
            return None
        return cls(pid, output)

    def __init__(self, pid: int, stdout: TextIO | None = None) -> None:
        self.pid: Final = pid
        self.stdout: Final = stdout
        self._ended = os.pidfd_open(pid)
        self._status: int | None = None
        self._lock = threading.Lock()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with self._lock:
            if self._status is None and select.select([self._ended], [], [], 0)[0]:
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                os.close(self._ended)
            return self._status

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            select.select([self._ended], [], [], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"server {self.pid}", timeout or 0)
        return status


class PreloadedPopen(subprocess.Popen[Any]):
    """``subprocess.Popen``, which forks processes of this interpreter that run modules or one-line programs."""

    def _execute_child(self, *arguments: Any) -> None:
        """Called by the constructor with all that describes the process, in this order since Python 3.11."""
        command, executable, preexec_fn, _, pass_fds, cwd, env, *_, shell, p2c, _, _, c2p, _, err = arguments[:16]
        others, start_new_session = (arguments[3], *arguments[16:21], arguments[22]), arguments[21]
        env = dict(os.environ if env is None else env)
        order = _order_of(command, env)
        pid = None
        if order is not None and others == _PLAIN and not (executable or preexec_fn or shell):
            files = {number: file for number, file in ((0, p2c), (1, c2p), (2, err)) if file != -1}
            for number in range(3):
                files.setdefault(number, number)
            order |= {
                "env": env,
                "cwd": str(cwd or Path.cwd()),
                "session": start_new_session,
                "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
                "limits": [resource.getrlimit(limit)[0] for limit in _LIMITS],
                "processors": list(os.sched_getaffinity(0)),
            }
            pid = _fork("tools", order, files | {file: file for file in pass_fds})
        if pid is None:
            super()._execute_child(*arguments)  # type: ignore[misc]  # of CPython, unknown to its stubs
            return
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*arguments[10:16])  # type: ignore[attr-defined]  # as above


def _order_of(command: Any, env: Mapping[str, str]) -> dict[str, Any] | None:
    """The module or program that a command of this interpreter runs; None for other commands and environments."""
    # Of PYTHONPATH only ``sitecustomize`` is read at the start; a forked process adds the folders itself.
    folders = env.get("PYTHONPATH", "").split(os.pathsep)
    if any((Path(folder) / "sitecustomize.py").exists() for folder in folders):
        return None
    if isinstance(command, str | bytes | Path) or _is_read_early(_with_own_path(env)):
        return None
    match list(map(str, command)):
        case [executable, *_] if executable != _EXECUTABLE:
            return None
        case [_, "-m", str(module), *arguments] if module.partition(".")[0] == "ortserve":
            return {"module": module, "arguments": arguments}
        case [_, "-c", str(program), *arguments] if program.startswith("from ortserve."):
            return {"program": program, "arguments": arguments}
    return None


def _with_own_path(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with the template's PYTHONPATH."""
    own = {name: value for name, value in _ENVIRONMENT.items() if name == "PYTHONPATH"}
    return {name: value for name, value in env.items() if name != "PYTHONPATH"} | own


def _is_read_early(env: Mapping[str, str]) -> bool:
    """Whether a variable differs from the template's that is read before the template forks."""
    changed = {name for name in {*env, *_ENVIRONMENT} if env.get(name) != _ENVIRONMENT.get(name)}
    return any(name.startswith(_READ_EARLY) for name in changed)


class _Template:
    """A process that has imported what the processes need that it forks. That of servers forks that of tools."""

    def __init__(self, kind: Kind) -> None:
        # Forked processes become orphans when the intermediate process ends. As a subreaper, this process then adopts
        # them.
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._orders, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
        self._orders.settimeout(_ANSWER_LIMIT_S)
        with theirs:
            self._process = _start_template(kind, theirs.fileno())

    def fork(self, order: Mapping[str, Any], files: Mapping[int, int]) -> int | None:
        """Fork a process with these open files, by the descriptor that each has there.

        Returns:
            Its process id; None if the system starts no process.

        Raises:
            _FailedStartError: The process has started and could not become what the order says.
            OSError: The template has ended, or does not answer in time.
        """
        message = json.dumps({**order, "files": list(files)}).encode()
        socket.send_fds(self._orders, [message], list(files.values()))
        answer = self._orders.recv(4096)
        if not answer:
            raise BrokenPipeError("the template has ended")
        pid, _, problem = answer.decode(errors="replace").partition(" ")
        if problem and pid:
            os.waitpid(int(pid), 0)
            what = order.get("module", order.get("program"))
            raise _FailedStartError(f"{what} {order['arguments']}: {problem}")
        return None if problem else int(pid)

    def end(self) -> None:
        self._orders.close()
        self._process.kill()
        self._process.wait()


def _start_template(kind: Kind, orders: int) -> "subprocess.Popen[bytes] | PreloadedProcess":
    """Start the process that receives its orders from this socket.

    Raises:
        OSError: The system starts no process.
    """
    if kind == "servers":
        return _Popen([sys.executable, __file__, str(orders)], pass_fds=[orders], env=_ENVIRONMENT)
    order = {"module": _TOOLS_TEMPLATE, "arguments": [str(orders)], "env": _ENVIRONMENT, "cwd": str(Path.cwd())}
    pid = _fork("servers", order, {orders: orders})
    if pid is None:
        raise BlockingIOError("no process forks the template of tools")
    return PreloadedProcess(pid)


class _FailedStartError(Exception):
    """A forked process could not become what its order says."""


_ENVIRONMENT: Final = dict(os.environ)
"""The environment of the templates: that of the test run, without the changes of tests."""
_EXECUTABLE: Final = sys.executable
_Popen: Final = subprocess.Popen
"""The class itself: tests replace the name by ``PreloadedPopen``."""
_TEMPLATES: Final[dict[Kind, _Template]] = {}
_LOCK: Final = threading.RLock()
"""For the templates, each of which answers one order at a time; entered again to start the one of tools."""


def _fork(kind: Kind, order: Mapping[str, Any], files: Mapping[int, int]) -> int | None:
    """Fork a process. Returns None if the template cannot: a template that fails is replaced with the next order."""
    with _LOCK:
        try:
            if kind not in _TEMPLATES:
                _TEMPLATES[kind] = _Template(kind)
            return _TEMPLATES[kind].fork(order, files)
        except OSError:
            if failed := _TEMPLATES.pop(kind, None):
                failed.end()
            return None


@dataclass
class _Exit:
    """How a forked process has exited."""

    status: int | None = None
    """None if it has not exited, or with a text or an exception, for which the interpreter has the status."""


def _import_for_servers() -> None:
    """Import what servers need, and make the calls whose first time takes longer."""
    from ortserve.app import run  # noqa: F401
    from ortserve.cli.main import main  # noqa: F401
    from ortserve.config.options import read_options
    from ortserve.frontends.http.control_app import make_control_app

    # The first call takes three times as long, because libraries import modules and compile expressions on first use.
    read_options({})
    unused = (Mock() for _ in range(5))
    make_control_app(*unused, title="never served")


def _import_for_tools() -> None:
    for command in _TOOLS:
        import_module(f"ortserve.tools.{command}.arguments")
        import_module(f"ortserve.tools.{command}.command")
    for module in _ALSO_FOR_TOOLS:
        import_module(module)


def _serve_orders(orders: socket.socket) -> None:
    """Fork a process for each order, until the test run has ended."""
    # A process collects garbage at its start, which would inspect, and so copy, all that was imported here.
    gc.collect()
    gc.freeze()

    # Forking is safe here, because only numpy has a thread, and numpy restarts it in the child.
    warnings.filterwarnings("ignore", message="This process .* is multi-threaded", category=DeprecationWarning)
    while True:
        message, files, _, _ = socket.recv_fds(orders, _MAX_BYTES, 64)
        if not message:
            return
        between = _fork_or_answer(orders)
        if between == 0:
            intermediate = os.getpid()
            if _fork_or_answer(orders) != 0:
                os._exit(0)
            problem = ""
            try:
                order = json.loads(message)
                _become(order, files)
            except BaseException as error:
                problem = f" {error!r}"
            while os.getppid() == intermediate:  # the test run adopts this process when the other has ended
                time.sleep(0.0005)
            try:
                orders.send(f"{os.getpid()}{problem}".encode()[:4096])
            except OSError:  # the test run has given up waiting, and starts the command itself
                os._exit(1)
            orders.close()
            if problem:
                os._exit(1)
            _run(order)
        for file in files:
            os.close(file)
        if between is not None:
            os.waitpid(between, 0)


def _end_with(exit_: _Exit) -> None:
    """End the process with the status that it has exited with, if there is one; otherwise as any process."""
    if exit_.status is None:
        return
    # If nobody reads the output, writing it fails. The interpreter then writes it again, and sets its own status.
    with suppress(OSError):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # the output of native libraries
        os._exit(exit_.status)


def _fork_or_answer(orders: socket.socket) -> int | None:
    """As ``os.fork``. If the system starts no process, sends that as the answer, without a process id."""
    try:
        return os.fork()
    except OSError as error:
        orders.send(f" {error!r}".encode())
        return None


def _become(order: Mapping[str, Any], files: Sequence[int]) -> None:
    """Give this process the open files, environment and limits of an order."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, _FREE_FILE) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(order["files"], moved, strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(order["cwd"])
    replaced = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(order["env"])
    if folders := [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]:
        sys.path[1:] = [*folders, *(folder for folder in sys.path[1:] if folder not in {*replaced, *folders})]
    if order.get("customizes"):
        sys.modules.pop("sitecustomize", None)  # Debian's
        import_module("sitecustomize")
    tempfile.tempdir = None  # read from the environment again
    if order.get("session"):
        os.setsid()
    for limit, soft in zip(_LIMITS, order.get("limits", ()), strict=False):
        resource.setrlimit(limit, (soft, resource.getrlimit(limit)[1]))
    for limit, soft_and_hard in order.get("both_limits", ()):
        resource.setrlimit(limit, soft_and_hard)
    if processors := order.get("processors"):
        os.sched_setaffinity(0, processors)
    signal.pthread_sigmask(signal.SIG_SETMASK, order.get("mask", ()))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _run(order: Mapping[str, Any]) -> None:
    """Run the module or the program, as the interpreter does with ``-m`` and ``-c``, or be the template of tools."""
    if order.get("module") == _TOOLS_TEMPLATE:
        _import_for_tools()
        _serve_orders(_orders_at(int(order["arguments"][0])))
        sys.exit()
    sys.path[0] = ""
    program = order.get("program")
    sys.argv = ["-c" if program else "ortserve", *order["arguments"]]
    if program:
        exec(program, {"__name__": "__main__"})
        sys.exit()
    if order["module"] == "ortserve":
        from ortserve.cli.main import main

        sys.exit(main(order["arguments"]))
    warnings.filterwarnings("ignore", message=".* found in sys.modules", category=RuntimeWarning)
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    sys.exit()


def _orders_at(number: int) -> socket.socket:
    """The socket at this descriptor, moved to one that no forked process gets."""
    above = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _FREE_FILE)
    os.close(number)
    return socket.socket(fileno=above)


def _main() -> None:
    """Be the template of servers, and in forked processes what their orders say."""
    exit_ = _Exit()
    atexit.register(_end_with, exit_)  # before libraries register theirs, because the first one is called last
    _import_for_servers()
    try:
        _serve_orders(_orders_at(int(sys.argv[1])))
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            exit_.status = ended.code or 0
        raise


if __name__ == "__main__":
    _main()
