"""The attention plan of a step: which pieces of which sequences are units of work. Made once, used by every layer.

A unit is one KV head of one sequence for a tile of queries (all query heads that share the KV head, some tokens), over
all splits of the context, or over one split where the whole would keep the other threads waiting. Splits lie at fixed
positions, every SPLIT tokens, whatever the batch, the block size or the chunk.

Neighbours in the batch that decode, and whose contexts begin with the same blocks, share units for the splits that they
have in common: one tile reads those for all of them, and each goes on from there by itself.
"""

from __future__ import annotations

from . import table as t
from .jit import kernel
from .memory import load_i32, store_i64
from .table import word

SPLIT = 256  # tokens; a multiple of 16
TILE_ROWS = 48  # query rows (tokens x heads of a group) of a unit, unless one token has more heads than that

SHARING = 8  # sequences in a shared unit, if a tile has room for so many

# fmt: off
(
    SEQUENCE, KV_HEAD, FIRST_ROW, NUM_QUERIES, FIRST_POSITION,
    FIRST_SPLIT, LAST_SPLIT, NUM_SPLITS,
    SHARED_SPLITS,   # so many were seen to by a shared unit
    PARTIAL, ARRIVAL,
) = range(11)
# fmt: on
UNIT_WORDS = 11
UNIT_BYTES = 8 * UNIT_WORDS


