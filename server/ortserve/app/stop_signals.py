"""SIGTERM and SIGINT: the first starts the drain, the second ends the process whatever the event loop does.

The loop notices a signal only while it turns, and Python's own handlers run only between two bytecodes of the main
thread. Neither happens while a call keeps the thread, or the interpreter lock, for ever. The second signal is therefore
left to the kernel: the handler of the first is installed for one signal, so that its delivery restores the default
action before any code of the process runs.
"""

import asyncio
import ctypes
import signal
from typing import Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def catch_stop_signals(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Handle the first of ``STOP_SIGNALS`` on ``loop``. Main thread only.

    The kernel does not apply default actions to the first process of a container (pid_namespaces(7)); there the server
    needs an init process as its parent. The images have one.

    Returns:
        An event that the first signal sets. The same signal once more, or either one after that, ends the process.
    """
    caught = asyncio.Event()

    def on_signal() -> None:
        caught.set()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # the loop would leave SIGINT to Python's KeyboardInterrupt

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
        _catch_once(number)
    return caught


def _catch_once(number: signal.Signals) -> None:
    """Have the kernel reset a signal to its default action when it is first delivered (SA_RESETHAND).

    Installs the handler that is there, Python's, a second time. Without glibc's function the default action returns
    only when the loop has run ``on_signal``.
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
    signal.siginterrupt(number, False)  # as the loop had it: system calls of ONNX Runtime are not interrupted
