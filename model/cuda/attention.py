"""Attention on the card: which rows share a pass over keys and values, and the launches of one layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...cuda_kernels import paged_decode, paged_float32, paged_prefill, tiles
from ...cuda_kernels.kv_formats import KV_FORMATS
from ...cuda_kernels.layout import SPLIT_TOKENS, AttentionShape
from ..backend import BackendLimits
from ..batch import StepBatch
from .device import CudaDevice, KernelMaker
from .staging import Mirror

Int32 = NDArray[np.int32]

PARTS_BYTES = 256 << 20  # what splits of one launch may leave behind; more rows take several launches
PREFILL_ROWS = 16  # rows of one sequence from which on `fast` takes the prefill kernel


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one launch of `paged_decode` covers: a stretch of tiles, and the stretch of rows that holds theirs."""

    first_tile: int
    num_tiles: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's launches in every layer of one window."""

    columns: int
    grid_splits: int
    chunks: tuple[Chunk, ...]
    in_parts: bool = False  # some row sees several splits
    num_prefill_tiles: int = 0


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    """Addresses of one layer's arrays, as the kernels document them; `parts` is shared by all layers."""

    qkv: int
    kv: int
    scales: int
    out: int
    parts: int


class Attention:
    """Plans a step, then launches layer by layer. `fast` prompts take a kernel of their own (see `paged_prefill`)."""

    def __init__(
        self,
        device: CudaDevice,
        shape: AttentionShape,
        out: str,
        limits: BackendLimits,
        windows: Iterable[int],
        fast: bool,
    ) -> None:
        self._device, self.shape, self._out = device, shape, out
        self._windows = sorted(set(windows))
        self._max_rows = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        self.max_blocks = -(-limits.max_model_len // limits.block_size)
        self._max_splits = -(-limits.max_model_len // SPLIT_TOKENS)
        self._float32 = shape.kv == "float32"
        kv = KV_FORMATS[shape.kv]
        self._fast = fast and not self._float32 and not kv.scaled and shape.head_dim % 16 == 0
        row_floats = shape.num_heads * self._max_splits
        self._parts_rows = max(16, min(self._max_rows, PARTS_BYTES // (4 * row_floats * (shape.head_dim + 1))))
        self._lse_bytes = 4 * self._parts_rows * row_floats
        self.parts_bytes = 0 if self._float32 else self._lse_bytes * (shape.head_dim + 1)

    def fields(self) -> dict[str, tuple[int, DTypeLike]]:
        """Arrays that a plan fills, by name."""
        found: dict[str, tuple[int, DTypeLike]] = {"sequences": (self._max_rows, np.int32)}
        for window in self._windows:
            found[f"tiles {window}"] = (2 * 3 * self._max_rows, np.int32)  # twice: tiles of shared prefixes
            rows = self._rows_per_tile(paged_decode.max_columns(self.shape))
            found[f"tile_rows {window}"] = (2 * self._max_rows * rows, np.int32)
            if self._fast:
                found[f"prefill_tiles {window}"] = (3 * self._max_rows, np.int32)
                rows = paged_prefill.rows_per_tile(self.shape)
                found[f"prefill_tile_rows {window}"] = (self._max_rows * rows, np.int32)
        return found

    def _rows_per_tile(self, columns: int) -> int:
        return paged_decode.rows_per_tile(self.shape, columns)

    def kernels(self) -> list[KernelMaker]:
        """Everything that `launch` may launch."""
        if self._float32:
            return [partial(paged_float32.paged_float32, self.shape)]
        columns = {paged_decode.min_columns(self.shape), paged_decode.max_columns(self.shape)}
        found = [partial(paged_decode.paged_decode, self.shape, self._out, n) for n in sorted(columns)]
        found.append(partial(paged_decode.combine, self.shape, self._out))
        return [*found, partial(paged_prefill.paged_prefill, self.shape, self._out)] if self._fast else [*found]

    # -- once a step --------------------------------------------------------------------------------------------------

    def plan(self, batch: StepBatch, rows: int, arrays: Mirror) -> dict[int, AttentionPlan]:
        """A plan for each window; `rows` - T rows of padding attend to nothing (decode steps only)."""
        counts = np.diff(batch.query_start)
        sequences = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        arrays.put("sequences", sequences, fill=-1, length=rows)
        if self._float32:
            return dict.fromkeys(self._windows, AttentionPlan(0, 0, ()))
        return {window: self._plan(batch, counts, rows, window, arrays) for window in self._windows}

    def _plan(self, batch: StepBatch, counts: Int32, rows: int, window: int, arrays: Mirror) -> AttentionPlan:
        decoding = bool((counts == 1).all())
        shared = []
        if decoding and window == 0 and rows <= self._parts_rows:
            shared = tiles.shared_prefixes(batch.block_tables, batch.seq_lens, self.shape.block_size)
        columns = (paged_decode.max_columns if shared or not decoding else paged_decode.min_columns)(self.shape)
        rows_per_tile = self._rows_per_tile(columns)
        plan = tiles.row_tiles(batch.query_start, batch.seq_lens, rows_per_tile, window)
        num_prefill = 0
        if self._fast and not decoding:
            prompts = counts >= PREFILL_ROWS
            prefill_rows = paged_prefill.rows_per_tile(self.shape)
            prefill = tiles.row_tiles(batch.query_start, batch.seq_lens, prefill_rows, window).of(prompts)
            arrays.put(f"prefill_tiles {window}", prefill.tiles)
            arrays.put(f"prefill_tile_rows {window}", prefill.tile_rows)
            plan, num_prefill = plan.of(~prompts), len(prefill.tiles)
        padding = rows - len(batch.tokens)
        if shared and rows_per_tile > 1:
            plan = tiles.shared_prefix_tiles(plan, shared)
            padding = 2 * rows - len(plan.tiles)  # at most as many shared tiles as rows: one size to capture
        plan = tiles.with_padding(plan, padding)
        arrays.put(f"tiles {window}", plan.tiles)
        arrays.put(f"tile_rows {window}", plan.tile_rows)
        splits = min(1 << (plan.grid_splits - 1).bit_length(), self._max_splits)  # few sizes: few captured graphs
        chunks = (Chunk(0, len(plan.tiles), 0, rows),) if shared else self._chunks(plan, padding, rows)
        return AttentionPlan(columns, splits, chunks, bool(shared) or splits > 1, num_prefill)

    def _chunks(self, plan: tiles.TilePlan, padding: int, rows: int) -> tuple[Chunk, ...]:
        """Cut a plan so that no launch's rows need more room than there is for parts."""
        first = plan.tile_rows[:, 0].copy()
        end = plan.tile_rows.max(axis=1, initial=0) + 1
        if padding:  # each padding tile stands for a row of its own
            first[-padding:] = np.arange(rows - padding, rows)
            end[-padding:] = first[-padding:] + 1
        chunks, start = [], 0
        while start < len(first):
            stop = int(np.searchsorted(end, first[start] + self._parts_rows, side="right"))
            chunks.append(Chunk(start, stop - start, int(first[start]), int(end[stop - 1] - first[start])))
            start = stop
        return tuple(chunks)

    # -- once a layer -------------------------------------------------------------------------------------------------

    def launch(
        self, arrays: Mirror, plan: AttentionPlan, rows: int, window: int, scale: float, at: AttentionBuffers
    ) -> None:
        """Launch one layer over `rows` rows."""
        shape = self.shape
        tables, positions = arrays.address("block_tables"), arrays.address("positions")
        numbers = self.max_blocks, window, scale * math.log2(math.e)
        if self._float32:
            kernel = paged_float32.paged_float32(shape)
            inputs = at.qkv, at.kv, tables, arrays.address("sequences"), positions, at.out
            self._device.launch(kernel, (-(-shape.num_heads // paged_float32.WARPS), rows), (*inputs, *numbers))
            return
        for chunk in plan.chunks:
            self._launch_chunk(arrays, plan, chunk, window, numbers[2], at)
        if plan.num_prefill_tiles:
            kernel = paged_prefill.paged_prefill(shape, self._out)
            grid = plan.num_prefill_tiles, shape.num_kv_heads * paged_prefill.head_chunks(shape)
            planned = arrays.address(f"prefill_tiles {window}"), arrays.address(f"prefill_tile_rows {window}")
            self._device.launch(kernel, grid, (at.qkv, at.kv, tables, positions, *planned, at.out, *numbers))

    def _launch_chunk(
        self, arrays: Mirror, plan: AttentionPlan, chunk: Chunk, window: int, scale: float, at: AttentionBuffers
    ) -> None:
        shape, first = self.shape, chunk.first_row
        lse, parts = at.parts, at.parts + self._lse_bytes
        # Kernels index parts by row: the chunk's first row has to come out at the start of the room for parts.
        lse_row = 4 * shape.num_heads * self._max_splits
        shifted = parts - first * lse_row * shape.head_dim, lse - first * lse_row
        planned = (
            arrays.address(f"tiles {window}", 3 * chunk.first_tile),
            arrays.address(f"tile_rows {window}", self._rows_per_tile(plan.columns) * chunk.first_tile),
        )
        inputs = at.qkv, at.kv, at.scales, arrays.address("block_tables"), arrays.address("positions"), *planned
        self._device.launch(
            paged_decode.paged_decode(shape, self._out, plan.columns),
            (plan.grid_splits, shape.num_kv_heads * paged_decode.head_chunks(shape), chunk.num_tiles),
            (*inputs, at.out, *shifted, self.max_blocks, self._max_splits, window, scale),
        )
        if not plan.in_parts:
            return  # every row saw one split, and `paged_decode` wrote its output
        width = shape.num_heads * shape.head_dim
        out = at.out + first * width * (4 if self._out == "float32" else 2)
        self._device.launch(
            paged_decode.combine(shape, self._out),
            (-(-width // paged_decode.THREADS), chunk.num_rows),
            (arrays.address("positions", first), parts, lse, out, self._max_splits, window),
        )
