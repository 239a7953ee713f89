"""Attention of many query rows over paged keys and values, on tensor cores: prompts, after any cached prefix.

The formula is that of `paged_decode`. One block has a tile of query rows of one sequence and one KV head (row m is
query m // heads, head m % heads) and walks the tokens in stretches at fixed positions, with the running maximum and sum
of an online softmax, so a row's bits depend on its position only, not on how the prompt was cut into chunks. (They
differ from those of `paged_decode`, which adds splits; where prompt and decode must agree bit for bit, decode rows
by rows with that kernel.)

Grid (num_tiles, num_kv_heads * head_chunks), 4 warps a block, `depth` x 16 rows a warp. Keys and values of stretch
i + 1 travel to shared memory by `cp.async` while stretch i is multiplied: S = Q K^T with both fragments by `ldmatrix`,
P straight from the accumulators of S, O += P V with V by `ldmatrix.trans`. Rows of shared memory hold an odd number of
16-byte words, so that the eight rows of a matrix never share a bank.

    qkv           (T, (num_heads + 2 num_kv_heads) * head_dim) float32, queries already rotated
    kv            (num_blocks, 2, num_kv_heads, block_size, head_dim) bfloat16 or float16: one layer (layout.py)
    block_tables  (S, max_blocks) int32
    positions     (T,) int32
    tiles         (num_tiles, 3) int32: sequence, first and last token that any of its rows may read (tiles.py)
    tile_rows     (num_tiles, rows_per_tile) int32: consecutive rows of qkv, -1 where unused
    out           (T, num_heads * head_dim) float32 or 16-bit
"""

from __future__ import annotations

import math
from typing import Any

from .cache import kernel_factory
from .compiler import FLOAT32, INT32, Kernel, build, pointer
from .elements import ELEMENTS, PACKED
from .intrinsics import (
    copy_async_16,
    copy_async_commit,
    copy_async_wait_all,
    copy_async_wait_but_one,
    exp2,
    load_f32x2,
    load_matrix_x4,
    load_matrix_x4_transposed,
    shared_address,
)
from .jit import cuda, device_function, types
from .layout import AttentionShape
from .reductions import ALL_LANES

WARPS = 4
THREADS = 32 * WARPS

_i32, _i64, _u32, _f32 = types.int32, types.int64, types.uint32, types.float32
_NEVER = -math.inf


def depth(shape: AttentionShape) -> int:
    """16-row tiles of one warp: two read keys and values half as often, where their outputs fit the registers."""
    return 1 if shape.head_dim > 128 else 2


def stretch(shape: AttentionShape) -> int:
    """Tokens of one step of the walk."""
    return 32 if shape.head_dim > 96 else 64


