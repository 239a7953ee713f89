"""Activations in the form that a product reads, made by whoever makes a row, while it is in the cache.

Dot products of bfloat16 read pairs of bfloat16, products of codes read groups of codes (see `activations`). A rounded
row has the columns of its float32 row, filled up to whole units of the form (32 columns, or a group); what the filling
holds does not matter.
"""

from __future__ import annotations

from . import table as t
from .jit import kernel
from .memory import call_address, load_i64
from .product import FORMAT_BYTES
from .table import word


@kernel
def unit_columns(state: int, read_as: int) -> int:
    """Columns of a unit of the form that products of `read_as` read; float32 has units of one."""
    return load_i64(word(state, t.TILES) + read_as * FORMAT_BYTES + 32)


@kernel
def rounded_bytes(state: int, read_as: int, columns: int) -> int:
    """Bytes of `columns` columns."""
    each = unit_columns(state, read_as)
    return (columns + each - 1) // each * load_i64(word(state, t.TILES) + read_as * FORMAT_BYTES + 40)


@kernel
def round_columns(
    state: int, read_as: int, x: int, x_stride: int, out: int, out_stride: int, rows: int, columns: int
) -> None:
    """Round `rows` rows of `columns` floats, or a few more: whole units."""
    function = load_i64(word(state, t.TILES) + read_as * FORMAT_BYTES + 16)
    each = unit_columns(state, read_as)
    call_address(function, (x, x_stride, out, out_stride, rows, (columns + each - 1) // each))


@kernel
def round_rows(row: int, state: int, first: int, last: int) -> None:
    """Make the rounded copy of rows first .. last - 1 of an operation's OUT, if it is wanted."""
    if word(row, t.ROUNDED_OUT):
        read_as, width = word(row, t.ROUNDED_AS), word(row, t.WIDTH)
        x, stride = word(row, t.OUT) + first * word(row, t.OUT_STRIDE), rounded_bytes(state, read_as, width)
        out = word(row, t.ROUNDED_OUT) + first * stride
        round_columns(state, read_as, x, word(row, t.OUT_STRIDE), out, stride, last - first, width)
