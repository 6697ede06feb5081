"""Bounds on the time for which work on texts holds the interpreter lock."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ortserve.codecs.binary_tensor import decode_bytes_elements, encode_bytes_elements
from ortserve.codecs.json_text import encode_json_data
from ortserve.core.dtypes import DataType


@pytest.fixture
def compiled_interpreter() -> Iterator[None]:
    """Simulate compiled code: the interpreter lock changes hands only when a thread releases it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("compiled_interpreter")
@pytest.mark.parametrize("work", ["decode", "encode", "write"])
@pytest.mark.parametrize(("count", "size"), [(500, 50_000), (1, 12_000_000)])
def test_few_long_texts_leave_the_interpreter_to_other_threads(work: str, count: int, size: int) -> None:
    texts = np.full(count, "x" * size, object)
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
    assert turns > 5
