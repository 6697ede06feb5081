"""Delays batches briefly for the next requests of callers that were just answered.

In a closed loop, a caller sends its next request as soon as it receives an answer. A batch that starts with the first
of these requests makes the others wait for a whole run. A batch that waits for them serves such callers 1.2 to 1.7
times as fast (simulated, ``loadtests/batching_simulation.py``). A wait gains nothing for requests that arrive
independently of answers, so only arrivals beyond the background rate count.
"""

from typing import Final

from ortserve.batching.latency import Line

_BINS: Final = 8
"""Number of equal parts of the window after an answer in which arriving rows are counted."""
_GAIN: Final = 0.1
"""Weight of the arrivals after the last answer in the usual ones."""
_MAX_SHARE: Final = 0.5
"""Maximum wait, as a share of the time of a batch of one row."""
_MIN_ROWS: Final = 0.5
"""Minimum number of expected rows for a wait."""
_SURE: Final = 1.05
"""Minimum ratio of the predicted throughput with a wait to that of starting at once."""
_TRIAL: Final = 1000
"""After this many waits, their measured gain decides whether the class continues to wait."""
_PAUSE: Final = 10_000
"""Number of answers after which a class waits again whose waits cost more than they gained, because other work on the
machine may have delayed them. It doubles with each such decision, and begins again after waits that gained."""


class ClosedLoopWait:
    """Learns when rows of one shape class arrive after an answer, and measures the gain of waiting for them.

    Times are monotonic nanoseconds. Loop thread only.

    Attributes:
        is_on: False while the class pauses, because waiting has cost more than it gained.
    """

    def __init__(self, answered_ns: int, solo_ns: float) -> None:
        """Begin with a first answer; the arguments are those of ``on_answer``."""
        self.is_on = True
        self._window_ns = _MAX_SHARE * solo_ns
        # Rows that usually arrive by the end of each bin of the window, beyond the background rate.
        self._usual = [0.0] * _BINS
        # The same for the last answer: rows in each bin, and their sum.
        self._seen = [0.0] * _BINS
        self._sum = 0.0
        self._answered_ns = answered_ns
        # Arrivals outside the window give the background rate.
        self._later_rows = 0.0
        self._later_ns = 0.0
        # The present wait: when it began, and with how many rows.
        self._wait: tuple[int, int] | None = None
        self._waits = 0
        self._gain_ns = 0.0
        self._pauses = 0
        self._answers_left = 0

    def is_pending(self, now_ns: int) -> bool:
        """Whether rows may still follow the last answer, or a wait for them has not ended."""
        return self._wait is not None or (self.is_on and now_ns - self._answered_ns < self._window_ns)

    def on_answer(self, now_ns: int, solo_ns: float) -> None:
        """Note that a batch was answered; a batch of one row takes ``solo_ns``."""
        self._learn(now_ns - self._answered_ns)
        window_ns = _MAX_SHARE * solo_ns
        if not 0.5 * window_ns <= self._window_ns <= 2 * window_ns:  # the old bins do not fit the new window
            self._usual = [0.0] * _BINS
            self._window_ns = window_ns
        self._seen = [0.0] * _BINS
        self._sum = 0.0
        self._answered_ns = now_ns
        if not self.is_on:
            self._answers_left -= 1
            self.is_on = self._answers_left <= 0

    def on_arrival(self, rows: int, now_ns: int) -> None:
        """Note ``rows`` that arrive now."""
        if self._window_ns <= 0:
            return
        after_ns = now_ns - self._answered_ns
        if after_ns <= self._window_ns:
            self._seen[min(_BINS - 1, int(after_ns / self._window_ns * _BINS))] += rows
            self._sum += rows
        else:
            self._later_rows += rows

    def wait_until(self, waiting_rows: int, max_rows: int, line: Line, now_ns: int) -> int | None:
        """Until when to wait for more rows now that an instance is free; None to start at once.

        The result is the end of the bin with the highest predicted throughput: (n + m) / (b + a·(n + m) + δ), if m rows
        join the n waiting ones during a wait of δ.
        """
        if not self.is_on or waiting_rows >= max_rows:
            return None
        after_ns = now_ns - self._answered_ns
        if after_ns >= self._window_ns:
            return None
        best_rate = _SURE * waiting_rows / (line.b_ns + line.a_ns * waiting_rows)
        until_ns = None
        for index, usual in enumerate(self._usual):
            end_ns = (index + 1) / _BINS * self._window_ns
            more = min(usual - self._sum, max_rows - waiting_rows)
            if end_ns <= after_ns or more < _MIN_ROWS:
                continue
            rows = waiting_rows + more
            rate = rows / (line.b_ns + line.a_ns * rows + end_ns - after_ns)
            if rate > best_rate:
                best_rate, until_ns = rate, self._answered_ns + int(end_ns)
        return until_ns

    def begin_wait(self, rows: int, now_ns: int) -> bool:
        """Begin to delay a batch of ``rows`` rows. Returns False if it is delayed already."""
        if self._wait is not None:
            return False
        self._wait = (now_ns, rows)
        return True

    def end_wait(self, rows: int, line: Line, now_ns: int) -> None:
        """End the present wait, if there is one, with a batch of ``rows`` rows, and add its gain."""
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
            if self.is_on:
                self._pauses = 0
            else:
                self._answers_left = _PAUSE << self._pauses
                self._pauses += 1
            self._waits = 0
            self._gain_ns = 0.0

    def abandon_wait(self) -> None:
        """End a wait without counting it, because no request is left."""
        self._wait = None

    def _learn(self, lasted_ns: int) -> None:
        """Average the arrivals since the last answer, ``lasted_ns`` ago, into the usual ones."""
        self._later_rows *= 1 - _GAIN
        self._later_ns *= 1 - _GAIN
        if lasted_ns > self._window_ns:
            self._later_ns += lasted_ns - self._window_ns
        rate = self._later_rows / self._later_ns if self._later_ns else 0.0
        total = 0.0
        for index in range(_BINS):
            end_ns = (index + 1) / _BINS * self._window_ns
            total += self._seen[index]
            self._usual[index] += _GAIN * (total - rate * end_ns - self._usual[index])
