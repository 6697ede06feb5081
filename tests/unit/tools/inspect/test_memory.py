"""Predictions of memory: the doubling of an arena, and straight lines through two sizes."""

from ortserve.tools.inspect.memory import Measurement, Sample, describe_memory, grown_arena
from ortserve.tools.inspect.result import Figure

MIB = 1024**2

# Peak use and size of the arena of an encoder of MiniLM's size by rows, in KiB, from a profile of ONNX Runtime 1.31.
ENCODER = {
    rows: Sample(rows, in_use, held, 0)
    for rows, in_use, held in (
        (1, 46592, 48640),
        (2, 51712, 56832),
        (4, 61952, 73216),
        (8, 82432, 105984),
        (16, 123392, 171520),
    )
}


def test_arena_doubles_its_extensions_until_the_use_fits() -> None:
    seen = [ENCODER[rows] for rows in (1, 2, 4)]

    assert grown_arena(seen, ENCODER[8].in_use) == ENCODER[8].held
    assert grown_arena(seen, ENCODER[16].in_use) == ENCODER[16].held


def test_arena_of_a_size_that_fits_does_not_grow() -> None:
    assert grown_arena([ENCODER[1], ENCODER[2], ENCODER[4]], ENCODER[2].in_use) == ENCODER[2].held


def test_arena_of_a_session_without_one_is_unknown() -> None:
    assert grown_arena([Sample(1, None, None, 0)], None) is None


def measured(*samples: Sample, in_arena: int = 10 * MIB) -> Measurement:
    return Measurement(100 * MIB, in_arena, samples, "synthetic", 1)


def test_larger_sizes_are_predicted_by_a_straight_line() -> None:
    samples = [Sample(rows, (10 + 3 * rows) * MIB, 64 * MIB, (5 + 4 * rows) * MIB) for rows in (1, 2, 4)]

    memory = describe_memory(measured(*samples), 90 * MIB, [1, 16])

    one, sixteen = memory.batches
    assert one.activations == Figure(3 * MIB, 3 * MIB)
    assert sixteen.activations == Figure(48 * MIB, None)
    assert sixteen.process == Figure((100 + 5 + 64) * MIB, None)
    assert memory.weights == Figure(90 * MIB, 100 * MIB)


def test_growth_that_activations_do_not_explain_is_not_extrapolated() -> None:
    samples = [Sample(rows, (10 + rows) * MIB, 64 * MIB, 5 * rows * MIB) for rows in (2, 4)]

    (sixteen,) = describe_memory(measured(*samples), 90 * MIB, [16]).batches

    assert sixteen.process.predicted == (100 + 20 + 2 * 12) * MIB


def test_model_that_is_not_batched_has_one_size() -> None:
    memory = describe_memory(measured(Sample(1, 12 * MIB, 16 * MIB, 7 * MIB)), 90 * MIB, [1])

    (one,) = memory.batches
    assert tuple(each.predicted for each in (one.activations, one.arena, one.process)) == (2 * MIB, 16 * MIB, 107 * MIB)


def test_session_without_an_arena_has_the_memory_of_its_process_only() -> None:
    samples = [Sample(rows, None, None, rows * MIB) for rows in (2, 4)]

    (eight,) = describe_memory(measured(*samples), 90 * MIB, [8]).batches

    assert tuple(each.predicted for each in (eight.activations, eight.arena, eight.process)) == (None, None, 108 * MIB)
