"""Waiting a moment for callers who come back.

A caller that was just answered often asks again at once. Who starts the next batch with the first of them leaves the
others behind for a whole run; who waits for them all serves such callers 1.2 to 1.7 times as fast (simulated,
``loadtests/batching_simulation.py``). Callers who come independently of the answers gain nothing by it, so only what
comes after an answer beyond the usual rate counts.
"""

from typing import Final

from ortserve.batching.latency import Line

_BINS: Final = 8
_GAIN: Final = 0.1
_MAX_SHARE: Final = 0.5
"""Longest wait, as a share of L(1)."""
_LEAST_ROWS: Final = 0.5
"""What is expected to come must be at least this much to be waited for."""
_SURE: Final = 1.05
"""Waiting must promise so much more than going at once."""
_TRIAL: Final = 1000
"""Waits after which their realised gain decides whether the class goes on waiting."""


class EchoProfile:
    """When the rows of one shape class arrive after an answer, and what waiting for them has brought so far.

    Times are monotonic nanoseconds. Loop thread only.

    Attributes:
        is_on: False once waiting was found to cost more than it gains.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._window_ns = 0.0
        # Rows that have usually come by the end of each bin of the window, beyond the background rate.
        self._usual = [0.0] * _BINS
        # The same for the answer given last: rows in each bin, and all together.
        self._seen = [0.0] * _BINS
        self._come = 0.0
        self._answered_ns: int | None = None
        # What comes outside the window makes the background rate.
        self._later_rows = 0.0
        self._later_ns = 0.0
        # The wait that is on: when it began, and with how many rows.
        self._wait: tuple[int, int] | None = None
        self._waits = 0
        self._gain_ns = 0.0

    def is_pending(self, now_ns: int) -> bool:
        """Whether rows may still follow the last answer, or a wait for them has not ended.

        Answers of runs on the event loop are not noted, so nothing follows them.
        """
        if self._answered_ns is None:
            return False
        return self._wait is not None or (self.is_on and now_ns - self._answered_ns < self._window_ns)

    def on_answer(self, now_ns: int, solo_ns: float) -> None:
        """A batch was answered; a batch of one row takes ``solo_ns``."""
        if self._answered_ns is not None:
            self._learn(now_ns - self._answered_ns)
        window_ns = _MAX_SHARE * solo_ns
        if not 0.5 * window_ns <= self._window_ns <= 2 * window_ns:  # then the bins would mean something else
            self._usual = [0.0] * _BINS
            self._window_ns = window_ns
        self._seen = [0.0] * _BINS
        self._come = 0.0
        self._answered_ns = now_ns

    def on_arrival(self, rows: int, now_ns: int) -> None:
        """Rows came."""
        if self._answered_ns is None or self._window_ns <= 0:
            return
        after_ns = now_ns - self._answered_ns
        if after_ns <= self._window_ns:
            self._seen[min(_BINS - 1, int(after_ns / self._window_ns * _BINS))] += rows
            self._come += rows
        else:
            self._later_rows += rows

    def wait_until(self, waiting_rows: int, max_rows: int, line: Line, now_ns: int) -> int | None:
        """Until when to wait for more, now that an instance is free; None to go at once.

        Of the moments at which more usually have come it takes the one that promises most rows a second:
        (n + m) / (b + a·(n + m) + δ), for a wait of δ in which m rows join the n that wait.
        """
        if not self.is_on or self._answered_ns is None or waiting_rows >= max_rows:
            return None
        after_ns = now_ns - self._answered_ns
        if after_ns >= self._window_ns:
            return None
        best_rate = _SURE * waiting_rows / (line.b_ns + line.a_ns * waiting_rows)
        until_ns = None
        for index, usual in enumerate(self._usual):
            end_ns = (index + 1) / _BINS * self._window_ns
            more = min(usual - self._come, max_rows - waiting_rows)
            if end_ns <= after_ns or more < _LEAST_ROWS:
                continue
            rows = waiting_rows + more
            rate = rows / (line.b_ns + line.a_ns * rows + end_ns - after_ns)
            if rate > best_rate:
                best_rate, until_ns = rate, self._answered_ns + int(end_ns)
        return until_ns

    def begin_wait(self, rows: int, now_ns: int) -> bool:
        """A batch of ``rows`` rows is put off; False where it already was."""
        if self._wait is not None:
            return False
        self._wait = (now_ns, rows)
        return True

    def end_wait(self, rows: int, line: Line, now_ns: int) -> None:
        """A batch of ``rows`` rows leaves, be it after a wait or not: what a wait has gained is counted."""
        if self._wait is None:
            return
        began_ns, waiting_rows = self._wait
        self._wait = None
        rows = max(waiting_rows, rows)
        at_once_ns = rows * (line.b_ns + line.a_ns * waiting_rows) / waiting_rows
        self._gain_ns += at_once_ns - (line.b_ns + line.a_ns * rows + now_ns - began_ns)
        self._waits += 1
        if self._waits == _TRIAL:
            self.is_on = self._gain_ns >= 0
            self._waits = 0
            self._gain_ns = 0.0

    def abandon_wait(self) -> None:
        """Nobody is left who could leave after the wait."""
        self._wait = None

    def _learn(self, lasted_ns: int) -> None:
        """Take what came after the last answer, until the next one, into what is usual."""
        self._later_rows *= 1 - _GAIN
        self._later_ns *= 1 - _GAIN
        if lasted_ns > self._window_ns:
            self._later_ns += lasted_ns - self._window_ns
        rate = self._later_rows / self._later_ns if self._later_ns else 0.0
        come = 0.0
        for index in range(_BINS):
            end_ns = (index + 1) / _BINS * self._window_ns
            come += self._seen[index]
            self._usual[index] += _GAIN * (come - rate * end_ns - self._usual[index])