@kernel
def queries_per_tile(state: int) -> int:
    """Tokens whose queries share a tile."""
    return max(1, TILE_ROWS * word(state, t.NUM_KV_HEADS) // word(state, t.NUM_HEADS))


@kernel
def total_work(state: int) -> int:
    """Query-key pairs of the step for one KV head, counted by tiles."""
    total, tile = 0, queries_per_tile(state)
    for sequence in range(word(state, t.NUM_SEQUENCES)):
        first = load_i32(word(state, t.QUERY_START) + 4 * sequence)
        last = load_i32(word(state, t.QUERY_START) + 4 * sequence + 4)
        length = load_i32(word(state, t.SEQ_LENS) + 4 * sequence)
        for row in range(first, last, tile):
            queries = min(tile, last - row)
            total += queries * (length - (last - row) + queries)
    return total


@kernel
def prefix_address(state: int, sequence: int, head: int) -> int:
    """Where the partial result of the shared splits of a sequence's single query stands."""
    return word(state, t.PREFIXES) + (sequence * word(state, t.NUM_KV_HEADS) + head) * word(state, t.PREFIX_BYTES)


@kernel
def common_splits(state: int, first: int, second: int, share: int) -> int:
    """Whole splits at the beginning of two contexts that lie in the same blocks; 0 unless both sequences decode and
    neither is divided."""
    starts, tables = word(state, t.QUERY_START), word(state, t.BLOCK_TABLES)
    if load_i32(starts + 4 * first + 4) - load_i32(starts + 4 * first) != 1:
        return 0
    if load_i32(starts + 4 * second + 4) - load_i32(starts + 4 * second) != 1:
        return 0
    one, other = load_i32(word(state, t.SEQ_LENS) + 4 * first), load_i32(word(state, t.SEQ_LENS) + 4 * second)
    if max(one, other) > share:
        return 0
    stride, tokens = 4 * word(state, t.MAX_BLOCKS), 0
    for block in range(min(one, other) // word(state, t.BLOCK_SIZE)):
        if load_i32(tables + first * stride + 4 * block) != load_i32(tables + second * stride + 4 * block):
            break
        tokens += word(state, t.BLOCK_SIZE)
    return tokens // SPLIT


@kernel
def find_group(state: int, first: int, share: int) -> tuple[int, int]:
    """The next sequence that does not share with `first`, and the splits that all before it have in common."""
    most, last, splits = min(SHARING, queries_per_tile(state)), first + 1, 0
    while last < word(state, t.NUM_SEQUENCES) and last - first < most:
        common = common_splits(state, first, last, share)
        if common == 0 or common < splits:
            break
        if splits == 0:
            splits = common
        last += 1
    return last, splits


@kernel
def add_shared_units(state: int, first: int, last: int, splits: int, entry: int) -> int:
    """Write the units of a group's common splits from `entry` on, and return where the next unit goes."""
    for head in range(word(state, t.NUM_KV_HEADS)):
        store_i64(entry + 8 * SEQUENCE, first)
        store_i64(entry + 8 * KV_HEAD, head)
        store_i64(entry + 8 * FIRST_ROW, load_i32(word(state, t.QUERY_START) + 4 * first))
        store_i64(entry + 8 * NUM_QUERIES, last - first)
        store_i64(entry + 8 * FIRST_POSITION, splits * SPLIT - 1)  # behind all that is read: nothing is masked
        store_i64(entry + 8 * FIRST_SPLIT, 0)
        store_i64(entry + 8 * LAST_SPLIT, splits)
        store_i64(entry + 8 * SHARED_SPLITS, 0)
        entry += UNIT_BYTES
    return entry


def plan_attention(row: int, state: int, unit: int, thread: int) -> None:
    """Write the units of the step and their number.

    A tile is divided into its splits when it alone is more than a quarter of a thread's share: then fewer than four
    tiles a thread are divided, which bounds the memory for partial results.
    """
    num_kv_heads, tile = word(state, t.NUM_KV_HEADS), queries_per_tile(state)
    share = total_work(state) * num_kv_heads // (4 * word(state, t.NUM_THREADS))
    entry, partials, arrivals = word(state, t.UNITS), 0, 0
    shared_entry, group_end, shared_splits = word(state, t.SHARED_UNITS), 0, 0
    for sequence in range(word(state, t.NUM_SEQUENCES)):
        if sequence == group_end:
            group_end, shared_splits = find_group(state, sequence, share)
            if shared_splits:
                shared_entry = add_shared_units(state, sequence, group_end, shared_splits, shared_entry)
        first = load_i32(word(state, t.QUERY_START) + 4 * sequence)
        last = load_i32(word(state, t.QUERY_START) + 4 * sequence + 4)
        length = load_i32(word(state, t.SEQ_LENS) + 4 * sequence)
        for first_row in range(first, last, tile):
            queries = min(tile, last - first_row)
            context = length - (last - first_row) + queries
            splits = (context + SPLIT - 1) // SPLIT
            pieces = splits if splits > 1 and queries * context > share else 1
            for head in range(num_kv_heads):
                for piece in range(pieces):
                    store_i64(entry + 8 * SEQUENCE, sequence)
                    store_i64(entry + 8 * KV_HEAD, head)
                    store_i64(entry + 8 * FIRST_ROW, first_row)
                    store_i64(entry + 8 * NUM_QUERIES, queries)
                    store_i64(entry + 8 * FIRST_POSITION, context - queries)
                    store_i64(entry + 8 * FIRST_SPLIT, piece if pieces > 1 else 0)
                    store_i64(entry + 8 * LAST_SPLIT, piece + 1 if pieces > 1 else splits)
                    store_i64(entry + 8 * NUM_SPLITS, splits)
                    store_i64(entry + 8 * SHARED_SPLITS, shared_splits)
                    store_i64(entry + 8 * PARTIAL, word(state, t.PARTIALS) + partials * word(state, t.PARTIAL_BYTES))
                    store_i64(entry + 8 * ARRIVAL, word(state, t.ARRIVALS) + 8 * arrivals)
                    entry += UNIT_BYTES
                if pieces > 1:
                    partials, arrivals = partials + pieces, arrivals + 1
    store_i64(state + 8 * t.NUM_SHARED_UNITS, (shared_entry - word(state, t.SHARED_UNITS)) // UNIT_BYTES)
    store_i64(state + 8 * t.NUM_UNITS, (entry - word(state, t.UNITS)) // UNIT_BYTES)
