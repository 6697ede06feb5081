"""The Huffman code of header blocks (RFC 7541, appendix B), decoded by whole bytes. Pure.

The decoder of the ``hpack`` library takes half a byte at a time: 17 ms for the largest header block, which blocks all
other calls. This one takes a byte at a time, and is compiled. Its two tables of 0.5 MB are computed from the library's
table.
"""

from typing import Final

import numpy as np
from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE

_NO_SYMBOL: Final = 256
"""In place of the symbol of a half that completes none."""
_FAILED: Final = 256
"""The state after a code that does not exist. The other states, 0 to 255, are the inner nodes of the code's tree."""


def _byte_steps() -> tuple[list[int], list[bytes], frozenset[int]]:
    """Join steps of half a byte to steps of a byte.

    Returns:
        By ``state << 8 | byte``: the next states, and the symbols that the byte completes, at most two. Also the states
        in which a string may end.
    """
    half = np.array([*HUFFMAN_TABLE, *[(_FAILED, HUFFMAN_FAIL, 0)] * 16], np.int64).reshape(-1, 16, 3)
    target, flags, symbol = half[..., 0], half[..., 1], half[..., 2]
    target = np.where(flags & HUFFMAN_FAIL, _FAILED, target)
    symbol = np.where(flags & HUFFMAN_EMIT_SYMBOL, symbol, _NO_SYMBOL)
    middle = np.repeat(target, 16, axis=1)  # after the first half of each byte
    second = np.tile(np.arange(16), 16)
    ends = frozenset(target[(flags & HUFFMAN_COMPLETE) != 0].tolist())
    pairs: list[int] = (np.repeat(symbol, 16, axis=1) << 9 | symbol[middle, second]).ravel().tolist()
    texts = {pair: bytes([code for code in (pair >> 9, pair & 511) if code != _NO_SYMBOL]) for pair in set(pairs)}
    return target[middle, second].ravel().tolist(), [texts[pair] for pair in pairs], ends


_STEPS: Final = _byte_steps()
_NEXT: Final = _STEPS[0]
_SYMBOLS: Final = _STEPS[1]
_ENDS: Final = _STEPS[2]


def decode_huffman(coded: bytes) -> bytes:
    """Decode a string. Raises ValueError for bytes that are not a code."""
    state = 0
    parts: list[bytes] = []
    for byte in coded:
        step = state << 8 | byte
        state = _NEXT[step]
        parts.append(_SYMBOLS[step])
    if state not in _ENDS:
        raise ValueError("a string that is not Huffman code")
    return b"".join(parts)
