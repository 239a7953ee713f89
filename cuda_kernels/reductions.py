"""Sums and maxima over a warp and a block, in an order that depends on nothing but the block's size.

Shared memory is the kernel's: two device functions with arrays of their own do not link.
"""

from __future__ import annotations

from typing import Any

from .compiler import WARP
from .jit import cuda, device_function

ALL_LANES = 0xFFFFFFFF


@device_function
def warp_sum(value: Any) -> Any:
    """The sum of the lanes' numbers, in every lane: halves are added, then quarters, and so on."""
    for step in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(ALL_LANES, value, step)
    return value


@device_function
def warp_max(value: Any) -> Any:
    """The largest of the lanes' numbers, in every lane."""
    for step in (16, 8, 4, 2, 1):
        value = max(value, cuda.shfl_xor_sync(ALL_LANES, value, step))
    return value


@device_function
def block_sum(value: Any, partial: Any, num_warps: Any) -> Any:
    """The sum over the block, in every thread: warps by `warp_sum`, then warp after warp. All threads take part.

    `partial` is shared memory of the value's type, one entry a warp.
    """
    thread = cuda.threadIdx.x & 0x3FF  # the mask says that it is not negative
    value = warp_sum(value)
    cuda.syncthreads()
    if thread % WARP == 0:
        partial[thread // WARP] = value
    cuda.syncthreads()
    total = partial[0]
    for warp in range(1, num_warps):
        total += partial[warp]
    return total


@device_function
def block_max(value: Any, partial: Any, num_warps: Any) -> Any:
    """The largest value of the block, in every thread; otherwise as `block_sum`."""
    thread = cuda.threadIdx.x & 0x3FF
    value = warp_max(value)
    cuda.syncthreads()
    if thread % WARP == 0:
        partial[thread // WARP] = value
    cuda.syncthreads()
    largest = partial[0]
    for warp in range(1, num_warps):
        largest = max(largest, partial[warp])
    return largest
