"""The clock of all measurements: monotonic nanoseconds. It is passed in, so that tests can control the time."""

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], int]

monotonic_ns: Clock = time.monotonic_ns
