"""The clock everything inside is measured by: monotonic nanoseconds, passed in so that tests can turn it."""

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], int]

monotonic_ns: Clock = time.monotonic_ns
