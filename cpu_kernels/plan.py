"""The attention plan of a step: which pieces of which sequences are units of work. Made once, used by every layer.

A unit is one KV head of one sequence for a tile of queries (all query heads that share the KV head, some tokens), over
all splits of the context, or over one split where the whole would keep the other threads waiting. Splits lie at fixed
positions, every SPLIT tokens, whatever the batch, the block size or the chunk.
"""

from __future__ import annotations

from . import table as t
from .jit import kernel
from .memory import load_i32, store_i64
from .table import word

SPLIT = 256  # tokens; a multiple of 16
TILE_ROWS = 48  # query rows (tokens x heads of a group) of a unit, unless one token has more heads than that

SEQUENCE, KV_HEAD, FIRST_ROW, NUM_QUERIES, FIRST_POSITION, FIRST_SPLIT, LAST_SPLIT, NUM_SPLITS, PARTIAL, ARRIVAL = (
    range(10)
)
UNIT_WORDS = 10
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


def plan_attention(row: int, state: int, unit: int, thread: int) -> None:
    """Write the units of the step and their number.

    A tile is divided into its splits when it alone is more than a quarter of a thread's share: then fewer than four
    tiles a thread are divided, which bounds the memory for partial results.
    """
    num_kv_heads, tile = word(state, t.NUM_KV_HEADS), queries_per_tile(state)
    share = total_work(state) * num_kv_heads // (4 * word(state, t.NUM_THREADS))
    entry, partials, arrivals = word(state, t.UNITS), 0, 0
    for sequence in range(word(state, t.NUM_SEQUENCES)):
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
                    store_i64(entry + 8 * PARTIAL, word(state, t.PARTIALS) + partials * word(state, t.PARTIAL_BYTES))
                    store_i64(entry + 8 * ARRIVAL, word(state, t.ARRIVALS) + 8 * arrivals)
                    entry += UNIT_BYTES
                if pieces > 1:
                    partials, arrivals = partials + pieces, arrivals + 1
    store_i64(state + 8 * t.NUM_UNITS, (entry - word(state, t.UNITS)) // UNIT_BYTES)
