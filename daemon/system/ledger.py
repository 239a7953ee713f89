"""Where the memory goes, decided and printed once, before anybody is served: weights + workspace + pool = total.

The host pool belongs to the total where the device is the host; a card's lies on the host, page-locked.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..settings.config import Config
from ..settings.options import ConfigError, show_size

CPU_AUTO_SHARE, CPU_AUTO_BYTES = 0.25, 1 << 30
"""Of the memory that is free, and at most: a daemon on somebody's laptop leaves it to the others, and touching pages
that nobody asked for only delays the start. 1 GiB holds 46,000 tokens of a 135M model in bfloat16."""

CUDA_AUTO_SHARE = 0.9
"""A GPU's memory is there for the pool; the rest is for the driver and for other processes' contexts."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The daemon's memory. `available_bytes` is what was free on the device before the pool was allocated."""

    weights_bytes: int
    workspace_bytes: int
    block_bytes: int
    num_blocks: int
    block_size: int
    available_bytes: int
    max_model_len: int
    host_slots: int = 0  # of one block each, for preempted sequences
    host_apart: bool = False  # the host pool is not in the device's memory, but page-locked beside it

    @property
    def host_pool_bytes(self) -> int:
        return self.host_slots * self.block_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def _to_allocate_bytes(self) -> int:
        """Of the device's memory."""
        return self.pool_bytes + (0 if self.host_apart else self.host_pool_bytes)

    @property
    def total_bytes(self) -> int:
        """Of the device's memory."""
        return self.weights_bytes + self.workspace_bytes + self._to_allocate_bytes

    def lines(self) -> list[str]:
        """The ledger as a person reads it."""
        tokens = self.num_blocks * self.block_size
        free_bytes = self.available_bytes - self._to_allocate_bytes
        place = "page-locked on the host" if self.host_apart else "of preempted sequences"
        host = ("host pool", self.host_pool_bytes, f"{self.host_slots:,} blocks {place}")
        rows = [
            ("weights", self.weights_bytes, ""),
            ("workspace", self.workspace_bytes, ""),
            ("pool", self.pool_bytes, f"{self.num_blocks:,} blocks of {self.block_size} = {tokens:,} tokens"),
            *([host] if self.host_slots and not self.host_apart else []),
            ("total", self.total_bytes, f"{show_size(max(free_bytes, 0))} of the device stays free"),
            *([host] if self.host_slots and self.host_apart else []),
        ]
        return [f"{name:<10}{size / 2**20:>10,.1f} MiB  {note}".rstrip() for name, size, note in rows]


def plan_memory(
    config: Config,
    *,
    weights_bytes: int,
    workspace_bytes: int,
    block_bytes: int,
    available_bytes: int,
    max_model_len: int,
    auto_share: float,
    auto_bytes: int | None,
    host_apart: bool = False,
) -> Ledger:
    """How many blocks to allocate. Raises ConfigError, naming the setting and by how much, where it does not fit.

    `pool_bytes = auto`: what max_num_seqs sequences of max_model_len can use at most, but no more than `auto_share` of
    the memory that is free nor than `auto_bytes` (None: no such limit), and never less than one sequence of
    max_model_len.
    """
    blocks_per_sequence = -(-max_model_len // config.block_size)
    if config.pool_bytes is None:
        allowed_bytes = int(available_bytes * auto_share)
        if auto_bytes is not None:
            allowed_bytes = min(allowed_bytes, auto_bytes)
        num_blocks = min(config.max_num_seqs * blocks_per_sequence, allowed_bytes // block_bytes)
        num_blocks = max(num_blocks, blocks_per_sequence)
    else:
        num_blocks = config.pool_bytes // block_bytes
        if num_blocks == 0:
            raise ConfigError(
                f"pool_bytes {show_size(config.pool_bytes)} holds no block of {show_size(block_bytes)}; "
                f"set pool_bytes to at least {block_bytes}, or lower block_size"
            )
    needed = num_blocks * block_bytes
    if needed > available_bytes:
        what = "one sequence of max_model_len" if config.pool_bytes is None else "pool_bytes"
        raise ConfigError(
            f"{what} needs {show_size(needed)} and only {show_size(available_bytes)} are free, "
            f"{show_size(needed - available_bytes)} too little; lower {_knob(config)}"
        )
    host_slots = _host_slots(config, block_bytes)
    if not host_apart and (short := needed + host_slots * block_bytes - available_bytes) > 0:
        raise ConfigError(
            f"pool and host_pool_bytes need {show_size(short + available_bytes)} and only {show_size(available_bytes)} "
            f"are free, {show_size(short)} too little; lower host_pool_bytes, or {_knob(config)}"
        )
    return Ledger(
        weights_bytes,
        workspace_bytes,
        block_bytes,
        num_blocks,
        config.block_size,
        available_bytes,
        max_model_len,
        host_slots,
        host_apart,
    )


def _host_slots(config: Config, block_bytes: int) -> int:
    slots = config.host_pool_bytes // block_bytes
    if config.host_pool_bytes and not slots:
        raise ConfigError(
            f"host_pool_bytes {show_size(config.host_pool_bytes)} holds no block of {show_size(block_bytes)}; "
            f"set host_pool_bytes to 0, or to at least {block_bytes}"
        )
    return slots


def _knob(config: Config) -> str:
    return "max_model_len or kv_dtype's width" if config.pool_bytes is None else "pool_bytes"
