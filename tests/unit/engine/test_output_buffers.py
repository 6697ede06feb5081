"""The memory of outputs is reused after the last view of it is gone, and not before."""

import sys
from collections.abc import Callable

import numpy as np
import orjson
import pytest

from ortserve.codecs.binary_tensor import encode_binary_tensor
from ortserve.codecs.json_text import encode_json_data
from ortserve.core.dtypes import DataType
from ortserve.engine.output_buffers import MAX_SETS, OutputBuffers, OutputPool, RowLayout, can_tell_leases, set_nbytes

LAYOUTS = (RowLayout(np.dtype(np.float32), (3, 2)), RowLayout(np.dtype(np.bool_), ()), RowLayout(np.dtype("i8"), (5,)))

SEEING: list[Callable[[np.ndarray], object]] = [
    lambda rows: rows,
    lambda rows: rows[1:2],
    lambda rows: rows[1:][:1, ::2][..., 0],
    lambda rows: rows.reshape(-1),
    lambda rows: rows.ravel(),
    lambda rows: rows.T,
    lambda rows: rows.view(np.uint8),
    lambda rows: rows.data,
    lambda rows: rows.data[1:],
    lambda rows: np.frombuffer(rows, np.uint8)[3:],
    lambda rows: np.asarray(rows.data),
    lambda rows: iter(rows),
    lambda rows: {"tail": [rows[:1], "text"]},
    lambda rows: encode_binary_tensor(rows, DataType.FP32),
    lambda rows: encode_binary_tensor(rows[1:2], DataType.FP32),
    lambda rows: encode_json_data(rows, DataType.FP32),
]

NOT_SEEING: list[Callable[[np.ndarray], object]] = [
    lambda rows: rows.copy(),
    lambda rows: rows.tobytes(),
    lambda rows: rows.tolist(),
    lambda rows: rows + 1,
    lambda rows: np.concatenate((rows, rows)),
    lambda rows: b"".join((b"head", encode_binary_tensor(rows, DataType.FP32))),
    lambda rows: orjson.dumps(encode_json_data(rows, DataType.FP32), option=orjson.OPT_SERIALIZE_NUMPY),
]


@pytest.mark.parametrize("see", SEEING)
def test_set_is_leased_while_its_memory_is_referenced(see: Callable[[np.ndarray], object]) -> None:
    buffers = OutputBuffers(LAYOUTS, 4)
    assert buffers.is_free
    seen = see(buffers.first_rows(3)[0])
    assert not buffers.is_free
    del seen
    assert buffers.is_free


@pytest.mark.parametrize("copy", NOT_SEEING)
def test_copies_do_not_lease(copy: Callable[[np.ndarray], object]) -> None:
    buffers = OutputBuffers(LAYOUTS, 4)
    buffers.first_rows(3)[0][:] = 0
    kept = copy(buffers.first_rows(3)[0])
    assert buffers.is_free
    assert kept is not None


def test_set_is_leased_until_the_last_of_several_readers_is_gone() -> None:
    buffers = OutputBuffers(LAYOUTS, 4)
    readers = [output[row : row + 1] for row in range(3) for output in buffers.first_rows(3)]
    while readers:
        assert not buffers.is_free
        readers.pop(len(readers) // 2)
    assert buffers.is_free


def test_outputs_have_their_type_and_shape_and_do_not_overlap() -> None:
    buffers = OutputBuffers(LAYOUTS, 4)
    outputs = buffers.first_rows(4)
    for index, (output, layout) in enumerate(zip(outputs, LAYOUTS, strict=True)):
        assert output.dtype == layout.dtype
        assert output.shape == (4, *layout.item)
        assert output.flags.c_contiguous
        assert buffers.address(index) == output.ctypes.data
        assert output.ctypes.data % 64 == 0
        output.view(np.uint8)[...] = index % 2
    for index, output in enumerate(outputs):
        assert (output.view(np.uint8) == index % 2).all()
    assert [output.shape[0] for output in buffers.first_rows(2)] == [2, 2, 2]


def test_pool_reuses_free_sets_and_grows_only_when_all_are_leased() -> None:
    pool = OutputPool(LAYOUTS, 4)
    first = pool.take()
    assert first is not None
    assert pool.take() is first
    leases = [first.first_rows(1)]
    for number in range(2, MAX_SETS + 1):
        buffers = pool.take()
        assert buffers is not None
        leases.append(buffers.first_rows(1))
        assert len(pool.sets) == number
    assert pool.take() is None
    del leases[3]
    assert pool.take() is pool.sets[3]


def test_size_of_a_set_counts_whole_cache_lines() -> None:
    assert set_nbytes([RowLayout(np.dtype(np.float32), (16,)), RowLayout(np.dtype(np.bool_), ())], 4) == 256 + 64


def test_leases_by_references_need_exact_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_tell_leases()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert not can_tell_leases()
