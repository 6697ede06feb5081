"""Rows of a batch, gathered into a reusable buffer."""

import numpy as np
import pytest

from ortserve.core.tensor import absent
from ortserve.engine.staging import HostStaging, stage_rows


def rows_from(first: int, rows: int, width: int = 3) -> np.ndarray:
    return np.arange(first, first + rows * width, dtype=np.float32).reshape(rows, width)


def stage(staging: HostStaging, *parts: np.ndarray, bucket: int = 0) -> np.ndarray:
    (staged,) = staging.stage([parts], bucket or sum(map(len, parts)))
    return staged


def test_parts_follow_each_other_and_padding_repeats_the_last_row() -> None:
    parts = rows_from(0, 2), rows_from(100, 1)
    staged = stage(HostStaging([0]), *parts, bucket=5)
    np.testing.assert_array_equal(staged, [*parts[0], *[parts[1][0]] * 3])
    assert staged.flags.c_contiguous
    assert staged.flags.aligned


def test_single_request_is_padded_too() -> None:
    rows = rows_from(0, 2)
    np.testing.assert_array_equal(stage(HostStaging([0]), rows, bucket=4), [rows[0], rows[1], rows[1], rows[1]])


def test_array_that_fills_its_bucket_alone_is_not_copied() -> None:
    rows = rows_from(0, 4)
    assert stage(HostStaging([0]), rows, bucket=4) is rows


def unaligned(array: np.ndarray) -> np.ndarray:
    view = np.frombuffer(b"x" + array.tobytes(), array.dtype, offset=1).reshape(array.shape)
    assert not view.flags.aligned
    return view


@pytest.mark.parametrize("bucket", [4, 8])
def test_unaligned_or_strided_arrays_are_copied(bucket: int) -> None:
    rows = rows_from(0, 4)
    for odd in (unaligned(rows), np.asfortranarray(rows), np.repeat(rows, 2, axis=0)[::2]):
        staged = stage(HostStaging([0]), odd, bucket=bucket)
        np.testing.assert_array_equal(staged[:4], rows)
        assert staged.flags.c_contiguous
        assert staged.flags.aligned
        assert not np.shares_memory(staged, odd)


def test_reused_buffer_shows_no_values_of_the_last_batch() -> None:
    staging = HostStaging([0])
    large = stage(staging, rows_from(1000, 4), rows_from(2000, 3), bucket=8)
    small = stage(staging, rows_from(0, 1), rows_from(50, 1), bucket=4)
    assert np.shares_memory(large, small)
    np.testing.assert_array_equal(small, [[0, 1, 2], *[[50, 51, 52]] * 3])


def test_buffer_is_replaced_for_another_size_shape_or_dtype() -> None:
    staging = HostStaging([0])
    for parts, bucket in (
        ((rows_from(0, 1), rows_from(5, 1)), 2),
        ((rows_from(0, 1), rows_from(5, 1)), 8),
        ((rows_from(0, 1, width=4), rows_from(5, 1, width=4)), 8),
        ((rows_from(0, 1).astype(np.int64), rows_from(5, 1).astype(np.int64)), 8),
        ((rows_from(0, 1)[:, 0], rows_from(5, 1)[:, 0]), 8),
    ):
        staged = stage(staging, *parts, bucket=bucket)
        assert staged.dtype == parts[0].dtype
        np.testing.assert_array_equal(staged, np.concatenate([*parts, *[parts[-1]] * (bucket - 2)]))


def test_inputs_have_separate_buffers() -> None:
    a, b = HostStaging([0, 0]).stage([(rows_from(0, 1), rows_from(3, 1)), (rows_from(6, 1), rows_from(9, 1))], 4)
    assert not np.shares_memory(a, b)
    assert (a[0, 0], b[0, 0]) == (0, 6)


def test_strings_are_padded_with_the_last_row_and_released() -> None:
    staging = HostStaging([0])
    texts = np.array(["a", "b"], object), np.array(["c"], object)
    staged = stage(staging, *texts, bucket=5)
    assert staged.tolist() == ["a", "b", "c", "c", "c"]
    assert not np.shares_memory(staged, stage(staging, *texts, bucket=5))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5, 0), (7, 2)])
def test_input_of_a_model_without_a_batch_axis_may_have_any_shape(shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.float32)
    (staged,) = HostStaging([0]).stage([(array,)], 1)
    assert staged is array


@pytest.mark.parametrize("parts", [[(2, 4)], [(2, 3), (1, 4)], [(2, 1)], [(1, 3)], [(2, 3), (2, 3)]])
def test_rows_of_another_shape_are_rejected_not_broadcast(parts: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"shape|dimensions"):
        stage_rows(tuple(np.ones(shape, np.float32) for shape in parts), np.empty((4, 3), np.float32), 2)


def test_rows_on_another_axis_are_staged_in_model_layout() -> None:
    parts = [np.arange(rows * 6).reshape(2, rows, 3) + 100 * rows for rows in (1, 2)]
    staging = HostStaging([1])
    (staged,) = staging.stage([tuple(np.moveaxis(part, 1, 0) for part in parts)], 4)
    assert staged.flags.c_contiguous
    np.testing.assert_array_equal(staged, np.concatenate([*parts, parts[1][:, -1:]], axis=1))
    (lone,) = staging.stage([(np.moveaxis(parts[1], 1, 0),)], 2)
    assert np.shares_memory(lone, parts[1]), "as the caller sent it"


def test_input_without_rows_is_staged_once() -> None:
    table = np.arange(6.0).reshape(2, 3)
    (staged,) = HostStaging([None]).stage([(np.broadcast_to(table, (1, 2, 3)), np.broadcast_to(table, (2, 2, 3)))], 8)
    assert np.shares_memory(staged, table)
    np.testing.assert_array_equal(staged, table)
    (number,) = HostStaging([None]).stage([(np.broadcast_to(np.array(8000), (2,)),)], 2)
    assert isinstance(number, np.ndarray), "ONNX Runtime takes no other"
    nothing = absent(2)
    assert HostStaging([None]).stage([(nothing,)], 2)[0] is nothing
