"""Causal attention over paged K and V, with the same bits for a query whatever else is in the step.

A query's context is cut into splits of SPLIT tokens at fixed positions. Within a split: scores, one fused multiply-add
chain over head_dim each; their maximum; exponentials; their sum, by lane (position mod 16) in order and then as a tree;
and the weighted values, one chain over tokens in order. Splits are merged in order by log-sum-exp. A token that a query
does not see adds an exact zero, and a split without any is skipped, so it makes no difference that another row of the
tile sees it. Slots past the sequence's end enter no arithmetic that is kept.

A *partial* is the result of some splits: [rows, head_width] weighted values, [rows] maxima, [rows] sums.
"""

from __future__ import annotations

import numpy as np

from . import table as t
from .jit import kernel
from .memory import (
    ask,
    atomic_add,
    atomic_load,
    atomic_store,
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    store_f32,
    store_i64,
    store_u8,
    store_u16,
    store_u32,
)
from .plan import (
    ARRIVAL,
    FIRST_POSITION,
    FIRST_ROW,
    FIRST_SPLIT,
    KV_HEAD,
    LAST_SPLIT,
    NUM_QUERIES,
    NUM_SPLITS,
    PARTIAL,
    SEQUENCE,
    SHARED_SPLITS,
    SPLIT,
    TILE_ROWS,
    UNIT_BYTES,
    prefix_address,
)
from .product import product
from .rounding import round_columns, rounded_bytes
from .table import float_word, word
from .vectors import exp, load, max_lanes, maximum, select_range, splat, store, sum_lanes

PANELS = SPLIT // 16
KEYS, VALUES, KEY_SCALES, VALUE_SCALES = (part * PANELS * 8 for part in range(4))  # of a split, panel by panel
TABLES_BYTES = 4 * PANELS * 8  # their addresses
ZERO = np.float32(0.0)
MINUS_INFINITY = np.float32(-np.inf)


def tile_rows(queries_per_kv_head: int) -> int:
    """Most query rows in a unit."""
    return max(TILE_ROWS, queries_per_kv_head)


