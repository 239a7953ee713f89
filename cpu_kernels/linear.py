"""The linear layer: one unit of work is a few panels of output columns for all, or some, of the rows.

What a unit reads again and again stays in the second level cache: it goes through its rows in blocks, and where rows
are long through k in stretches, keeping the totals of each stretch for the next. Neither changes a sum. Weights in
groups are read as they are by few rows, and unpacked for many, panel by panel (see `unpacking`): the same bits, too.
"""

from __future__ import annotations

from . import table as t
from .isa import FIRST_INTEGER
from .jit import kernel
from .memory import call_address, load_i64, store_i64
from .product import FORMAT_BYTES, product
from .rounding import round_columns, rounded_bytes, unit_columns
from .table import rows_of, word

CHAIN = 128  # k whose products are summed in one chain
CODE_CHAIN = 8 * CHAIN  # the same where codes are summed group by group
STRETCH = 8 * CHAIN  # k that many rows go through before the next
UNPACKED_STRETCH = 8 * CHAIN
BLOCK_BYTES = 192 * 1024  # of x: what stays in L2 beside the weights
BLOCK_ROWS = 80  # most rows in a block that needs memory of its own, for totals or rounding
NEAR = 1024  # bytes ahead of what it reads that a tile asks for, where each of its steps asks for a line
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
def tall_rows(state: int, read_as: int) -> int:
    """Most rows of a tile."""
    return load_i64(word(state, t.TILES) + read_as * FORMAT_BYTES)


@kernel
def panel_step(state: int, read_as: int) -> int:
    """Bytes of a panel that a tile's step reads."""
    return load_i64(word(state, t.TILES) + read_as * FORMAT_BYTES + 8)


@kernel
def unpack_function(state: int, read_as: int) -> int:
    """What unpacks a panel for many rows; 0: nothing does, or nothing needs to."""
    return load_i64(word(state, t.TILES) + read_as * FORMAT_BYTES + 48)


@kernel
def unpacked_format(state: int, read_as: int) -> int:
    return load_i64(word(state, t.TILES) + read_as * FORMAT_BYTES + 56)


@kernel
def multiply(
    row: int,
    state: int,
    panel: int,
    x: int,
    x_stride: int,
    rows: int,
    begin: int,
    end: int,
    totals: int,
    out: int,
    panels: int,
    read_as: int,
    table: int,
    at: int,
    k_bytes: int,
    ahead: int,
    ahead_step: int,
) -> None:
    """Rows of x times `panels` panels from `panel` on over k begin .. end - 1.

    The first panel's k `begin` lies at `at` past the address in `table`. Totals start at `totals` unless `begin` is 0,
    and stay there unless `end` is the last k: then bias and residual are added and the result goes to `out`. A panel
    takes `k_bytes` over all k. Meanwhile memory is asked for from `ahead` past the address of the weights on, by all
    tiles together `ahead_step` bytes in each step.
    """
    last, k, panel_bytes = end == word(row, t.K), word(row, t.K), word(row, t.PANEL_BYTES)
    chain = CODE_CHAIN if read_as >= FIRST_INTEGER else CHAIN
    blocks = (end - begin + chain - 1) // chain
    totals_stride = word(row, t.UNIT_PANELS) * 64
    bias = word(row, t.BIAS)
    product(
        word(state, t.TILES),
        read_as,
        rows,
        panels,
        x,
        x_stride,
        table,
        0,
        0,
        panel_bytes,
        at,
        blocks,
        chain * k_bytes // k,
        1,
        chain,
        end - begin - chain * (blocks - 1),
        panel_step(state, read_as),
        totals if begin else 0,
        totals_stride,
        out if last else totals,
        word(row, t.OUT_STRIDE) if last else totals_stride,
        bias + panel * 64 if bias and last else 0,
        word(row, t.ACCUMULATE) if last else 0,
        row + 8 * t.WEIGHT,
        0,
        0,
        ahead,
        panel_bytes,
        panel_bytes * (end - begin) // k,
        ahead_step,
    )


