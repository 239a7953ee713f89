"""The linear layer: one unit of work is a few panels of output columns for all, or some, of the rows.

What a unit reads again and again stays in the second level cache: it goes through its rows in blocks, and where rows
are long through k in stretches, keeping the totals of each stretch for the next. Neither changes a sum.
"""

from __future__ import annotations

from . import table as t
from .isa import BFLOAT16_DOT
from .jit import kernel
from .memory import load_i64
from .product import FORMAT_BYTES, product
from .rounding import round_columns, rounded_stride
from .table import rows_of, word

CHAIN = 128  # k whose products are summed in one chain
STRETCH = 8 * CHAIN  # k that many rows go through before the next
BLOCK_BYTES = 192 * 1024  # of x: what stays in L2 beside the weights
BLOCK_ROWS = 80  # most rows in a block that needs memory of its own, for totals or rounding
NEAR = 1024  # bytes that a tile without company asks ahead of what it reads
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
def multiply(
    row: int, state: int, panel: int, x: int, x_stride: int, rows: int, begin: int, end: int, totals: int, out: int
) -> None:
    """Rows of x times the unit's panels over k begin .. end - 1.

    Totals start at `totals` unless `begin` is 0, and stay there unless `end` is the last k: then bias and residual are
    added and the result goes to `out`.
    """
    last, k = end == word(row, t.K), word(row, t.K)
    panel_bytes, blocks = word(row, t.PANEL_BYTES), (end - begin + CHAIN - 1) // CHAIN
    panels = min(word(row, t.UNIT_PANELS), word(row, t.PANELS) - panel)
    at = panel * panel_bytes + panel_bytes // k * begin
    totals_stride = word(row, t.UNIT_PANELS) * 64
    bias = word(row, t.BIAS)
    product(
        word(state, t.TILES),
        word(row, t.WEIGHT_FORMAT),
        rows,
        panels,
        x,
        x_stride,
        row + 8 * t.WEIGHT,  # the table of panels has one entry: the address of the first
        0,
        0,
        panel_bytes,
        at,
        blocks,
        CHAIN * panel_bytes // k,
        1,
        CHAIN,
        end - begin - CHAIN * (blocks - 1),
        64,
        totals if begin else 0,
        totals_stride,
        out if last else totals,
        word(row, t.OUT_STRIDE) if last else totals_stride,
        bias + panel * 64 if bias and last else 0,
        word(row, t.ACCUMULATE) if last else 0,
        row + 8 * t.WEIGHT,
        0,
        0,
        at + NEAR,
        panel_bytes,
        panel_bytes // k * (end - begin),
    )


def linear(row: int, state: int, unit: int, thread: int) -> None:
    """out (+)= x @ weight.T (+ bias) for the panels and rows of `unit`."""
    groups, total = row_groups(row, state), rows_of(row, state)
    group, panel = unit % groups, unit // groups * word(row, t.UNIT_PANELS)
    first, last = total * group // groups, total * (group + 1) // groups
    x_stride, rows, k = word(row, t.X_STRIDE), last - first, word(row, t.K)
    x = word(row, t.X) + (first + word(row, t.ROW_BEGIN)) * x_stride
    out = word(row, t.OUT) + first * word(row, t.OUT_STRIDE) + panel * 64
    is_dot = word(row, t.WEIGHT_FORMAT) == BFLOAT16_DOT
    rounds = is_dot and not word(row, t.X_ROUNDED)
    x_bytes = 2 if is_dot else 4
    # A single tile of rows reads every weight once, in order: nothing is gained by stretches.
    tall = load_i64(word(state, t.TILES) + word(row, t.WEIGHT_FORMAT) * FORMAT_BYTES)
    stretch = STRETCH if rows > tall and rows * k * x_bytes > BLOCK_BYTES else k
    most = max(tall, BLOCK_BYTES // (min(stretch, k) * x_bytes))
    if rounds or stretch < k:
        most = min(most, BLOCK_ROWS)
    scratch = word(state, t.LINEAR_SCRATCH) + thread * word(state, t.LINEAR_BYTES)
    totals, stride = scratch + word(state, t.TOTALS_OFFSET), rounded_stride(k) if rounds else x_stride
    blocks = (rows + most - 1) // most
    for block in range(blocks):
        begin, end = rows * block // blocks, rows * (block + 1) // blocks
        source = x + begin * x_stride
        if rounds:
            round_columns(state, source, x_stride, scratch, stride, end - begin, k)
            source = scratch
        for start in range(0, k, stretch):
            stop = min(k, start + stretch)
            target = out + begin * word(row, t.OUT_STRIDE)
            multiply(row, state, panel, source + start * x_bytes, stride, end - begin, start, stop, totals, target)
