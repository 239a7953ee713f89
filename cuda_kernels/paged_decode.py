"""Attention of a few query rows over paged keys and values, on tensor cores: decode, split along the tokens.

For a query q at position p and the tokens t that it sees (p - window < t <= p):

    s_t = scale * q . k_t        out = sum_t exp(s_t) v_t / sum_t exp(s_t)

Tokens are cut into splits of SPLIT_TOKENS at fixed positions. One block computes, for up to 8 (or 16) query rows of one
KV head, the part of one split: a normalised output and its log-sum-exp (base 2). `combine` adds the parts, in order,
by their weights. A row's arithmetic depends on its own position only: not on the other rows of its tile, nor on the
batch. So a tile may hold the heads of one decoding row, rows of a prompt, or rows of several sequences that share a
prefix (cascade), and all give the same bits; `tiles.py` makes these plans.

Grid (splits, num_kv_heads * head_chunks, num_tiles), 4 warps a block. Warp w takes 16-token tiles w, w + 4, ... of its
split. With g = lane / 4 and c = lane % 4:

    S^T = K Q^T     lane holds K[g, :] and K[g + 8, :], 8 dims of every 32, by 16-byte loads: that is the A fragment of
                    two products, if Q^T uses the same order of dims, which a dot product does not notice
    P^T             (16 tokens, 8 rows): turned from the C to the B fragment by `movmatrix`
    O^T += V^T P^T  lane holds 8 dims of tokens 2c, 2c + 1, 2c + 8, 2c + 9, by 16-byte loads; `prmt` pairs the tokens

so nothing passes through shared memory until the four warps' sums are merged, in order, at the end.

    qkv           (T, (num_heads + 2 num_kv_heads) * head_dim) float32, queries already rotated
    kv            (num_blocks, 2, num_kv_heads, block_size, head_dim), 16- or 8-bit: one layer (layout.py)
    scales        (num_blocks, 2, num_kv_heads, block_size) float32: read for 8-bit formats only (kv_formats.py)
    block_tables  (S, max_blocks) int32
    positions     (T,) int32
    tiles         (num_tiles, 3) int32: sequence, first and last token that any of its rows may read
    tile_rows     (num_tiles, rows_per_tile) int32: rows of qkv, -1 where unused
    out           (T, num_heads * head_dim) float32 or 16-bit; written here for rows that see one split only
    parts         (T, num_heads, max_splits, head_dim) float32
    lse           (T, num_heads, max_splits) float32
"""

from __future__ import annotations

import math
from typing import Any

from .cache import kernel_factory
from .compiler import FLOAT32, INT32, Kernel, build, pointer
from .elements import ELEMENTS
from .intrinsics import exp2, load_f32x4, log2, permute_bytes, transpose_8x8
from .jit import cuda, device_function, types
from .kv_formats import KV_FORMATS
from .layout import SPLIT_TOKENS, AttentionShape
from .reductions import ALL_LANES

WARPS = 4
THREADS = 32 * WARPS
TILE_TOKENS = 16
TILES_PER_WARP = SPLIT_TOKENS // (TILE_TOKENS * WARPS)
COLUMNS = 8  # query rows of one `mma`

_i32, _i64, _u32, _f32 = types.int32, types.int64, types.uint32, types.float32
_NEVER = -math.inf


