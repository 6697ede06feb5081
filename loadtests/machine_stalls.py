"""Measures how long the machine itself runs nothing, for example because its host does not schedule it.

``noisy_neighbour.py`` starts ``watch`` in a process of its own. On each processor a thread with real-time priority
sleeps for short times; no other process can delay it, so a late end of its sleep is a stall of the machine. A virtual
machine that returns free memory to its host (a balloon with free page reporting) stalls while it writes to such memory.
"""

import os
import time
from multiprocessing.connection import Connection as Pipe
from threading import Thread
from typing import Final

_STEP_S: Final = 0.002
_PRIORITY: Final = 2
"""Above that of ``small_requests``."""


class _Watch(Thread):
    """Measures the longest stall of one processor since ``longest_s`` was last set to 0."""

    def __init__(self, processor: int) -> None:
        super().__init__(daemon=True)
        self._processor = processor
        self.longest_s = 0.0

    def run(self) -> None:
        os.sched_setaffinity(0, {self._processor})
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
        while True:
            due_s = time.monotonic() + _STEP_S
            time.sleep(_STEP_S)
            self.longest_s = max(self.longest_s, time.monotonic() - due_s)


def watch(pipe: Pipe) -> None:
    """Answer each message with the longest stall in seconds since the message before; nan without real-time priority.

    Ends when it receives None.
    """
    watches = [_Watch(processor) for processor in sorted(os.sched_getaffinity(0))]
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    except PermissionError:
        watches = []
    for one in watches:
        one.start()
    while pipe.recv() is not None:
        pipe.send(max((one.longest_s for one in watches), default=float("nan")))
        for one in watches:
            one.longest_s = 0.0
