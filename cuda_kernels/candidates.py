"""Passes of one block of threads over one row of candidates: its maximum, totals, and the sets that limits keep.

Nothing is sorted. Candidates rank by value, equal ones by token id; how far a value lies below the row's maximum, in
float32 numbers between them, is its distance. A set kept by rank is {distance < d} and the first few of {distance ==
d}, so top-k and top-p are searches for d, seven probes a pass. Weights are integers because integer sums have no order.

The arithmetic is that of the CPU's `candidates.py`, operation by operation, so that both devices draw the same token.
"""

from __future__ import annotations

import math
from typing import Any

from .compiler import WARP
from .intrinsics import add, f32_bits, f32_from_bits, multiply, multiply_high_u64, round_to_i64
from .jit import cuda, device_function, types
from .reductions import ALL_LANES, block_max, block_sum, warp_sum

THREADS = 512
WARPS = THREADS // WARP
PROBES = 7
SEGMENTS = 256  # parts of a row whose weights are summed, to find where a draw falls

# `shared` is an int64 array of the kernel: sums over the warps, then what `search` (or `find`) adds up.
SHARED_SIZE = WARPS + max(PROBES * WARPS, 2 * SEGMENTS + 3)
_TIED = WARPS + SEGMENTS
_FOUND = WARPS + 2 * SEGMENTS

_i64, _u32, _u64, _f32 = types.int64, types.uint32, types.uint64, types.float32

_INFINITY_KEY = 0x7F800000
NO_WEIGHT = 0x41E80000  # distance of -29 from 0: exp(-29) * 2**40 rounds to 0

# exp(x) = 2**n * exp(r), r = x - n log(2): adding 1.5 * 2**23 rounds to the integer n in the low bits of the float.
_ROUND = 12582912.0
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
_EXP_MIN = -87.0
# Minimax for exp(r) = 1 + r + r**2 (c2 + c3 r + c4 r**2 + c5 r**3 + c6 r**4), |r| <= log(2) / 2; relative error 2**-28.
_C2, _C3, _C4 = 0.49999993451679986, 0.16666520689635433, 0.04166838736699273
_C5, _C6 = 0.008368709842509956, 0.0013814612983435101
WEIGHT_BITS = 40
WEIGHT_ONE = math.ldexp(1.0, WEIGHT_BITS)


@device_function
def key(x: Any) -> Any:
    """int64 that orders like the float32 x, -0 equal to +0; NaN lies above +inf or below -inf."""
    magnitude = _i64(f32_bits(x) & _u32(0x7FFFFFFF))
    return -magnitude if f32_bits(x) >> _u32(31) else magnitude


@device_function
def from_key(value: Any) -> Any:
    """The float32 that has this key."""
    if value < 0:
        return f32_from_bits(_u32(_u32(-value) | _u32(0x80000000)))
    return f32_from_bits(_u32(value))


@device_function
def weight(x: Any) -> Any:
    """rint(exp(x) * 2**40) of a float32 x <= 0 (-inf included) as int64."""
    x = x if x > _f32(_EXP_MIN) else _f32(_EXP_MIN)
    shifted = add(multiply(x, _f32(_LOG2_E)), _f32(_ROUND))
    n = add(shifted, _f32(-_ROUND))
    r = add(add(x, -multiply(n, _f32(_LN2_HIGH))), -multiply(n, _f32(_LN2_LOW)))
    tail = add(multiply(_f32(_C6), r), _f32(_C5))
    tail = add(multiply(tail, r), _f32(_C4))
    tail = add(multiply(tail, r), _f32(_C3))
    tail = add(multiply(tail, r), _f32(_C2))
    mantissa = add(add(multiply(multiply(r, r), tail), r), _f32(1))
    exponent = _u32(_u32(f32_bits(shifted) + _u32(WEIGHT_BITS)) << _u32(23))
    return round_to_i64(f32_from_bits(_u32(f32_bits(mantissa) + exponent)))


@device_function
def peak(values: Any, start: Any, size: Any, thread: Any, shared: Any) -> Any:
    """Token id of the first maximum of values[start : start + size]; -1 if there is NaN, +inf, or nothing but -inf."""
    best, lowest = _i64(-1) << _i64(62), _i64(1) << _i64(62)
    for token in range(thread, size, THREADS):
        here = key(values[start + token])
        lowest = min(lowest, here)
        best = max(best, here * (_i64(1) << _i64(31)) - token)  # of equal values the first
    best = block_max(best, shared, WARPS)
    lowest = -block_max(-lowest, shared, WARPS)
    highest = (best + (_i64(1) << _i64(31)) - 1) >> _i64(31)
    if highest >= _INFINITY_KEY or highest <= -_INFINITY_KEY or lowest < -_INFINITY_KEY:
        return _i64(-1)
    return highest * (_i64(1) << _i64(31)) - best


@device_function
def total_weight(values: Any, start: Any, size: Any, maximum: Any, thread: Any, shared: Any) -> Any:
    """sum(rint(exp(value - maximum) * 2**40)) over the row, int64."""
    total = _i64(0)
    for token in range(thread, size, THREADS):
        total += weight(add(values[start + token], -maximum))
    return block_sum(total, shared, WARPS)


