"""Rotary embedding, optional head norms, and the write of a token's K and V into its slot of the pool."""

from __future__ import annotations

import numpy as np

from . import table as t
from .isa import BFLOAT16, CODES, FLOAT16
from .jit import kernel
from .memory import (
    bits_of_float,
    bits_of_half,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_u8,
    store_u16,
    store_u32,
)
from .rowwise import inverse_rms
from .table import float_word, rows_of_unit, word
from .vectors import load, splat, store

ZERO = np.float32(0.0)
SMALLEST_SCALE = np.float32(1e-35)  # nothing divided by it overflows into an infinity
ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits


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
def code_scale(source: int, head_dim: int) -> np.float32:
    """What the largest number of a head is divided by to become 127; NaN where one of them is NaN or infinite."""
    largest, strange = ZERO, ZERO
    for i in range(0, 4 * head_dim, 4):
        value = load_f32(source + i)
        largest = max(largest, abs(value))
        strange += value * ZERO
    scale = largest * np.float32(1.0 / 127.0) + strange
    return ZERO if scale < SMALLEST_SCALE else scale


@kernel
def code_of(value: np.float32, scale: np.float32) -> np.int64:
    """round(value / scale), ties to even, in the low 8 bits; 0 where the scale is 0 or NaN."""
    shifted = value / scale + ROUND if scale > ZERO else ROUND
    return np.int64(bits_of_float(shifted))


@kernel
def write_number(kv_format: int, out: int, value: np.float32, scale: np.float32) -> None:
    """Store a number in a format whose lanes hold one."""
    if kv_format == FLOAT16:
        store_u16(out, bits_of_half(value))
    elif kv_format == CODES:
        store_u8(out, code_of(value, scale))
    else:
        store_f32(out, value)


@kernel
def write_key(state: int, source: int, out: int, offset: int) -> None:
    """Spread one head's key over column `offset` of the block's K at `out`."""
    head_dim, kv_format = word(state, t.HEAD_DIM), word(state, t.KV_FORMAT)
    lane_bytes, scale = word(state, t.KV_LANE_BYTES), ZERO
    if word(state, t.KV_SCALES_BYTES):
        scale = code_scale(source, head_dim)
        store_f32(out + 4 * offset, scale)
    out += word(state, t.KV_SCALES_BYTES) + offset * lane_bytes
    stride = word(state, t.BLOCK_SIZE) * lane_bytes
    if kv_format == BFLOAT16:
        for d in range(0, head_dim, 2):
            low = bfloat16_bits(load_f32(source + 4 * d))
            high = bfloat16_bits(load_f32(source + 4 * d + 4)) if d + 1 < head_dim else 0
            store_u32(out + (d >> 1) * stride, low | (high << 16))
    else:
        for d in range(head_dim):
            write_number(kv_format, out + d * stride, load_f32(source + 4 * d), scale)


@kernel
def write_value(state: int, source: int, out: int, offset: int) -> None:
    """Write one head's value to row `offset` of the block's V at `out`."""
    head_dim, kv_format = word(state, t.HEAD_DIM), word(state, t.KV_FORMAT)
    lane_bytes, scale = word(state, t.KV_LANE_BYTES), ZERO
    if word(state, t.KV_SCALES_BYTES):
        scale = code_scale(source, head_dim)
        store_f32(out + 4 * offset, scale)
    row_bytes = word(state, t.HEAD_WIDTH) * lane_bytes
    out += word(state, t.KV_SCALES_BYTES)
    if kv_format == BFLOAT16:
        out += (offset >> 1) * row_bytes + (offset & 1) * 2
        for d in range(head_dim):
            store_u16(out + 4 * d, bfloat16_bits(load_f32(source + 4 * d)))
    else:
        out += offset * row_bytes
        for d in range(head_dim):
            write_number(kv_format, out + d * lane_bytes, load_f32(source + 4 * d), scale)


def rope_kv_write(row: int, state: int, unit: int, thread: int) -> None:
    """Rotate queries and keys of the unit's rows in place, and store keys and values in the rows' slots."""
    head_dim, block_size = word(state, t.HEAD_DIM), word(state, t.BLOCK_SIZE)
    num_heads, num_kv_heads = word(state, t.NUM_HEADS), word(state, t.NUM_KV_HEADS)
    pool = word(state, t.POOL) + word(row, t.LAYER) * word(state, t.LAYER_BYTES)
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
        keys = pool + block * word(state, t.BLOCK_BYTES)
        values = keys + word(state, t.VALUES_OFFSET)
        for head in range(num_kv_heads):
            key = x + (num_heads + head) * head_dim * 4
            value = key + num_kv_heads * head_dim * 4
            write_key(state, key, keys + head * word(state, t.KEY_BYTES), offset)
            write_value(state, value, values + head * word(state, t.VALUE_BYTES), offset)
