"""Slots on the host for blocks of preempted sequences, and whether swapping or computing again costs less."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class PreemptionCosts:
    """Measured by the engine, and updated while it runs. Seconds."""

    swap_s_per_block: float = 0.0  # one way; of copying alone, also where it goes on beside a step
    compute_s_per_token: float = 0.0

    def swap_s(self, num_blocks: int) -> float:
        """Out and back in."""
        return 2 * self.swap_s_per_block * num_blocks

    def recompute_s(self, num_tokens: int) -> float:
        return self.compute_s_per_token * num_tokens


class HostPool:
    """`num_slots` host slots, each of one block's size."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots, or None and nothing taken."""
        if count > len(self._free):
            return None
        slots = [self._free.pop() for _ in range(count)]
        self._used.update(slots)
        return slots

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot not in self._used:
                raise RuntimeError(f"host slot {slot} is released and was not taken")
            self._used.remove(slot)
            self._free.append(slot)

    def check_invariants(self) -> None:
        """Raise RuntimeError if a slot is lost or twice there."""
        if len(self._free) + len(self._used) != self.num_slots or not self._used.isdisjoint(self._free):
            raise RuntimeError("host slots are lost or free twice")
