"""A device without arithmetic: it remembers which token was written where, and checks every read.

The next token is a function of the whole prefix as it is found in the pool's memory through the block table, so a
sequence that comes out like the function iterated proves every block, slot, copy and swap on its way.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence as Items

from kvpool.daemon.memory.sequence import Sequence, SequenceState
from kvpool.daemon.scheduling.scheduler import Scheduler
from kvpool.daemon.scheduling.step_plan import Chunk, StepPlan

VOCAB_SIZE = 64


def next_token(tokens: Items[int]) -> int:
    """The model: a token that depends on every token before it."""
    return zlib.crc32(array("i", tokens).tobytes()) % VOCAB_SIZE


def undisturbed(
    prompt: Items[int], max_tokens: int, stop: frozenset[int] = frozenset(), min_tokens: int = 0
) -> list[int]:
    """Prompt and output as they must come out, whatever happened meanwhile."""
    tokens = list(prompt)
    for count in range(1, max_tokens + 1):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop and count >= min_tokens:
            break
    return tokens


class FakeDevice:
    """Pool and host memory as dictionaries from (block, offset) to (token, position)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.size = scheduler.pool.block_size
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}
        self.host: dict[tuple[int, int], tuple[int, int] | None] = {}
        self._in_flight: list[tuple[Chunk, list[int], list[tuple[int, int]]]] = []  # with tokens and slots at launch

    def launch(self, plan: StepPlan) -> None:
        """Take the plan over, checking that it is within its limits, and move blocks."""
        limits = self.scheduler.limits
        assert len(plan.chunks) <= limits.max_num_seqs
        assert sum(chunk.num_tokens for chunk in plan.chunks) == plan.num_tokens <= limits.max_num_batched_tokens
        assert len({id(chunk.sequence) for chunk in plan.chunks}) == len(plan.chunks)
        self._move(plan)
        self._in_flight = []
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
            assert sequence.state is SequenceState.RUNNING
            assert chunk.start == sequence.num_computed_tokens < end <= sequence.num_tokens
            slots = [self.slot(sequence, position) for position in range(self._first(end), end)]
            self._in_flight.append((chunk, sequence.token_ids[:end], slots))

    def collect(self) -> dict[int, int]:
        """Compute what was launched; the sampled tokens. Every sequence must still hold the blocks it had then."""
        for chunk, tokens, slots in self._in_flight:
            first = len(tokens) - len(slots)
            assert slots == [self.slot(chunk.sequence, position) for position in range(first, len(tokens))]
            for position in range(max(first, chunk.start), len(tokens)):
                self.memory[slots[position - first]] = (tokens[position], position)
        sampled = {}
        for chunk, tokens, slots in self._in_flight:
            first = len(tokens) - len(slots)
            for position, slot in enumerate(slots, first):
                found, wanted = self.memory.get(slot), (tokens[position], position)
                assert found == wanted, f"{chunk.sequence!r} reads {found} at {position}, where it wrote {wanted}"
            if chunk.samples:
                sampled[chunk.sequence.sequence_id] = next_token(tokens)
        return sampled

    def _first(self, end: int) -> int:
        """The first position that the token at `end` - 1 looks at."""
        window = self.scheduler.tables.window
        return max(0, end - window) if window else 0

    def _move(self, plan: StepPlan) -> None:
        sources, destinations = {a for a, _ in plan.copies}, [b for _, b in plan.copies]
        assert sources.isdisjoint(destinations)
        assert len(set(destinations)) == len(destinations)
        assert {slot for slot, _ in plan.swap_in}.isdisjoint(slot for _, slot in plan.swap_out)
        assert {block for _, block in plan.swap_in}.isdisjoint([*sources, *destinations])
        for block, slot in plan.swap_out:
            for offset in range(self.size):
                self.host[slot, offset] = self.memory.get((block, offset))
        for offset in range(self.size):
            read = {source: self.memory.get((source, offset)) for source in sources}
            for source, destination in plan.copies:
                self._put(destination, offset, read[source])
            for slot, block in plan.swap_in:
                self._put(block, offset, self.host[slot, offset])

    def _put(self, block: int, offset: int, value: tuple[int, int] | None) -> None:
        if value is None:
            self.memory.pop((block, offset), None)
        else:
            self.memory[block, offset] = value

    def slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        block = sequence.block_table[position // self.size]
        assert 0 <= block < self.scheduler.pool.num_blocks
        return block, position % self.size

    def step(self, now: float = 0.0) -> tuple[StepPlan, list[Sequence]]:
        """One whole step; the plan, and what ended in it."""
        plan = self.scheduler.schedule(now)
        self.launch(plan)
        return plan, [*plan.expired, *self.scheduler.update(plan, self.collect())]

    def drain(self, max_steps: int = 5000, now: float = 0.0) -> int:
        """Step until nothing is queued or running; how many steps that took."""
        for count in range(max_steps):
            if not self.scheduler.has_work:
                return count
            self.step(now)
            self.scheduler.check_invariants()
        raise AssertionError(f"not done after {max_steps} steps: {list(self.scheduler.roster.sequences.values())}")
