"""What all sequences together, and each owner, may have. Values, replaced as a whole when limits are reloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """What one uid may have at once; None stands for no limit of its own."""

    weight: float = 1.0  # its share of tokens, slots and blocks against other uids
    max_blocks: int | None = None  # charged to it
    max_sequences: int | None = None  # alive: queued, running, paused and idle ones
    max_running: int | None = None  # in one step
    max_queued: int | None = None
    max_pinned_blocks: int | None = None  # None: an eighth of the pool
    tokens_per_s: float | None = None  # computed for it; a second's worth may be saved up
    max_priority: int | None = None  # a more urgent request is treated as this urgent

    def __post_init__(self) -> None:
        if self.weight <= 0 or (self.tokens_per_s is not None and self.tokens_per_s <= 0):
            raise ValueError("weight and tokens_per_s must be above 0")
        for name in ("max_blocks", "max_sequences", "max_running", "max_queued"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Size of a step, length of a sequence and of the queue, and the limits of each owner."""

    max_num_seqs: int = 64  # sequences in one step
    max_num_batched_tokens: int = 512  # rows in one step
    max_model_len: int = 8192  # tokens of a sequence, prompt and output
    max_queued: int = 1024  # sequences waiting, of all owners
    ageing_s: float = 10.0  # after each, who waits and has nothing running in the class is one class more urgent
    defaults: OwnerLimits = OwnerLimits()
    owners: Mapping[int, OwnerLimits] = field(default_factory=dict)  # by uid

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_queued"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.ageing_s <= 0:
            raise ValueError("ageing_s must be above 0")

    @property
    def max_running(self) -> int:
        """Sequences that run at once: each must get at least one row of every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def of(self, uid: int) -> OwnerLimits:
        return self.owners.get(uid, self.defaults)