def partial_bytes(queries_per_kv_head: int, head_width: int) -> int:
    return -(-tile_rows(queries_per_kv_head) * (head_width + 2) * 4 // 64) * 64


def prefix_bytes(queries_per_kv_head: int, head_width: int) -> int:
    """A partial of one token's queries."""
    return -(-queries_per_kv_head * (head_width + 2) * 4 // 64) * 64


def scratch_bytes(queries_per_kv_head: int, head_width: int) -> int:
    """Per thread: queries, scores, two partials, panel tables of this split and the next, copies of K and V."""
    rows = tile_rows(queries_per_kv_head)
    partials = 2 * partial_bytes(queries_per_kv_head, head_width)
    return rows * (head_width + SPLIT) * 4 + partials + 2 * TABLES_BYTES + 2 * SPLIT * (4 + head_width * 4)


# -- partial results --------------------------------------------------------------------------------------------------


@kernel
def clear(partial: int, rows: int, head_width: int) -> None:
    """No token seen: all sums zero."""
    for r in range(rows):
        store_f32(partial + rows * (head_width + 1) * 4 + 4 * r, ZERO)


@kernel
def merge(into: int, part: int, rows: int, head_width: int) -> None:
    """Add the splits of `part` to `into`, row by row; rows whose sum is zero saw nothing."""
    maxima, sums = rows * head_width * 4, rows * (head_width + 1) * 4
    for r in range(rows):
        part_sum, into_sum = load_f32(part + sums + 4 * r), load_f32(into + sums + 4 * r)
        if part_sum == ZERO:
            continue
        part_max = load_f32(part + maxima + 4 * r)
        source, target = part + r * head_width * 4, into + r * head_width * 4
        if into_sum == ZERO:
            store_f32(into + maxima + 4 * r, part_max)
            store_f32(into + sums + 4 * r, part_sum)
            for i in range(0, 4 * head_width, 64):
                store(target + i, load(source + i))
            continue
        into_max = load_f32(into + maxima + 4 * r)
        top = max(into_max, part_max)
        keep, add = exp(splat(into_max - top)), exp(splat(part_max - top))
        total = splat(into_sum) * keep + splat(part_sum) * add
        store_f32(into + maxima + 4 * r, top)
        store_f32(into + sums + 4 * r, max_lanes(total))
        for i in range(0, 4 * head_width, 64):
            store(target + i, load(target + i) * keep + load(source + i) * add)


@kernel
def write_rows(partial: int, row: int, state: int, unit: int) -> None:
    """out = weighted values / sum, for every query row of the unit; and their rounded copy, if it is wanted."""
    head_dim, head_width = word(state, t.HEAD_DIM), word(state, t.HEAD_WIDTH)
    group = word(state, t.NUM_HEADS) // word(state, t.NUM_KV_HEADS)
    rows = word(unit, NUM_QUERIES) * group
    whole = head_dim & -16
    for r in range(rows):
        total = load_f32(partial + rows * (head_width + 1) * 4 + 4 * r)
        source = partial + r * head_width * 4
        out = word(row, t.OUT) + (word(unit, FIRST_ROW) + r // group) * word(row, t.OUT_STRIDE)
        out += (word(unit, KV_HEAD) * group + r % group) * head_dim * 4
        for i in range(0, 4 * whole, 64):
            store(out + i, load(source + i) / splat(total))
        for i in range(4 * whole, 4 * head_dim, 4):
            store_f32(out + i, load_f32(source + i) / total)
    if word(row, t.ROUNDED_OUT):
        first, columns = word(unit, KV_HEAD) * group * head_dim, group * head_dim
        x = word(row, t.OUT) + word(unit, FIRST_ROW) * word(row, t.OUT_STRIDE) + first * 4
        read_as = word(row, t.ROUNDED_AS)
        stride = rounded_bytes(state, read_as, word(row, t.WIDTH))
        rounded = word(row, t.ROUNDED_OUT) + word(unit, FIRST_ROW) * stride + rounded_bytes(state, read_as, first)
        round_columns(state, read_as, x, word(row, t.OUT_STRIDE), rounded, stride, word(unit, NUM_QUERIES), columns)


# -- one split --------------------------------------------------------------------------------------------------------


@kernel
def gather_queries(row: int, state: int, unit: int, out: int) -> None:
    """Copy the unit's query rows, scaled, to (rows, head_width)."""
    head_dim, head_width = word(state, t.HEAD_DIM), word(state, t.HEAD_WIDTH)
    group = word(state, t.NUM_HEADS) // word(state, t.NUM_KV_HEADS)
    scale = splat(float_word(row, t.SCALAR))
    for r in range(word(unit, NUM_QUERIES) * group):
        x = word(row, t.X) + (word(unit, FIRST_ROW) + r // group) * word(row, t.X_STRIDE)
        x += (word(unit, KV_HEAD) * group + r % group) * head_dim * 4
        for i in range(0, head_width, 16):
            value = load(x + 4 * i) * scale
            store(out + 4 * (r * head_width + i), select_range(0, head_dim - i, value, splat(ZERO)))


@kernel
def copy_numbers(source: int, source_stride: int, target: int, target_stride: int, count: int, size: int) -> None:
    """Copy `count` numbers of `size` bytes."""
    for i in range(count):
        if size == 4:
            store_u32(target + i * target_stride, load_u32(source + i * source_stride))
        elif size == 2:
            store_u16(target + i * target_stride, load_u16(source + i * source_stride))
        else:
            store_u8(target + i * target_stride, load_u8(source + i * source_stride))


@kernel
def value_offset(state: int, token: int) -> int:
    """Where the V of a token starts, counted from the first token's."""
    lane_bytes, pair = word(state, t.KV_LANE_BYTES), word(state, t.KV_PAIR)
    return token // pair * word(state, t.HEAD_WIDTH) * lane_bytes + token % pair * (lane_bytes // pair)


@kernel
def find_panels(row: int, state: int, unit: int, start: int, low: int, high: int, tables: int) -> None:
    """Fill the tables with the addresses of the split's panels, for tokens start + low .. start + high - 1.

    For blocks of whole panels: nothing is copied. Scales are asked for.
    """
    block_size, lane_bytes = word(state, t.BLOCK_SIZE), word(state, t.KV_LANE_BYTES)
    scales_bytes = word(state, t.KV_SCALES_BYTES)
    blocks = word(state, t.BLOCK_TABLES) + word(unit, SEQUENCE) * word(state, t.MAX_BLOCKS) * 4
    k_base = word(state, t.POOL) + word(row, t.LAYER) * word(state, t.LAYER_BYTES)
    v_base = k_base + word(state, t.VALUES_OFFSET) + word(unit, KV_HEAD) * word(state, t.VALUE_BYTES)
    k_base += word(unit, KV_HEAD) * word(state, t.KEY_BYTES)
    token = low & -16
    blocks += (start + token) // block_size * 4
    offset = (start + token) % block_size
    while token < high:
        block = load_i32(blocks) * word(state, t.BLOCK_BYTES)
        while offset < block_size and token < high:
            entry = tables + (token >> 4) * 8
            if scales_bytes:
                store_i64(entry + KEY_SCALES, k_base + block + 4 * offset)
                store_i64(entry + VALUE_SCALES, v_base + block + 4 * offset)
                ask(k_base + block + 4 * offset)
                ask(v_base + block + 4 * offset)
            store_i64(entry + KEYS, k_base + block + scales_bytes + offset * lane_bytes)
            store_i64(entry + VALUES, v_base + block + scales_bytes + value_offset(state, offset))
            token, offset = token + 16, offset + 16
        blocks, offset = blocks + 4, 0


@kernel
def gather_panels(row: int, state: int, unit: int, start: int, low: int, high: int, tables: int, copies: int) -> None:
    """The same for blocks that are not whole panels: their tokens are copied into panels, zeros before `low`."""
    block_size, head_width = word(state, t.BLOCK_SIZE), word(state, t.HEAD_WIDTH)
    lane_bytes, scales_bytes = word(state, t.KV_LANE_BYTES), word(state, t.KV_SCALES_BYTES)
    number_bytes = lane_bytes // word(state, t.KV_PAIR)
    key_lanes = (word(state, t.KEY_BYTES) - scales_bytes) // (block_size * lane_bytes)
    blocks = word(state, t.BLOCK_TABLES) + word(unit, SEQUENCE) * word(state, t.MAX_BLOCKS) * 4
    k_base = word(state, t.POOL) + word(row, t.LAYER) * word(state, t.LAYER_BYTES)
    v_base = k_base + word(state, t.VALUES_OFFSET) + word(unit, KV_HEAD) * word(state, t.VALUE_BYTES)
    k_base += word(unit, KV_HEAD) * word(state, t.KEY_BYTES)
    key_scales, value_scales = copies, copies + 4 * SPLIT
    keys, values = copies + 8 * SPLIT, copies + 8 * SPLIT + SPLIT * head_width * 4
    for panel in range(low >> 4, (high + 15) >> 4):
        entry = tables + panel * 8
        store_i64(entry + KEYS, keys + panel * key_lanes * 16 * lane_bytes)
        store_i64(entry + VALUES, values + value_offset(state, panel * 16))
        store_i64(entry + KEY_SCALES, key_scales + panel * 64)
        store_i64(entry + VALUE_SCALES, value_scales + panel * 64)
    for i in range(value_offset(state, low & -16), value_offset(state, (low + 15) & -16), 64):
        store(values + i, splat(ZERO))
    for token in range(low, high):
        block = load_i32(blocks + (start + token) // block_size * 4) * word(state, t.BLOCK_BYTES)
        offset = (start + token) % block_size
        source = k_base + block + scales_bytes + offset * lane_bytes
        target = keys + (token >> 4) * key_lanes * 16 * lane_bytes + (token & 15) * lane_bytes
        copy_numbers(source, block_size * lane_bytes, target, 16 * lane_bytes, key_lanes, lane_bytes)
        source = v_base + block + scales_bytes + value_offset(state, offset)
        copy_numbers(source, lane_bytes, values + value_offset(state, token), lane_bytes, head_width, number_bytes)
        if scales_bytes:
            store_f32(key_scales + 4 * token, load_f32(k_base + block + 4 * offset))
            store_f32(value_scales + 4 * token, load_f32(v_base + block + 4 * offset))


@kernel
def soften(
    scores: int, first: int, last: int, low: int, high: int, tables: int, scaled: int, maximum_at: int, sum_at: int
) -> None:
    """scores -> exp(scores - max) over tokens low .. high - 1, exact zeros elsewhere in panels first .. last - 1.

    `scaled`: scores of K are multiplied by its scales first, and the result, for V, by V's; the sum is without those.
    """
    nothing = splat(MINUS_INFINITY)
    best = nothing
    for panel in range(first, last):
        value = load(scores + panel * 64)
        if scaled:
            value = value * load(load_i64(tables + KEY_SCALES + panel * 8))
            store(scores + panel * 64, value)
        if panel * 16 < low or panel * 16 + 16 > high:
            value = select_range(low - panel * 16, high - panel * 16, value, nothing)
        best = maximum(value, best)
    top = max_lanes(best)
    total = splat(ZERO)
    for panel in range(first, last):
        value = exp(load(scores + panel * 64) - splat(top))
        weighted = value
        if scaled:
            weighted = value * load(load_i64(tables + VALUE_SCALES + panel * 8))
        if panel * 16 < low or panel * 16 + 16 > high:
            value = select_range(low - panel * 16, high - panel * 16, value, splat(ZERO))
            weighted = select_range(low - panel * 16, high - panel * 16, weighted, splat(ZERO))
        total = total + value
        store(scores + panel * 64, weighted)
    store_f32(maximum_at, top)
    store_f32(sum_at, sum_lanes(total))


@kernel
def seen_range(row: int, unit: int, split: int) -> tuple[int, int]:
    """Which tokens of a split any query of the unit sees: first and last (exclusive), from the split's start."""
    position, window = word(unit, FIRST_POSITION) - split * SPLIT, word(row, t.WINDOW)
    low = max(0, position - window + 1) if window else 0
    return low, min(SPLIT, position + word(unit, NUM_QUERIES))


@kernel
def find_next(row: int, state: int, unit: int, split: int, tables: int) -> int:
    """Where the addresses of the K panels stand that will be read after this split; 0 if that is not known.

    After the unit's last split that is the unit which nobody claimed yet: likely this thread's next, though not surely.
    """
    split += 1
    if split == word(unit, LAST_SPLIT):
        operation = (row - word(state, t.OPS)) // t.ROW_BYTES
        number = atomic_load(word(state, t.PROGRESS) + operation * t.PROGRESS_BYTES) & t.UNIT_MASK
        if number >= word(state, t.NUM_UNITS):
            return 0
        unit = word(state, t.UNITS) + number * UNIT_BYTES
        split = max(word(unit, FIRST_SPLIT), word(unit, SHARED_SPLITS))
    low, high = seen_range(row, unit, split)
    if low >= high or word(state, t.BLOCK_SIZE) & 15:
        return 0
    find_panels(row, state, unit, split * SPLIT, low, high, tables)
    for panel in range(
        (high + 15) >> 4, PANELS
    ):  # what this split reads beyond that: something near, not something old
        store_i64(tables + panel * 8, load_i64(tables + (low >> 4) * 8))
    return tables + (low >> 4) * 8


@kernel
def attend_split(row: int, state: int, unit: int, split: int, queries: int, scratch: int, partial: int) -> None:
    """Write the partial of one split for all query rows of the unit.

    While keys are read, the split's values are asked for; while values are read, the keys that come next.
    """
    head_dim, head_width, block_size = word(state, t.HEAD_DIM), word(state, t.HEAD_WIDTH), word(state, t.BLOCK_SIZE)
    group = word(state, t.NUM_HEADS) // word(state, t.NUM_KV_HEADS)
    rows, window = word(unit, NUM_QUERIES) * group, word(row, t.WINDOW)
    position, start = word(unit, FIRST_POSITION), split * SPLIT
    low, high = seen_range(row, unit, split)
    if low >= high:
        clear(partial, rows, head_width)
        return
    scores, tables = scratch, scratch + rows * SPLIT * 4
    first, last = low >> 4, (high + 15) >> 4
    if block_size & 15:
        gather_panels(row, state, unit, start, low, high, tables, tables + 2 * TABLES_BYTES)
    else:
        find_panels(row, state, unit, start, low, high, tables)
    scaled, pair, lane_bytes = word(state, t.KV_SCALES_BYTES), word(state, t.KV_PAIR), word(state, t.KV_LANE_BYTES)
    keys, values = tables + KEYS + first * 8, tables + VALUES + first * 8
    product(
        word(state, t.TILES), word(state, t.KV_FORMAT), rows, last - first, queries, head_width * 4,
        keys, 0, 8, 0, 0, 1, 0, 1, head_dim, (head_dim + pair - 1) & -pair,
        (16 if block_size & 15 else block_size) * lane_bytes, 0, 0, scores + first * 64, SPLIT * 4, 0, 0,
        values, 8, 0, 0, 0, 0, 16 * lane_bytes,
    )  # fmt: skip
    maxima, sums = partial + rows * head_width * 4, partial + rows * (head_width + 1) * 4
    for r in range(rows):
        seen = position + r // group + 1 - start  # tokens of this split up to the query's own
        row_low = min(SPLIT, max(0, seen - window)) if window else 0
        row_high = max(row_low, min(SPLIT, seen))
        at = scores + r * SPLIT * 4
        soften(at, first, last, row_low, row_high, tables, scaled, maxima + 4 * r, sums + 4 * r)
    following = find_next(row, state, unit, split, tables + TABLES_BYTES)
    product(
        word(state, t.TILES), word(state, t.KV_FORMAT), rows, head_width >> 4, scores + first * 64, SPLIT * 4,
        values, 8, 0, 16 * lane_bytes, 0, 1, 0, last - first, 16, high - 16 * (last - 1),
        head_width * lane_bytes, 0, 0, partial, head_width * 4, 0, 0,
        following or values, 0, 8, 0, 256 * lane_bytes // pair, 0, 16 * lane_bytes,
    )  # fmt: skip


@kernel
def copy_partial(source: int, source_rows: int, first: int, target: int, rows: int, head_width: int) -> None:
    """Copy `rows` rows of a partial of `source_rows`, from row `first` on, to a partial of `rows`."""
    for i in range(0, 4 * rows * head_width, 64):
        store(target + i, load(source + first * head_width * 4 + i))
    for column in range(head_width, head_width + 2):  # maxima and sums
        for r in range(rows):
            value = load_f32(source + (source_rows * column + first + r) * 4)
            store_f32(target + (rows * column + r) * 4, value)


def attend_shared(row: int, state: int, number: int, thread: int) -> None:
    """Run a unit that several sequences share, and leave each its own part of the result."""
    unit = word(state, t.SHARED_UNITS) + number * UNIT_BYTES
    scratch = word(state, t.SCRATCH) + thread * word(state, t.SCRATCH_BYTES)
    head_width, size = word(state, t.HEAD_WIDTH), word(state, t.PARTIAL_BYTES)
    group = word(state, t.NUM_HEADS) // word(state, t.NUM_KV_HEADS)
    rows = word(unit, NUM_QUERIES) * group
    queries, running, part = scratch, scratch + rows * head_width * 4, scratch + rows * head_width * 4 + size
    gather_queries(row, state, unit, queries)
    clear(running, rows, head_width)
    for split in range(word(unit, LAST_SPLIT)):
        attend_split(row, state, unit, split, queries, part + size, part)
        merge(running, part, rows, head_width)
    for member in range(word(unit, NUM_QUERIES)):
        target = prefix_address(state, word(unit, SEQUENCE) + member, word(unit, KV_HEAD))
        copy_partial(running, rows, member * group, target, group, head_width)


def attend(row: int, state: int, number: int, thread: int) -> None:
    """Run unit `number` of the plan. The thread that delivers the last split of a divided tile merges them all."""
    unit = word(state, t.UNITS) + number * UNIT_BYTES
    scratch = word(state, t.SCRATCH) + thread * word(state, t.SCRATCH_BYTES)
    head_width, size = word(state, t.HEAD_WIDTH), word(state, t.PARTIAL_BYTES)
    rows = word(unit, NUM_QUERIES) * (word(state, t.NUM_HEADS) // word(state, t.NUM_KV_HEADS))
    queries, running, part = scratch, scratch + rows * head_width * 4, scratch + rows * head_width * 4 + size
    gather_queries(row, state, unit, queries)
    clear(running, rows, head_width)
    splits, slots = word(unit, NUM_SPLITS), word(unit, PARTIAL)
    divided = word(unit, LAST_SPLIT) - word(unit, FIRST_SPLIT) < splits
    first = word(unit, FIRST_SPLIT)
    if word(unit, SHARED_SPLITS) and not word(row, t.WINDOW):
        first = word(unit, SHARED_SPLITS)
        copy_partial(
            prefix_address(state, word(unit, SEQUENCE), word(unit, KV_HEAD)), rows, 0, running, rows, head_width
        )
    for split in range(first, word(unit, LAST_SPLIT)):
        target = slots + split * size if divided else part
        attend_split(row, state, unit, split, queries, part + size, target)
        if not divided:
            merge(running, part, rows, head_width)
    if divided:
        if atomic_add(word(unit, ARRIVAL), 1) + 1 < splits:
            return
        atomic_store(word(unit, ARRIVAL), 0)
        for split in range(splits):
            merge(running, slots + split * size, rows, head_width)
    write_rows(running, row, state, unit)
