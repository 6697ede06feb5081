"""Python imports this module at its start if its folder is in PYTHONPATH: it counts the server's garbage.

SIGUSR1 disables the cyclic garbage collector. SIGUSR2 prints as JSON how many objects of each type the collector would
have found since then. Both first print the number of the measurement.
"""

import gc
import json
import signal
from collections import Counter
from itertools import count
from types import FrameType

begun = count(1)
reported = count(1)


def _begin(_number: int, _frame: FrameType | None) -> None:
    gc.disable()
    gc.collect()
    print(f"measurement {next(begun)} begins", flush=True)


def _report(_number: int, _frame: FrameType | None) -> None:
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    gc.garbage.clear()
    gc.collect()
    print(f"garbage {next(reported)}: {json.dumps(found)}", flush=True)


signal.signal(signal.SIGUSR1, _begin)
signal.signal(signal.SIGUSR2, _report)
