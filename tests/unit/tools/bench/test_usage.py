"""The meter of a server, with a control whose answers the test sets."""

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


def test_a_process_that_ends_in_a_round_does_not_lower_the_time_of_other_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = UsageMeter(cast("Control", Controlled({1: 1}, {1: 4}, {1: 4}, {1: 6})))
    meter._processes = [psutil.Process()]
    totals_s = deque([10.0, 11.0, 11.0, 0.5])
    monkeypatch.setattr(meter, "look", totals_s.popleft)
    for _ in range(2):
        meter.begin()
        meter.end()

    usage = meter.usage(100)
    assert usage is not None
    assert usage.cpu_us_per_request == pytest.approx(10_000)
    assert meter.batches == {1: 5}
