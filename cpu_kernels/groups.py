"""Weights as codes in groups along a row, and how the panels of 16 columns hold them.

    w = scale * code + least        code 0 .. 2^bits - 1; scale and least of the group, or least = -2^(bits - 1) scale
    w = scale * code                of 16 bits: code -4095 .. 4095

A panel is its groups one after the other: the codes as words of 32 bits for each of the 16 columns, then the scales of
the 16 columns, then their least values where the format has them. With n words a group, word i of a column holds the
codes of k = i, n + i, 2 n + i, .. of the group, the first in the low bits: a step takes k in order by going through all
words with one mask after the other.

    int8        8 bits, groups of 32, scale float16                  8.5  bits a weight   GGUF's Q8_0
    int4        4 bits, groups of 32, scale and least float16        5    bits a weight   Q4_0, Q4_1
    int8_k      8 bits, groups of 16, scale and least float32       12    bits a weight   Q5_0, Q5_1, Q5_K, Q6_K
    int4_k      4 bits, groups of 32, scale and least float32        6    bits a weight   Q4_K
    int16      16 bits, groups of 64, scale float32                 16.5  bits a weight
    int8_long   8 bits, groups of 64, scale float16                  8.25 bits a weight

The formats with k hold GGUF's nested scales multiplied out, which takes float32. A product of scale and code is exact,
or rounded once where least is its multiple, so every format gives exactly the float32 numbers of GGUF's own definition.

int8_long is what weights of other kinds are rounded to: longer groups are multiplied faster.

int16 is for weights of 16 bits where integers are multiplied faster than floats. Its codes take 13 of the bits, so that
a group's sum of products with activations of 14 bits stays within 32; the largest of a group is off by at most 2^-13
of itself, where bfloat16 rounds every number by up to 2^-9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .isa import (
    INT4,
    INT4_K,
    INT4_K_X8,
    INT4_K_X16,
    INT4_X8,
    INT4_X16,
    INT8,
    INT8_K,
    INT8_K_X16,
    INT8_LONG,
    INT8_LONG_X16,
    INT8_X16,
    INT16,
    INT16_X16,
    SPREAD8,
    SPREAD16,
    SPREAD16_K,
    SPREAD16_LONG,
    SPREAD16_PLUS,
)
from .vectors import LANES


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """How one format holds a group of `size` k; `scale` is the dtype of its scales."""

    bits: int
    size: int
    scale: Any
    has_least: bool
    is_signed: bool = False

    @property
    def zero(self) -> int:
        """The code of zero in a format without least values."""
        return 0 if self.is_signed else 1 << (self.bits - 1)

    @property
    def words(self) -> int:
        """Words of one column."""
        return self.size * self.bits // 32

    @property
    def codes_bytes(self) -> int:
        return self.words * LANES * 4

    @property
    def scale_bytes(self) -> int:
        """Scales of the 16 columns; as many again for the least values."""
        return LANES * int(np.dtype(self.scale).itemsize)

    @property
    def bytes(self) -> int:
        """One group of 16 columns."""
        return self.codes_bytes + self.scale_bytes * (1 + self.has_least)

    @property
    def lines(self) -> int:
        """Cache lines of those."""
        return -(-self.bytes // 64)


GROUP_FORMATS = {
    INT8: GroupFormat(8, 32, np.float16, False),
    INT4: GroupFormat(4, 32, np.float16, True),
    INT8_K: GroupFormat(8, 16, np.float32, True),
    INT4_K: GroupFormat(4, 32, np.float32, True),
    INT16: GroupFormat(16, 64, np.float32, False, is_signed=True),
    INT8_LONG: GroupFormat(8, 64, np.float16, False),
}
INT16_LIMIT = 4095

HELD_AS = {  # how the panels lie that products of codes read
    INT8_X16: INT8,
    INT4_X16: INT4,
    INT8_K_X16: INT8_K,
    INT4_K_X16: INT4_K,
    INT4_X8: INT4,
    INT4_K_X8: INT4_K,
    INT16_X16: INT16,
    INT8_LONG_X16: INT8_LONG,
}

# How products read panels of codes, by how activations are held; what is missing is read as it is, in float32.
_IN_16_BITS = {held: read_as for read_as, held in HELD_AS.items() if read_as not in (INT4_X8, INT4_K_X8)}
INTEGER_PRODUCTS: dict[str, dict[int, int]] = {
    "float32": {},
    "int16": _IN_16_BITS,
    "int8": _IN_16_BITS | {INT4: INT4_X8, INT4_K: INT4_K_X8},
}

# What products of codes read for many rows: the same, but a code has as many bits as an activation (see `unpacking`).
SPREAD_FORMATS = {
    SPREAD16: GroupFormat(16, 32, np.float32, False, is_signed=True),
    SPREAD16_PLUS: GroupFormat(16, 32, np.float32, True),
    SPREAD16_K: GroupFormat(16, 16, np.float32, True),
    SPREAD8: GroupFormat(8, 32, np.float32, True),
    SPREAD16_LONG: GroupFormat(16, 64, np.float32, False, is_signed=True),
}


def group_of(read_as: int) -> GroupFormat:
    """How the panels lie that are read as `read_as`, one of GROUPED, INTEGER or SPREAD."""
    return SPREAD_FORMATS[read_as] if read_as in SPREAD_FORMATS else GROUP_FORMATS[HELD_AS.get(read_as, read_as)]


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix (N, K) in groups of `size`: codes (N, K) uint8 (int16: int16), scale and least (N, K / size)."""

    codes: NDArray[Any]
    scale: NDArray[Any]
    least: NDArray[Any] | None

    @property
    def size(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]


def pack_codes(matrix: Codes, weight_format: int, out: NDArray[np.uint8]) -> None:
    """Pack a matrix into `out`, ceil(N / 16) panels long; columns past N are zero. The sizes of groups must agree."""
    group = GROUP_FORMATS[weight_format]
    rows, cols = matrix.codes.shape
    panels, groups = -(-rows // LANES), cols // group.size
    if matrix.size != group.size:
        raise ValueError(f"groups of {matrix.size} do not fit a format of groups of {group.size}")
    target = out.reshape(panels, groups, group.bytes)
    chunk = max(1, (1 << 22) // (LANES * cols))  # panels of about 4 MiB of codes, so that temporaries stay small
    for first in range(0, panels, chunk):
        part = slice(first * LANES, (first + chunk) * LANES)
        filled = _whole_panels(matrix.codes[part]).reshape(-1, LANES, groups, 32 // group.bits, group.words)
        columns = filled.transpose(0, 2, 4, 1, 3)  # panel, group, word, column, place in the word
        if group.bits == 4:
            columns = columns[..., 0::2] | columns[..., 1::2] << 4
        to = target[first : first + chunk]
        to[..., : group.codes_bytes] = np.ascontiguousarray(columns).view(np.uint8).reshape(len(filled), groups, -1)
        scales = [matrix.scale, matrix.least] if matrix.least is not None and group.has_least else [matrix.scale]
        for number, values in enumerate(scales):
            at = group.codes_bytes + number * group.scale_bytes
            across = _whole_panels(values[part].astype(group.scale)).reshape(-1, LANES, groups).swapaxes(1, 2)
            to[..., at : at + group.scale_bytes] = np.ascontiguousarray(across).view(np.uint8)


def _whole_panels(rows: NDArray[Any]) -> NDArray[Any]:
    """Filled up with rows of zeros to a multiple of 16."""
    missing = -len(rows) % LANES
    return np.concatenate([rows, np.zeros((missing, rows.shape[1]), rows.dtype)]) if missing else rows
