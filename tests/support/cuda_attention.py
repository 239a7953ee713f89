"""Attention over a paged pool: ragged batches with the traps that a real pool has, and the launches of the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx import Counters
from tests.support import cuda_twins
from tests.support.cuda_rooms import layout, paged_decode, paged_prefill, tiles
from tests.support.cuda_run import launch
from tests.support.cuda_twins import stored, values
from tests.support.real_card import fresh, kernel_device

Array = NDArray[Any]


@dataclass
class Batch:
    """A step's attention input. Blocks are shuffled, the first may be shared; everything nobody may read is NaN."""

    shape: layout.AttentionShape
    qkv: Array  # (T, qkv_width) float32
    pool: Array  # (num_blocks, 2, num_kv_heads, block_size, head_dim) stored
    scales: Array  # (num_blocks, 2, num_kv_heads, block_size) float32; one number for formats without
    block_tables: Array  # (S, max_blocks) int32
    positions: Array  # (T,) int32
    sequences: Array  # (T,) int32
    query_start: Array  # (S + 1,) int32
    seq_lens: Array  # (S,) int32

    def expected(self, window: int = 0) -> Array:
        """(T, num_heads * head_dim) float64 by the twin."""
        shape = self.shape
        pool = values(self.pool, shape.kv)
        if self.pool.itemsize == 1:
            pool = pool * self.scales[..., None]
        out = []
        for row in range(len(self.positions)):
            last = int(self.positions[row])
            tokens = np.arange(max(0, last - window + 1) if window else 0, last + 1)
            blocks = self.block_tables[self.sequences[row], tokens // shape.block_size]
            keys, value = (pool[blocks, i, :, tokens % shape.block_size] for i in range(2))
            query = self.qkv[row, : shape.num_heads * shape.head_dim].reshape(shape.num_heads, shape.head_dim)
            out.append(cuda_twins.attention(query, keys, value, shape.head_dim**-0.5).ravel())
        return np.stack(out)


def make_batch(
    shape: layout.AttentionShape, lens: list[int], counts: list[int] | None = None, *, shared: int = 0, seed: int = 0
) -> Batch:
    """Sequences of `lens` tokens whose last `counts` (default 1) are this step's rows; all begin with the same `shared`
    tokens in the same blocks (a multiple of block_size)."""
    random = fresh(seed)
    counts = counts or [1] * len(lens)
    size = shape.block_size
    own = [-(-length // size) - shared // size for length in lens]
    num_blocks = shared // size + sum(own) + 2
    ids = random.permutation(num_blocks)
    tables = np.full((len(lens), max(-(-length // size) for length in lens)), -(2**30), np.int32)
    contents = np.full((num_blocks, 2, shape.num_kv_heads, size, shape.head_dim), np.nan)
    used = shared // size
    for s, length in enumerate(lens):
        blocks = np.concatenate([ids[: shared // size], ids[used : used + own[s]]])
        used += own[s]
        tables[s, : len(blocks)] = blocks
        tokens = np.arange(length)
        made = random.normal(0, 1, (length, 2, shape.num_kv_heads, shape.head_dim))
        contents[blocks[tokens // size], :, :, tokens % size] = made
    query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(n - c, n) for n, c in zip(lens, counts, strict=True)]).astype(np.int32)
    qkv = random.normal(0, 1, (len(positions), shape.qkv_width)).astype(np.float32)
    q_width = shape.num_heads * shape.head_dim
    element = "float16" if shape.kv in cuda_twins.LARGEST_CODE else shape.kv
    qkv[:, :q_width] = values(stored(qkv[:, :q_width], element), element)
    scales = np.ones(1, np.float32)
    if shape.kv in cuda_twins.LARGEST_CODE:
        scales = cuda_twins.head_scales(contents, shape.kv)
        contents = np.nan_to_num(contents / scales[..., None], nan=100.0)  # what nobody may read: NaN by its scale
    return Batch(
        shape,
        qkv,
        stored(contents, shape.kv),
        scales,
        tables,
        positions,
        np.repeat(np.arange(len(lens)), counts).astype(np.int32),
        query_start,
        np.array(lens, np.int32),
    )


def decode_attention(
    batch: Batch, window: int = 0, columns: int = 0, plan: tiles.TilePlan | None = None
) -> tuple[Array, Counters]:
    """out (T, num_heads * head_dim), in stored form, by `paged_decode` and `combine`."""
    shape, device = batch.shape, kernel_device()
    columns = columns or paged_decode.min_columns(shape)
    plan = plan or tiles.row_tiles(
        batch.query_start, batch.seq_lens, paged_decode.rows_per_tile(shape, columns), window
    )
    max_splits = int(batch.positions.max()) // layout.SPLIT_TOKENS + 1
    rows, width = len(batch.positions), shape.num_heads * shape.head_dim
    out = device.empty((rows, width), np.uint16)
    parts = device.empty((rows, shape.num_heads, max_splits, shape.head_dim), np.float32)
    lse = device.empty(parts.shape[:3], np.float32)
    positions = device.array(batch.positions)
    inputs = [device.array(each) for each in (batch.qkv, batch.pool, batch.scales, batch.block_tables)]
    planned = [device.array(each) for each in (plan.tiles, plan.tile_rows)]
    numbers = batch.block_tables.shape[1], max_splits, window, shape.head_dim**-0.5 * math.log2(math.e)
    grid = plan.grid_splits, shape.num_kv_heads * paged_decode.head_chunks(shape), len(plan.tiles)
    element = shape.kv if shape.kv in ("bfloat16", "float16") else "float16"
    kernel = paged_decode.paged_decode(shape, element, columns)
    counters = launch(device, kernel, grid, *inputs, positions, *planned, out, parts, lse, *numbers)
    grid = -(-width // paged_decode.THREADS), rows
    combine = paged_decode.combine(shape, element)
    counters += launch(device, combine, grid, positions, parts, lse, out, max_splits, window)
    return device.read(out), counters


def prefill_attention(batch: Batch, window: int = 0) -> tuple[Array, Counters]:
    """out (T, num_heads * head_dim), in stored form."""
    shape, device = batch.shape, kernel_device()
    plan = tiles.row_tiles(batch.query_start, batch.seq_lens, paged_prefill.rows_per_tile(shape), window)
    out = device.empty((len(batch.positions), shape.num_heads * shape.head_dim), np.uint16)
    given = batch.qkv, batch.pool, batch.block_tables, batch.positions, plan.tiles, plan.tile_rows
    inputs = [device.array(each) for each in given]
    grid = len(plan.tiles), shape.num_kv_heads * paged_prefill.head_chunks(shape)
    numbers = batch.block_tables.shape[1], window, shape.head_dim**-0.5 * math.log2(math.e)
    counters = launch(device, paged_prefill.paged_prefill(shape, shape.kv), grid, *inputs, out, *numbers)
    return device.read(out), counters
