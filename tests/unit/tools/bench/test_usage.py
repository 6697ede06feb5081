"""The meter of a server, with a control whose answers the test sets."""

import subprocess
import sys
from collections import deque
from typing import cast

import psutil
import pytest

from ortserve.tools.address import Address
from ortserve.tools.bench.usage import UsageMeter
from ortserve.tools.control import Control


class Controlled:
    """A control of no server. ``batches`` returns or raises the next one of ``answers``."""

    address = Address("http://127.0.0.1:1", "127.0.0.1", 1, is_tls=False, is_grpc=False, headers={})

    def __init__(self, *answers: dict[int, int] | BaseException | None) -> None:
        self.answers = deque(answers)

    def batches(self) -> dict[int, int] | None:
        answer = self.answers.popleft()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def test_a_beginning_that_is_interrupted_counts_nothing() -> None:
    meter = UsageMeter(cast("Control", Controlled(KeyboardInterrupt(), {1: 7})))
    meter._processes = [psutil.Process()]
    with pytest.raises(KeyboardInterrupt):
        meter.begin()
    meter.end()

    assert meter.usage(0) is None
    assert meter.batches == {}


@pytest.mark.parametrize("answers", [(None, {1: 4}), ({1: 3}, None), ({1: 3, 2: 1}, {1: 9})])
def test_batches_are_unknown_if_the_server_does_not_say_or_counts_anew(
    answers: tuple[dict[int, int] | None, ...],
) -> None:
    meter = UsageMeter(cast("Control", Controlled(*answers, {1: 9}, {1: 11})))
    for _ in answers:
        meter.begin()
        meter.end()

    assert meter.batches == {1: 2}


def test_a_process_that_ends_keeps_the_time_that_it_was_seen_to_use() -> None:
    meter = UsageMeter(cast("Control", Controlled({1: 1}, {1: 4}, {1: 4}, {1: 6})))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        process = psutil.Process(busy.pid)
        meter._processes = [process]
        meter.begin()
        while sum(process.cpu_times()[:2]) < 0.2:
            busy.poll()
        seen_s = meter.look()
        busy.kill()
    meter.end()
    meter.begin()
    meter.end()

    usage = meter.usage(100)
    assert usage is not None
    assert 1000 <= usage.cpu_us_per_request <= seen_s * 1e4
    assert meter.batches == {1: 5}
