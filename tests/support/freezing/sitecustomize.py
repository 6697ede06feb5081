"""Python imports this module at its start if its folder is in PYTHONPATH: SIGUSR1 then freezes the event loop.

``FREEZE_WAY`` selects how: ``python`` by an endless loop of bytecode; ``call`` by a C call that has released the
interpreter lock; ``lock`` by a C call that holds it. With ``FREEZE_S`` a C call ends after that many seconds.
"""

import ctypes
import os
import signal
from types import FrameType


def _freeze(_number: int, _frame: FrameType | None) -> None:
    print("freezing", flush=True)
    if os.environ["FREEZE_WAY"] == "python":
        while True:
            pass
    libc = (ctypes.PyDLL if os.environ["FREEZE_WAY"] == "lock" else ctypes.CDLL)(None)
    if seconds := os.environ.get("FREEZE_S"):
        libc.usleep(int(float(seconds) * 1e6))
        return
    mutex = (ctypes.c_char * 64)()
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # deadlocks with itself


signal.signal(signal.SIGUSR1, _freeze)
