"""Attention of query rows over a float32 pool, for exact comparison with other devices; `paged_decode` has the formula.

Grid (ceil(num_heads / 4), T), 128 threads: one query row and head a warp, which walks its tokens in stretches of 32 at
fixed positions. Within a stretch lane l scores token l (its whole key), then holds output dims l, l + 32, ... and adds
the stretch's values token after token.

    qkv           (T, (num_heads + 2 num_kv_heads) * head_dim) float32, queries already rotated
    kv            (num_blocks, 2, num_kv_heads, block_size, head_dim) float32: one layer (layout.py)
    block_tables  (S, max_blocks) int32
    sequences     (T,) int32: a row's sequence, -1 for padding
    positions     (T,) int32
    out           (T, num_heads * head_dim) float32
"""

from __future__ import annotations

import math
from typing import Any

from .cache import kernel_factory
from .compiler import FLOAT32, INT32, WARP, Kernel, build, pointer
from .intrinsics import exp2, load_f32x4
from .jit import cuda, types
from .layout import AttentionShape
from .reductions import ALL_LANES, warp_max, warp_sum

THREADS = 128
WARPS = THREADS // WARP

_i32, _i64, _f32 = types.int32, types.int64, types.float32
_NEVER = -math.inf


@kernel_factory
def paged_float32(shape: AttentionShape) -> Kernel:
    """Kernel for one attention shape."""
    head_dim, block_size, num_heads, num_kv_heads = (
        shape.head_dim,
        shape.block_size,
        shape.num_heads,
        shape.num_kv_heads,
    )
    group, qkv_width, plane = shape.queries_per_kv_head, shape.qkv_width, shape.plane
    dims = -(-head_dim // WARP)

    def paged_float32(
        qkv: Any,
        kv: Any,
        block_tables: Any,
        sequences: Any,
        positions: Any,
        out: Any,
        max_blocks: Any,
        window: Any,
        scale: Any,
    ) -> None:
        thread = cuda.threadIdx.x & (THREADS - 1)
        lane, head, row = thread & (WARP - 1), cuda.blockIdx.x * WARPS + (thread >> 5), cuda.blockIdx.y
        sequence = sequences[row]
        if head >= num_heads or sequence < 0:
            return
        last = positions[row]
        first = max(last - window + 1, 0) if window > 0 else _i32(0)
        query = _i64(row) * qkv_width + head * head_dim
        o = cuda.local.array(dims, types.float32)
        for i in range(dims):
            o[i] = _f32(0)
        top, total = _f32(_NEVER), _f32(0)
        for stretch in range(first // WARP * WARP, last + 1, WARP):
            token = min(max(stretch + lane, first), last)  # a lane without a token repeats a neighbour's, weight 0
            block = block_tables[_i64(sequence) * max_blocks + token // block_size]
            key = (_i64(block) * (2 * num_kv_heads) + head // group) * plane + token % block_size * head_dim
            score = _f32(0)
            for dim in range(0, head_dim, 4):
                qa, qb, qc, qd = load_f32x4(qkv, query + dim)
                a, b, c, d = load_f32x4(kv, key + dim)
                score += qa * a + qb * b + qc * c + qd * d
            score = score * scale if token == stretch + lane else _f32(_NEVER)
            new_top = max(top, warp_max(score))
            weight, shrink = exp2(score - new_top), exp2(top - new_top)
            top, total = new_top, total * shrink + warp_sum(weight)
            for i in range(dims):
                o[i] *= shrink
            for other in range(max(first - stretch, 0), min(last - stretch + 1, WARP)):
                share = cuda.shfl_sync(ALL_LANES, weight, other)
                value = cuda.shfl_sync(ALL_LANES, key, other) + num_kv_heads * plane
                for i in range(dims):
                    if lane + WARP * i < head_dim:
                        o[i] += share * kv[value + lane + WARP * i]
        for i in range(dims):
            if lane + WARP * i < head_dim:
                out[(_i64(row) * num_heads + head) * head_dim + lane + WARP * i] = o[i] / total

    arguments = {
        "qkv": pointer(FLOAT32),
        "kv": pointer(FLOAT32),
        "block_tables": pointer(INT32),
        "sequences": pointer(INT32),
        "positions": pointer(INT32),
        "out": pointer(FLOAT32),
        "max_blocks": INT32,
        "window": INT32,
        "scale": FLOAT32,
    }
    return build(paged_float32, arguments, name="paged_float32", threads=THREADS, registers=80)
