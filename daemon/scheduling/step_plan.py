"""What one step does, as a value: made by the scheduler, carried out by the engine, and handed back with the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..memory.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """`num_tokens` tokens of one sequence from position `start`: a decode (one token), a prompt or a part of one."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool  # it reaches the sequence's last token, so its last row gives the next one
    next_slot: int = -1  # of that token: block id x block size + offset; -1: it is the last one, or has no place yet


@dataclass(slots=True)
class StepPlan:
    """One step. The engine carries it out in this order: `swap_out`, `copies`, `swap_in`, then the chunks.

    No block is both a source and a destination of `copies`, and no host slot is both read and written, so each of the
    three lists may be done at once, but each only after the one before it.
    """

    chunks: list[Chunk] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (block id, host slot)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source block id, destination block id)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host slot, block id)
    expired: list[Sequence] = field(default_factory=list)  # finished: their deadline passed
    preempted: list[Sequence] = field(default_factory=list)  # lost their blocks in this step
    num_tokens: int = 0  # rows of the step
    wake_at: float | None = None  # with no chunk: when something may change by itself (a deadline, a rate limit)

    @property
    def sampling_chunks(self) -> list[Chunk]:
        """Those that give a token, in the order of the result's rows."""
        return [chunk for chunk in self.chunks if chunk.samples]

    @property
    def moves_nothing(self) -> bool:
        """No sequence gets further by it: none is computed, none comes back."""
        return not (self.chunks or self.swap_in)

    @property
    def empty(self) -> bool:
        """Nothing for the device to do."""
        return not (self.chunks or self.swap_out or self.copies or self.swap_in)
