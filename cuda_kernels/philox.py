"""Counter-based random numbers: Philox4x32 with 10 rounds (Salmon et al., "Parallel random numbers", SC 2011)."""

from __future__ import annotations

from typing import Any

from .intrinsics import multiply_high_u32
from .jit import device_function, types

_u32, _u64 = types.uint32, types.uint64


@device_function
def philox_u64(seed: Any, counter: Any) -> Any:
    """The first two words, as uint64, for key `seed` (uint64) and counter (`counter` (uint64), 0, 0)."""
    c0, c1, c2, c3 = _u32(counter), _u32(counter >> _u64(32)), _u32(0), _u32(0)
    k0, k1 = _u32(seed), _u32(seed >> _u64(32))
    for _ in range(10):
        high0, low0 = multiply_high_u32(_u32(0xD2511F53), c0), _u32(_u32(0xD2511F53) * c0)
        high1, low1 = multiply_high_u32(_u32(0xCD9E8D57), c2), _u32(_u32(0xCD9E8D57) * c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = _u32(k0 + _u32(0x9E3779B9)), _u32(k1 + _u32(0xBB67AE85))
    return _u64(c1) << _u64(32) | _u64(c0)
