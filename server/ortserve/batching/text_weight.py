"""How much text a run may take, since ONNX Runtime keeps the interpreter's lock while it copies texts.

Measured on a virtual AMD EPYC core with ONNX Runtime 1.31.1: 60 to 100 ns for an input's element and 75 to 150 ns for
an output's, and 0.2 to 0.9 ns and 1.2 to 2 ns for each byte of them. The event loop stands still for that long.
"""

from typing import Final

from ortserve.core.batch import Arrays

MAX_TEXT_UNITS: Final = 16_384
"""Of a run: as many short texts, or 512 KiB of long ones, which hold the lock for up to 4 ms."""
_BYTES_PER_UNIT: Final = 32
_COUNTED: Final = 1024
"""Elements of an input whose characters are counted, for some 40 µs; of more, evenly spaced ones stand for all."""


def text_units(inputs: Arrays) -> int:
    """The texts of a request: one unit each, and one for 32 bytes, which are estimated where texts are many."""
    units = 0
    for array in inputs:
        if not array.dtype.hasobject or not array.size:
            continue
        step = -(-array.size // _COUNTED)
        counted = array.reshape(-1)[::step].tolist()
        # Most characters that are not ASCII have two or three bytes, and take longer a byte.
        nbytes = sum([len(text) if text.isascii() else 3 * len(text) for text in counted])
        units += array.size + nbytes * array.size // len(counted) // _BYTES_PER_UNIT
    return units


def most_rows(units: int, rows: int, max_rows: int) -> int:
    """The most rows of a run of such a request, at least 1: fewer than ``max_rows`` where it has much text."""
    if units <= MAX_TEXT_UNITS:
        return max_rows
    return max(1, min(max_rows, rows * MAX_TEXT_UNITS // units))
