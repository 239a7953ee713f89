"""Weights in the order in which the tile reads them: panels of 16 output columns, k by k.

    float32   [ceil(N / 16), K, 16] float32
    bfloat16  [ceil(N / 16), ceil(K / 2), 16, 2] uint16, the two k of a pair side by side in one 32-bit lane

N and K are filled up with zeros. (Weights in groups of codes: see `groups`.)
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .groups import GROUP_FORMATS, group_of
from .isa import BFLOAT16, FIRST_GROUPED, FLOAT32
from .vectors import LANES

Float32 = NDArray[np.float32]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def panel_bytes(weight_format: int, cols: int) -> int:
    """Bytes of one panel of 16 columns with `cols` k."""
    if weight_format in GROUP_FORMATS:
        return cols // GROUP_FORMATS[weight_format].size * GROUP_FORMATS[weight_format].bytes
    return cols * 64 if weight_format == FLOAT32 else round_up(cols, 2) * 32


def step_bytes(read_as: int) -> int:
    """Bytes of a panel of weights that one step of a tile reads."""
    return group_of(read_as).bytes if read_as >= FIRST_GROUPED else 64


def to_bfloat16(values: Float32) -> NDArray[np.uint16]:
    """The bits of float32 values rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    with np.errstate(invalid="ignore"):
        bits: NDArray[np.uint16] = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return bits


def from_bfloat16(bits: NDArray[np.uint16]) -> Float32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pack(matrix: Float32, weight_format: int, out: NDArray[np.uint8]) -> None:
    """Pack (N, K) float32 rows into `out`, ceil(N / 16) * panel_bytes long, a few panels at a time."""
    rows, cols = matrix.shape
    size = panel_bytes(weight_format, cols)
    chunk = max(1, (1 << 22) // (LANES * 4 * cols))  # panels in about 4 MiB, so that temporaries stay small
    for first in range(0, -(-rows // LANES), chunk):
        part = matrix[first * LANES : (first + chunk) * LANES]
        count = -(-len(part) // LANES)
        target = out[first * size : (first + count) * size]
        if weight_format == FLOAT32:
            _panels(part, cols, 1, target.view(np.float32))
        elif weight_format == BFLOAT16:
            _panels(to_bfloat16(part), round_up(cols, 2), 2, target.view(np.uint16))
        else:
            raise ValueError(f"no packing for weight format {weight_format}")


def _panels(rows: NDArray[Any], cols: int, group: int, out: NDArray[Any]) -> None:
    """out[panel, k // group, lane, k % group] = rows[16 panel + lane, k]."""
    count = -(-len(rows) // LANES)
    if rows.shape != (count * LANES, cols):
        filled = np.zeros((count * LANES, cols), rows.dtype)
        filled[: rows.shape[0], : rows.shape[1]] = rows
        rows = filled
    split = rows.reshape(count, LANES, cols // group, group)
    out.reshape(count, cols // group, LANES, group)[:] = split.transpose(0, 2, 1, 3)
