"""The contract between the daemon and a device: everything the engine may ask of a back end.

A back end owns the weights, the workspace and the pool's memory; it knows nothing of sequences, owners or sockets.
At most one step is in flight. Calls come from one thread (the daemon's loop), and only `launch` overlaps with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .batch import StepBatch, StepResult

Progress = Callable[[str, float], None]
"""Called while a back end starts: what is being done, and the share done (0 to 1)."""


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """Largest step that will ever be launched; workspaces are allocated for it once."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Backend(Protocol):
    """A device that runs a Program over a paged pool. Construct it (weights and workspace), then `allocate_pool`."""

    @property
    def description(self) -> str:
        """One line for people: device, kernels chosen, dtypes, threads."""

    @property
    def kv_layout(self) -> str:
        """A word that is another one wherever the same tokens would leave other bytes in a block."""

    @property
    def works_ahead(self) -> bool:
        """Copies of swaps go on beside steps, and a step may be begun before it is asked for: the scheduler then leaves
        a sequence that is swapped in out of one step, and takes a block one token early."""

    @property
    def weights_bytes(self) -> int: ...

    @property
    def workspace_bytes(self) -> int: ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, K and V of all layers."""

    def available_bytes(self) -> int:
        """Memory of the device that is free now; what `pool_bytes = auto` starts from."""

    def allocate_pool(self, num_blocks: int) -> None:
        """Allocate (and touch) the pool. Raises MemoryError naming pool_bytes."""

    def launch(self, batch: StepBatch) -> None:
        """Start one step and return at once. `batch`'s arrays must stay untouched until `collect`."""

    def fileno(self) -> int:
        """A descriptor that polls readable when the launched step is done."""

    def collect(self) -> StepResult:
        """Wait for the launched step and return its result. Raises RuntimeError if the device failed."""

    def copy_blocks(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy whole blocks inside the pool, all layers (copy-on-write). Not while a step is in flight."""

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """(len(blocks), block_bytes) uint8: raw contents, for snapshots. Not while a step is in flight."""

    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """The inverse of `read_blocks`."""

    def allocate_host(self, num_slots: int) -> None:
        """Allocate (and touch) the host pool, of one block a slot: page-locked where a device copies by itself. Raises
        MemoryError naming host_pool_bytes."""

    def swap_out(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks to host slots. It may return before they are there: whatever is asked for later may write to the
        blocks at once, and finds the slots full. Not while a step is in flight. A failure may show in `collect`."""

    def swap_in(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy host slots to blocks. It may return before they are there: whatever reads the blocks later waits for
        them. Not while a step is in flight. A failure may show in `collect`."""

    def read_host(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """(len(slots), block_bytes) uint8: raw contents, as `read_blocks` gives those of blocks."""

    def take_swap_times(self) -> tuple[int, float]:
        """Blocks that were swapped, either way, and the seconds that copying them took: of all copies that have ended
        since the last call."""

    def keys_values(self, data: NDArray[np.uint8]) -> NDArray[np.float32]:
        """What `read_blocks` or `read_host` returned, as numbers: (len(data), num_layers, 2, block_size, num_kv_heads,
        head_dim) float32, the keys (rotated, as attention reads them) and the values of every token."""

    def close(self) -> None:
        """Stop threads and free memory. Idempotent."""