@kernel
def multiply_packed(
    row: int, state: int, panel: int, x: int, x_stride: int, rows: int, begin: int, end: int, totals: int, out: int
) -> None:
    """The unit's panels as they lie in memory: the table of panels has one entry, the address of the first."""
    panels = min(word(row, t.UNIT_PANELS), word(row, t.PANELS) - panel)
    panel_bytes, k, read_as = word(row, t.PANEL_BYTES), word(row, t.K), word(row, t.WEIGHT_FORMAT)
    at = panel * panel_bytes + panel_bytes * begin // k
    multiply(
        row, state, panel, x, x_stride, rows, begin, end, totals, out, panels, read_as,
        row + 8 * t.WEIGHT, at, panel_bytes, at + NEAR, panel_step(state, read_as),
    )  # fmt: skip


@kernel
def multiply_unpacked(
    row: int,
    state: int,
    panel: int,
    x: int,
    x_stride: int,
    rows: int,
    begin: int,
    end: int,
    totals: int,
    out: int,
    scratch: int,
) -> None:
    """The unit's panels one by one, each unpacked at `scratch` for all rows."""
    panel_bytes, k, read_as = word(row, t.PANEL_BYTES), word(row, t.K), word(row, t.WEIGHT_FORMAT)
    unpacked, unpack = unpacked_format(state, read_as), unpack_function(state, read_as)
    steps = (end - begin) * panel_bytes // (k * panel_step(state, read_as))
    each = unit_columns(state, unpacked)  # k of a step
    store_i64(scratch, scratch + 64)
    for number in range(min(word(row, t.UNIT_PANELS), word(row, t.PANELS) - panel)):
        at = (panel + number) * panel_bytes + panel_bytes * begin // k
        call_address(unpack, (word(row, t.WEIGHT) + at, scratch + 64, steps))
        multiply(
            row, state, panel + number, x, x_stride, rows, begin, end, totals + number * 64, out + number * 64, 1,
            unpacked, scratch, 0, k // each * panel_step(state, unpacked), at, panel_bytes * each // k,
        )  # fmt: skip


def linear(row: int, state: int, unit: int, thread: int) -> None:
    """out (+)= x @ weight.T (+ bias) for the panels and rows of `unit`."""
    groups, total = row_groups(row, state), rows_of(row, state)
    group, panel = unit % groups, unit // groups * word(row, t.UNIT_PANELS)
    first, last = total * group // groups, total * (group + 1) // groups
    x_stride, rows, k = word(row, t.X_STRIDE), last - first, word(row, t.K)
    x = word(row, t.X) + (first + word(row, t.ROW_BEGIN)) * x_stride
    out = word(row, t.OUT) + first * word(row, t.OUT_STRIDE) + panel * 64
    read_as = word(row, t.WEIGHT_FORMAT)
    tall, stretch = tall_rows(state, read_as), k
    unpacks = unpack_function(state, read_as) != 0 and rows > tall
    if unpacks:
        tall = tall_rows(state, unpacked_format(state, read_as))
        stretch = UNPACKED_STRETCH
    elif rows > tall and rows * rounded_bytes(state, read_as, k) > BLOCK_BYTES:
        stretch = STRETCH  # a single tile of rows reads every weight once, in order, and gains nothing by this
    rounds = unit_columns(state, read_as) > 1 and not word(row, t.X_ROUNDED)
    most = max(tall, BLOCK_BYTES // rounded_bytes(state, read_as, min(stretch, k)))
    if rounds or stretch < k:
        most = min(most, BLOCK_ROWS)
    scratch = word(state, t.LINEAR_SCRATCH) + thread * word(state, t.LINEAR_BYTES)
    totals, unpacked = scratch + word(state, t.TOTALS_OFFSET), scratch + word(state, t.UNPACKED_OFFSET)
    stride = rounded_bytes(state, read_as, k) if rounds else x_stride
    blocks = (rows + most - 1) // most
    for block in range(blocks):
        begin, end = rows * block // blocks, rows * (block + 1) // blocks
        source = x + begin * x_stride
        if rounds:
            round_columns(state, read_as, source, x_stride, scratch, stride, end - begin, k)
            source = scratch
        for start in range(0, k, stretch):
            stop = min(k, start + stretch)
            target = out + begin * word(row, t.OUT_STRIDE)
            at = source + rounded_bytes(state, read_as, start)
            if unpacks:
                multiply_unpacked(row, state, panel, at, stride, end - begin, start, stop, totals, target, unpacked)
            else:
                multiply_packed(row, state, panel, at, stride, end - begin, start, stop, totals, target)
