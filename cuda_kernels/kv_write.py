"""Rotary embedding of queries and keys fused with the write of keys and values into the pool.

For each head x of a token at position p, with angles a_i = p * inv_freq_i (their cosines and sines come as tables):

    x = x / sqrt(mean(x^2) + eps) * norm                                 queries and keys, in models with these norms
    (x_i, x_j) = (x_i cos a_i - x_j sin a_i, x_j cos a_i + x_i sin a_i)  i < rotary_dim / 2, j = i + rotary_dim / 2

Grid (ceil(heads / 4), num_rows), heads = num_heads + 2 num_kv_heads: one warp a head. Lane l holds pairs l, l + 32, ...

    qkv           (num_rows, heads * head_dim) float32: queries are rotated in place
    positions     (num_rows,) int32
    slot_mapping  (num_rows,) int64, block * block_size + offset; -1: a padding row, nothing is written
    cos, sin      (max_model_len, rotary_dim / 2) float32
    q_norm, k_norm  (head_dim,) float32
    kv            (num_blocks, 2, num_kv_heads, block_size, head_dim): one layer of the pool (layout.py)
    scales        (num_blocks, 2, num_kv_heads, block_size) float32: written for 8-bit formats only
"""

from __future__ import annotations

import math
from typing import Any

from .cache import kernel_factory
from .compiler import FLOAT32, INT32, INT64, WARP, Kernel, build, pointer
from .intrinsics import rsqrt
from .jit import cuda, device_function, types
from .kv_formats import KV_FORMATS
from .layout import AttentionShape
from .reductions import warp_max, warp_sum

THREADS = 128
HEADS_PER_BLOCK = THREADS // WARP

_i64, _f32 = types.int64, types.float32


@kernel_factory
def kv_write(shape: AttentionShape, rotary_dim: int, qk_norm: bool) -> Kernel:
    """Kernel for one attention shape; the first `rotary_dim` numbers of a head are rotated."""
    head_dim, block_size, num_heads, num_kv_heads = (
        shape.head_dim,
        shape.block_size,
        shape.num_heads,
        shape.num_kv_heads,
    )
    heads, plane = num_heads + 2 * num_kv_heads, shape.plane
    half, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    pairs = -(-head_dim // (2 * WARP))
    kv_format = KV_FORMATS[shape.kv]
    encode, scaled, largest = kv_format.encode, kv_format.scaled, kv_format.largest

    @device_function
    def head_scale(x: Any, y: Any) -> Any:
        """Largest magnitude of the head / largest code; NaN where anything is NaN or infinite, lest it be lost."""
        highest = spread = _f32(0)
        for i in range(pairs):
            highest = max(highest, max(abs(x[i]), abs(y[i])))
            spread += abs(x[i]) + abs(y[i])
        highest, spread = warp_max(highest), warp_sum(spread)
        if not spread < _f32(math.inf):
            return _f32(math.nan)
        return highest / _f32(largest) if highest > _f32(0) else _f32(1)

    def kv_write(
        qkv: Any,
        positions: Any,
        slot_mapping: Any,
        cos: Any,
        sin: Any,
        q_norm: Any,
        k_norm: Any,
        kv: Any,
        scales: Any,
        eps: Any,
    ) -> None:
        thread = cuda.threadIdx.x & (THREADS - 1)
        lane, head = thread & (WARP - 1), cuda.blockIdx.x * HEADS_PER_BLOCK + (thread >> 5)
        row = cuda.blockIdx.y
        slot = slot_mapping[row]
        if head >= heads or slot < 0:
            return
        source = (_i64(row) * heads + head) * head_dim
        is_value = head >= num_heads + num_kv_heads
        x = cuda.local.array(pairs, types.float32)
        y = cuda.local.array(pairs, types.float32)
        squares = _f32(0)
        for i in range(pairs):
            pair = lane + WARP * i
            x[i] = y[i] = _f32(0)
            if pair < half + rest:
                first = pair if pair < half else pair + half
                x[i], y[i] = qkv[source + first], qkv[source + first + (half if pair < half else rest)]
            squares += x[i] * x[i] + y[i] * y[i]
        if qk_norm and not is_value:
            scale = rsqrt(warp_sum(squares) / _f32(head_dim) + eps)
            norm = q_norm if head < num_heads else k_norm
            for i in range(pairs):
                pair = lane + WARP * i
                if pair < half + rest:
                    first = pair if pair < half else pair + half
                    x[i] *= scale * norm[first]
                    y[i] *= scale * norm[first + (half if pair < half else rest)]
        if not is_value:
            angle = _i64(positions[row]) * half
            for i in range(pairs):
                pair = lane + WARP * i
                if pair < half:
                    cosine, sine = cos[angle + pair], sin[angle + pair]
                    x[i], y[i] = x[i] * cosine - y[i] * sine, y[i] * cosine + x[i] * sine
        block, offset = slot // block_size, slot % block_size
        plane_index = block * (2 * num_kv_heads) + (head - num_heads)
        target = plane_index * plane + offset * head_dim
        scale = _f32(1)
        if scaled and head >= num_heads:
            scale = head_scale(x, y)
            if lane == 0:
                scales[plane_index * block_size + offset] = scale
        for i in range(pairs):
            pair = lane + WARP * i
            if pair < half + rest:
                first = pair if pair < half else pair + half
                second = first + (half if pair < half else rest)
                if head < num_heads:
                    qkv[source + first], qkv[source + second] = x[i], y[i]
                else:
                    kv[target + first], kv[target + second] = encode(x[i] / scale), encode(y[i] / scale)

    arguments = {
        "qkv": pointer(FLOAT32),
        "positions": pointer(INT32),
        "slot_mapping": pointer(INT64),
        "cos": pointer(FLOAT32),
        "sin": pointer(FLOAT32),
        "q_norm": pointer(FLOAT32),
        "k_norm": pointer(FLOAT32),
        "kv": pointer(kv_format.stored),
        "scales": pointer(FLOAT32),
        "eps": FLOAT32,
    }
    return build(kv_write, arguments, name="kv_write", threads=THREADS, registers=64)
