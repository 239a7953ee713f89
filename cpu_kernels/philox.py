"""Counter-based random numbers: Philox4x32 with 10 rounds (Salmon et al., "Parallel random numbers", SC 2011).

A draw is a pure function of (seed, counter), so a token's randomness does not depend on the batch, on the thread, or on
how often its sequence was paused and resumed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .jit import kernel

Uint64 = Any  # np.uint64 inside a kernel, where mypy's scalars and Numba's differ

# Every operand is uint64: Numba turns a mix of signed and unsigned 64-bit integers into float64.
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ZERO = np.uint64(0)
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)


@kernel
def philox4x32_10(
    c0: Uint64, c1: Uint64, c2: Uint64, c3: Uint64, k0: Uint64, k1: Uint64
) -> tuple[Uint64, Uint64, Uint64, Uint64]:
    """Four random 32-bit words of a 128-bit counter and a 64-bit key; all arguments and results uint64 below 2**32."""
    for _ in range(10):
        product0 = _MULTIPLIER_0 * c0
        product1 = _MULTIPLIER_1 * c2
        c0 = (product1 >> _32) ^ c1 ^ k0
        c1 = product1 & _LOW
        c2 = (product0 >> _32) ^ c3 ^ k1
        c3 = product0 & _LOW
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


@kernel
def draw_u64(seed: Uint64, counter: Uint64) -> Uint64:
    """uint64 random bits of output token number `counter` (int64) of the sequence with this `seed` (uint64)."""
    count = np.uint64(counter)
    w0, w1, _, _ = philox4x32_10(count & _LOW, count >> _32, _ZERO, _ZERO, seed & _LOW, seed >> _32)
    return (w1 << _32) | w0


@kernel
def scale_u64(bits: Uint64, total: Uint64) -> Uint64:
    """(bits * total) >> 64 as int64: a uniform integer in 0 .. total - 1. `bits` is uint64, 0 < total < 2**63."""
    size = np.uint64(total)
    bits_low, bits_high = bits & _LOW, bits >> _32
    size_low, size_high = size & _LOW, size >> _32
    middle = bits_high * size_low + ((bits_low * size_low) >> _32)
    carry = bits_low * size_high + (middle & _LOW)
    return np.int64(bits_high * size_high + (middle >> _32) + (carry >> _32))
