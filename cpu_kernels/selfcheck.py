"""A small product through the processor's bfloat16 instruction and through float32, compared before it is trusted."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from .isa import BFLOAT16, BFLOAT16_DOT
from .packing import from_bfloat16, pack, panel_bytes, round_up, to_bfloat16
from .tile import ARGUMENTS

_ROWS, _K, _COLUMNS = 7, 70, 16


def dot_agrees(tiles: NDArray[np.int64]) -> bool:
    """Whether tiles of BFLOAT16_DOT give what tiles of BFLOAT16 give on rounded activations, for every height.

    `tiles`: `tile.tile_table` with both formats. The instruction rounds otherwise, but no worse than float32 sums do.
    """
    random = np.random.default_rng(0)
    weights = random.normal(size=(_COLUMNS, _K)).astype(np.float32)
    packed = np.zeros(panel_bytes(BFLOAT16, _K), dtype=np.uint8)
    pack(weights, BFLOAT16, packed)
    stride = round_up(_K, 32)
    x = np.zeros((_ROWS, stride), dtype=np.float32)
    x[:, :_K] = random.normal(size=(_ROWS, _K))
    rounded = np.zeros((_ROWS, stride), dtype=np.uint16)
    _call(
        int(tiles[BFLOAT16_DOT, 0, 1, 0]),
        x.ctypes.data,
        4 * stride,
        rounded.ctypes.data,
        2 * stride,
        _ROWS,
        stride // 32,
    )
    if not np.array_equal(rounded, to_bfloat16(x)):
        return False
    exact = from_bfloat16(rounded)
    for rows in range(1, min(_ROWS, int(tiles[BFLOAT16_DOT, 0, 0, 0]), int(tiles[BFLOAT16, 0, 0, 0])) + 1):
        got = _product(tiles, BFLOAT16_DOT, rounded, packed, rows)
        expected = _product(tiles, BFLOAT16, exact, packed, rows)
        if not np.allclose(got, expected, rtol=1e-5, atol=1e-4):
            return False
    return True


def _product(
    tiles: NDArray[np.int64], tile_format: int, x: NDArray[np.generic], packed: NDArray[np.uint8], rows: int
) -> NDArray[np.float32]:
    """One panel of x (rows, k) @ weights.T."""
    out = np.zeros((rows, _COLUMNS), dtype=np.float32)
    table = np.array([packed.ctypes.data], dtype=np.int64)
    arguments = dict.fromkeys(ARGUMENTS, 0) | {
        "x": x.ctypes.data,
        "x_stride": x.strides[0],
        "cuts": 1,
        "groups": 1,
        "table": table.ctypes.data,
        "blocks": 1,
        "segments": 1,
        "k": _K,
        "last_k": _K,
        "step_stride": 64,
        "out": out.ctypes.data,
        "out_stride": out.strides[0],
        "ahead_table": table.ctypes.data,
    }
    _call(int(tiles[tile_format, rows, 1, 0]), *(arguments[name] for name in ARGUMENTS))
    return out


def _call(address: int, *arguments: int) -> None:
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)(*arguments)
