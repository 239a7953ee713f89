"""Giving out the rows of a step: first to sequences that lack one token, then to prompts."""

from __future__ import annotations

from ..memory.block_pool import EMPTY
from ..memory.sequence import Sequence, SequenceState
from .fairness import RateLimiter, share_rows
from .limits import SchedulerLimits
from .residency import Residency
from .step_plan import Chunk, StepPlan


class StepFiller:
    """Plans chunks for the running sequences, and takes the blocks for them."""

    def __init__(self, residency: Residency, rates: RateLimiter) -> None:
        self._residency = residency
        self._roster = residency.roster
        self._tables = residency.tables
        self._pool = residency.pool
        self._rates = rates
        self._stalled = False

    def fill(self, plan: StepPlan, limits: SchedulerLimits, now: float) -> bool:
        """Add chunks to the plan. True if a running sequence got nothing because it found no block."""
        self._stalled = False
        prompts: list[Sequence] = []
        for sequence in sorted(self._roster.running, key=self._residency.rank)[: limits.max_running]:
            missing = len(sequence.token_ids) - sequence.num_computed_tokens
            if self._residency.works_ahead and sequence in self._residency.brought_back:
                continue  # its blocks travel beside this step
            if missing > 1:
                prompts.append(sequence)
            elif missing == 1 and sequence.state is SequenceState.RUNNING:
                self._give(plan, sequence, 1, limits, now)
        served = self._residency.served
        prompts.sort(key=lambda prompt: (-prompt.urgency, served(prompt.uid), prompt.due, prompt.sequence_id))
        rows = share_rows(
            [(prompt.uid, prompt.num_wanted_tokens) for prompt in prompts],
            limits.max_num_batched_tokens - plan.num_tokens,
            lambda uid: limits.of(uid).weight,
        )
        for sequence, count in zip(prompts, rows, strict=True):
            if count and sequence.state is SequenceState.RUNNING:
                self._give(plan, sequence, count, limits, now)
        return self._stalled

    def _give(self, plan: StepPlan, sequence: Sequence, rows: int, limits: SchedulerLimits, now: float) -> None:
        """Plan up to so many rows for the sequence, as its owner's rate and memory allow."""
        uid, own, start = sequence.uid, limits.of(sequence.uid), sequence.num_computed_tokens
        if own.tokens_per_s is not None:
            rows = min(rows, self._rates.allowance(uid, own.tokens_per_s, now))
            if rows < 1:
                sequence.wait_reason = f"uid {uid} has used its {own.tokens_per_s:g} tokens/s"
                sequence.protected_until = -1  # others are not to wait for it
                return
        if rows > 1 or not self._may_write(sequence):
            rows = self._make_writable(sequence, rows)
            if rows < 1:
                return
        if own.tokens_per_s is not None:
            self._rates.spend(uid, rows)
        end = start + rows
        if end > sequence.counted_until:
            self._roster.counters.charge(uid, end - sequence.counted_until, own.weight)
            sequence.counted_until = end
        sequence.in_flight, sequence.wait_reason = True, ""
        samples = end == len(sequence.token_ids) and sequence.max_tokens > 0
        plan.chunks.append(Chunk(sequence, start, rows, samples))
        plan.num_tokens += rows

    def look_ahead(self, plan: StepPlan, limits: SchedulerLimits) -> None:
        """Say where the tokens that a step of decodes samples will go, and take their blocks where nobody has to give
        way for them: the step after it is known then, and can be begun before it is asked for."""
        if not self._residency.works_ahead or plan.num_tokens != len(plan.chunks):
            return  # the step after one that holds prompts is not begun early
        size = self._pool.block_size
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + 1
            length = len(sequence.token_ids) + 1  # with the token that is sampled now
            last = length - sequence.num_prompt_tokens >= sequence.max_tokens or length >= limits.max_model_len
            if last or not chunk.samples:
                continue
            if end == len(sequence.block_table) * size and self._residency.room(sequence) > 0:
                self._tables.grow(sequence, end + 1, spare=False)
                self._residency.promise(sequence)
            if end < len(sequence.block_table) * size:
                chunk.next_slot = sequence.block_table[end // size] * size + end % size

    def _may_write(self, sequence: Sequence) -> bool:
        """Whether the next token has its place already: the usual case of a decode."""
        index, table = sequence.num_computed_tokens // self._pool.block_size, sequence.block_table
        if index >= len(table) or sequence.promised_blocks:
            return False
        return self._pool.ref_count[table[index]] == 1 and self._pool.kind[table[index]] == EMPTY

    def _make_writable(self, sequence: Sequence, rows: int) -> int:
        """Take blocks for as many of the next tokens as fit; others give way only for the first. How many fit."""
        start = sequence.num_computed_tokens
        fitting = self._residency.fit(sequence, rows)
        if fitting < 1:
            need = self._tables.blocks_short(sequence, start + 1)
            refusal = self._residency.make_room(sequence, need, self._residency.outranked(sequence))
            if refusal is not None:
                sequence.wait_reason, self._stalled = refusal.reason, True
                return 0
            fitting = 1
        end = start + fitting
        spare = self._residency.room(sequence) > self._tables.blocks_short(sequence, end)
        self._tables.grow(sequence, end, spare=spare)
        self._residency.promise(sequence)
        return fitting
