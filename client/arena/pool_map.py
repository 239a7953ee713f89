"""A snapshot of the pool: what every block is, whose, and how often it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..wire.errors import ProtocolError
from ..wire.token_ids import unpack_token_ids

FREE, USED, CACHED = 0, 1, 2
NOBODY, HIDDEN = -1, -2
"""Owners of blocks that nobody is charged for, and of those whose owner the caller may not know."""


@dataclass(frozen=True, slots=True)
class PoolMap:
    """`sequences` are the rows of `ps`, `counters` the figures of `stats`, all of the same moment."""

    block_size: int
    states: NDArray[np.uint8]  # (num_blocks,) FREE, USED or CACHED
    owners: NDArray[np.int32]  # (num_blocks,) uid, NOBODY or HIDDEN
    ref_counts: NDArray[np.uint16]  # (num_blocks,) sequences that hold the block
    sequences: list[dict[str, Any]]
    counters: dict[str, Any]

    @property
    def num_blocks(self) -> int:
        return len(self.states)

    def count(self, state: int) -> int:
        return int(np.count_nonzero(self.states == state))

    @classmethod
    def of(cls, value: Any) -> PoolMap:
        """From the daemon's answer. Raises ProtocolError naming what does not fit."""
        if not isinstance(value, dict):
            raise ProtocolError("the daemon's answer must be a map", field="value")
        num_blocks, block_size = value.get("num_blocks"), value.get("block_size")
        if not isinstance(num_blocks, int) or not isinstance(block_size, int) or block_size < 1:
            raise ProtocolError("the daemon's answer must have num_blocks and block_size", field="value")
        counters = value.get("counters", {})
        if not isinstance(counters, dict):
            raise ProtocolError("must be a map", field="value.counters")
        return cls(
            block_size=block_size,
            states=_array(value, "states", "u1", num_blocks),
            owners=_array(value, "owners", "<i4", num_blocks),
            ref_counts=_array(value, "ref_counts", "<u2", num_blocks),
            sequences=rows_of(value.get("sequences")),
            counters=counters,
        )


def _array(value: dict[str, Any], name: str, dtype: str, num_blocks: int) -> NDArray[Any]:
    packed = value.get(name)
    if not isinstance(packed, bytes) or len(packed) != num_blocks * np.dtype(dtype).itemsize:
        raise ProtocolError(
            f"must be one {np.dtype(dtype).name} for each of {num_blocks} blocks", field=f"value.{name}"
        )
    return np.frombuffer(packed, dtype=dtype)


def rows_of(value: Any) -> list[dict[str, Any]]:
    """Rows of sequences, their `blocks` unpacked to lists. Raises ProtocolError."""
    if not isinstance(value, tuple) or not all(isinstance(row, dict) for row in value):
        raise ProtocolError("the daemon's answer must be an array of maps", field="value")
    return [row | {"blocks": _block_ids(row["blocks"])} if "blocks" in row else row for row in value]


def _block_ids(packed: Any) -> list[int]:
    if not isinstance(packed, bytes) or len(packed) % 4:
        raise ProtocolError("must be packed int32", field="value.blocks")
    block_ids: list[int] = unpack_token_ids(packed).tolist()
    return block_ids
