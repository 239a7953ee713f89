"""How keys and values lie in the pool, for each format: the shapes that `rope` writes and `attention` reads.

A block holds for each layer K of all KV heads, then V of all KV heads; for each head

    float32   K [head_dim, block_size]               V [block_size, head_width]
    bfloat16  K [ceil(head_dim / 2), block_size, 2]  V [ceil(block_size / 2), head_width, 2]
    float16   like float32, in halves
    int8      scales [block_size] float32, then like float32, in bytes: a number is its code times its token's scale

so that 16 tokens of K, and 16 columns of V, are a panel of the matrix tile. head_width is head_dim filled up to a
multiple of 16. The pool is divided by layers first: what one layer reads of neighbouring blocks lies side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from .isa import BFLOAT16, CODES, FLOAT16, FLOAT32


@dataclass(frozen=True, slots=True)
class KvFormat:
    """One format. A lane is one of the 16 columns that a step of a tile reads."""

    tile_format: int  # how a tile reads the panels
    lane_bytes: int
    pair: int = 1  # numbers in a lane: dimensions of K, tokens of V
    scaled: bool = False

    def scales_bytes(self, block_size: int) -> int:
        """What stands before K, and before V, of one head in one block."""
        return 4 * block_size if self.scaled else 0

    def key_bytes(self, head_dim: int, block_size: int) -> int:
        """K of one head in one block."""
        return self.scales_bytes(block_size) + -(-head_dim // self.pair) * block_size * self.lane_bytes

    def value_bytes(self, head_width: int, block_size: int) -> int:
        """V of one head in one block."""
        return self.scales_bytes(block_size) + -(-block_size // self.pair) * head_width * self.lane_bytes


KV_FORMATS = {
    "float32": KvFormat(FLOAT32, 4),
    "bfloat16": KvFormat(BFLOAT16, 4, pair=2),
    "float16": KvFormat(FLOAT16, 2),
    "int8": KvFormat(CODES, 1, scaled=True),
}
