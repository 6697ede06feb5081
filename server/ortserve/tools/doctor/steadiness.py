"""Measures the steadiness of processors and the speed of memory by repeating the same work for a bounded time."""

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import numpy as np
import psutil

from ortserve.tools.console import progress
from ortserve.tools.doctor.machine import Files, throttled_periods
from ortserve.tools.doctor.result import Steadiness

_UNIT_S: Final = 0.001
_MAX_THREADS: Final = 16
"""More Python threads would disturb each other. On larger machines, these are spread over the processors."""
_COPY_S: Final = 0.25
_MIN_COPIES: Final = 3
_MIN_COPY_BYTES: Final = 32 * 1024**2
_MAX_COPY_BYTES: Final = 128 * 1024**2
"""Size of the source and of the target of a copy: more than caches hold."""


def measure_steadiness(allowed: Sequence[int], free_bytes: int, seconds: float) -> Steadiness | None:
    """Hash concurrently on all processors ``allowed`` for ``seconds``, then copy memory for half a second.

    Allocates at most a sixteenth of ``free_bytes``. Returns None without processors or seconds, or if a thread did
    fewer than ten units of work.
    """
    if not allowed or not seconds:
        return None
    chosen = allowed[:: -(-len(allowed) // _MAX_THREADS)]
    sample = b"\0" * (256 * 1024)
    fastest_s = min(_seconds(lambda: hashlib.sha256(sample).digest()) for _ in range(5))
    data = b"\0" * max(4096, int(len(sample) * _UNIT_S / fastest_s))
    quotas = Files().quotas()
    throttled = throttled_periods(quotas)
    psutil.cpu_times_percent()  # the next call returns the shares since this one
    end = time.perf_counter() + seconds

    def hash_on(processor: int) -> list[float]:
        with suppress(OSError):  # the processor may have become unavailable
            os.sched_setaffinity(0, {processor})
        return _repeat(lambda: hashlib.sha256(data).digest(), end)

    with ThreadPoolExecutor(len(chosen)) as pool, progress("testing how steady the processors are", seconds) as step:
        hashing = [pool.submit(hash_on, processor) for processor in chosen]
        while (left := end - time.perf_counter()) > 0:
            step(seconds - left, "")
            time.sleep(min(0.1, left))
    times = [one.result() for one in hashing]
    stolen = getattr(psutil.cpu_times_percent(), "steal", 0.0) / 100
    copies = [_copy_speed(count, len(chosen), free_bytes) for count in (1, len(chosen))]
    return summarize(times, stolen, throttled_periods(quotas) - throttled, *copies)


def summarize(
    times_s: Sequence[Sequence[float]], stolen: float, throttled: int, copy_one: float | None, copy_all: float | None
) -> Steadiness | None:
    """Compute the result from the times of the units of work, by processor. Pure."""
    if not times_s or min(map(len, times_s)) < 10:
        return None
    medians = [statistics.median(taken) for taken in times_s]
    spreads = [float(np.quantile(taken, 0.99)) / median for taken, median in zip(times_s, medians, strict=True)]
    return Steadiness(
        processors=len(times_s),
        median_ms=statistics.median(medians) * 1e3,
        spread=statistics.median(spreads),
        slowest=max(medians) / min(medians),
        stolen=stolen,
        throttled_periods=throttled,
        copy_one_gb_per_s=copy_one,
        copy_all_gb_per_s=copy_all,
    )


def _copy_speed(threads: int, max_threads: int, free_bytes: int) -> float | None:
    """GB/s that ``threads`` concurrent copies read and write; None without memory for ``max_threads``."""
    nbytes = min(_MAX_COPY_BYTES, free_bytes // 16 // (2 * max_threads))
    if nbytes < _MIN_COPY_BYTES:
        return None
    pairs = [(np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)) for _ in range(threads)]
    end = time.perf_counter() + _COPY_S
    with ThreadPoolExecutor(threads) as pool:
        times = list(pool.map(lambda pair: _repeat(lambda: np.copyto(*pair), end, _MIN_COPIES), pairs))
    return sum(2 * nbytes / statistics.median(taken) for taken in times) / 1e9


def _repeat(work: Callable[[], object], end: float, least: int = 0) -> list[float]:
    """Repeat work, which releases the interpreter lock, until ``end``. Returns the seconds of each repetition."""
    times: list[float] = []
    while len(times) < least or time.perf_counter() < end:
        times.append(_seconds(work))
    return times


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return max(1e-9, time.perf_counter() - began)
