"""The reader of standard error stalls: no thread reads a real pipe for a while."""

import json
import os
from collections.abc import Iterator

import pytest

from ortserve.telemetry.standard_error import StandardError

LINE = "a line of a request, as long as most of them are\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The ends of a pipe for reading and writing."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def describe(dropped: int) -> str:
    return json.dumps({"dropped": dropped})


def read_all(stream: StandardError, reading: int) -> str:
    """Read what the stream holds, and what it writes meanwhile."""
    os.set_blocking(reading, False)
    parts = []
    while True:
        stream.flush()
        try:
            parts.append(os.read(reading, 1 << 20))
        except BlockingIOError:
            return b"".join(parts).decode()


def test_lines_reach_a_reader_at_once(pipe: tuple[int, int]) -> None:
    stream = StandardError(pipe[1], describe)
    assert stream.write(LINE) == len(LINE)
    stream.write("é\udcff\n")
    assert os.read(pipe[0], 1000) == LINE.encode() + "é\\udcff\n".encode()


def test_lines_are_held_while_nobody_reads(pipe: tuple[int, int]) -> None:
    stream = StandardError(pipe[1], describe)
    for _ in range(5000):  # more than a pipe holds
        stream.write(LINE)
    assert read_all(stream, pipe[0]) == LINE * 5000


def test_dropped_lines_are_counted_in_a_line_of_their_own(pipe: tuple[int, int]) -> None:
    stream = StandardError(pipe[1], describe)
    sent = 40_000
    for _ in range(sent):
        stream.write(LINE)
    held = read_all(stream, pipe[0])
    stream.write("the reader is back\n")
    *_, report, last = (held + read_all(stream, pipe[0])).splitlines()
    assert last == "the reader is back"
    assert json.loads(report) == {"dropped": sent - held.count(LINE)}
    assert held == LINE * held.count(LINE)


def test_failed_descriptor_loses_lines_without_an_error() -> None:
    reading, writing = os.pipe()
    stream = StandardError(writing, describe)
    os.close(reading)
    stream.write(LINE)
    os.close(writing)
    stream.write(LINE)
    stream.wait_until_written(10)


def test_end_of_the_process_waits_for_a_reader_only_for_a_while(pipe: tuple[int, int]) -> None:
    stream = StandardError(pipe[1], describe)
    stream.write(LINE * 5000)
    stream.wait_until_written(0.01)
    assert read_all(stream, pipe[0]) == LINE * 5000
