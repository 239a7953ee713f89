"""Passes over one row of candidates: its maximum, its total, and the sets that top-k, top-p and min-p keep.

Nothing is sorted. A set kept by rank is {scaled > threshold} and the first `ties` of {scaled == threshold}, so top-k
and top-p are searches for a threshold, each step one vectorised count over those blocks of the row that reach it.
Weights are integers because integer sums have no order: they vectorise, and the bits do not depend on how.

All arrays are float32: `scaled` (V,), `weights` (V,) = exp(scaled) * 2**40 before rounding, `block_max`
(ceil(V / BLOCK),) the maximum of each BLOCK columns, `spare` (spare_floats(V),) scratch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import kernel

Float32 = NDArray[np.float32]
Scalar = Any  # in a kernel: float32 for values, int64 for counts and weights, unless the docstring says otherwise

BLOCK = 128  # columns whose maximum is kept, so that later passes skip what cannot matter
FEW = 128  # candidates that are cheaper to sort than to halve once more
_BY_VALUE = 16  # steps by value before the search halves the remaining float32 bit patterns

_MAGNITUDE, _SIGN = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
_INFINITY_KEY = np.int32(0x7F800000)
_NO_KEY, _EVERY_KEY = np.int32(-0x80000000), np.int32(0x7FFFFFFF)  # below and above the key of every number
_BY_COUNT, _BY_WEIGHT = np.int64(0), np.int64(1)  # typed: Numba compiles anew for each plain constant passed
_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_NO_WEIGHT = np.float32(-29.0)  # exp(-29) * 2**40 rounds to 0

# exp(x) = 2**n * exp(r), r = x - n log(2): adding 1.5 * 2**23 rounds to the integer n in the low bits of the float.
_ROUND_32 = np.float32(12582912.0)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_EXP_MIN = np.float32(-87.0)
# Minimax for exp(r) = 1 + r + r**2 (c2 + c3 r + c4 r**2 + c5 r**3 + c6 r**4), |r| <= log(2) / 2; relative error 2**-28.
_C2, _C3, _C4 = np.float32(0.49999993451679986), np.float32(0.16666520689635433), np.float32(0.04166838736699273)
_C5, _C6 = np.float32(0.008368709842509956), np.float32(0.0013814612983435101)
_ONE = np.float32(1.0)

# Adding 1.5 * 2**52 rounds a float64 to an integer in the low bits of its pattern.
_WEIGHT_BITS = np.int32(40)
_WEIGHT_ONE = 2.0**40
_ROUND_64 = 6755399441055744.0
_ROUND_64_BITS = np.int64(0x4338000000000000)


def spare_floats(vocab_size: int) -> int:
    """float32 entries of `spare`: three arrays for an eighth of the row, with room for one more."""
    return 3 * (vocab_size // 8 + FEW + 1)


@kernel
def num_blocks(size: Scalar) -> Scalar:
    """Blocks in a row of `size` columns."""
    return (size + BLOCK - 1) // BLOCK


@kernel
def columns(block: Scalar, size: Scalar) -> range:
    """The columns of a block, unsigned: Numba then leaves out Python's negative indices, and LLVM can vectorise."""
    return range(np.uint64(block * BLOCK), np.uint64(min((block + 1) * BLOCK, size)))


@kernel
def _key(x: Scalar) -> Scalar:
    """int32 that orders like the float32 x, -0 equal to +0; NaN lies above +inf or below -inf."""
    bits = np.float32(x).view(np.int32)
    sign = bits >> np.int32(31)
    return np.int32(((bits & _MAGNITUDE) ^ sign) - sign)


@kernel
def _from_key(key: Scalar) -> Scalar:
    """The float32 whose `_key` is the int32 `key`."""
    sign = key >> np.int32(31)
    return np.int32(((key ^ sign) - sign) | (sign & _SIGN)).view(np.float32)


