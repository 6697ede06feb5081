"""How steady the processors are, and how fast memory is: the same work again and again for a bounded time."""

import hashlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from ortserve.engine.process_limits import cpu_quotas
from ortserve.tools.doctor.machine import Files, first_number
from ortserve.tools.doctor.result import Steadiness

_UNIT_S: Final = 0.001
_MOST_THREADS: Final = 16
"""Of Python, so that they do not disturb each other; on larger machines they are spread over the processors."""
_COPY_S: Final = 0.25
_LEAST_COPIES: Final = 3
_LEAST_COPY_BYTES: Final = 32 * 1024**2
_MOST_COPY_BYTES: Final = 256 * 1024**2


def measure_steadiness(
    allowed: Sequence[int], *, cache_bytes: int, free_bytes: int, seconds: float, step: Callable[[float], None]
) -> Steadiness | None:
    """Hash on all processors at once for ``seconds``, then copy memory for half a second.

    Args:
        allowed: Processors of the affinity mask.
        cache_bytes: Of the last level.
        free_bytes: Memory that may be taken; at most a sixteenth of it is.
        seconds: Of the hashing.
        step: Called with the seconds that have passed.

    Returns:
        None without processors or seconds, and if a thread could not do ten units of work.
    """
    if not allowed or not seconds:
        return None
    chosen = [allowed[i * len(allowed) // _MOST_THREADS] for i in range(_MOST_THREADS)]
    chosen = list(allowed) if len(allowed) <= _MOST_THREADS else chosen
    data = b"\0" * _unit_bytes()
    files = Files()
    before, throttled = files.text("proc/stat"), _throttled_periods(files)
    times: list[list[int]] = [[] for _ in chosen]
    end = time.perf_counter() + seconds

    def work(processor: int, taken: list[int]) -> None:
        _stay_on(processor)
        while time.perf_counter() < end:
            began = time.perf_counter_ns()
            hashlib.sha256(data).digest()  # releases the interpreter lock
            taken.append(time.perf_counter_ns() - began)

    _run_all([partial(work, *each) for each in zip(chosen, times, strict=True)], seconds, step)
    after, throttled_after = files.text("proc/stat"), _throttled_periods(files)
    one, everyone = _copy_speeds(len(chosen), cache_bytes, free_bytes)
    return summarize(times, seconds, stolen_share(before, after), throttled_after - throttled, one, everyone)


def summarize(
    times_ns: Sequence[Sequence[int]],
    seconds: float,
    stolen: float | None,
    throttled: int,
    copy_one: float | None,
    copy_all: float | None,
) -> Steadiness | None:
    """The result from the times of all units of work, by processor. Pure."""
    if not times_ns or min(map(len, times_ns)) < 10:
        return None
    medians = [statistics.median(taken) for taken in times_ns]
    spreads = [float(np.quantile(taken, 0.99)) / median for taken, median in zip(times_ns, medians, strict=True)]
    return Steadiness(
        seconds=seconds,
        processors=len(times_ns),
        median_ms=statistics.median(medians) / 1e6,
        spread=statistics.median(spreads),
        worst_spread=max(spreads),
        slowest=max(medians) / min(medians),
        stolen=stolen,
        throttled_periods=throttled,
        copy_one_gb_per_s=copy_one,
        copy_all_gb_per_s=copy_all,
    )


def stolen_share(before: str, after: str) -> float | None:
    """The share of processor time that the hypervisor gave to others, from two contents of ``/proc/stat``. Pure."""
    counts = []
    for text in (before, after):
        words = text.split("\n", 1)[0].split()
        if len(words) < 9 or words[0] != "cpu" or not all(word.isdecimal() for word in words[1:9]):
            return None
        counts.append([int(word) for word in words[1:9]])
    passed = sum(counts[1]) - sum(counts[0])
    return max(0.0, (counts[1][7] - counts[0][7]) / passed) if passed > 0 else None


def _unit_bytes() -> int:
    """The number of bytes whose hash takes about a millisecond here: of the fastest of a few hashes."""
    sample = b"\0" * (256 * 1024)
    best = min(_seconds(lambda: hashlib.sha256(sample).digest()) for _ in range(5))
    return max(4096, int(len(sample) * _UNIT_S / best))


def _copy_speeds(threads: int, cache_bytes: int, free_bytes: int) -> tuple[float | None, float | None]:
    """GB/s that copies read and write: by one thread, and by all at once."""
    nbytes = min(_MOST_COPY_BYTES, max(_LEAST_COPY_BYTES, 4 * cache_bytes))
    while nbytes * 2 * threads > free_bytes / 16:
        if nbytes <= _LEAST_COPY_BYTES:
            return None, None
        nbytes //= 2
    arrays = [(np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)) for _ in range(threads)]

    def copy(index: int, taken: list[float], end: float) -> None:
        source, target = arrays[index]
        while len(taken) < _LEAST_COPIES or time.perf_counter() < end:
            taken.append(_seconds(lambda: np.copyto(target, source)))  # releases the interpreter lock

    speeds = []
    for count in (1, threads):
        taken: list[list[float]] = [[] for _ in range(count)]
        end = time.perf_counter() + _COPY_S
        _run_all([partial(copy, index, taken[index], end) for index in range(count)])
        speeds.append(sum(2 * nbytes / statistics.median(each) for each in taken) / 1e9)
    return speeds[0], speeds[1]


def _run_all(
    works: Sequence[Callable[[], object]], seconds: float = 0, step: Callable[[float], None] | None = None
) -> None:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)
            if step is not None:
                step(min(seconds, time.perf_counter() - began))


def _stay_on(processor: int) -> None:
    """Pin this thread, which ends with its work."""
    try:
        os.sched_setaffinity(0, {processor})
    except OSError:
        return


def _throttled_periods(files: Files) -> int:
    stats = (Files(quota.folder).fields("cpu.stat", " ") for quota in cpu_quotas(files.cgroups, files.own_cgroup))
    return sum(first_number(stat.get("nr_throttled", "")) or 0 for stat in stats)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return max(1e-9, time.perf_counter() - began)
