"""Activations rounded to bfloat16 for dot products: by whoever makes a row, while it is in the cache.

A rounded row has the columns of its float32 row, filled up to a multiple of 32; what the filling holds does not matter.
"""

from __future__ import annotations

from . import table as t
from .isa import BFLOAT16_DOT
from .jit import kernel
from .memory import call_address, load_i64
from .product import FORMAT_BYTES
from .table import word


@kernel
def rounded_stride(columns: int) -> int:
    """Bytes between rounded rows."""
    return (columns + 31 & -32) * 2


@kernel
def round_columns(state: int, x: int, x_stride: int, out: int, out_stride: int, rows: int, columns: int) -> None:
    """Round `rows` rows of `columns` floats, or a few more: 32 at a time."""
    function = load_i64(word(state, t.TILES) + BFLOAT16_DOT * FORMAT_BYTES + 16)
    call_address(function, (x, x_stride, out, out_stride, rows, (columns + 31) // 32))


@kernel
def round_rows(row: int, state: int, first: int, last: int) -> None:
    """Make the bfloat16 copy of rows first .. last - 1 of an operation's OUT, if it is wanted."""
    if word(row, t.ROUNDED_OUT):
        x, stride = word(row, t.OUT) + first * word(row, t.OUT_STRIDE), rounded_stride(word(row, t.WIDTH))
        out = word(row, t.ROUNDED_OUT) + first * stride
        round_columns(state, x, word(row, t.OUT_STRIDE), out, stride, last - first, word(row, t.WIDTH))