@kernel
def _weight(x: Scalar) -> Scalar:
    """exp(x) * 2**40 of a float32 x <= 0 (-inf included) as float32, within 2 units in the last place."""
    x = x if x > _EXP_MIN else _EXP_MIN
    shifted = np.float32(x * _LOG2_E + _ROUND_32)
    n = shifted - _ROUND_32
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    tail = (((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2
    mantissa = np.float32(r * r * tail + r + _ONE)
    exponent = (shifted.view(np.int32) + _WEIGHT_BITS) << np.int32(23)
    return np.int32(mantissa.view(np.int32) + exponent).view(np.float32)


@kernel
def _rounded(weight: Scalar) -> Scalar:
    """A float32 weight rounded to an integer, in operations that exist as vector instructions."""
    return np.float64(np.float64(weight) + _ROUND_64).view(np.int64) - _ROUND_64_BITS


@kernel
def _integer_weight(x: Scalar) -> Scalar:
    """Weight of one candidate scaled to x: the same bits as in the passes over a row."""
    return _rounded(_weight(x))


@kernel
def peak(row: Float32, block_max: Float32) -> tuple[Scalar, bool]:
    """(index of the first maximum, row is usable); fills `block_max`. Unusable: NaN, +inf or nothing above -inf."""
    best, best_block, lowest = _NO_KEY, 0, _EVERY_KEY
    for b in range(len(block_max)):
        high, low = _NO_KEY, _EVERY_KEY
        for i in columns(b, len(row)):
            key = _key(row[i])
            high = max(high, key)
            low = min(low, key)
        lowest = min(lowest, low)
        block_max[b] = _from_key(high)
        if high > best:
            best, best_block = high, b
    if best >= _INFINITY_KEY or best <= -_INFINITY_KEY or lowest < -_INFINITY_KEY:
        return -1, False
    for i in columns(best_block, len(row)):
        if _key(row[i]) == best:
            return np.int64(i), True
    return -1, False


@kernel
def log_total(row: Float32, maximum: Scalar, weights: Float32) -> Scalar:
    """log(sum(exp(row - maximum))) as float64; fills `weights`."""
    total = 0
    for b in range(num_blocks(len(row))):
        for i in columns(b, len(row)):  # apart from the sum, so that it runs at the vector width of float32
            weights[i] = _weight(row[i] - maximum)
        for i in columns(b, len(row)):
            total += _rounded(weights[i])
    return math.log(total / _WEIGHT_ONE)


@kernel
def scale(
    row: Float32, maximum: Scalar, temperature: Scalar, scaled: Float32, weights: Float32, block_max: Float32
) -> None:
    """scaled = (row - maximum) / temperature and its weights; `block_max` follows. `row` may be `scaled`."""
    for i in range(len(row)):
        x = (row[i] - maximum) / temperature
        scaled[i] = x
        weights[i] = _weight(x)
    for b in range(len(block_max)):
        block_max[b] = (block_max[b] - maximum) / temperature


@kernel
def _above(scaled: Float32, weights: Float32, block_max: Float32, threshold: Scalar) -> tuple[Scalar, Scalar]:
    """(count, weight) of the candidates with scaled > threshold."""
    count, weight = np.int64(0), np.int64(0)
    for b in range(len(block_max)):
        if block_max[b] > threshold:
            for i in columns(b, len(scaled)):
                mask = -np.int64(scaled[i] > threshold)
                count -= mask
                weight += mask & _rounded(weights[i])
    return count, weight


@kernel
def _search(
    scaled: Float32,
    weights: Float32,
    block_max: Float32,
    floor: Scalar,
    floor_count: Scalar,
    goal: Scalar,
    by_weight: Scalar,
    spare: Float32,
) -> tuple[Scalar, Scalar]:
    """(threshold, ties) of the fewest best candidates whose count, or weight, reaches `goal`.

    The `floor_count` candidates above `floor` must reach it. The row is searched until an eighth of it is left, which
    is copied out, and that until few are left to sort.
    """
    room = len(spare) // 3
    inner, inner_weights, inner_max = spare[:room], spare[room : 2 * room], spare[2 * room :]
    low, high, count, goal = _narrow(scaled, weights, block_max, floor, _ZERO, floor_count, goal, by_weight, room - 1)
    if count >= room:
        return high, _ties(high, goal, by_weight)
    _gather(scaled, block_max, low, high, inner)
    inner, inner_max = inner[:count], inner_max[: num_blocks(count)]
    for i in range(count):
        inner_weights[i] = _weight(inner[i])
    for b in range(len(inner_max)):
        inner_max[b] = high  # inner blocks are not told apart
    low, high, count, goal = _narrow(inner, inner_weights, inner_max, low, high, count, goal, by_weight, np.int64(FEW))
    if count > FEW:
        return high, _ties(high, goal, by_weight)
    few = inner_weights
    _gather(inner, inner_max, low, high, few)
    _sort_descending(few[:count])
    return _walk(few[:count], low, goal, by_weight)


@kernel
def _narrow(
    scaled: Float32,
    weights: Float32,
    block_max: Float32,
    low: Scalar,
    high: Scalar,
    count: Scalar,
    goal: Scalar,
    by_weight: Scalar,
    enough: Scalar,
) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """(low, high, count, goal): halve low < scaled <= high, which holds `count` candidates and the last one needed.

    Ends when at most `enough` are left in it, or one value. `goal` is what they must reach beside those above `high`.
    """
    high_count, high_measure = 0, 0
    step = 0
    while count > enough and _key(high) - _key(low) > 1:
        middle = (low + high) * _HALF
        if step >= _BY_VALUE:
            middle = _from_key(np.int32((np.int64(_key(low)) + np.int64(_key(high))) >> 1))
        step += 1
        above, weight = _above(scaled, weights, block_max, middle)
        measure = weight if by_weight else above
        if measure >= goal:
            low, count = middle, above - high_count
        else:
            high, count = middle, count - (above - high_count)
            high_count, high_measure = above, measure
    return low, high, count, goal - high_measure


@kernel
def _ties(value: Scalar, goal: Scalar, by_weight: Scalar) -> Scalar:
    """How many candidates scaled to `value` reach `goal`."""
    unit = _integer_weight(value) if by_weight else 1
    return (goal + unit - 1) // unit


@kernel
def _gather(scaled: Float32, block_max: Float32, low: Scalar, high: Scalar, kept: Float32) -> None:
    """Write the values low < scaled <= high to `kept`, which must have room for one more."""
    size = np.int64(0)
    for b in range(len(block_max)):
        if block_max[b] > low:
            for i in columns(b, len(scaled)):  # no branch: which values are kept cannot be foreseen
                kept[size] = scaled[i]
                size += np.int64(scaled[i] > low) & np.int64(scaled[i] <= high)


@kernel
def _sort_descending(values: Float32) -> None:
    """Sort a few values in place."""
    for i in range(1, len(values)):
        value, place = values[i], i
        while place > 0 and values[place - 1] < value:
            values[place] = values[place - 1]
            place -= 1
        values[place] = value


@kernel
def _walk(values: Float32, floor: Scalar, goal: Scalar, by_weight: Scalar) -> tuple[Scalar, Scalar]:
    """(threshold, ties) of the fewest of `values`, largest first, that reach `goal`; all above `floor` if none do."""
    i = 0
    while i < len(values):
        value, run = values[i], 1
        while i + run < len(values) and values[i + run] == value:
            run += 1
        unit = _integer_weight(value) if by_weight else 1
        if unit * run >= goal:
            return value, (goal + unit - 1) // unit
        goal -= unit * run
        i += run
    return floor, 0


@kernel
def keep(
    scaled: Float32, weights: Float32, block_max: Float32, top_k: Scalar, top_p: Scalar, min_p: Scalar, spare: Float32
) -> tuple[Scalar, Scalar]:
    """(threshold, ties) of what top-k, top-p and min-p leave: all above `threshold`, the first `ties` equal to it."""
    threshold, ties = _NO_WEIGHT, 0
    if top_k > 0 or top_p < _ONE:
        threshold, ties = _keep_best(scaled, weights, block_max, top_k, top_p, spare)
    if min_p > _ZERO:
        floor = np.float32(math.log(min_p))
        if floor > threshold:
            threshold, ties = _from_key(np.int32(_key(floor) - 1)), 0
    return threshold, ties


@kernel
def _keep_best(
    scaled: Float32, weights: Float32, block_max: Float32, top_k: Scalar, top_p: Scalar, spare: Float32
) -> tuple[Scalar, Scalar]:
    """`keep` for top-k, and top-p of what it leaves."""
    threshold, ties = _NO_WEIGHT, 0
    count, total = _above(scaled, weights, block_max, threshold)
    if 0 < top_k < count:
        threshold, ties = _search(scaled, weights, block_max, threshold, count, np.int64(top_k), _BY_COUNT, spare)
        count, total = _above(scaled, weights, block_max, threshold)
    if top_p < _ONE:
        everything = total + ties * _integer_weight(threshold)
        goal = max(np.int64(1), np.int64(math.ceil(np.float64(top_p) * np.float64(everything))))
        if total >= goal:
            threshold, ties = _search(scaled, weights, block_max, threshold, count, goal, _BY_WEIGHT, spare)
        else:
            ties = _ties(threshold, goal - total, _BY_WEIGHT)
    return threshold, ties


@kernel
def find(
    scaled: Float32, weights: Float32, block_max: Float32, threshold: Scalar, ties: Scalar, point: Scalar
) -> tuple[Scalar, Scalar]:
    """(token, total): the kept candidate at which the cumulative weight, in order of token id, exceeds `point`.

    Where it never does, the token is -1 and `total` is the weight of all that is kept.
    """
    tied_weight = _integer_weight(threshold)
    total = 0
    for b in range(len(block_max)):
        if block_max[b] < threshold:
            continue
        weight, tied = np.int64(0), np.int64(0)
        for i in columns(b, len(scaled)):
            weight += -np.int64(scaled[i] > threshold) & _rounded(weights[i])
            tied += np.int64(scaled[i] == threshold)
        tied = min(tied, ties)
        if total + weight + tied * tied_weight > point:
            return _find_in_block(scaled, weights, threshold, ties, point - total, b), point
        ties -= tied
        total += weight + tied * tied_weight
    return -1, total


@kernel
def _find_in_block(
    scaled: Float32, weights: Float32, threshold: Scalar, ties: Scalar, point: Scalar, block: Scalar
) -> Scalar:
    """`find` within one block, whose weights exceed `point`."""
    for i in columns(block, len(scaled)):
        tied = scaled[i] == threshold and ties > 0
        ties -= tied
        if tied or scaled[i] > threshold:
            point -= _rounded(weights[i])
            if point < 0:
                return np.int64(i)
    return -1