@device_function
def measure(values: Any, start: Any, size: Any, top: Any, below: Any, by_weight: Any, thread: Any, shared: Any) -> Any:
    """How many candidates (or how much weight) have distance < below from key `top`."""
    total = _i64(0)
    for token in range(thread, size, THREADS):
        value = values[start + token]
        if top - key(value) < below:
            total += weight(value) if by_weight else _i64(1)
    return block_sum(total, shared, WARPS)


@device_function
def search(
    values: Any, start: Any, size: Any, top: Any, limit: Any, goal: Any, by_weight: Any, thread: Any, shared: Any
) -> Any:
    """(d, under): the least distance d at which the measure of {distance <= d} reaches `goal`, and that of {< d}.

    The measure of {distance < limit} must reach it. Weights are those of the values themselves, so `top` is 0 then.
    """
    counts = cuda.local.array(PROBES, types.int64)
    low, high, under = _i64(-1), _i64(limit - 1), _i64(0)  # the measure up to low is `under` < goal, up to high >= goal
    while high - low > 1:
        for i in range(PROBES):
            counts[i] = _i64(0)
        span = high - low
        for token in range(thread, size, THREADS):
            value = values[start + token]
            distance = top - key(value)
            if low < distance and distance <= high:
                amount = weight(value) if by_weight else _i64(1)
                for i in range(PROBES):
                    counts[i] += amount if distance <= low + (span * (i + 1) >> _i64(3)) else _i64(0)
        cuda.syncthreads()
        for i in range(PROBES):
            here = warp_sum(counts[i])
            if thread % WARP == 0:
                shared[WARPS * (i + 1) + thread // WARP] = here
        cuda.syncthreads()
        new_low, new_high, new_under = low, high, under
        for i in range(PROBES - 1, -1, -1):
            up_to = under
            for warp in range(WARPS):
                up_to += shared[WARPS * (i + 1) + warp]
            probe = low + (span * (i + 1) >> _i64(3))
            if up_to >= goal:
                new_high = probe
            elif probe > new_low:
                new_low, new_under = probe, up_to
        low, high, under = new_low, new_high, new_under
    return high, under


@device_function
def find(values: Any, start: Any, size: Any, threshold: Any, ties: Any, bits: Any, thread: Any, shared: Any) -> Any:
    """The kept candidate at which the weights, summed in order of token id, exceed (bits * their total) >> 64.

    Kept are the candidates at distance < threshold from 0 and the first `ties` at it; `bits` is uint64.
    """
    lane, warp = thread % WARP, thread // WARP
    length = (size + SEGMENTS * WARP - 1) // (SEGMENTS * WARP) * WARP
    unit = weight(from_key(-threshold))
    total = num_tied = _i64(0)
    cuda.syncthreads()  # others may still read what `search` left in `shared`
    for segment in range(warp, SEGMENTS, WARPS):
        above = equal = _i64(0)
        for token in range(segment * length + lane, min((segment + 1) * length, size), WARP):
            value = values[start + token]
            distance = -key(value)
            above += weight(value) if distance < threshold else _i64(0)
            equal += _i64(1) if distance == threshold else _i64(0)
        total += above
        num_tied += equal
        above, equal = warp_sum(above), warp_sum(equal)
        if lane == 0:
            shared[WARPS + segment], shared[_TIED + segment] = above, equal
    total = block_sum(total, shared, WARPS) + min(block_sum(num_tied, shared, WARPS), ties) * unit
    if thread == 0:
        point, left, segment = _i64(multiply_high_u64(bits, _u64(total))), _i64(ties), _i64(0)
        here = shared[WARPS] + min(shared[_TIED], left) * unit
        while here <= point:
            point -= here
            left -= min(shared[_TIED + segment], left)
            segment += 1
            here = shared[WARPS + segment] + min(shared[_TIED + segment], left) * unit
        shared[_FOUND], shared[_FOUND + 1], shared[_FOUND + 2] = segment, point, left
    cuda.syncthreads()
    if warp == 0:
        first, point, left = shared[_FOUND] * length, shared[_FOUND + 1], shared[_FOUND + 2]
        cuda.syncwarp()
        token = _i64(-1)
        while token < 0:
            value = values[start + first + lane] if first + lane < size else _f32(-math.inf)
            distance = -key(value)
            equal = cuda.ballot_sync(ALL_LANES, distance == threshold)
            earlier = _i64(cuda.popc(_u32(equal) & _u32((_u32(1) << _u32(lane)) - _u32(1))))
            kept = distance < threshold or (distance == threshold and earlier < left)
            reached = weight(value) if kept else _i64(0)
            for step in (1, 2, 4, 8, 16):  # inclusive sums over the lanes
                before = cuda.shfl_up_sync(ALL_LANES, reached, step)
                reached += before if lane >= step else _i64(0)
            passed = cuda.ballot_sync(ALL_LANES, reached > point)
            if passed:
                token = first + cuda.ffs(passed) - 1
            point -= cuda.shfl_sync(ALL_LANES, reached, WARP - 1)
            left -= _i64(cuda.popc(_u32(equal)))
            first += WARP
        if lane == 0:
            shared[_FOUND] = token
    cuda.syncthreads()
    return shared[_FOUND]
