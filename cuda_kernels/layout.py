"""Where a token's keys and values lie in the pool, for every kernel that touches it.

    pool    (num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim) in the pool's format; 2: keys, values
    scales  (num_layers, num_blocks, 2, num_kv_heads, block_size) float32, 8-bit formats only

A layer's part is contiguous, so that one step of one layer stays within few memory pages; kernels of a layer receive
its part alone. Within a block, a head's keys are contiguous rows of head_dim: a warp reads whole rows, hence full
32-byte sectors, and 16 tokens of one head are one stretch (4 KiB at head_dim 128 in a 16-bit format).
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_HEAD_DIM = 256
BLOCK_SIZES = (8, 16, 32, 64, 128)
SPLIT_TOKENS = 256  # decode cuts a sequence here: more splits keep more of the card busy, fewer write fewer parts


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a compiled attention or KV kernel depends on. `kv` is the pool's format, an element's name."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv: str

    def __post_init__(self) -> None:
        if self.head_dim % 8 or not 0 < self.head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM} on CUDA, got {self.head_dim}")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {BLOCK_SIZES} on CUDA, got {self.block_size}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_width(self) -> int:
        """Columns of a row of `qkv`: queries, keys, values of every head."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def plane(self) -> int:
        """Numbers of one head's keys (or values) in one block."""
        return self.block_size * self.head_dim
