"""BF16 in numpy, which has no such type: bit patterns in ``uint16``, the upper halves of float32."""

import numpy as np


def widen(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bit patterns, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Round float32 values to bit patterns: to nearest, ties to even; NaN stays NaN, beyond the range is infinite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(values.shape)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