def head_chunks(shape: AttentionShape) -> int:
    """Into how many blocks the query heads of one KV head are cut: what their outputs leave of the registers."""
    return -(-shape.queries_per_kv_head // (COLUMNS * max_columns(shape)))


def heads_per_tile(shape: AttentionShape) -> int:
    return -(-shape.queries_per_kv_head // head_chunks(shape))


def rows_per_tile(shape: AttentionShape, columns: int) -> int:
    """Token rows of one tile of `columns` times 8 query rows; their heads share every load of keys and values."""
    return COLUMNS * columns // heads_per_tile(shape)


def min_columns(shape: AttentionShape) -> int:
    """`columns` that one row's heads need: what a decode step uses."""
    return -(-heads_per_tile(shape) // COLUMNS)


def max_columns(shape: AttentionShape) -> int:
    """The most `columns` that fit the registers: what rows of a prompt use."""
    return 1 if shape.head_dim > 128 else 2


def _registers(shape: AttentionShape, columns: int) -> int:
    """Budget a thread: what keys, values and outputs of a tile take."""
    if shape.head_dim > 128:
        return 255
    return {1: 112, 2: 168}[columns] if shape.head_dim <= 64 else {1: 168, 2: 255}[columns]


@kernel_factory
def paged_decode(shape: AttentionShape, out: str, columns: int) -> Kernel:
    """Kernel for tiles of `columns` times 8 query rows; `shape.kv` is any format but float32, `out` any element."""
    kv_format = KV_FORMATS[shape.kv]
    mma, pack, load8, scaled = kv_format.mma, kv_format.pack, kv_format.load8, kv_format.scaled
    unit, gain = kv_format.unit, kv_format.gain
    narrow = ELEMENTS[out].narrow
    head_dim, block_size, num_heads, num_kv_heads = (
        shape.head_dim,
        shape.block_size,
        shape.num_heads,
        shape.num_kv_heads,
    )
    group, heads, chunks = shape.queries_per_kv_head, heads_per_tile(shape), head_chunks(shape)
    rows = rows_per_tile(shape, columns)
    qkv_width, plane = shape.qkv_width, shape.plane
    key_chunks, value_chunks = -(-head_dim // 32), -(-head_dim // 64)
    q_size, k_size, v_size = 4 * key_chunks * columns, 8 * key_chunks, 16 * value_chunks
    o_size, pair_size = 16 * value_chunks * columns, 2 * columns
    o_stride = 16 * value_chunks
    merge_stride = head_dim + 1  # odd: the four columns that a warp writes at once fall into different banks
    merge_size = WARPS * COLUMNS * merge_stride
    stat_size = WARPS * COLUMNS

    @device_function
    def row_of(tile_rows: Any, tile: Any, column: Any) -> Any:
        """The token row of a column of the tile, or -1."""
        return tile_rows[tile * rows + column // heads] if column < rows * heads else _i32(-1)

    @device_function
    def head_of(kv_head: Any, chunk: Any, column: Any) -> Any:
        """The query head of a column; past the KV head's last one in the last chunk (see `valid`)."""
        return kv_head * group + chunk * heads + column % heads

    @device_function
    def load_queries(q: Any, qkv: Any, tile_rows: Any, tile: Any, kv_head: Any, chunk: Any, lane: Any) -> None:
        """B fragments of Q^T: lane (g, c) holds dims 32 j + 8 c .. + 7 of column g, zero where there is none."""
        for n in range(columns):
            column = COLUMNS * n + (lane >> 2)
            row = row_of(tile_rows, tile, column)
            missing = row < 0 or chunk * heads + column % heads >= group
            source = _i64(0) if missing else _i64(row) * qkv_width + head_of(kv_head, chunk, column) * head_dim
            for j in range(key_chunks):
                dim = 32 * j + 8 * (lane & 3)
                q0 = q1 = q2 = q3 = _u32(0)
                if not missing and dim < head_dim:
                    a, b, c, d = load_f32x4(qkv, source + dim)
                    q0, q1 = pack(a, b), pack(c, d)
                    a, b, c, d = load_f32x4(qkv, source + dim + 4)
                    q2, q3 = pack(a, b), pack(c, d)
                at = 4 * (key_chunks * n + j)
                q[at], q[at + 1], q[at + 2], q[at + 3] = q0, q1, q2, q3

    @device_function
    def load_keys(k: Any, kv: Any, near: Any, far: Any, lane: Any) -> None:
        """A fragments of K: tokens g and g + 8 start at elements `near` and `far`."""
        for j in range(key_chunks):
            dim = min(32 * j + 8 * (lane & 3), head_dim - 8)
            k[8 * j], k[8 * j + 1], k[8 * j + 2], k[8 * j + 3] = load8(kv, near + dim)
            k[8 * j + 4], k[8 * j + 5], k[8 * j + 6], k[8 * j + 7] = load8(kv, far + dim)

    @device_function
    def load_values(v: Any, kv: Any, token: Any, start: Any, lane: Any) -> None:
        """8 dims of every 64 of a token's values, into the `token`-th quarter of each chunk of `v`."""
        for j in range(value_chunks):
            dim = min(64 * j + 8 * (lane >> 2), head_dim - 8)
            at = 16 * j + 4 * token
            v[at], v[at + 1], v[at + 2], v[at + 3] = load8(kv, start + dim)

    @device_function
    def weigh(s: Any, scale: Any, token: Any, first: Any, last: Any) -> Any:
        """A scaled score in base 2, or -inf where the query does not see the token."""
        return s * scale if first <= token and token <= last else _f32(_NEVER)

    @device_function
    def accumulate(o: Any, v: Any, n: Any, p0: Any, p1: Any, shrink0: Any, shrink1: Any) -> None:
        """O^T = O^T * shrink + V^T P^T for one tile of columns."""
        for j in range(value_chunks):
            for i in range(4):
                at, a = o_stride * n + 16 * j + 4 * i, 16 * j + i
                o[at], o[at + 1], o[at + 2], o[at + 3] = mma(
                    permute_bytes(v[a], v[a + 4], _u32(0x5410)),
                    permute_bytes(v[a], v[a + 4], _u32(0x7632)),
                    permute_bytes(v[a + 8], v[a + 12], _u32(0x5410)),
                    permute_bytes(v[a + 8], v[a + 12], _u32(0x7632)),
                    p0,
                    p1,
                    o[at] * shrink0,
                    o[at + 1] * shrink1,
                    o[at + 2] * shrink0,
                    o[at + 3] * shrink1,
                )

    @device_function
    def column_max(a: Any, b: Any) -> Any:
        """The largest of two values per lane over the lanes of a column (those that share c)."""
        value = max(a, b)
        for step in (4, 8, 16):
            value = max(value, cuda.shfl_xor_sync(ALL_LANES, value, step))
        return value

    @device_function
    def column_sum(value: Any) -> Any:
        for step in (4, 8, 16):
            value += cuda.shfl_xor_sync(ALL_LANES, value, step)
        return value

    def paged_decode(
        qkv: Any,
        kv: Any,
        scales: Any,
        block_tables: Any,
        positions: Any,
        tiles: Any,
        tile_rows: Any,
        out: Any,
        parts: Any,
        lse: Any,
        max_blocks: Any,
        max_splits: Any,
        window: Any,
        scale: Any,
    ) -> None:
        tile = cuda.blockIdx.z
        first_token, last_token = tiles[3 * tile + 1], tiles[3 * tile + 2]
        split = first_token // SPLIT_TOKENS + cuda.blockIdx.x
        split_start = split * SPLIT_TOKENS
        if split_start > last_token:
            return
        kv_head, chunk = cuda.blockIdx.y // chunks, cuda.blockIdx.y % chunks
        thread = cuda.threadIdx.x & (THREADS - 1)
        lane, warp = thread & 31, thread >> 5

        # Lane 2 i + h (h: first or second 8 tokens) finds the block of the warp's i-th tile.
        half_tile = split_start + TILE_TOKENS * (warp + WARPS * ((lane & 7) >> 1)) + 8 * (lane & 1)
        half_tile = min(max(half_tile, first_token), last_token)
        block = block_tables[_i64(tiles[3 * tile]) * max_blocks + half_tile // block_size]

        q = cuda.local.array(q_size, types.uint32)
        load_queries(q, qkv, tile_rows, tile, kv_head, chunk, lane)
        first = cuda.local.array(pair_size, types.int32)  # the tokens that the lane's columns 2c, 2c + 1 see
        last = cuda.local.array(pair_size, types.int32)
        top = cuda.local.array(pair_size, types.float32)  # running maximum, base 2
        total = cuda.local.array(pair_size, types.float32)  # this lane's share of the sum
        for i in range(pair_size):
            row = row_of(tile_rows, tile, COLUMNS * (i >> 1) + 2 * (lane & 3) + (i & 1))
            last[i] = positions[row] if row >= 0 else _i32(-1)
            first[i] = max(last[i] - window + 1, 0) if window > 0 else _i32(0)
            top[i], total[i] = _f32(_NEVER), _f32(0)
        o = cuda.local.array(o_size, types.float32)
        for i in range(o_size):
            o[i] = _f32(0)

        k = cuda.local.array(k_size, types.uint32)
        v = cuda.local.array(v_size, types.uint32)
        for i in range(TILES_PER_WARP):
            token = split_start + TILE_TOKENS * (warp + WARPS * i)
            near_block = cuda.shfl_sync(ALL_LANES, block, 2 * i)
            far_block = cuda.shfl_sync(ALL_LANES, block, 2 * i + 1)
            if token > last_token or token + (TILE_TOKENS - 1) < first_token:
                continue
            # Tokens outside [first_token, last_token] are read as the nearest one inside: finite, and weighed 0.
            near = _i64(near_block) * (2 * num_kv_heads) + kv_head  # planes: one head's keys (or values) in one block
            far = _i64(far_block) * (2 * num_kv_heads) + kv_head
            near_key = min(max(token + (lane >> 2), first_token), last_token) % block_size
            far_key = min(max(token + 8 + (lane >> 2), first_token), last_token) % block_size
            load_keys(k, kv, near * plane + near_key * head_dim, far * plane + far_key * head_dim, lane)
            near_scale = far_scale = scale
            near_gain = far_gain = _f32(1)
            if scaled:
                near_scale *= scales[near * block_size + near_key] * _f32(unit)
                far_scale *= scales[far * block_size + far_key] * _f32(unit)
                near_gain = scales[(near + num_kv_heads) * block_size + near_key] * _f32(gain)
                far_gain = scales[(far + num_kv_heads) * block_size + far_key] * _f32(gain)
            near = (near + num_kv_heads) * plane
            far = (far + num_kv_heads) * plane
            for pair in range(2):
                near_value = min(max(token + 2 * (lane & 3) + pair, first_token), last_token) % block_size
                far_value = min(max(token + 8 + 2 * (lane & 3) + pair, first_token), last_token) % block_size
                load_values(v, kv, pair, near + near_value * head_dim, lane)
                load_values(v, kv, pair + 2, far + far_value * head_dim, lane)

            for n in range(columns):
                s0 = s1 = s2 = s3 = _f32(0)
                for j in range(key_chunks):
                    a, b = 8 * j, 4 * (key_chunks * n + j)
                    s0, s1, s2, s3 = mma(k[a], k[a + 4], k[a + 1], k[a + 5], q[b], q[b + 1], s0, s1, s2, s3)
                    s0, s1, s2, s3 = mma(k[a + 2], k[a + 6], k[a + 3], k[a + 7], q[b + 2], q[b + 3], s0, s1, s2, s3)
                near_token, far_token = token + (lane >> 2), token + 8 + (lane >> 2)
                s0 = weigh(s0, near_scale, near_token, first[2 * n], last[2 * n])
                s1 = weigh(s1, near_scale, near_token, first[2 * n + 1], last[2 * n + 1])
                s2 = weigh(s2, far_scale, far_token, first[2 * n], last[2 * n])
                s3 = weigh(s3, far_scale, far_token, first[2 * n + 1], last[2 * n + 1])
                top0 = max(top[2 * n], column_max(s0, s2))
                top1 = max(top[2 * n + 1], column_max(s1, s3))
                base0 = top0 if top0 > _f32(_NEVER) else _f32(0)
                base1 = top1 if top1 > _f32(_NEVER) else _f32(0)
                s0, s1, s2, s3 = exp2(s0 - base0), exp2(s1 - base1), exp2(s2 - base0), exp2(s3 - base1)
                shrink0, shrink1 = exp2(top[2 * n] - base0), exp2(top[2 * n + 1] - base1)
                total[2 * n] = total[2 * n] * shrink0 + (s0 + s2)
                total[2 * n + 1] = total[2 * n + 1] * shrink1 + (s1 + s3)
                top[2 * n], top[2 * n + 1] = top0, top1
                p0 = transpose_8x8(pack(s0 * near_gain, s1 * near_gain))
                p1 = transpose_8x8(pack(s2 * far_gain, s3 * far_gain))
                accumulate(o, v, n, p0, p1, shrink0, shrink1)

        merged = cuda.shared.array(merge_size, types.float32)  # (WARPS, COLUMNS, merge_stride)
        tops = cuda.shared.array(stat_size, types.float32)  # (WARPS, COLUMNS), then each warp's weight
        totals = cuda.shared.array(stat_size, types.float32)
        lses = cuda.shared.array(COLUMNS, types.float32)
        for n in range(columns):
            cuda.syncthreads()
            for i in range(2):
                column = 2 * (lane & 3) + i
                total_here = column_sum(total[2 * n + i])
                if lane < 4:
                    tops[COLUMNS * warp + column] = top[2 * n + i]
                    totals[COLUMNS * warp + column] = total_here
                at = (COLUMNS * warp + column) * merge_stride + 8 * (lane >> 2)
                for j in range(value_chunks):
                    if 64 * j + 8 * (lane >> 2) < head_dim:
                        for m in range(4):
                            merged[at + 64 * j + 2 * m] = o[o_stride * n + 16 * j + 4 * m + i]
                            merged[at + 64 * j + 2 * m + 1] = o[o_stride * n + 16 * j + 4 * m + 2 + i]
            cuda.syncthreads()
            if thread < COLUMNS:
                highest = tops[thread]
                for other in range(1, WARPS):
                    highest = max(highest, tops[COLUMNS * other + thread])
                base = highest if highest > _f32(_NEVER) else _f32(0)
                sum_all = _f32(0)
                for other in range(WARPS):
                    weight = exp2(tops[COLUMNS * other + thread] - base)
                    tops[COLUMNS * other + thread] = weight
                    sum_all += totals[COLUMNS * other + thread] * weight
                lses[thread] = base + log2(sum_all)
                for other in range(WARPS):
                    tops[COLUMNS * other + thread] /= sum_all * _f32(gain / unit)
            cuda.syncthreads()
            for element in range(thread, COLUMNS * head_dim, THREADS):
                column, dim = element // head_dim, element % head_dim
                row = row_of(tile_rows, tile, COLUMNS * n + column)
                if row < 0 or chunk * heads + (COLUMNS * n + column) % heads >= group:
                    continue
                last_seen = positions[row]
                first_seen = max(last_seen - window + 1, 0) if window > 0 else _i32(0)
                first_split, last_split = first_seen // SPLIT_TOKENS, last_seen // SPLIT_TOKENS
                if split < first_split or split > last_split:
                    continue
                value = _f32(0)
                for other in range(WARPS):
                    at = COLUMNS * other + column
                    value += merged[at * merge_stride + dim] * tops[at]
                head = head_of(kv_head, chunk, COLUMNS * n + column)
                if first_split == last_split:
                    out[(_i64(row) * num_heads + head) * head_dim + dim] = narrow(value)
                else:
                    at = (_i64(row) * num_heads + head) * max_splits + (split - first_split)
                    parts[at * head_dim + dim] = value
                    if dim == 0:
                        lse[at] = lses[column]

    arguments = {
        "qkv": pointer(FLOAT32),
        "kv": pointer(kv_format.stored),
        "scales": pointer(FLOAT32),
        "block_tables": pointer(INT32),
        "positions": pointer(INT32),
        "tiles": pointer(INT32),
        "tile_rows": pointer(INT32),
        "out": pointer(ELEMENTS[out].stored),
        "parts": pointer(FLOAT32),
        "lse": pointer(FLOAT32),
        "max_blocks": INT32,
        "max_splits": INT32,
        "window": INT32,
        "scale": FLOAT32,
    }
    return build(
        paged_decode,
        arguments,
        name=f"paged_decode_{COLUMNS * columns}",
        threads=THREADS,
        registers=_registers(shape, columns),
    )


@kernel_factory
def combine(shape: AttentionShape, out: str) -> Kernel:
    """Kernel that joins a row's parts: out = sum_s 2^(lse_s - M) part_s / sum_s 2^(lse_s - M), M the largest lse.

    Grid (ceil(num_heads * head_dim / 128), T), one output number a thread; rows of one split were written before.
    """
    narrow = ELEMENTS[out].narrow
    head_dim, num_heads = shape.head_dim, shape.num_heads

    def combine(positions: Any, parts: Any, lse: Any, out: Any, max_splits: Any, window: Any) -> None:
        row = cuda.blockIdx.y
        element = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        last_seen = positions[row]
        first_seen = max(last_seen - window + 1, 0) if window > 0 else _i32(0)
        num_splits = last_seen // SPLIT_TOKENS - first_seen // SPLIT_TOKENS + 1
        if element >= num_heads * head_dim or num_splits < 2:
            return
        first = (_i64(row) * num_heads + element // head_dim) * max_splits
        highest = lse[first]
        for split in range(1, num_splits):
            highest = max(highest, lse[first + split])
        value = weights = _f32(0)
        for split in range(num_splits):
            weight = exp2(lse[first + split] - highest)
            weights += weight
            value += weight * parts[(first + split) * head_dim + element % head_dim]
        out[_i64(row) * (num_heads * head_dim) + element] = narrow(value / weights)

    arguments = {
        "positions": pointer(INT32),
        "parts": pointer(FLOAT32),
        "lse": pointer(FLOAT32),
        "out": pointer(ELEMENTS[out].stored),
        "max_splits": INT32,
        "window": INT32,
    }
    return build(combine, arguments, name="combine", threads=THREADS, registers=40)
