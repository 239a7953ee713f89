"""8- and 4-bit weights in groups of 32 along a row: how the host packs them for `quantised_matmul`.

    int8    w = scale * code            code -127 .. 127, scale float16
    int4    w = scale * code + least    code 0 .. 15, scale and least float16

A matrix is cut into tiles of 16 rows and 64 columns (two groups a row, filled up with zeros), and each lane of a warp
finds its part of a tile in one or two 16-byte words. With g = lane / 4 and c = lane % 4 the lane has, in each half of
32 columns, columns 8 c .. 8 c + 7 of rows g and g + 8:

    codes   int4 (tiles, 32 lanes, 2 halves, 2 rows) uint32: column 2 i in nibble i, column 2 i + 1 in nibble i + 4
            int8 (tiles, 2 halves, 32 lanes, 2 rows, 8 columns) int8
    scales  int4 (tiles, 8 g, 2 halves, 2 rows, 2) float16: scale, least
            int8 (tiles, 8 g, 2 rows, 2 halves) float16
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

GROUP = 32
TILE_ROWS, TILE_COLS = 16, 64
NAMES = ("int8", "int4")


def packed_bytes(name: str, rows: int, cols: int) -> tuple[int, int]:
    """Bytes of the codes and of the scales of a packed matrix."""
    tiles = -(-rows // TILE_ROWS) * -(-cols // TILE_COLS)
    return (tiles * 512, tiles * 128) if name == "int4" else (tiles * 1024, tiles * 64)


def pack(
    codes: NDArray[np.uint8], scale: NDArray[Any], least: NDArray[Any] | None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes (N, K) with scale and least (N, K / 32) as the module's text says, as bytes. Codes count from 0: with no
    least, 128 stands for zero, and they become int8 here; else they have 4 bits."""
    if least is None:
        codes = (codes ^ 0x80).view(np.int8)
    codes = _tiles(codes, 2, GROUP).reshape(-1, 2, 8, 2, 4, 8)  # tile, row / 8, g, half, c, column
    scale = _tiles(scale.astype(np.float16), 2, 1).reshape(-1, 2, 8, 2)  # tile, row / 8, g, half
    if least is None:
        return (
            np.ascontiguousarray(codes.transpose(0, 3, 2, 4, 1, 5)).reshape(-1).view(np.uint8),
            np.ascontiguousarray(scale.transpose(0, 2, 1, 3)).reshape(-1).view(np.uint8),
        )
    nibbles = codes.transpose(0, 2, 4, 3, 1, 5).astype(np.uint32)  # tile, g, c, half, row / 8, column
    shifts = np.array([4 * (column // 2 + 4 * (column % 2)) for column in range(8)], np.uint32)
    words = np.bitwise_or.reduce(nibbles << shifts, axis=-1)
    both = np.stack([scale, _tiles(least.astype(np.float16), 2, 1).reshape(-1, 2, 8, 2)], axis=-1)
    return words.reshape(-1).view(np.uint8), np.ascontiguousarray(both.transpose(0, 2, 3, 1, 4)).reshape(-1).view(
        np.uint8
    )


def _tiles(values: NDArray[Any], per_tile: int, width: int) -> NDArray[Any]:
    """(tiles, 16, per_tile, width) of (N, K), filled up with zeros."""
    rows, cols = values.shape
    columns = per_tile * width
    shape = -(-rows // TILE_ROWS), -(-cols // columns)
    filled = np.zeros((shape[0] * TILE_ROWS, shape[1] * columns), values.dtype)
    filled[:rows, :cols] = values
    split = filled.reshape(shape[0], TILE_ROWS, shape[1], per_tile, width)
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(-1, TILE_ROWS, per_tile, width)
