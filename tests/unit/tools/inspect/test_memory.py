"""Predictions of memory: the doubling of an arena, straight lines through two sizes, and profiles of ONNX Runtime."""

import json
from typing import Any

from ortserve.tools.inspect.memory import ArenaUse, Sample, arena_by_size, describe_batch, grown_arena

MIB = 1024**2

# Activations and size of arenas by rows, in KiB, from profiles of ONNX Runtime 1.31: an encoder of MiniLM's size, and
# a convolutional network for audio, whose tensors get blocks of almost twice their size.
ENCODER = {
    rows: ArenaUse(activations * 1024, held * 1024, 41472 * 1024)
    for rows, activations, held in ((1, 717, 44544), (2, 1444, 44544), (4, 2888, 48640), (8, 5775, 56832))
}
AUDIO = {
    rows: ArenaUse(activations * 1024, held * 1024, 68 * 1024)
    for rows, activations, held in (
        (1, 109367, 263240),
        (2, 218730, 525384),
        (4, 437440, 1049672),
        (8, 874900, 2098248),
        (16, 1749800, 4195400),
    )
}
FIRST = (1, 2, 4)


def test_arena_doubles_its_extensions_with_the_activations() -> None:
    assert grown_arena([ENCODER[rows] for rows in FIRST], ENCODER[8].activations) == ENCODER[8].held
    for rows in (8, 16):
        assert grown_arena([AUDIO[rows] for rows in FIRST], AUDIO[rows].activations) == AUDIO[rows].held


def test_arena_grows_if_activations_exceed_its_first_region() -> None:
    seen = [ArenaUse(rows * MIB // 8, 5 * MIB - 100, 4 * MIB) for rows in FIRST]

    assert grown_arena(seen, 4 * MIB // 5) == 5 * MIB - 100
    assert grown_arena(seen, 3 * MIB // 2) == 7 * MIB - 100


def test_arena_of_a_size_that_fits_does_not_grow() -> None:
    assert grown_arena([ENCODER[rows] for rows in FIRST], ENCODER[2].activations) == ENCODER[2].held


def test_arena_of_a_session_without_one_is_unknown() -> None:
    assert grown_arena([], None) is None


def sample(rows: int, activations: int, process: int) -> Sample:
    return Sample(rows, ArenaUse(activations * MIB, 64 * MIB, 0), process * MIB)


def test_larger_sizes_are_predicted_by_a_straight_line() -> None:
    samples = [sample(rows, 3 * rows, 105 + 4 * rows) for rows in FIRST]

    one, sixteen = (describe_batch(rows, samples) for rows in (1, 16))

    assert (one.activations_nbytes, one.activations_measured_nbytes) == (3 * MIB, 3 * MIB)
    assert (one.process_nbytes, one.process_measured_nbytes) == (109 * MIB, 109 * MIB)
    assert (sixteen.activations_nbytes, sixteen.activations_measured_nbytes) == (48 * MIB, None)


def test_activations_that_grow_faster_than_the_rows_are_not_0_for_one_row() -> None:
    one = describe_batch(1, [sample(rows, rows**2, 100) for rows in (2, 4)])

    assert one.activations_nbytes == 2 * MIB


def test_growth_of_the_process_beyond_that_of_the_arena_is_not_extrapolated() -> None:
    samples = [sample(rows, 12 * rows, 100 + 50 * rows) for rows in (2, 4)]

    sixteen = describe_batch(16, samples)

    assert sixteen.arena_nbytes == (64 + 128 + 256) * MIB
    assert sixteen.process_nbytes == (300 + 128 + 256) * MIB


def test_model_that_is_not_batched_has_one_size() -> None:
    one = describe_batch(1, [sample(1, 2, 107)])

    assert (one.activations_nbytes, one.arena_nbytes, one.process_nbytes) == (2 * MIB, 64 * MIB, 107 * MIB)


def test_session_without_an_arena_has_the_memory_of_its_process_only() -> None:
    samples = [Sample(rows, None, (100 + rows) * MIB) for rows in (2, 4)]

    eight = describe_batch(8, samples)

    assert (eight.activations_nbytes, eight.arena_nbytes, eight.process_nbytes) == (None, None, 108 * MIB)


def node(requested: int, grown: int, blocks: int, taken: int, peak: int, held: int) -> dict[str, Any]:
    names = ("bytes_requested_in_use", "requested_in_use_delta", "bytes_in_use", "in_use_delta", "in_use_peak")
    counts = dict(zip(names, (requested, grown, blocks, taken, peak), strict=True), arena_held=held)
    return {"name": "node", "args": {f"mem_{name}": str(count) for name, count in counts.items()}}


RUN: dict[str, Any] = {"name": "model_run", "args": {}}


def test_activations_are_what_nodes_request_and_not_the_blocks_that_they_get() -> None:
    events = [node(170, 70, 228, 128, 228, 512), RUN, node(240, 140, 356, 256, 356, 512), RUN]

    assert arena_by_size(json.loads(json.dumps(events)), 1) == [ArenaUse(70, 512, 100), ArenaUse(140, 512, 100)]


def test_memory_that_a_node_frees_itself_counts() -> None:
    events = [node(100, 0, 100, 0, 100, 512), node(150, 50, 150, 50, 180, 512), RUN]

    assert arena_by_size(events, 1) == [ArenaUse(80, 512, 100)]


def test_profile_without_an_arena_has_no_use() -> None:
    assert arena_by_size([{"name": "node", "args": {}}, RUN, RUN], 2) == [None]
