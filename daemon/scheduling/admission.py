"""What is refused at the door, with a typed error that names the value to set. What is let in can finish.

Proof: while everybody else gives way, a sequence needs at most the blocks of its last computed token, so it is enough
that those fit into the empty pool (less what is pinned) and into its owner's limit.
"""

from __future__ import annotations

from ...client.wire.errors import Busy, NeverFits, QuotaExceeded, TooLong
from ..memory.block_tables import BlockTables
from ..memory.pins import Pins
from ..memory.reservation import Reservation, reserved_tokens
from .limits import SchedulerLimits
from .roster import Roster


class Admission:
    """Checks against the limits of the moment; changes nothing."""

    def __init__(self, tables: BlockTables, roster: Roster, pins: Pins, reservation: Reservation) -> None:
        self._tables = tables
        self._roster = roster
        self._pins = pins
        self._reservation = reservation

    def blocks_needed(self, num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
        """The most blocks that the request can need at any time; the last sampled token is never computed."""
        total = num_prompt_tokens + max(0, max_tokens - 1)
        reserved = reserved_tokens(
            self._reservation,
            num_prompt_tokens=num_prompt_tokens,
            output_tokens=max_tokens,
            max_model_len=max_model_len,
        )
        return max(self._tables.peak_blocks(total), self._tables.blocks_for(reserved))

    def reserve(self, limits: SchedulerLimits) -> int:
        """Blocks that are never pinned: with those, what was accepted can finish, and the longest sequence there may be
        can be accepted (or in a pool too small for it, whatever needs half of the blocks)."""
        num_blocks, longest = self._tables.pool.num_blocks, self._tables.peak_blocks(limits.max_model_len)
        needs = (
            self.blocks_needed(sequence.num_prompt_tokens, sequence.max_tokens, limits.max_model_len)
            for sequence in self._roster.sequences.values()
        )
        return max([longest if longest <= num_blocks else num_blocks // 2, *needs])

    def check_lengths(self, num_prompt_tokens: int, max_tokens: int, limits: SchedulerLimits) -> None:
        """Raises TooLong."""
        longest = limits.max_model_len
        if num_prompt_tokens > longest:
            raise TooLong(f"{num_prompt_tokens} tokens, max_model_len is {longest}", field="prompt")
        if num_prompt_tokens + max_tokens > longest:
            raise TooLong(
                f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} are more than max_model_len {longest}; "
                f"set max_tokens to {longest - num_prompt_tokens} or less",
                field="max_tokens",
            )

    def check_blocks(self, uid: int, num_prompt_tokens: int, max_tokens: int, limits: SchedulerLimits) -> None:
        """Raises NeverFits or QuotaExceeded."""
        need = self.blocks_needed(num_prompt_tokens, max_tokens, limits.max_model_len)
        pool, size = self._tables.pool, self._tables.pool.block_size
        usable = pool.num_blocks - self._pins.num_blocks
        if need > usable:
            raise NeverFits(
                f"needs up to {need} blocks of {size} tokens, the pool has {usable} that are not pinned; "
                f"lower max_tokens, or set pool_bytes to hold {need} blocks",
                field="max_tokens",
            )
        quota = limits.of(uid).max_blocks
        if quota is not None and need > quota - self._pins.blocks_of(uid):
            raise QuotaExceeded(
                f"needs up to {need} blocks of {size} tokens, uid {uid} may hold {quota} (max_blocks), pins included; "
                "lower max_tokens",
                field="max_tokens",
            )

    def check_places(self, uid: int, n: int, limits: SchedulerLimits, *, new: bool, retry_after_ms: int) -> None:
        """Raises QuotaExceeded or Busy; `new`: the sequences do not exist yet."""
        own, alive = limits.of(uid), self._roster.alive_of(uid)
        if new and own.max_sequences is not None and alive + n > own.max_sequences:
            raise QuotaExceeded(f"uid {uid} has {alive} sequences, max_sequences is {own.max_sequences}", field="n")
        lines = [
            (self._roster.num_waiting, limits.max_queued, "max_queued"),
            (self._roster.waiting_of(uid), own.max_queued, f"max_queued of uid {uid}"),
        ]
        for waiting, longest, name in lines:
            if longest is not None and n > longest:
                raise QuotaExceeded(f"{n} sequences can never wait at once, {name} is {longest}", field="n")
            if longest is not None and waiting + n > longest:
                raise Busy(f"{waiting} sequences wait, {name} is {longest}", retry_after_ms=retry_after_ms)
