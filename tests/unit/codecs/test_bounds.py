"""Shapes that are impossible for arrays, and bounds on the time for which work on texts holds the interpreter lock."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ortserve.codecs.binary_tensor import decode_bytes_elements, encode_bytes_elements
from ortserve.codecs.bounds import MAX_DIMS, shape_fault
from ortserve.codecs.json_text import encode_json_data
from ortserve.core.dtypes import DataType


@pytest.mark.parametrize("shape", [[], [0], [1] * 64, [0] * 64, [2**60 - 1], [0, 2**59], [2**30, 2**29, 0]])
def test_largest_shapes_of_the_widest_elements_are_accepted(shape: list[int]) -> None:
    assert shape_fault(shape) is None
    if 0 in shape:
        assert np.empty(shape, np.float64).shape == tuple(shape)


@pytest.mark.parametrize("shape", [[2**60], [2**31, 2**29], [0, 2**60], [2**62, 0, 2**62]])
def test_too_many_elements_are_rejected_even_beside_a_zero(shape: list[int]) -> None:
    text = ",".join(map(str, shape))
    assert shape_fault(shape) == f"at most {2**60 - 1} elements, got [{text}]"
    with pytest.raises(ValueError, match=r"too (big|large)"):
        np.empty(shape, np.float64)


def test_too_many_dimensions_are_rejected_before_their_product_is_computed() -> None:
    assert shape_fault([2**62] * 1_000_000) == f"at most {MAX_DIMS} dimensions, got 1000000"
    with pytest.raises(ValueError, match="maximum supported dimension"):
        np.empty([1] * (MAX_DIMS + 1))


@pytest.fixture
def compiled_interpreter() -> Iterator[None]:
    """Simulate compiled code: the interpreter lock changes hands only when a thread releases it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("compiled_interpreter")
@pytest.mark.parametrize("work", ["decode", "encode", "write"])
def test_few_long_texts_leave_the_interpreter_to_other_threads(work: str) -> None:
    texts = np.full(500, "x" * 50_000, object)
    content = encode_bytes_elements(texts)
    works: dict[str, Callable[[], object]] = {
        "decode": lambda: decode_bytes_elements(content, texts.shape, "x"),
        "encode": lambda: encode_bytes_elements(texts),
        "write": lambda: encode_json_data(texts, DataType.BYTES),
    }
    turns = 0
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(works[work])
        while not working.done():
            time.sleep(0)
            turns += 1
    assert turns > 10
