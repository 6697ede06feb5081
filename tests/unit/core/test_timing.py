"""The timestamps of a request and the phases between them."""

from ortserve.core.timing import PHASES, Timing


def test_phases_follow_one_another_and_sum_to_the_total() -> None:
    timing = Timing(1, 3, 6, 10, 15, 21)
    assert dict(zip(PHASES, timing.phases_ns(), strict=True)) == {
        "decode": 2,
        "queue": 3,
        "stage": 4,
        "compute": 5,
        "encode": 6,
    }
    assert sum(timing.phases_ns()) == timing.done_ns - timing.received_ns


def test_phases_are_told_in_milliseconds_as_the_header_spells_them() -> None:
    timing = Timing(0, 1_000, 2_001_000, 2_001_000, 3_234_567, 1_003_234_567)
    assert timing.server_timing() == (
        b"decode;dur=0.001, queue;dur=2.000, stage;dur=0.000, compute;dur=1.234, encode;dur=1000.000"
    )
