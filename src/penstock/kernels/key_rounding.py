"""Rounding keys to 8 or 4 bits in numpy: what the compiled kernel of `KeyCodes.put` means."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
ByteArray = NDArray[np.uint8]
WordArray = NDArray[np.uint32]
KeyDtype = Literal["float32", "bfloat16", "float16"]

SMALLEST_STEP = np.float32(1e-30)


def widened(raw: ByteArray, dtype: str) -> FloatArray:
    """Keys as float32, out of their bytes.

    Args:
        raw: [n, bytes]

    Returns:
        [n, channels]
    """
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(dtype).astype(np.float32)


def step_of(values: FloatArray) -> FloatArray:
    """Step of int8 codes over the last axis, which it takes away."""
    steps: FloatArray = np.maximum(np.abs(values).max(axis=-1) / np.float32(127.0), SMALLEST_STEP)
    return steps


def byte_codes(keys: FloatArray) -> tuple[ByteArray, WordArray]:
    """Symmetric codes, each 128 more than it means.

    Args:
        keys: [..., channels]

    Returns:
        [..., channels], and the bits of the steps, [...]
    """
    steps = step_of(keys)
    codes = np.rint(keys * (np.float32(1.0) / steps)[..., None])
    return (codes + 128).astype(np.uint8), steps.view(np.uint32)


def group_codes(keys: FloatArray) -> tuple[ByteArray, WordArray]:
    """Codes 0 to 15 between the least value and the largest.

    Args:
        keys: one group. [..., channels]

    Returns:
        [..., channels], and the step (low half) with the least value (high half) in bfloat16, [...]
    """
    least = _bfloat16_bits(keys.min(axis=-1))
    low = least.view(np.float32)
    wide = np.maximum((keys.max(axis=-1) - low) / np.float32(15.0), SMALLEST_STEP)
    step = _bfloat16_bits(wide)
    inverse = np.float32(1.0) / step.view(np.float32)
    codes = np.rint((keys - low[..., None]) * inverse[..., None]).clip(0, 15)
    words = np.bitwise_or(step >> np.uint32(16), least, dtype=np.uint32)
    return codes.astype(np.uint8), words


def _bfloat16_bits(values: FloatArray) -> WordArray:
    """The nearest bfloat16, ties to even, as the high half of a float32's bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: WordArray = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return rounded
