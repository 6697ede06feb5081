"""Predictions of memory: the doubling of an arena, and straight lines through two sizes."""

from ortserve.tools.inspect.memory import Sample, describe_batch, grown_arena

MIB = 1024**2

# Peak use and size of an encoder's arena (MiniLM's size) by rows, in KiB, from a profile of ONNX Runtime 1.31.
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


def sample(rows: int, in_use: int, process: int) -> Sample:
    return Sample(rows, in_use * MIB, 64 * MIB, process * MIB)


def test_larger_sizes_are_predicted_by_a_straight_line() -> None:
    samples = [sample(rows, 10 + 3 * rows, 105 + 4 * rows) for rows in (1, 2, 4)]

    one, sixteen = (describe_batch(rows, samples, 10 * MIB) for rows in (1, 16))

    assert (one.activations_nbytes, one.activations_measured_nbytes) == (3 * MIB, 3 * MIB)
    assert (one.process_nbytes, one.process_measured_nbytes) == (109 * MIB, 109 * MIB)
    assert (sixteen.activations_nbytes, sixteen.activations_measured_nbytes) == (48 * MIB, None)
    assert (sixteen.process_nbytes, sixteen.process_measured_nbytes) == ((105 + 64) * MIB, None)


def test_growth_that_activations_do_not_explain_is_not_extrapolated() -> None:
    samples = [sample(rows, 10 + rows, 100 + 5 * rows) for rows in (2, 4)]

    assert describe_batch(16, samples, 10 * MIB).process_nbytes == (100 + 20 + 2 * 12) * MIB


def test_model_that_is_not_batched_has_one_size() -> None:
    one = describe_batch(1, [sample(1, 12, 107)], 10 * MIB)

    assert (one.activations_nbytes, one.arena_nbytes, one.process_nbytes) == (2 * MIB, 64 * MIB, 107 * MIB)


def test_session_without_an_arena_has_the_memory_of_its_process_only() -> None:
    samples = [Sample(rows, None, None, (100 + rows) * MIB) for rows in (2, 4)]

    eight = describe_batch(8, samples, 0)

    assert (eight.activations_nbytes, eight.arena_nbytes, eight.process_nbytes) == (None, None, 108 * MIB)
