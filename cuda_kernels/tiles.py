"""Which query rows share a pass over keys and values: plans for `paged_decode`, made on the host once a step.

A plan is `tiles` (num_tiles, 3) int32: sequence, first and last token that any of its rows may read; and `tile_rows`
(num_tiles, rows_per_tile) int32: token rows, -1 where unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .layout import SPLIT_TOKENS

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The two arrays of a plan."""

    tiles: Int32  # (num_tiles, 3)
    tile_rows: Int32  # (num_tiles, rows_per_tile)

    @property
    def grid_splits(self) -> int:
        """Splits of the longest tile: the first dimension of `paged_decode`'s grid."""
        return int(np.max(self.tiles[:, 2] // SPLIT_TOKENS - self.tiles[:, 1] // SPLIT_TOKENS, initial=0)) + 1

    def of(self, sequences: NDArray[np.bool_]) -> TilePlan:
        """Only the tiles of some sequences (S,)."""
        chosen = sequences[self.tiles[:, 0]]
        return TilePlan(self.tiles[chosen], self.tile_rows[chosen])


def with_padding(plan: TilePlan, count: int) -> TilePlan:
    """`count` more tiles in which nothing happens, so that a captured launch of more tiles can run this plan."""
    if count == 0:
        return plan
    tiles = np.tile(np.array([0, 0, -1], np.int32), (count, 1))
    rows = np.full((count, plan.tile_rows.shape[1]), -1, np.int32)
    return TilePlan(np.concatenate([plan.tiles, tiles]), np.concatenate([plan.tile_rows, rows]))


def row_tiles(query_start: Int32, seq_lens: Int32, rows_per_tile: int, window: int = 0) -> TilePlan:
    """Rows of a sequence in order, `rows_per_tile` at a time: decoding rows get a tile each.

    query_start (S + 1,) and seq_lens (S,) are a step's (see `StepBatch`); `window` > 0 is that of the layer.
    """
    counts = np.diff(query_start)
    tiles_of = -(-counts // rows_per_tile)  # (S,)
    sequence = np.repeat(np.arange(len(counts)), tiles_of)
    nth = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    first_row = nth * rows_per_tile  # within the sequence's rows
    last_row = np.minimum(first_row + rows_per_tile, counts[sequence]) - 1
    start = (seq_lens - counts)[sequence]
    first_token = np.maximum(start + first_row - window + 1, 0) if window > 0 else np.zeros_like(first_row)
    rows = first_row[:, None] + np.arange(rows_per_tile)
    rows = np.where(rows <= last_row[:, None], rows + query_start[sequence][:, None], -1)
    return TilePlan(
        np.stack([sequence, first_token, start + last_row], axis=1).astype(np.int32).reshape(-1, 3),
        rows.astype(np.int32).reshape(-1, rows_per_tile),
    )


def shared_prefixes(block_tables: Int32, seq_lens: Int32, block_size: int) -> list[tuple[list[int], int]]:
    """Groups of sequences that begin with the same blocks, at least a split of them: (sequences, shared tokens).

    The shared tokens end before any member's last one, whose row must see its own block.
    """
    blocks = SPLIT_TOKENS // block_size
    groups: dict[bytes, list[int]] = {}
    for sequence in np.flatnonzero(seq_lens > SPLIT_TOKENS):
        groups.setdefault(block_tables[sequence, :blocks].tobytes(), []).append(int(sequence))
    found = []
    for members in groups.values():
        if len(members) > 1:
            whole = (int(seq_lens[members].min()) - 1) // block_size
            tables = block_tables[members, :whole]
            differ = (tables != tables[0]).any(axis=0)
            found.append((members, (int(differ.argmax()) if differ.any() else whole) * block_size))
    return found


def shared_prefix_tiles(plan: TilePlan, groups: Iterable[tuple[Sequence[int], int]]) -> TilePlan:
    """Make sequences that begin with the same blocks read them once (cascade); their outputs keep their bits.

    `groups` are (sequences, shared_tokens), each sequence in at most one group; only whole splits are shared. `plan`
    must be `row_tiles` of a step in which these sequences have one tile each, without a window.
    """
    rows_per_tile = plan.tile_rows.shape[1]
    tiles, tile_rows = plan.tiles.copy(), plan.tile_rows
    tile_of = {int(sequence): i for i, sequence in enumerate(tiles[:, 0])}
    shared_tiles, shared_rows = [], []
    for sequences, shared_tokens in groups:
        shared = shared_tokens // SPLIT_TOKENS * SPLIT_TOKENS
        members = [tile_of[sequence] for sequence in sequences]
        if shared == 0 or len(members) < 2:
            continue
        tiles[members, 1] = shared
        rows = tile_rows[members]
        rows = rows[rows >= 0]
        for start in range(0, len(rows), rows_per_tile):
            some = np.full(rows_per_tile, -1, np.int32)
            some[: len(rows[start : start + rows_per_tile])] = rows[start : start + rows_per_tile]
            shared_tiles.append((sequences[0], 0, shared - 1))
            shared_rows.append(some)
    if not shared_tiles:
        return plan
    return TilePlan(
        np.concatenate([np.array(shared_tiles, np.int32), tiles]), np.concatenate([np.stack(shared_rows), tile_rows])
    )
