"""The words of the two tables that kernels read: one row for each operation, and the state of the step.

Every word is an int64: an address in bytes, a number, or the bits of a float32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from .jit import instruction, kernel
from .memory import INT64, POINTER

# -- operations -------------------------------------------------------------------------------------------------------

# fmt: off
(
    PLAN, EMBED, RMS_NORM, LINEAR, ROPE_KV_WRITE, SHARED_ATTENTION, ATTENTION, ACTIVATION, LAYER_OUTPUT, SELECT_ROWS,
    SAMPLE,
) = range(11)

(
    OPCODE,
    X, X_STRIDE,             # input rows: address, bytes between rows
    OUT, OUT_STRIDE,
    ROWS_KIND,               # of which there are so many in this step: TOKEN_ROWS, LOGIT_ROWS or LAYER_ROWS
    ROW_BEGIN, ROW_LIMIT,    # the operation covers at most ROW_LIMIT of them, from ROW_BEGIN on
    WIDTH,                   # columns of the result
    WEIGHT, WEIGHT_FORMAT,   # address of the first panel (or of a vector)
    PANELS, PANEL_BYTES,     # panels of 16 columns
    STEP_BYTES,              # bytes of a panel that a tile's step reads
    K,                       # elements of one row of x that the product reads
    UNIT_PANELS,             # panels that one unit of work covers
    BIAS,                    # address, 0: none
    ACCUMULATE,              # 1: add to OUT
    X_ROUNDED,               # 1: X is in the form that WEIGHT_FORMAT reads (see `rounding`)
    ROUNDED_OUT, ROUNDED_AS, # where a rounded copy of OUT is wanted, 0: nowhere; the format whose form it has
    SCALAR,                  # epsilon, embedding scale or softmax scale, as float32 bits
    KIND,                    # SILU or GELU_TANH
    COS, SIN, HALF,          # rotary tables (max_model_len, HALF) float32
    Q_NORM, K_NORM,          # addresses of head norms, 0: none
    LAYER,                   # whose K and V
    WINDOW,                  # tokens a query may look back, itself included; 0: everything
) = range(30)
# fmt: on
ROW_WORDS = 32
ROW_BYTES = 8 * ROW_WORDS

TOKEN_ROWS, LOGIT_ROWS, LAYER_ROWS = range(3)
SILU, GELU_TANH = 0, 1

# -- the step ---------------------------------------------------------------------------------------------------------

# fmt: off
(
    GENERATION, FINISHED,    # number of the step that was launched last, and of the one that finished last
    STOP, FAILED,            # 1: threads end; 1: a thread failed, nobody waits for it
    NUM_THREADS, DONE_EVENT, # eventfd that says a step is finished
    FUNCTIONS, TILES,        # addresses: of the operations' functions by opcode; the table of `tile.tile_table`
    OPS, NUM_OPS, PROGRESS,  # operation rows, and two counters for each
    SCRATCH, SCRATCH_BYTES,  # per thread
    LINEAR_SCRATCH, LINEAR_BYTES,  # per thread: rounded rows of x,
    TOTALS_OFFSET,           # from here on totals of a product
    UNPACKED_OFFSET,         # and from here on an unpacked panel
    POOL, LAYER_BYTES,       # address; bytes of one layer, all blocks
    BLOCK_SIZE, BLOCK_BYTES, # bytes of one block in one layer
    VALUES_OFFSET,           # of the heads' V in it, which stand behind K
    KEY_BYTES, VALUE_BYTES,  # K and V of one head in one block
    KV_FORMAT, KV_PAIR, KV_LANE_BYTES, KV_SCALES_BYTES,  # see `kv_formats.KvFormat`
    NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_WIDTH,  # HEAD_WIDTH: HEAD_DIM filled up to whole panels
    UNITS, NUM_UNITS,        # the attention plan of this step
    SHARED_UNITS, NUM_SHARED_UNITS,  # its units for several sequences at once
    PREFIXES, PREFIX_BYTES,  # what those found, for each sequence and KV head
    PARTIALS, PARTIAL_BYTES, ARRIVALS,
    VOCAB_SIZE, SAMPLING_SCRATCH, SAMPLING_FLOATS,  # per thread: float32 of scratch
    # From here on the words of one step, which are written together:
    NUM_TOKENS, NUM_SEQUENCES, NUM_LOGIT_ROWS, NUM_LAYER_ROWS,
    TOKENS, POSITIONS, SLOT_MAPPING, QUERY_START, SEQ_LENS, BLOCK_TABLES, LOGIT_ROW_INDEX, LAYER_ROW_INDEX,
    MAX_BLOCKS,              # columns of the block tables
    TOP_WIDTH,               # columns of the top lists
    LOGITS_OUT,              # where raw logits are copied, 0: nowhere
    LAYERS_OUT,              # address of one word for each layer: where its output is copied, 0: nowhere
    SAMPLING,                # address and length of each array of SamplingArrays, then those of SampledArrays
) = range(61)
# fmt: on
STATE_WORDS = 112

# Per operation two counters, a cache line each: the next unit to claim, and the units done. The high half of each is
# the number of the step.
PROGRESS_BYTES = 128
GENERATION_SHIFT = 32
UNIT_MASK = (1 << GENERATION_SHIFT) - 1


def _load_word(builder: Any, table: Any, index: Any, kind: ir.Type) -> Any:
    address = builder.add(table, builder.mul(index, INT64(8)))
    return builder.load(builder.inttoptr(address, POINTER), align=8, typ=kind)


@instruction
def word(typing_context: Any, table: Any, index: Any) -> Any:
    """Word `index` of a row or of the state."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load_word(builder, arguments[0], arguments[1], INT64)

    return types.int64(types.int64, types.int64), generate


@instruction
def float_word(typing_context: Any, table: Any, index: Any) -> Any:
    """The float32 in the low half of word `index`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load_word(builder, arguments[0], arguments[1], ir.FloatType())

    return types.float32(types.int64, types.int64), generate


@kernel
def rows_of(row: int, state: int) -> int:
    """How many rows an operation has in this step."""
    kind = word(row, ROWS_KIND)
    total = word(state, NUM_TOKENS)
    if kind != TOKEN_ROWS:
        total = word(state, NUM_LOGIT_ROWS) if kind == LOGIT_ROWS else word(state, NUM_LAYER_ROWS)
    return max(0, min(total - word(row, ROW_BEGIN), word(row, ROW_LIMIT)))


@kernel
def rows_per_unit(rows: int, state: int) -> int:
    """Rows that one unit of a row-wise operation covers: four units a thread, at most 16 rows in one."""
    return max(1, min(16, rows // (4 * word(state, NUM_THREADS))))


@kernel
def rows_of_unit(row: int, state: int, unit: int) -> tuple[int, int]:
    """First and last (exclusive) row of a unit of a row-wise operation."""
    rows = rows_of(row, state)
    each = rows_per_unit(rows, state)
    return unit * each, min(rows, unit * each + each)
