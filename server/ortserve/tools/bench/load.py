"""Loads: a closed loop of callers that wait for answers, or an open loop of arrivals at given times. Pure."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from ortserve.errors import invalid_input

_MAX_ARRIVALS: Final = 20_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """A load.

    Attributes:
        concurrency: Callers of a closed loop, which send their next request when they have an answer; None for an open
            loop.
        rate: Requests per second of an open loop, sent whether earlier ones are answered or not; 0 for the times of a
            file.
        arrivals: ``constant``, ``poisson``, ``bursts:N`` (N at a time), or a file of times in seconds, one a line.
    """

    concurrency: int | None = None
    rate: float | None = None
    arrivals: str = "constant"

    @property
    def is_open(self) -> bool:
        return self.concurrency is None

    @property
    def label(self) -> str:
        """The load in words. Equal loads have equal labels."""
        if self.rate is None:
            return "1 caller" if self.concurrency == 1 else f"{self.concurrency} callers"
        return f"{self.rate:g}/s {self.arrivals}" if self.rate else f"times of {Path(self.arrivals).name}"

    def divide(self, processes: int, seconds: float, seed: int) -> "list[tuple[int | None, np.ndarray | None]]":
        """The part of each generator: its callers of a closed loop, or its ``arrival_times`` of an open one."""
        if self.concurrency is not None:
            return [(len(range(index, self.concurrency, processes)), None) for index in range(processes)]
        times = arrival_times(self, seconds, seed)
        return [(None, times[index::processes]) for index in range(processes)]


def arrival_times(load: Load, seconds: float, seed: int) -> np.ndarray:
    """When to send the requests of an open loop: ascending nanoseconds from its beginning.

    Raises:
        ServeError: invalid_input: a kind of arrivals that does not exist, or a file without times.
    """
    kind, _, size = load.arrivals.partition(":")
    rate = load.rate or 0.0
    if rate * seconds > _MAX_ARRIVALS:
        raise invalid_input(f"--rate: expected at most {_MAX_ARRIVALS:,} requests in all, got {rate * seconds:,.0f}")
    if not rate:
        times = _read_times(Path(load.arrivals))
        return times[times < seconds * 1e9]
    if kind == "poisson":
        count = int(rate * seconds + 10 * (rate * seconds) ** 0.5 + 20)
        times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    elif kind == "bursts":
        if not re.fullmatch("[1-9][0-9]{0,6}", size):
            raise invalid_input(f"--arrivals: expected bursts:N with the requests of a burst, got '{load.arrivals}'")
        bursts = np.arange(int(rate * seconds / int(size)) + 1)
        times = np.repeat(bursts * (int(size) / rate), int(size))
    elif load.arrivals == "constant":
        times = np.arange(int(rate * seconds) + 1) / rate
    else:
        raise invalid_input(f"--arrivals: expected constant, poisson, bursts:N or a file, got '{load.arrivals}'")
    return np.asarray(times[times < seconds] * 1e9, np.int64)


def _read_times(file: Path) -> np.ndarray:
    try:
        times = np.sort(np.array([float(word) for word in file.read_text(encoding="utf-8").split()]))
    except (OSError, ValueError) as error:
        expected = "expected constant, poisson, bursts:N or a file of times in seconds, one a line"
        raise invalid_input(f"--arrivals {file}: {expected}: {error}") from None
    if not len(times) or not np.isfinite(times).all():
        raise invalid_input(f"--arrivals {file}: expected times in seconds, one a line, got {len(times)} of them")
    return np.asarray((times - times[0]) * 1e9, np.int64)
