"""Rotary embedding, optional head norms, and the write of a token's K and V into its slot of the pool.

A block holds for each layer and KV head
    K  float32 [head_dim, block_size]                bfloat16 [ceil(head_dim / 2), block_size, 2]
    V  float32 [block_size, head_width]              bfloat16 [ceil(block_size / 2), head_width, 2]
so that 16 tokens of K, and 16 columns of V, are a panel of the matrix tile. head_width is head_dim filled up to a
multiple of 16.
"""

from __future__ import annotations

import numpy as np

from . import table as t
from .isa import BFLOAT16
from .jit import kernel
from .memory import bits_of_float, load_f32, load_i32, load_i64, store_f32, store_u16, store_u32
from .rowwise import inverse_rms
from .table import float_word, rows_of_unit, word
from .vectors import load, splat, store


@kernel
def bfloat16_bits(value: float) -> np.int64:
    """The 16 bits of a float32 rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.int64(bits_of_float(value))
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded if value == value else np.int64(0x7FC0)


@kernel
def rotate(x: int, cos: int, sin: int, half: int) -> None:
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for the pairs (i, i + half) of one head, in place."""
    whole = half & -16
    for i in range(0, 4 * whole, 64):
        x1, x2, c, s = load(x + i), load(x + i + 4 * half), load(cos + i), load(sin + i)
        store(x + i, x1 * c - x2 * s)
        store(x + i + 4 * half, x2 * c + x1 * s)
    for i in range(4 * whole, 4 * half, 4):
        x1, x2, c, s = load_f32(x + i), load_f32(x + i + 4 * half), load_f32(cos + i), load_f32(sin + i)
        store_f32(x + i, x1 * c - x2 * s)
        store_f32(x + i + 4 * half, x2 * c + x1 * s)


@kernel
def normalise_head(x: int, weight: int, head_dim: int, eps: float) -> None:
    """RMS norm of one head, in place. The next head follows without a gap: nothing past head_dim is written."""
    scale = inverse_rms(x, head_dim, eps)
    whole = head_dim & -16
    for i in range(0, 4 * whole, 64):
        store(x + i, load(x + i) * splat(scale) * load(weight + i))
    for i in range(4 * whole, 4 * head_dim, 4):
        store_f32(x + i, load_f32(x + i) * scale * load_f32(weight + i))


@kernel
def write_key(kv_format: int, source: int, out: int, head_dim: int, block_size: int) -> None:
    """Spread one head's key over its column of the block; `out` is the column's first element."""
    if kv_format == BFLOAT16:
        for d in range(0, head_dim, 2):
            low = bfloat16_bits(load_f32(source + 4 * d))
            high = bfloat16_bits(load_f32(source + 4 * d + 4)) if d + 1 < head_dim else 0
            store_u32(out + (d >> 1) * block_size * 4, low | (high << 16))
    else:
        for d in range(head_dim):
            store_f32(out + d * block_size * 4, load_f32(source + 4 * d))


@kernel
def write_value(kv_format: int, source: int, out: int, head_dim: int, head_width: int, offset: int) -> None:
    """Write one head's value to row `offset` of the block's V at `out`."""
    if kv_format == BFLOAT16:
        out += (offset >> 1) * head_width * 4 + (offset & 1) * 2
        for d in range(head_dim):
            store_u16(out + 4 * d, bfloat16_bits(load_f32(source + 4 * d)))
    else:
        out += offset * head_width * 4
        for d in range(head_dim):
            store_f32(out + 4 * d, load_f32(source + 4 * d))


def rope_kv_write(row: int, state: int, unit: int, thread: int) -> None:
    """Rotate queries and keys of the unit's rows in place, and store keys and values in the rows' slots."""
    head_dim, head_width, block_size = word(state, t.HEAD_DIM), word(state, t.HEAD_WIDTH), word(state, t.BLOCK_SIZE)
    num_heads, num_kv_heads = word(state, t.NUM_HEADS), word(state, t.NUM_KV_HEADS)
    kv_format = word(state, t.KV_FORMAT)
    half, eps = word(row, t.HALF), float_word(row, t.SCALAR)
    for index in range(*rows_of_unit(row, state, unit)):
        x = word(row, t.X) + index * word(row, t.X_STRIDE)
        position = load_i32(word(state, t.POSITIONS) + 4 * index)
        cos, sin = word(row, t.COS) + position * half * 4, word(row, t.SIN) + position * half * 4
        for head in range(num_heads + num_kv_heads):
            norm = word(row, t.Q_NORM) if head < num_heads else word(row, t.K_NORM)
            if norm:
                normalise_head(x + head * head_dim * 4, norm, head_dim, eps)
            rotate(x + head * head_dim * 4, cos, sin, half)
        slot = load_i64(word(state, t.SLOT_MAPPING) + 8 * index)
        block, offset = slot // block_size, slot % block_size
        keys = word(state, t.POOL) + block * word(state, t.BLOCK_BYTES) + word(row, t.K_OFFSET)
        values = word(state, t.POOL) + block * word(state, t.BLOCK_BYTES) + word(row, t.V_OFFSET)
        for head in range(num_kv_heads):
            key = x + (num_heads + head) * head_dim * 4
            value = key + num_kv_heads * head_dim * 4
            write_key(kv_format, key, keys + head * word(state, t.KEY_BYTES) + offset * 4, head_dim, block_size)
            write_value(kv_format, value, values + head * word(state, t.VALUE_BYTES), head_dim, head_width, offset)
