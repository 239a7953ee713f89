"""The linear layer: one unit of work is a few panels of output columns for all, or some, of the rows."""

from __future__ import annotations

from . import table as t
from .isa import BFLOAT16_DOT
from .jit import kernel
from .product import product
from .rounding import round_columns, rounded_stride
from .table import rows_of, word

CHAIN = 128  # k whose products are summed in one chain
NEAR = 1024  # bytes that a tile without company asks ahead of what it reads
ROUNDED_ROWS = 80  # rows that are rounded to bfloat16 at a time, where nobody did it before
ROW_GROUP = 96  # rows are divided only when the panels alone cannot occupy the threads


@kernel
def row_groups(row: int, state: int) -> int:
    """Into how many groups the rows are cut."""
    panel_groups = (word(row, t.PANELS) + word(row, t.UNIT_PANELS) - 1) // word(row, t.UNIT_PANELS)
    if panel_groups >= 2 * word(state, t.NUM_THREADS):
        return 1
    return max(1, rows_of(row, state) // ROW_GROUP)


@kernel
def linear_units(row: int, state: int) -> int:
    panel_groups = (word(row, t.PANELS) + word(row, t.UNIT_PANELS) - 1) // word(row, t.UNIT_PANELS)
    return panel_groups * row_groups(row, state) if rows_of(row, state) else 0


@kernel
def linear_rows(row: int, state: int, panel: int, x: int, x_stride: int, out: int, rows: int) -> None:
    """`rows` rows of x times the unit's panels from `panel` on."""
    bias, blocks = word(row, t.BIAS), (word(row, t.K) + CHAIN - 1) // CHAIN
    product(
        word(state, t.TILES),
        word(row, t.WEIGHT_FORMAT),
        rows,
        min(word(row, t.UNIT_PANELS), word(row, t.PANELS) - panel),
        x,
        x_stride,
        row + 8 * t.WEIGHT,  # the table of panels has one entry: the address of the first
        0,
        0,
        word(row, t.PANEL_BYTES),
        panel * word(row, t.PANEL_BYTES),
        blocks,
        CHAIN * word(row, t.PANEL_BYTES) // word(row, t.K),
        1,
        CHAIN,
        word(row, t.K) - CHAIN * (blocks - 1),
        64,
        out,
        word(row, t.OUT_STRIDE),
        bias + panel * 64 if bias else 0,
        word(row, t.ACCUMULATE),
        row + 8 * t.WEIGHT,
        0,
        0,
        panel * word(row, t.PANEL_BYTES) + NEAR,
        word(row, t.PANEL_BYTES),
    )


def linear(row: int, state: int, unit: int, thread: int) -> None:
    """out (+)= x @ weight.T (+ bias) for the panels and rows of `unit`."""
    groups, rows = row_groups(row, state), rows_of(row, state)
    group, panel = unit % groups, unit // groups * word(row, t.UNIT_PANELS)
    first, last = rows * group // groups, rows * (group + 1) // groups
    x = word(row, t.X) + (first + word(row, t.ROW_BEGIN)) * word(row, t.X_STRIDE)
    out = word(row, t.OUT) + first * word(row, t.OUT_STRIDE) + panel * 64
    if word(row, t.WEIGHT_FORMAT) != BFLOAT16_DOT or word(row, t.X_ROUNDED):
        linear_rows(row, state, panel, x, word(row, t.X_STRIDE), out, last - first)
        return
    rounded, stride = word(state, t.ROUNDED) + thread * word(state, t.ROUNDED_BYTES), rounded_stride(word(row, t.K))
    for begin in range(0, last - first, ROUNDED_ROWS):
        count = min(ROUNDED_ROWS, last - first - begin)
        round_columns(
            state, x + begin * word(row, t.X_STRIDE), word(row, t.X_STRIDE), rounded, stride, count, word(row, t.K)
        )
        linear_rows(row, state, panel, rounded, stride, out + begin * word(row, t.OUT_STRIDE), count)