def head_chunks(shape: AttentionShape) -> int:
    return -(-shape.queries_per_kv_head // (16 * WARPS * depth(shape)))


def rows_per_tile(shape: AttentionShape) -> int:
    """Token rows of one tile, each with all its heads of the KV head."""
    return 16 * WARPS * depth(shape) // -(-shape.queries_per_kv_head // head_chunks(shape))


@kernel_factory
def paged_prefill(shape: AttentionShape, out: str) -> Kernel:
    """Kernel for one attention shape (head_dim a multiple of 16); `shape.kv` is bfloat16 or float16."""
    if shape.head_dim % 16:
        raise ValueError(f"paged_prefill: head_dim must be a multiple of 16, got {shape.head_dim}")
    packed = PACKED[shape.kv]
    mma, pack = packed.mma, packed.pack
    store_out = ELEMENTS[out].store2
    head_dim, block_size, num_heads, num_kv_heads = (
        shape.head_dim,
        shape.block_size,
        shape.num_heads,
        shape.num_kv_heads,
    )
    group, chunks, qkv_width, plane = shape.queries_per_kv_head, head_chunks(shape), shape.qkv_width, shape.plane
    heads, rows = -(-group // chunks), rows_per_tile(shape)
    deep, tokens = depth(shape), stretch(shape)
    tile_height = 16 * WARPS * deep
    words = head_dim // 8 + 1  # 16-byte words of a row in shared memory: odd
    loaders = THREADS // tokens  # threads that fetch one token
    q_words, stage_words = tile_height * words, tokens * words  # Q, then K and V of two stages
    steps, dim_tiles, token_tiles = head_dim // 16, head_dim // 8, tokens // 8
    o_size, s_size, q_size, row_size = 4 * deep * dim_tiles, 4 * deep * token_tiles, 4 * deep, 2 * deep

    @device_function
    def load_queries(shared: Any, qkv: Any, tile_rows: Any, tile: Any, kv_head: Any, chunk: Any, thread: Any) -> None:
        """Q of the tile, converted, into shared memory; zeros where a row or head does not exist."""
        for m in range(thread >> 5, tile_height, WARPS):
            query, head = m // heads, chunk * heads + m % heads
            row = tile_rows[tile * rows + query] if query < rows else _i32(-1)
            missing = row < 0 or head >= group
            source = _i64(0) if missing else _i64(row) * qkv_width + (kv_head * group + head) * head_dim
            for dim in range(2 * (thread & 31), head_dim, 64):
                a, b = load_f32x2(qkv, source + dim)
                shared[4 * m * words + dim // 2] = _u32(0) if missing else pack(a, b)

    @device_function
    def fetch(
        base: Any,
        stage: Any,
        kv: Any,
        tables: Any,
        table: Any,
        token: Any,
        first: Any,
        last: Any,
        kv_head: Any,
        thread: Any,
    ) -> None:
        """Start the copies of one stretch: keys, then values. Tokens nobody may read are replaced by a neighbour."""
        slot = thread // loaders
        wanted = min(max(token + slot, first), last)
        block = tables[table + wanted // block_size]
        key = (_i64(block) * (2 * num_kv_heads) + kv_head) * plane + wanted % block_size * head_dim
        target = base + _u32(16 * (q_words + 2 * stage * stage_words + slot * words))
        for word in range(thread % loaders, dim_tiles, loaders):
            copy_async_16(target + _u32(16 * word), kv, key + 8 * word)
            copy_async_16(target + _u32(16 * (stage_words + word)), kv, key + num_kv_heads * plane + 8 * word)
        copy_async_commit()

    @device_function
    def score(s: Any, queries: Any, keys: Any, lane: Any) -> None:
        """S = Q K^T for the warp's rows and one stretch."""
        for i in range(s_size):
            s[i] = _f32(0)
        q_row = _u32(16 * ((lane & 15) * words + (lane >> 4)))
        k_row = _u32(16 * (((lane & 7) + 8 * (lane >> 4)) * words + ((lane >> 3) & 1)))
        q = cuda.local.array(q_size, types.uint32)
        for step in range(steps):
            for m in range(deep):
                q[4 * m], q[4 * m + 1], q[4 * m + 2], q[4 * m + 3] = load_matrix_x4(
                    queries + q_row + _u32(16 * (16 * m * words + 2 * step))
                )
            for n in range(0, token_tiles, 2):
                k0, k1, k2, k3 = load_matrix_x4(keys + k_row + _u32(16 * (8 * n * words + 2 * step)))
                for m in range(deep):
                    i, j = 4 * (m * token_tiles + n), 4 * m
                    s[i], s[i + 1], s[i + 2], s[i + 3] = mma(
                        q[j], q[j + 1], q[j + 2], q[j + 3], k0, k1, s[i], s[i + 1], s[i + 2], s[i + 3]
                    )
                    s[i + 4], s[i + 5], s[i + 6], s[i + 7] = mma(
                        q[j], q[j + 1], q[j + 2], q[j + 3], k2, k3, s[i + 4], s[i + 5], s[i + 6], s[i + 7]
                    )

    @device_function
    def mask(s: Any, position: Any, token: Any, window: Any) -> None:
        """-inf where the row does not see the token; `token` is that of the lane's first column."""
        for row in range(row_size):
            last = position[row] - token
            first = last - window if window > 0 else _i32(-tokens)
            for n in range(token_tiles):
                i = 4 * ((row >> 1) * token_tiles + n) + 2 * (row & 1)
                if 8 * n > last or 8 * n <= first:
                    s[i] = _f32(_NEVER)
                if 8 * n + 1 > last or 8 * n + 1 <= first:
                    s[i + 1] = _f32(_NEVER)

    @device_function
    def soften(s: Any, o: Any, top: Any, total: Any, scale: Any) -> None:
        """Turn scores into weights relative to the new running maximum; shrink what was summed under the old one."""
        for row in range(row_size):
            m, half = row >> 1, 2 * (row & 1)
            highest = top[row]
            for n in range(token_tiles):
                i = 4 * (m * token_tiles + n) + half
                highest = max(highest, max(s[i], s[i + 1]))
            highest = max(highest, cuda.shfl_xor_sync(ALL_LANES, highest, 1))
            highest = max(highest, cuda.shfl_xor_sync(ALL_LANES, highest, 2))
            base = highest * scale if highest > _f32(_NEVER) else _f32(0)
            shrink = exp2(top[row] * scale - base)
            top[row] = highest
            here = _f32(0)
            for n in range(token_tiles):
                i = 4 * (m * token_tiles + n) + half
                s[i], s[i + 1] = exp2(s[i] * scale - base), exp2(s[i + 1] * scale - base)
                here += s[i] + s[i + 1]
            total[row] = total[row] * shrink + here
            for n in range(dim_tiles):
                i = 4 * (m * dim_tiles + n) + half
                o[i] *= shrink
                o[i + 1] *= shrink

    @device_function
    def mix(o: Any, s: Any, values: Any, lane: Any) -> None:
        """O += P V."""
        v_row = _u32(16 * ((lane & 15) * words + (lane >> 4)))
        for step in range(tokens // 16):
            for n in range(0, dim_tiles, 2):
                v0, v1, v2, v3 = load_matrix_x4_transposed(values + v_row + _u32(16 * (16 * step * words + n)))
                for m in range(deep):
                    p = 4 * (m * token_tiles + 2 * step)
                    p0, p1 = pack(s[p], s[p + 1]), pack(s[p + 2], s[p + 3])
                    p2, p3 = pack(s[p + 4], s[p + 5]), pack(s[p + 6], s[p + 7])
                    i = 4 * (m * dim_tiles + n)
                    o[i], o[i + 1], o[i + 2], o[i + 3] = mma(p0, p1, p2, p3, v0, v1, o[i], o[i + 1], o[i + 2], o[i + 3])
                    o[i + 4], o[i + 5], o[i + 6], o[i + 7] = mma(
                        p0, p1, p2, p3, v2, v3, o[i + 4], o[i + 5], o[i + 6], o[i + 7]
                    )

    def paged_prefill(
        qkv: Any,
        kv: Any,
        block_tables: Any,
        positions: Any,
        tiles: Any,
        tile_rows: Any,
        out: Any,
        max_blocks: Any,
        window: Any,
        scale: Any,
    ) -> None:
        shared = cuda.shared.array(0, types.uint32, alignment=16)
        base = shared_address(shared)
        tile, kv_head, chunk = cuda.blockIdx.x, cuda.blockIdx.y // chunks, cuda.blockIdx.y % chunks
        thread = cuda.threadIdx.x & (THREADS - 1)
        lane, warp = thread & 31, thread >> 5
        table, first, last = _i64(tiles[3 * tile]) * max_blocks, tiles[3 * tile + 1], tiles[3 * tile + 2]
        start = first // tokens * tokens
        fetch(base, 0, kv, block_tables, table, start, first, last, kv_head, thread)
        load_queries(shared, qkv, tile_rows, tile, kv_head, chunk, thread)

        first_row = tile_rows[tile * rows]
        first_position = positions[first_row]
        position = cuda.local.array(row_size, types.int32)  # of the lane's rows g, g + 8 of each 16
        top = cuda.local.array(row_size, types.float32)
        total = cuda.local.array(row_size, types.float32)
        for i in range(row_size):
            m = 16 * (deep * warp + (i >> 1)) + 8 * (i & 1) + (lane >> 2)
            position[i] = first_position + m // heads
            top[i], total[i] = _f32(_NEVER), _f32(0)
        o = cuda.local.array(o_size, types.float32)
        s = cuda.local.array(s_size, types.float32)
        for i in range(o_size):
            o[i] = _f32(0)
        queries = base + _u32(16 * (16 * deep * warp * words))

        for token in range(start, last + 1, tokens):
            stage = (token // tokens - start // tokens) & 1
            if token + tokens <= last:
                fetch(base, 1 - stage, kv, block_tables, table, token + tokens, first, last, kv_head, thread)
                copy_async_wait_but_one()
            else:
                copy_async_wait_all()
            cuda.syncthreads()
            keys = base + _u32(16 * (q_words + 2 * stage * stage_words))
            score(s, queries, keys, lane)
            if token + tokens - 1 > first_position or window > 0:
                mask(s, position, token + 2 * (lane & 3), window)
            soften(s, o, top, total, scale)
            mix(o, s, keys + _u32(16 * stage_words), lane)
            cuda.syncthreads()  # the next fetch overwrites this stage

        for i in range(row_size):
            m = 16 * (deep * warp + (i >> 1)) + 8 * (i & 1) + (lane >> 2)
            whole = total[i] + cuda.shfl_xor_sync(ALL_LANES, total[i], 1)
            whole += cuda.shfl_xor_sync(ALL_LANES, whole, 2)
            query, head = m // heads, chunk * heads + m % heads
            row = tile_rows[tile * rows + query] if query < rows else _i32(-1)
            if row >= 0 and head < group:
                at = (_i64(row) * num_heads + kv_head * group + head) * head_dim + 2 * (lane & 3)
                for n in range(dim_tiles):
                    j = 4 * ((i >> 1) * dim_tiles + n) + 2 * (i & 1)
                    store_out(out, at + 8 * n, o[j] / whole, o[j + 1] / whole)

    arguments = {
        "qkv": pointer(FLOAT32),
        "kv": pointer(packed.stored),
        "block_tables": pointer(INT32),
        "positions": pointer(INT32),
        "tiles": pointer(INT32),
        "tile_rows": pointer(INT32),
        "out": pointer(ELEMENTS[out].stored),
        "max_blocks": INT32,
        "window": INT32,
        "scale": FLOAT32,
    }
    shared_bytes = 16 * (q_words + 4 * stage_words)
    return build(
        paged_prefill, arguments, name="paged_prefill", threads=THREADS, registers=255, shared_bytes=shared_bytes
    )
