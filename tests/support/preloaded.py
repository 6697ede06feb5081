"""Servers forked from a process that has already imported the server, which saves 0.9 s of processor time per start.

``PreloadedProcess`` forks a server from a template process of the test run. The server is an ordinary process: it reads
its own arguments and environment, and becomes a child of the test run, which waits for it. Starts that need
``sitecustomize``, or limits set by another program, use ``subprocess``.
"""

import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, TextIO
from unittest.mock import Mock

_PR_SET_CHILD_SUBREAPER: Final = 36
_MAX_BYTES: Final = 2**20
"""Maximum size of the arguments and the environment of one server."""


class PreloadedProcess:
    """A forked server, with the methods of ``subprocess.Popen`` that tests use.

    Attributes:
        pid: Its process id.
        stdout: Its standard output and standard error.
    """

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        reading, writing = os.pipe()
        self.pid: Final = _template().fork(arguments, env, writing)
        os.close(writing)
        self.stdout: Final[TextIO] = os.fdopen(reading)
        self._ended = os.pidfd_open(self.pid)
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


class _Template:
    """The process that has imported the server and forks it."""

    def __init__(self) -> None:
        # Servers become orphans when the intermediate process ends. As a subreaper, this process then adopts them.
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._orders, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
        self._process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()
        self._lock = threading.Lock()

    def fork(self, arguments: Sequence[str], env: Mapping[str, str], output: int) -> int:
        """Fork a server that prints to a file descriptor. Returns its process id."""
        order = json.dumps({"arguments": list(arguments), "env": dict(env), "cwd": str(Path.cwd())}).encode()
        with self._lock:
            socket.send_fds(self._orders, [order], [output])
            answer = self._orders.recv(64)
        assert answer, "the template of the servers has ended"
        return int(answer)


@cache
def _template() -> _Template:
    return _Template()


def _serve_orders(orders: socket.socket) -> None:
    """Fork a server for each order, until the test run has ended."""
    from ortserve.app import run  # noqa: F401
    from ortserve.cli.main import main
    from ortserve.config.options import read_options
    from ortserve.frontends.http.control_app import make_control_app

    # The first call takes three times as long, because libraries import modules and compile expressions on first use.
    read_options({})
    unused = (Mock() for _ in range(5))
    make_control_app(*unused, title="never served", version="0")

    # A server collects garbage several times at its start, which would inspect and copy all that was imported here.
    gc.collect()
    gc.freeze()

    # Forking is safe here, because only numpy has a thread, and numpy restarts it in the child.
    warnings.filterwarnings("ignore", message="This process .* is multi-threaded", category=DeprecationWarning)
    while True:
        order, files, _, _ = socket.recv_fds(orders, _MAX_BYTES, 1)
        if not order:
            return
        output = files[0]
        between = os.fork()
        if between == 0:
            server = os.fork()
            if server:
                orders.send(str(server).encode())
                os._exit(0)
            orders.close()
            asked = json.loads(order)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.close(output)
            os.chdir(asked["cwd"])
            os.environ.clear()
            os.environ.update(asked["env"])
            sys.argv = ["ortserve", *asked["arguments"]]
            sys.exit(main(asked["arguments"]))
        os.close(output)
        os.waitpid(between, 0)


if __name__ == "__main__":
    _serve_orders(socket.socket(fileno=int(sys.argv[1])))
